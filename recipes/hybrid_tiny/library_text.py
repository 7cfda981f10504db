"""English and code that every machine with Python has: the documentation strings of its standard library.

Templates repeat themselves; a drafter's adapter that has only seen theirs gains less on strangers' prompts than one that has
also seen text which people wrote for one another.
"""

from __future__ import annotations

import ast
import inspect
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

FOLDERS_LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3", "ensurepip", "config"}
MOST_WORDS, FEWEST_WORDS = 110, 6
DOCTEST = re.compile(r"^\s*>>>", re.MULTILINE)

Documented = ast.FunctionDef | ast.AsyncFunctionDef


def library_text(folder: Path | None = None) -> tuple[list[str], list[str]]:
    """All functions with a documentation string, as beginnings to go on from (`def …` and the string), and all paragraphs of such
    strings that are sentences; of `folder` (default: this Python's standard library). ValueError if there is too little."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    beginnings, paragraphs = [], []
    for path in sorted(folder.rglob("*.py")):
        if FOLDERS_LEFT_OUT.intersection(path.relative_to(folder).parts):
            continue
        for node, text in documented(path):
            if isinstance(node, Documented) and fits(text):
                beginnings.append(beginning_of(node, text))
            paragraphs += [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if is_prose(part)]
    beginnings, paragraphs = sorted(set(beginnings)), sorted(set(paragraphs))
    if min(len(beginnings), len(paragraphs)) < 10:
        raise ValueError(f"{folder}: {len(beginnings)} documented functions, {len(paragraphs)} paragraphs; name a folder of Python files that has at least ten of both")
    return beginnings, paragraphs


def documented(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Modules, classes and functions of a file with their documentation strings; nothing of a file that does not parse."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Documented) and (text := ast.get_docstring(node)):
            yield node, inspect.cleandoc(text)


def beginning_of(node: Documented, text: str) -> str:
    """A function as far as its documentation string, indented as in a module."""
    body = text.replace("\n", "\n    ")
    return f'def {node.name}({ast.unparse(node.args)}):\n    """{body}\n    """\n'


def fits(text: str) -> bool:
    return FEWEST_WORDS <= len(text.split()) <= MOST_WORDS


def is_prose(part: str) -> bool:
    """Sentences, not a table or an example."""
    words = part.split()
    letters = sum(character.isalpha() or character.isspace() for character in part)
    return fits(part) and not DOCTEST.search(part) and letters > 0.9 * len(part) and words[0][:1].isupper() and part.rstrip()[-1:] in ".?!:"

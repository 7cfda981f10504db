"""The architecture as a test: who may import whom, and which library lives where (docs/architecture.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "ddtree"

MAY_IMPORT = {
    "__main__": "cli",
    "__init__": "engine sampling",
    "cli": "sglang replicas server service bench audit doctor client training engine models sampling sources text budget",
    "replicas": "service",
    "server": "engine sampling text sources service",
    "bench": "client engine models sampling sources text tree budget",
    "audit": "client engine models caches sampling sources text tree",
    "doctor": "audit engine models sources text",
    "training": "models caches sources text tree engine sampling",
    "sglang": "engine models kernels sampling tree",
    "engine": "models caches kernels tree sampling budget",
    "models": "caches kernels",
    "caches": "kernels",
    "tree": "",
    "budget": "",
    "sampling": "",
    "text": "",
    "sources": "",
    "client": "",
    "service": "",
    "kernels": "",
}

# Library -> the rooms, or single files, that may import it.
LIVES_IN = {
    "triton": "kernels",
    "sglang": "sglang",
    "transformers": "text audit",
    "fastapi": "server",
    "uvicorn": "server replicas",
    "starlette": "server replicas",
    "prometheus_client": "server",
    "llguidance": "text",
    "pydantic": "server",
    "gguf": "models training/export.py",
    "safetensors": "models training/export.py",
    "rich": "cli sources bench audit training",
    "matplotlib": "bench audit",
    "torch": " ".join(sorted(MAY_IMPORT.keys() - {"tree", "budget", "service", "replicas"})),
}


def room_of(path: str) -> str:
    """`tree/build.py` -> `tree`; `__init__.py` -> `__init__`."""
    return path.split("/")[0].removesuffix(".py")


def imported_modules(source: str) -> list[str]:
    """Every module a file names, also inside functions, under TYPE_CHECKING and in import_module("...")."""
    modules = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            modules.append("." * node.level + (node.module or ""))
        elif isinstance(node, ast.ImportFrom):
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            if name in ("import_module", "__import__"):
                modules.append(str(node.args[0].value))
    return modules


def faults(path: str, source: str) -> list[str]:
    """What is wrong with the imports of the file at `path`, relative to the package."""
    room = room_of(path)
    if room not in MAY_IMPORT:
        return [f"{path}: room {room!r} has no line in MAY_IMPORT"]
    found = []
    for module in imported_modules(source):
        top, _, rest = module.partition(".")
        allowed = LIVES_IN.get(top, room).split()
        if not top:
            found.append(f"{path}: relative import {module}")
        elif top == "ddtree":
            other = rest.split(".")[0]
            if other not in {room, "__version__", *MAY_IMPORT[room].split()}:
                found.append(f"{path}: {room} may not import {module}")
        elif room not in allowed and path not in allowed:
            found.append(f"{path}: {top} lives in {LIVES_IN[top]}")
    return found


def test_every_file_keeps_the_import_order():
    files = sorted(PACKAGE.rglob("*.py"))
    assert files, "no package beside the tests"
    found = [
        fault for file in files for fault in faults(file.relative_to(PACKAGE).as_posix(), file.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


def test_table_has_no_cycle_and_no_unknown_room():
    order = {}

    def visit(room: str, trail: tuple[str, ...]) -> None:
        assert room in MAY_IMPORT, f"{trail[-1]} may import {room!r}, which has no line"
        assert room not in trail, f"cycle: {' -> '.join((*trail, room))}"
        if room not in order:
            for other in MAY_IMPORT[room].split():
                visit(other, (*trail, room))
            order[room] = True

    for room in MAY_IMPORT:
        visit(room, ())
    for library, places in LIVES_IN.items():
        assert {room_of(place) for place in places.split()} <= set(MAY_IMPORT), library


def test_table_is_the_one_in_the_docs():
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text("utf-8")
    lines = [line.split("->") for line in text.splitlines() if line.startswith("    ") and " -> " in line]
    documented = {left.strip(): set(right.split()) for left, right in (pair for pair in lines if len(pair) == 2)}
    for room, others in MAY_IMPORT.items():
        if others and not room.startswith("__"):
            assert documented.get(room) == set(others.split()), room


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tree/build.py", "from ddtree.engine.request import Request"),
        ("tree/build.py", "from ddtree import sampling"),
        ("tree/build.py", "import ddtree.caches.kv"),
        ("tree/build.py", "import ddtree"),
        ("tree/build.py", "import torch"),
        ("tree/build.py", "from .draft_tree import DraftTree"),
        ("engine/engine.py", "def f():\n    from ddtree.server import app"),
        ("engine/engine.py", "if TYPE_CHECKING:\n    from ddtree.text.stops import StopStrings"),
        ("engine/engine.py", "importlib.import_module('ddtree.cli')"),
        ("server/app.py", "import ddtree.models.llama"),
        ("server/app.py", "import transformers.utils"),
        ("training/trainer.py", "from safetensors.torch import save_file"),
        ("server/app.py", "from rich import print"),
        ("attic/old.py", ""),
    ],
)
def test_a_planted_fault_is_found(path, source):
    assert faults(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tree/build.py", "import numpy as np\nfrom ddtree.tree.draft_tree import DraftTree"),
        ("training/export.py", "from safetensors.torch import save_file"),
        ("cli/main.py", "from ddtree import __version__\nfrom ddtree.server.app import create_app"),
        ("__init__.py", "from ddtree.engine.engine import Engine"),
        ("kernels/tree_attention/triton.py", "import triton.language as tl"),
    ],
)
def test_what_is_allowed_passes(path, source):
    assert not faults(path, source)

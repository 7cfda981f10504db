"""What is taken from a folder of Python files, and what is not."""

import pytest

from recipes.hybrid_tiny.library_text import library_text

SENTENCES = "Return the {} of a list, which may be empty, as a new list.\n\n    A second paragraph says how long that takes: a while.\n\n    >>> f([])\n    []\n    "


def write_modules(folder, count: int) -> None:
    for i in range(count):
        text = SENTENCES.format(f"thing number {chr(97 + i)}")
        (folder / f"m{i}.py").write_text(
            f'"""The module that explains {chr(97 + i)} to whoever asks for it."""\ndef f{i}(x: list, y=0, *rest):\n    """{text}"""\n    return x\ndef bare(x):\n    return x\n'
        )


def test_functions_and_paragraphs_are_found_and_the_rest_is_left(tmp_path):
    write_modules(tmp_path, 12)
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "hidden.py").write_text('def hidden():\n    """Hide from everyone who looks for a test here."""\n')
    beginnings, paragraphs = library_text(tmp_path)
    assert len(beginnings) == 12
    assert beginnings[0].startswith('def f0(x: list, y=0, *rest):\n    """Return the thing number a of a list')
    assert "The module that explains a to whoever asks for it." in paragraphs
    assert "A second paragraph says how long that takes: a while." in paragraphs
    assert not any(">>>" in paragraph or "Hide" in paragraph for paragraph in paragraphs)


def test_a_folder_with_too_little_is_refused(tmp_path):
    write_modules(tmp_path, 2)
    with pytest.raises(ValueError, match="2 documented functions"):
        library_text(tmp_path)

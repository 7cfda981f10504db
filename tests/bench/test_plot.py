"""Pictures of a run: files that stand alone, and none of a refusal."""

import pytest

from ddtree.bench.plot import draw, write_plots
from tests.bench.results import finished

pytest.importorskip("matplotlib")


def test_a_run_becomes_a_picture_and_a_page(tmp_path):
    image, page = write_plots(finished(), tmp_path / "new")
    assert image.read_bytes().startswith(b"\x89PNG") and image.name == "bench.png"
    text = page.read_text(encoding="utf-8")
    assert "<svg" in text and "toy &lt;b&gt;" in text and "<b>" not in text
    assert "src=" not in text and "<link" not in text and "<script" not in text, "self-contained"
    assert "ddtree bench toy" in text and "&quot;refused&quot;: false" in text


def test_the_curve_the_intervals_and_the_chain_are_drawn():
    speedup, acceptance = draw(finished()).axes
    labels = [text.get_text() for text in speedup.get_legend().get_texts()]
    assert any("predicted" in label for label in labels) and any("95 %" in label for label in labels)
    assert any("chain" in label for label in labels) and "tree budget" in speedup.get_xlabel()
    assert [tick.get_text() for tick in acceptance.get_xticklabels()] == ["4", "8", "16"]


def test_plain_alone_can_be_drawn(tmp_path):
    result = finished()
    result["configs"] = {"0": result["configs"]["0"]}
    write_plots(result | {"predicted": {}}, tmp_path)


def test_a_refused_run_has_no_picture(tmp_path):
    with pytest.raises(ValueError, match="refused"):
        write_plots({"refused": True}, tmp_path)

"""Pictures of a run: files that stand alone, and none of a refusal."""

import pytest

from ddtree.bench.plot import draw, render_page, write_plots
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


def labels_of(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_adapters_trees_and_those_without_it_are_told_apart():
    """Also chain and auto; each with the prediction for its own scoring."""
    result = finished(scoring="conditioned")
    rows, predicted = result["configs"], result["predicted"]
    rows |= {"16:factorised": rows["8"], "chain:factorised": rows["chain"], "auto": rows["4"]}
    predicted |= {"16:factorised": {"speedup": 1.25}, "chain": {"speedup": 1.5}}
    speedup, acceptance = draw(result).axes
    named = ["trees, conditioned", "trees, factorised", "chain of 7, conditioned", "chain of 7, factorised", "auto, conditioned"]
    assert set(named) <= set(labels_of(acceptance))
    assert {f"{name}, 95 % interval" for name in named} <= set(labels_of(speedup))
    lines = {line.get_label(): list(line.get_ydata()) for line in speedup.get_lines()}
    assert lines["predicted: acceptance x T_plain / T_round"] == [1.8, 2.0, 1.7]
    assert lines["predicted, trees, factorised"] == [1.25] and lines["predicted, chain of 7, conditioned"] == [1.5]


def test_a_run_without_an_adapter_says_nothing_of_scorings():
    assert labels_of(draw(finished(scoring="factorised")).axes[1])[:2] == ["trees", "chain of 7"]


def test_the_page_says_how_the_run_drafted_and_computed():
    said = render_page(finished(scoring="conditioned", batch_invariant=True), "<svg></svg>")
    assert "drafts conditioned" in said and "batch-invariant" in said
    assert "batch-invariant" not in render_page(finished(batch_invariant=False), "<svg></svg>")


def test_a_picture_may_be_named(tmp_path):
    image, page = write_plots(finished(), tmp_path / "mine" / "sweep.png")
    assert (image, page) == (tmp_path / "mine" / "sweep.png", tmp_path / "mine" / "sweep.html")
    assert image.read_bytes().startswith(b"\x89PNG") and "<svg" in page.read_text(encoding="utf-8")


def test_plain_alone_can_be_drawn(tmp_path):
    result = finished()
    result["configs"] = {"0": result["configs"]["0"]}
    write_plots(result | {"predicted": {}}, tmp_path)


def test_a_refused_run_has_no_picture(tmp_path):
    with pytest.raises(ValueError, match="refused"):
        write_plots({"refused": True}, tmp_path)

"""Cost curves: interpolated, never falling, kept up to date by the clocks, and read back from disk."""

import json
import logging

import numpy as np
import pytest

from ddtree.budget.cost import CostModel, Curve
from ddtree.budget.store import CostStore

VERIFY = {1: 1.0, 5: 1.2, 17: 2.0}
FACTS = {"machine": "here", "model": "m", "threads": 2}


def model(**changes) -> CostModel:
    return CostModel(Curve(VERIFY | changes.pop("verify", {})), Curve({2: 0.2, 16: 0.4}), 0.01, 0.05)


def test_between_knots_and_beyond_them():
    curve = Curve(VERIFY)
    assert curve.at(3) == pytest.approx(1.1)
    assert curve.at(29) == pytest.approx(2.8)
    assert curve.upto(40)[[0, 1, 5, 17]] == pytest.approx([0.0, 1.0, 1.2, 2.0])


def test_more_rows_never_cost_less():
    curve = Curve({1: 1.3, 2: 1.0, 9: 1.5})
    assert (np.diff(curve.upto(20)) >= 0).all() and curve.at(1) == pytest.approx(1.0)


def test_a_bucket_costs_the_same_throughout():
    curve = Curve({8: 1.0, 16: 2.0, 64: 3.0}, buckets=(8, 16, 64))
    assert curve.upto(64)[[1, 8, 9, 16, 17, 64]] == pytest.approx([1, 1, 2, 2, 3, 3])


def test_a_busy_machine_moves_the_scale_and_not_the_shape():
    cost = model()
    for _ in range(300):
        for rows in (1, 5, 17):
            cost.observe(rows, 3 * model().verify.at(rows), 16, 3 * 0.4)
    assert cost.scale == pytest.approx(3, rel=0.15)
    assert cost.verify.at(17) / cost.verify.at(1) == pytest.approx(2, rel=0.1)
    assert cost.round_s(17, 16) / cost.plain_s() == pytest.approx(model().round_s(17, 16) / model().plain_s(), rel=0.1)


def test_what_became_dearer_alone_is_learnt():
    cost = model()
    for _ in range(500):
        cost.observe(1, 1.0)
        cost.observe(17, 4.0)
    assert cost.verify.at(17) / cost.verify.at(1) == pytest.approx(4, rel=0.1)


def test_one_hiccup_changes_little():
    cost = model()
    cost.observe(5, 100.0)
    assert cost.verify.at(5) == pytest.approx(1.2, rel=0.05) and cost.scale < 1.12


@pytest.mark.parametrize("knots", [{}, {0: 1.0}, {1: 0.0}, {1: float("nan")}])
def test_nonsense_is_refused(knots):
    with pytest.raises(ValueError, match="a cost curve needs counts >= 1 and seconds > 0"):
        Curve(knots)


def test_stored_costs_come_back(tmp_path):
    store = CostStore(tmp_path / "costs")
    store.save(FACTS, model())
    read = CostStore(tmp_path / "costs").load(FACTS)
    assert read.as_json() == model().as_json()
    assert store.load(FACTS | {"threads": 1}) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1}', "null"])
def test_a_corrupt_file_is_a_message_and_nothing_more(tmp_path, caplog, content):
    store = CostStore(tmp_path)
    store.path(FACTS).write_text(content)
    with caplog.at_level(logging.WARNING, "ddtree"):
        assert store.load(FACTS) is None
    assert "measuring anew" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda read: read.update(version=0),
        lambda read: read["facts"].update(threads=9),
        lambda read: read["cost"].pop("verify_s"),
        lambda read: read["cost"].update(verify_s={}),
        lambda read: read["cost"].update(plain_rest_s=-1),
        lambda read: read["cost"].update(draft_s={"2": "fast"}),
    ],
)
def test_a_stale_file_is_a_message_too(tmp_path, caplog, change):
    store = CostStore(tmp_path)
    store.save(FACTS, model())
    read = json.loads(store.path(FACTS).read_text())
    change(read)
    store.path(FACTS).write_text(json.dumps(read))
    with caplog.at_level(logging.WARNING, "ddtree"):
        assert store.load(FACTS) is None
    assert "ignoring the measured costs" in caplog.text


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    CostStore(tmp_path / "file" / "costs").save(FACTS, model())

"""The auto budget's part of the `ddtree` object: the decision and its inputs, added up over choices, never NaN."""

import json
from collections import Counter

from ddtree.engine.request import RequestStats
from ddtree.server.report import auto_object, ddtree_object


def chosen(**changes) -> RequestStats:
    stats = RequestStats(tree_budget="auto", mode="ddtree", block_size=8, decode_rounds=10, plain_rounds=4, probe_rounds=1)
    stats.nodes_verified, stats.output_tokens, stats.acceptance_histogram = 30, 26, Counter({1: 4, 3: 3, 4: 3})
    stats.predicted_tokens, stats.predicted_s, stats.predicted_plain_s, stats.trust_offset = 24.0, 2.0, 3.0, 0.5
    for name, value in changes.items():
        setattr(stats, name, value)
    return stats


def test_the_decision_and_its_inputs():
    found = ddtree_object([chosen()], "auto", seed=1)
    assert (found["tree_budget"], found["tree_budget_requested"], found["plain_rounds"]) == ("auto", "auto", 4)
    assert found["auto"] == {
        "predicted_speedup": 1.5,
        "predicted_acceptance_length": 2.4,
        "mean_nodes": 3.0,
        "round_ms": 200.0,
        "plain_round_ms": 125.0,
        "probe_rounds": 1,
        "trust_offset": 0.5,
    }


def test_choices_add_up_and_the_one_that_drafted_leads():
    plain = chosen(mode="target_only", nodes_verified=0, predicted_tokens=10.0, predicted_s=1.0, predicted_plain_s=1.0)
    found = ddtree_object([plain, chosen()], "auto", seed=1)
    assert found["mode"] == "ddtree" and found["auto"]["predicted_speedup"] == 1.3333
    assert found["auto"]["mean_nodes"] == 1.5 and found["plain_rounds"] == 8


def test_scoring_is_that_of_most_trees_of_all_choices():
    """Six rounds of ten drafted in each choice."""
    for counts, said in (((6, 0), "conditioned"), ((5, 0), "factorised"), ((0, 0), "factorised")):
        found = ddtree_object([chosen(conditioned_rounds=count) for count in counts], "auto", seed=1)
        assert (found["conditioned_rounds"], found["scoring"]) == (sum(counts), said)
    assert ddtree_object([chosen(plain_rounds=10)], "auto", seed=1)["scoring"] is None


def test_a_pinned_budget_has_none_and_nothing_over_nothing_is_null():
    assert ddtree_object([RequestStats(tree_budget=8)], 8, seed=1)["auto"] is None
    empty = auto_object([RequestStats(tree_budget="auto")])
    assert empty["predicted_speedup"] is None and empty["round_ms"] is None and empty["mean_nodes"] is None
    assert "NaN" not in json.dumps(empty)

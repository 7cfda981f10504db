"""The offline run on scripted actors: same prompts, same tokens, every configuration, and counts that add up."""

import pytest

from ddtree.bench.offline import Offline, Settings
from ddtree.bench.output import CHAIN
from ddtree.bench.pooled import summarise
from ddtree.bench.validity import Rules, inspect
from ddtree.bench.workloads import Prompt
from ddtree.engine.measure import start_auto
from tests.bench.fakes import Letters
from tests.scripted import scripted_engine

PROMPTS = [Prompt(f"p{i}", (f"prompt {i}", "and more")[: 1 + i % 2], "toy") for i in range(4)]
CONFIGS = ("0", CHAIN, "4", "12")


def offline(skill=0.7, **options):
    settings = {"configs": CONFIGS, "max_tokens": 40, "ignore_eos": True, "repeats": 2, **options}
    return Offline(scripted_engine(skill), Letters(), Settings(**settings))


def hush(line):
    pass


def test_every_configuration_says_the_same():
    run = offline()
    items, answers = run.inspect(PROMPTS, hush)
    assert [item.id for item in items] == ["p0", "p1", "p1#2", "p2", "p3", "p3#2"]
    verdict = inspect(answers, Rules(ignore_eos=True))
    assert not verdict.refused
    assert {c: answers["p0"][c].mode for c in CONFIGS} == {
        "0": "target_only",
        CHAIN: "chain",
        "4": "ddtree",
        "12": "ddtree",
    }
    assert (
        answers["p1"]["0"].text in dict(items[2].messages).values()
        or items[2].messages[1][1] == answers["p1"]["0"].text
    )


def test_a_chain_has_one_node_per_depth():
    chain = offline().inspect(PROMPTS, hush)[1]["p0"][CHAIN]
    assert 0 < chain.nodes_verified <= 7 * chain.decode_rounds


def test_a_budget_may_leave_the_adapter_out():
    run = offline(configs=("0", "12", "12:factorised"))
    items, answers = run.inspect(PROMPTS, hush)
    request = run.request(items[0], "12:factorised")
    assert (request.tree_budget, request.scoring) == (12, "factorised") and run.request(items[0], "12").scoring is None
    assert not inspect(answers, Rules(ignore_eos=True)).refused
    assert list(summarise(list(run.measure(items, hush)))) == ["0", "12", "12:factorised"]


def test_auto_is_a_configuration():
    """Whatever it chooses, plain decoding included, is what was asked for."""
    for skill in (0.0, 0.9):
        run = offline(skill, configs=("0", "auto", "4"))
        start_auto(run.engine, {"0": {"4": 2.0}}, limit_s=0.5)
        answers = run.inspect(PROMPTS, hush)[1]
        assert not inspect(answers, Rules(ignore_eos=True)).refused
        assert answers["p0"]["auto"].tree_budget == "auto"
        assert list(summarise(list(run.measure(run.inspect(PROMPTS, hush)[0], hush)))) == ["0", "auto", "4"]


def test_the_passes_interleave_and_pool():
    run = offline()
    items, _ = run.inspect(PROMPTS, hush)
    timed = list(run.measure(items, hush))
    assert len(timed) == len(items) * len(CONFIGS) * 2
    by_item = [timed[i : i + len(CONFIGS)] for i in range(0, len(timed), len(CONFIGS))]
    assert all(
        len({o.item_id for o in row}) == 1 and {o.config for o in row} == set(CONFIGS) for row in by_item
    )
    assert len({tuple(o.config for o in row) for row in by_item}) > 1, "the order turns around"
    rows = summarise(timed)
    assert rows["0"]["speedup"]["pooled"] == 1 and rows["0"]["acceptance_length"] == 1
    assert rows["12"]["acceptance_length"] > 1.5 and rows[CHAIN]["acceptance_length"] > 1.5
    for row in rows.values():
        low, high = row["tokens_per_s"]["interval"]
        assert low <= row["tokens_per_s"]["pooled"] <= high
        assert set(row["stage_ms"]) == {"draft", "build", "verify", "accept", "commit"}


def test_sampled_runs_are_equal_too():
    from ddtree.sampling.params import SamplingParams

    run = offline(sampling=SamplingParams(temperature=1.0), seed=3)
    assert not inspect(run.inspect(PROMPTS, hush)[1], Rules(ignore_eos=True)).refused


def test_replies_that_end_at_once_are_refused():
    """With EOS honoured the scripted law ends most replies within a few tokens."""
    _, answers = offline(ignore_eos=False).inspect(PROMPTS, hush)
    assert {reason.kind for reason in inspect(answers, Rules()).reasons} == {"short"}


def test_without_a_drafter_it_fell_back():
    run = offline(skill=None, configs=("0", "4"))
    _, answers = run.inspect(PROMPTS[:1], hush)
    (reason,) = inspect(answers, Rules(ignore_eos=True)).reasons
    assert reason.kind == "fell_back" and "no drafter" in reason.message


def test_a_fault_names_the_item(caplog):
    run = offline()
    run.engine.target.fail_at = 3
    with pytest.raises(RuntimeError, match="p0, configuration 0"):
        run.inspect(PROMPTS, hush)

"""A whole run: what a number is said to depend on, and what is said instead of a number."""

import io
import json

import pytest
from rich.console import Console

from ddtree.bench.offline import Offline, Settings
from ddtree.bench.report import show
from ddtree.bench.run import Facts, run_offline
from ddtree.bench.workloads import Prompt
from tests.bench.fakes import Letters
from tests.scripted import scripted_engine

PROMPTS = [Prompt(f"p{i}", (f"prompt {i}",), "toy") for i in range(3)]
FACTS = Facts(
    "toy",
    "toy-dflash",
    "off",
    "ddtree bench toy",
    lambda config, item: f"ddtree audit toy --budgets 0,{config}",
)
DEPENDS_ON = [
    "model",
    "drafter",
    "dtype",
    "device",
    "thinking",
    "temperature",
    "eos_policy",
    "prompt_tokens",
    "output_tokens",
    "warm_up",
    "cache_state",
    "modes",
    "command",
    "versions",
    "baseline",
    "max_tokens",
]


def hush(line):
    pass


def run(engine=None, **options):
    settings = {"configs": ("0", "chain", "8"), "max_tokens": 24, "ignore_eos": True, "repeats": 2, **options}
    return run_offline(
        Offline(engine or scripted_engine(0.7), Letters(), Settings(**settings)), PROMPTS, FACTS, hush
    )


def shown(result):
    console = Console(file=io.StringIO(), width=140)
    show(result, console)
    return console.file.getvalue()


def test_a_result_states_what_it_depends_on():
    result = run()
    assert result["refused"] is False and list(result["configs"]) == ["0", "chain", "8"]
    assert set(DEPENDS_ON) <= set(result) and result["eos_policy"].startswith("ignored")
    assert result["modes"] == {"0": ["target_only"], "chain": ["chain"], "8": ["ddtree"]}
    text = shown(result)
    assert "tokens/s" in text and "EOS ignored (--ignore-eos)" in text
    last = json.loads(text.splitlines()[-1])
    assert last["configs"]["8"]["speedup"]["pooled"] == result["configs"]["8"]["speedup"]["pooled"]


def test_a_refusal_shows_the_text_and_no_speed():
    result = run(ignore_eos=False)
    assert result["refused"] is True and "configs" not in result
    text = shown(result)
    assert "refused" in text and "ddtree audit toy --budgets" in text and "--ignore-eos" in text
    assert "tokens/s" not in text and "speedup" not in text
    last = json.loads(text.splitlines()[-1])
    assert (
        last["refused"] is True and last["reasons"][0]["kind"] == "short" and last["reasons"][0]["plain_text"]
    )


@pytest.mark.parametrize("after", [1, 3])
def test_a_target_that_errs_under_a_tree_is_refused(after):
    """A cache that forgets: the tree's output differs, in the inspection or only in a timed pass."""
    engine = scripted_engine(0.9)
    verify, seen = engine.target.verify, []

    def forgetful(sequences, trees):
        chosen = verify(sequences, trees)
        if trees[0].num_nodes > 1:
            seen.append(1)
            if len(seen) >= 12 * after:
                return [(row + 1) % 13 for row in chosen]
        return chosen

    engine.target.verify = forgetful
    result = run(engine)
    assert "differs" in {reason["kind"] for reason in result["reasons"]}
    reason = result["reasons"][0]
    assert reason["text"] != reason["plain_text"] and reason["audit"].startswith("ddtree audit")

"""What every Qwen family must show: equal to transformers, to itself in any chunking, on any tree, at any budget.

A test class inherits `TargetChecks` and says which family; its models are made once.
"""

from __future__ import annotations

import pytest
import torch

from ddtree.engine.drafter import Drafter
from ddtree.engine.request import Request
from ddtree.sampling.params import SamplingParams
from tests.closeness import assert_close
from tests.models.qwens import PROMPT_LENGTHS, PeekingDrafter, drafter_for, engine_around, reference
from tests.models.tiny import feed, greedy, path_to, random_ids, random_parents, run, saved_and_loaded

AGAINST_TRANSFORMERS = 1e-4
AGAINST_ITSELF = 2e-5
NOTHING = torch.zeros(0, dtype=torch.int64)


def generated(engine, prompt, budget: int, temperature: float = 0.0, max_tokens: int = 32, **options):
    """What the engine writes after `prompt` [T]."""
    sampling = SamplingParams(temperature=temperature)
    request = Request(tuple(prompt.tolist()), max_tokens, sampling, seed=7, tree_budget=budget, **options)
    return engine.generate(request)


class TargetChecks:
    """Needs `FAMILY`, `CONFIG_CLASS` and `CHANGES` (to `qwens.COMMON`)."""

    FAMILY: str
    CONFIG_CLASS: str
    CHANGES: dict
    BUDGETS = (1, 7, 16, 64, 256)

    @pytest.fixture(scope="class")
    @classmethod
    def models(cls, tmp_path_factory):
        """(transformers' model, ours loaded from what it saves)."""
        torch.manual_seed(3)
        theirs = reference(cls.FAMILY, cls.CONFIG_CLASS, **cls.CHANGES)
        return theirs, saved_and_loaded(theirs, tmp_path_factory.mktemp(cls.FAMILY))

    @pytest.fixture(scope="class")
    @classmethod
    def drafter(cls, models):
        torch.manual_seed(4)
        return drafter_for(models[1].config)

    @pytest.mark.parametrize("length", PROMPT_LENGTHS)
    def test_prefill_features_and_greedy_tokens_equal_transformers(self, models, length):
        theirs, ours = models
        prompt = random_ids(length)
        with torch.inference_mode():
            expected = theirs(prompt[None], output_hidden_states=True)
        layers = tuple(range(ours.config.num_layers))
        logits, features = feed(ours, ours.new_cache(), prompt, feature_layers=layers)
        assert_close("logits", logits, expected.logits[0], AGAINST_TRANSFORMERS)
        hidden_states = torch.cat(expected.hidden_states[1:], dim=-1)[0]
        assert_close("features", features, hidden_states, AGAINST_TRANSFORMERS)
        everything = torch.ones(1, length, dtype=torch.long)
        tokens = theirs.generate(
            prompt[None], attention_mask=everything, max_new_tokens=64, do_sample=False, pad_token_id=0
        )
        assert greedy(ours, ours.new_cache(), prompt, 64) == tokens[0, length:].tolist()

    @pytest.mark.parametrize("chunk", [1, 7, 63, 64, 65, 128])
    def test_any_chunking_gives_the_same_prefill(self, models, chunk):
        ours = models[1]
        prompt, more = random_ids(131), random_ids(2)
        whole, chunked = ours.new_cache(), ours.new_cache()
        expected = feed(ours, whole, prompt)[0]
        assert_close("logits", feed(ours, chunked, prompt, chunk)[0], expected, AGAINST_ITSELF)
        assert_close("after", feed(ours, chunked, more)[0], feed(ours, whole, more)[0], AGAINST_ITSELF)

    @pytest.mark.parametrize("seed", [0, 1])
    def test_tree_rows_equal_their_paths_alone_and_a_commit_equals_fresh_prefill(self, models, seed):
        ours = models[1]
        prompt, more, nodes = random_ids(70), random_ids(3), random_ids(40)
        parents = random_parents(40, seed)
        cache = ours.new_cache()
        feed(ours, cache, prompt)
        for node in range(seed, 40, 6):
            path = path_to(node, parents)
            alone, features = feed(
                ours, ours.new_cache(), torch.cat((prompt, nodes[path], more)), feature_layers=(1,)
            )
            output = run(ours, cache, nodes, parents, feature_layers=(1,))
            assert_close(f"node {node}", ours.logits(output.hidden[node]), alone[-4], AGAINST_ITSELF)
            assert_close(f"features of {node}", output.features[node], features[-4], AGAINST_ITSELF)
            cache.commit(NOTHING)  # the next round finds nothing of this one
        path = path_to(39, parents)
        run(ours, cache, nodes, parents)
        cache.commit(torch.tensor(path))
        fresh = feed(ours, ours.new_cache(), torch.cat((prompt, nodes[path], more)))[0]
        assert_close("continued", feed(ours, cache, more)[0], fresh[-3:], AGAINST_ITSELF)

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_every_budget_writes_what_plain_decoding_writes(self, models, drafter, temperature):
        ours, prompt = models[1], random_ids(70)
        honest, peeking = Drafter(drafter, ours), PeekingDrafter(drafter, ours)
        plain = generated(engine_around(ours, honest), prompt, 0, temperature).token_ids
        peeking.script = (*prompt.tolist(), *plain)
        for budget in self.BUDGETS:
            for each in (honest, peeking):
                written = generated(engine_around(ours, each), prompt, budget, temperature)
                assert written.token_ids == plain, f"budget {budget}, {type(each).__name__}"
        # The last one accepted long paths, so that commits folded more than the root.
        assert written.stats.mean_acceptance_length > 2.5

    def test_turns_aborts_and_stops_leave_no_trace(self, models, drafter):
        ours = models[1]
        honest, peeking = Drafter(drafter, ours), PeekingDrafter(drafter, ours)
        engine = engine_around(ours, peeking)
        conversation = random_ids(20)
        for budget in (16, 0, 64):
            plain = generated(engine_around(ours, honest), conversation, 0, max_tokens=20).token_ids
            peeking.script = (*conversation.tolist(), *plain)
            abandoned = engine.add(Request(tuple(conversation.tolist()), 20, tree_budget=16))
            for _ in range(3):
                engine.step()
            engine.abort(abandoned)
            stop = frozenset({plain[11]})
            stopped = generated(engine, conversation, budget, max_tokens=20, eos_token_ids=stop)
            assert stopped.token_ids == plain[: plain.index(plain[11]) + 1]
            assert generated(engine, conversation, budget, max_tokens=20).token_ids == plain
            conversation = torch.cat((conversation, torch.tensor(plain), random_ids(5)))

"""Qwen3.5 (dense): against transformers and itself; a tree read as a sequence must fail; configs; precision."""

import pytest
import torch

from ddtree.caches.kv import KVCache
from ddtree.caches.recurrent import RecurrentCache
from ddtree.caches.rows import Rows, Span
from ddtree.engine.drafter import Drafter
from ddtree.models import stack
from ddtree.models.qwen3_5 import Qwen3_5
from ddtree.models.registry import load_target
from tests.closeness import assert_close
from tests.models.qwens import LINEAR, engine_around
from tests.models.target_checks import AGAINST_ITSELF, TargetChecks, generated
from tests.models.tiny import feed, path_to, random_ids, random_parents, run

CHANGES = {**LINEAR, "intermediate_size": 40}


class FlattenedCache(RecurrentCache):
    """What a plain cache does to a tree: its nodes are consecutive tokens, and all of them stay in the state."""

    def stage_conv(self, x, weight, bias, parents):
        return super().stage_conv(x, weight, bias, None)

    def stage(self, query, key, value, g, beta, ancestor_mask):
        return super().stage(query, key, value, g, beta, None)

    def commit(self, path):
        everything = torch.arange(self._conv_inputs.shape[0]) if len(path) else path
        super().commit(everything)


class TestQwen3_5(TargetChecks):
    FAMILY, CONFIG_CLASS, CHANGES = "Qwen3_5", "Qwen3_5TextConfig", CHANGES

    def test_caches_are_tree_aware(self, models):
        ours = models[1]
        assert type(ours) is Qwen3_5 and ours.config.is_hybrid
        kinds = [type(cache) for cache in ours.new_cache().layers]
        assert kinds == [RecurrentCache, RecurrentCache, RecurrentCache, KVCache]

    def test_a_tree_read_as_a_sequence_fails(self, models, drafter, monkeypatch):
        """The negative control: the checks above see the fault that they are there for."""
        ours, prompt = models[1], random_ids(70)
        honest = Drafter(drafter, ours)
        plain = generated(engine_around(ours, honest), prompt, 0).token_ids
        monkeypatch.setattr(stack, "RecurrentCache", FlattenedCache)
        # Without trees the two caches are the same.
        assert generated(engine_around(ours, honest), prompt, 0).token_ids == plain
        for budget in (7, 16, 64):
            assert generated(engine_around(ours, honest), prompt, budget).token_ids != plain
        nodes, parents = random_ids(40), random_parents(40, seed=0)
        cache = ours.new_cache()
        feed(ours, cache, prompt)
        output = run(ours, cache, nodes, parents)
        alone = feed(ours, ours.new_cache(), torch.cat((prompt, nodes[path_to(39, parents)])))[0]
        with pytest.raises(AssertionError, match="relative norm"):
            assert_close("node 39", ours.logits(output.hidden[39]), alone[-1], 1e-2)

    def test_two_sequences_in_one_forward_equal_each_alone(self, models):
        ours = models[1]
        first, second = random_ids(6), random_ids(4)
        caches = ours.new_cache(), ours.new_cache()
        spans = (Span(caches[0], 0, 6, None, None), Span(caches[1], 6, 10, None, None))
        positions = torch.cat((torch.arange(6), torch.arange(4)))
        with torch.inference_mode():
            output = ours.forward(Rows(torch.cat((first, second)), positions, spans))
        alone = [run(ours, ours.new_cache(), token_ids).hidden for token_ids in (first, second)]
        assert_close("hidden", output.hidden, torch.cat(alone), AGAINST_ITSELF)

    def test_bfloat16_keeps_fp32_where_the_family_computes_in_it(self, models, tmp_path):
        theirs = models[0]
        theirs.save_pretrained(tmp_path)
        low = load_target(tmp_path, "cpu", torch.bfloat16)
        fp32 = {name for name, tensor in low.named_parameters() if tensor.dtype == torch.float32}
        mixer = {f"layers.{i}.mixer.{name}" for i in range(3) for name in ("A_log", "dt_bias", "norm")}
        norms = {f"layers.{i}.{name}_layernorm.weight" for i in range(4) for name in ("input", "post_attention")}
        assert fp32 == {*mixer, *norms, "layers.3.mixer.q_norm", "layers.3.mixer.k_norm", "norm.weight"}
        assert torch.equal(low.layers[0].mixer.A_log, theirs.model.layers[0].linear_attn.A_log)
        prompt = random_ids(70)
        with torch.inference_mode():
            expected = theirs.bfloat16()(prompt[None]).logits[0]
            theirs.float()
        logits = feed(low, low.new_cache(), prompt)[0]
        assert_close("logits", logits, expected, 0.05)

"""Qwen3.5 (dense): against transformers and itself; a tree read as a sequence must fail; configs; precision."""

import copy

import pytest
import torch

from ddtree.caches.kv import KVCache
from ddtree.caches.recurrent import RecurrentCache
from ddtree.engine.drafter import Drafter
from ddtree.engine.request import Request
from ddtree.models import stack
from ddtree.models.qwen3_5 import Qwen3_5
from ddtree.models.registry import load_target
from tests.closeness import assert_close
from tests.models.qwens import LINEAR, engine_around, reference, save_inside_multimodal
from tests.models.target_checks import AGAINST_TRANSFORMERS, TargetChecks, generated
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


class FlattenedConvolution(RecurrentCache):
    """Half of the fault: only the short convolution reads the rows before a node instead of its ancestors."""

    def stage_conv(self, x, weight, bias, parents):
        return super().stage_conv(x, weight, bias, None)


class KeptSiblings(RecurrentCache):
    """The other half: nodes are right, but the rejected ones stay in the state."""

    def stage(self, query, key, value, g, beta, ancestor_mask):
        super().stage(query, key, value, g, beta, None)
        self._flattened = self._staged
        return super().stage(query, key, value, g, beta, ancestor_mask)

    def commit(self, path):
        if len(path):
            self._staged = self._flattened
            path = torch.arange(self._conv_inputs.shape[0])
        super().commit(path)


class TestQwen3_5(TargetChecks):
    FAMILY, CONFIG_CLASS, CHANGES = "Qwen3_5", "Qwen3_5TextConfig", CHANGES
    BUDGETS = (1, 2, 7, 15, 16, 32, 64, 128, 256, 512, 1024)

    def test_caches_are_tree_aware(self, models):
        ours = models[1]
        assert type(ours) is Qwen3_5 and ours.config.is_hybrid
        kinds = [type(cache) for cache in ours.new_cache().layers]
        assert kinds == [RecurrentCache, RecurrentCache, RecurrentCache, KVCache]

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_the_largest_tree_too(self, models, drafter, temperature):
        ours, prompt = models[1], random_ids(70)
        engine = engine_around(ours, Drafter(drafter, ours))
        plain = generated(engine, prompt, 0, temperature, max_tokens=8).token_ids
        written = generated(engine, prompt, 1024, temperature, max_tokens=8)
        assert written.token_ids == plain and written.stats.nodes_verified > 1000

    @pytest.mark.parametrize("fault", [FlattenedCache, FlattenedConvolution, KeptSiblings])
    def test_a_tree_read_as_a_sequence_fails(self, models, drafter, monkeypatch, fault):
        """The negative control: the equality above sees the fault that it is there for."""
        ours, prompt = models[1], random_ids(70)
        honest = Drafter(drafter, ours)
        plain = generated(engine_around(ours, honest), prompt, 0).token_ids
        monkeypatch.setattr(stack, "RecurrentCache", fault)
        # Without trees the caches are the same.
        assert generated(engine_around(ours, honest), prompt, 0).token_ids == plain
        for budget in (7, 16, 64):
            assert generated(engine_around(ours, honest), prompt, budget).token_ids != plain

    def test_a_node_of_a_flattened_tree_is_far_off(self, models, monkeypatch):
        ours, prompt, nodes, parents = models[1], random_ids(70), random_ids(40), random_parents(40, seed=0)
        alone = feed(ours, ours.new_cache(), torch.cat((prompt, nodes[path_to(39, parents)])))[0]
        monkeypatch.setattr(stack, "RecurrentCache", FlattenedCache)
        cache = ours.new_cache()
        feed(ours, cache, prompt)
        output = run(ours, cache, nodes, parents)
        with pytest.raises(AssertionError, match="relative norm"):
            assert_close("node 39", ours.logits(output.hidden[39]), alone[-1], 0.1)

    def test_two_sequences_side_by_side_equal_each_alone(self, models, drafter):
        ours = models[1]
        honest = Drafter(drafter, ours)
        prompts = [random_ids(70), random_ids(3)]
        alone = [
            generated(engine_around(ours, honest), prompt, 0, max_tokens=20).token_ids for prompt in prompts
        ]
        engine = engine_around(ours, honest, max_running=2)
        requests = [
            Request(tuple(prompt.tolist()), 20, tree_budget=16 * (i + 1)) for i, prompt in enumerate(prompts)
        ]
        written = {engine.add(request): [] for request in requests}
        while engine.has_work:
            for emission in engine.step():
                written[emission.request_id].extend(emission.token_ids)
        assert [tuple(token_ids) for token_ids in written.values()] == alone

    def test_bfloat16_keeps_fp32_where_the_family_computes_in_it(self, models, tmp_path):
        theirs = models[0]
        theirs.save_pretrained(tmp_path)
        low = load_target(tmp_path, "cpu", torch.bfloat16)
        fp32 = {name for name, tensor in low.named_parameters() if tensor.dtype == torch.float32}
        mixer = {f"layers.{i}.mixer.{name}" for i in range(3) for name in ("A_log", "dt_bias", "norm")}
        norms = {
            f"layers.{i}.{name}_layernorm.weight" for i in range(4) for name in ("input", "post_attention")
        }
        assert fp32 == {*mixer, *norms, "layers.3.mixer.q_norm", "layers.3.mixer.k_norm", "norm.weight"}
        assert torch.equal(low.layers[0].mixer.A_log, theirs.model.layers[0].linear_attn.A_log)
        prompt = random_ids(70)
        exact = feed(models[1], models[1].new_cache(), prompt)[0]
        with torch.inference_mode():
            rounded = copy.deepcopy(theirs).bfloat16()(prompt[None]).logits[0].float()
        error = (feed(low, low.new_cache(), prompt)[0].float() - exact).norm()
        assert error < 1.25 * (rounded - exact).norm()


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.5,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}


@pytest.mark.parametrize(
    "changes", [{"rope_parameters": YARN}, {"attention_bias": True}, {"tie_word_embeddings": True}]
)
def test_variants_equal_transformers_also_inside_a_multimodal_file(changes, tmp_path, tmp_path_factory):
    theirs = reference("Qwen3_5", "Qwen3_5TextConfig", **{**CHANGES, **changes})
    theirs.save_pretrained(tmp_path)
    published = save_inside_multimodal(
        tmp_path, tmp_path_factory.mktemp("published"), "Qwen3_5ForConditionalGeneration"
    )
    prompt = random_ids(130)
    with torch.inference_mode():
        expected = theirs(prompt[None]).logits[0]
    for folder in (tmp_path, published):
        ours = load_target(folder, "cpu", torch.float32)
        assert_close("logits", feed(ours, ours.new_cache(), prompt)[0], expected, AGAINST_TRANSFORMERS)

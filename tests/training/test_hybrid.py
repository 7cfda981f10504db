"""The training-time forward of a hybrid target, and its writer, against the served model and transformers."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ddtree.caches.rows import Rows, Span
from ddtree.models.registry import load_target
from ddtree.training.hybrid import HybridTarget, gated_delta_chunks
from ddtree.training.hybrid_writer import HybridWriter, write

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
    "vocab_size": 97,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random checkpoint with lively values."""
    from ddtree.models.config import ModelConfig
    from ddtree.models.registry import TARGETS

    path = tmp_path_factory.mktemp("hybrid")
    generator = torch.Generator().manual_seed(3)
    model = TARGETS["Qwen3_5ForCausalLM"](ModelConfig.from_hf(CONFIG), "meta", torch.float32)
    tensors = {}
    for name, like in model.checkpoint_tensors():
        scale = 0.3 if like.ndim == 1 else 2 * like.shape[-1] ** -0.5
        tensors[name] = torch.empty(like.shape).normal_(0, scale, generator=generator)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def token_ids():
    return torch.randint(0, 97, (3, 150), generator=torch.Generator().manual_seed(1))


def distance(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def served(model, ids, taps):
    cache = model.new_cache()
    with torch.inference_mode():
        output = model(Rows(ids, torch.arange(len(ids)), (Span(cache, 0, len(ids), None, None),)), taps)
        return output.features, output.hidden, model.logits(output.hidden)


def test_forward_and_features_are_the_served_models(folder, token_ids):
    target, model = HybridTarget.load(folder, "cpu", torch.float32), load_target(folder, "cpu", torch.float32)
    features, hidden = target.forward(token_ids, (0, 2, 3))
    logits = target.logits(hidden)
    for row, ids in enumerate(token_ids):
        for ours, theirs in zip((features, hidden, logits), served(model, ids, (0, 2, 3)), strict=True):
            assert distance(ours[row], theirs) < 2e-5
    torch.testing.assert_close(target.features(token_ids, (0, 2)), features[..., :64])


def test_steps_equal_the_forward(folder, token_ids):
    target = HybridTarget.load(folder, "cpu", torch.float32)
    logits = target.logits(target.forward(token_ids, ())[1])
    writer = HybridWriter(target, 3, 150)
    stepped = torch.stack([writer.step(token_ids[:, step], step) for step in range(150)], dim=1)
    assert distance(stepped, logits) < 2e-5


def test_write_is_greedy_decoding_up_to_a_stop(folder):
    target, model = HybridTarget.load(folder, "cpu", torch.float32), load_target(folder, "cpu", torch.float32)
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [1]]
    tokens, classes, ends = write(target, prompts, np.zeros(3), 40, stop_ids=[])
    stop = int(tokens[0, 20])
    stopped, stopped_classes, stopped_ends = write(target, prompts, np.zeros(3), 40, stop_ids=[stop])
    assert (ends == 40).all() and stopped_ends[0] <= 21
    for row, prompt in enumerate(prompts):
        ids = torch.from_numpy(tokens[row].astype(np.int64))
        chosen = served(model, ids, ())[2].argmax(-1)
        assert tokens[row, : len(prompt)].tolist() == prompt
        assert (chosen[len(prompt) - 1 : -1] == ids[len(prompt) :]).all()
        assert (classes[row] == [2] * len(prompt) + [1] * (40 - len(prompt))).all()
        end = stopped_ends[row]
        assert (stopped[row, :end] == tokens[row, :end]).all() and (stopped_classes[row, end:] == 0).all()
        assert end == 40 or stopped[row, end - 1] == stop


def test_gradients_flow_through_the_chunks():
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(1, 2, 128, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    parts[:2] = [part / part.norm(dim=-1, keepdim=True) for part in parts[:2]]
    decay = -torch.rand(1, 2, 128, generator=generator, dtype=torch.float64)
    beta = torch.rand(1, 2, 128, generator=generator, dtype=torch.float64)
    leaves = [part.requires_grad_() for part in (*parts, decay, beta)]

    def recurrence(query, key, value, decay, beta):
        state, outs = torch.zeros(1, 2, 4, 4, dtype=torch.float64), []
        for t in range(128):
            state = state * decay[:, :, t, None, None].exp()
            u = beta[:, :, t, None] * (value[:, :, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, :, t]))
            state = state + key[:, :, t, :, None] * u[:, :, None]
            outs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, :, t]))
        return torch.stack(outs, dim=2)

    ours, theirs = gated_delta_chunks(*leaves), recurrence(*leaves)
    torch.testing.assert_close(ours, theirs)
    weight = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad((out * weight).sum(), leaves) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)

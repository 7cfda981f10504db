"""Qwen3 against transformers on tiny random models; what it shares with Llama is tested there."""

import pytest
import torch

from ddtree.models.config import ModelConfig
from ddtree.models.qwen3 import Qwen3
from tests.closeness import assert_close
from tests.models.tiny import (
    SHAPE,
    feed,
    greedy,
    path_to,
    random_ids,
    random_parents,
    reference,
    run,
    saved_and_loaded,
)

RATIO = 1e-5
THETA = {"rope_type": "default", "rope_theta": 1e6}
CASES = {
    "plain": {"head_dim": 16, "rope_parameters": THETA},
    "tied": {"head_dim": 8, "rope_parameters": THETA, "tie_word_embeddings": True},
    "biases": {"head_dim": 12, "rope_parameters": THETA, "attention_bias": True},
    "yarn": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


@pytest.fixture(scope="module", params=CASES)
def models(request, tmp_path_factory):
    """(transformers' model, ours) of one case."""
    torch.manual_seed(2)
    theirs = reference("Qwen3", **CASES[request.param])
    return theirs, saved_and_loaded(theirs, tmp_path_factory.mktemp(request.param))


def test_prefill_logits_and_features_equal_transformers(models):
    theirs, ours = models
    assert type(ours) is Qwen3
    token_ids = random_ids(70)
    with torch.inference_mode():
        expected = theirs(token_ids[None], output_hidden_states=True)
    logits, features = feed(ours, ours.new_cache(), token_ids, chunk=33, feature_layers=(0, 1, 2))
    assert_close("logits", logits, expected.logits[0], RATIO)
    assert_close("features", features, torch.cat(expected.hidden_states[1:], dim=-1)[0], RATIO)


def test_greedy_tokens_equal_transformers(models):
    theirs, ours = models
    prompt = random_ids(11)
    expected = theirs.generate(prompt[None], max_new_tokens=32, do_sample=False, pad_token_id=0)[0, 11:]
    assert greedy(ours, ours.new_cache(), prompt, 32) == expected.tolist()


def test_each_tree_node_equals_its_path_run_alone_and_commits(models):
    ours = models[1]
    prompt, more, nodes, parents = random_ids(9), random_ids(3), random_ids(17), random_parents(17, seed=6)
    for node in range(0, 17, 4):
        cache = ours.new_cache()
        feed(ours, cache, prompt)
        output = run(ours, cache, nodes, parents)
        path = path_to(node, parents)
        alone = feed(ours, ours.new_cache(), torch.cat((prompt, nodes[path], more)))[0]
        assert_close(f"node {node}", ours.logits(output.hidden[node]), alone[-4], RATIO)
        cache.commit(torch.tensor(path))
        assert_close(f"after node {node}", feed(ours, cache, more)[0], alone[-3:], RATIO)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rope_parameters": None}, "rope_theta is missing"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types=.*sliding_attention.*not supported",
        ),
    ],
)
def test_refuses_what_it_would_have_to_guess(changes, message):
    config = {
        **SHAPE,
        **CASES["plain"],
        "architectures": ["Qwen3ForCausalLM"],
        "rms_norm_eps": 1e-6,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(config)


def test_the_window_that_qwen_configs_carry_unused_is_ignored():
    unused = {"model_type": "qwen3", "sliding_window": 4096, "use_sliding_window": False}
    config = {
        **SHAPE,
        **CASES["plain"],
        "architectures": ["Qwen3ForCausalLM"],
        "rms_norm_eps": 1e-6,
        **unused,
    }
    assert ModelConfig.from_hf(config).qk_norm

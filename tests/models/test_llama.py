"""Llama against transformers on tiny random models: prompts, chunks, single tokens, trees, commits."""

import pytest
import torch

from ddtree.caches.rows import Rows, Span
from ddtree.models.config import ModelConfig
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
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
LONG = {
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 128,
}

# Each case is a config that something published uses.
CASES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one-kv-head": {"num_key_value_heads": 1},
    "as-many-kv-heads": {"num_key_value_heads": 6},
    "head-dim": {"head_dim": 16},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}},
    "llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3}},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **YARN}},
    "yarn-mscale": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            **YARN,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
        }
    },
    "longrope": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **LONG}},
}


@pytest.fixture(scope="module", params=CASES)
def models(request, tmp_path_factory):
    """(transformers' model, ours) of one case."""
    torch.manual_seed(1)
    theirs = reference("Llama", **CASES[request.param])
    return theirs, saved_and_loaded(theirs, tmp_path_factory.mktemp(request.param))


def test_prefill_logits_and_features_equal_transformers(models):
    theirs, ours = models
    token_ids = random_ids(70)
    with torch.inference_mode():
        expected = theirs(token_ids[None], output_hidden_states=True)
    logits, features = feed(ours, ours.new_cache(), token_ids, feature_layers=(2, 0, 1))
    assert_close("logits", logits, expected.logits[0], RATIO)
    hidden_states = [expected.hidden_states[layer + 1][0] for layer in (2, 0, 1)]
    assert_close("features", features, torch.cat(hidden_states, dim=-1), RATIO)


def test_greedy_tokens_equal_transformers(models):
    theirs, ours = models
    prompt = random_ids(11)
    expected = theirs.generate(prompt[None], max_new_tokens=32, do_sample=False, pad_token_id=0)[0, 11:]
    assert greedy(ours, ours.new_cache(), prompt, 32) == expected.tolist()


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill_equals_one_prefill(models, chunk):
    ours = models[1]
    token_ids = random_ids(65)
    whole, chunked = ours.new_cache(), ours.new_cache()
    expected = feed(ours, whole, token_ids)[0]
    assert_close("logits", feed(ours, chunked, token_ids, chunk)[0], expected, RATIO)
    assert whole.context_length == chunked.context_length == 65


@pytest.mark.parametrize("seed", [0, 1])
def test_each_tree_node_equals_its_path_run_alone(models, seed):
    ours = models[1]
    prompt, parents = random_ids(9), random_parents(20, seed)
    nodes = random_ids(20)
    nodes[1] = 0  # token id 0 is a token
    cache = ours.new_cache()
    feed(ours, cache, prompt)
    output = run(ours, cache, nodes, parents, feature_layers=(1,))
    for node in range(0, 20, 3):
        path = path_to(node, parents)
        alone = ours.new_cache()
        logits, features = feed(ours, alone, torch.cat((prompt, nodes[path])), feature_layers=(1,))
        assert_close(f"node {node}", ours.logits(output.hidden[node]), logits[-1], RATIO)
        assert_close(f"features of node {node}", output.features[node], features[-1], RATIO)


@pytest.mark.parametrize("leaf", [0, 7, 19])
def test_committed_path_then_continue_equals_fresh_prefill(models, leaf):
    ours = models[1]
    prompt, more, parents = random_ids(9), random_ids(5), random_parents(20, seed=4)
    nodes = random_ids(20)
    path = path_to(leaf, parents)
    cache = ours.new_cache()
    feed(ours, cache, prompt)
    run(ours, cache, nodes, parents)
    cache.commit(torch.tensor(path))
    run(ours, cache, nodes, parents)
    cache.commit(torch.zeros(0, dtype=torch.int64))  # an aborted round in between
    continued = feed(ours, cache, more)[0]
    fresh = feed(ours, ours.new_cache(), torch.cat((prompt, nodes[path], more)))[0]
    assert_close("logits", continued, fresh[-5:], RATIO)


def test_two_sequences_in_one_forward_equal_each_alone(models):
    ours = models[1]
    first, second = random_ids(6), random_ids(4)
    caches = ours.new_cache(), ours.new_cache()
    spans = (Span(caches[0], 0, 6, None, None), Span(caches[1], 6, 10, None, None))
    positions = torch.cat((torch.arange(6), torch.arange(4)))
    with torch.inference_mode():
        output = ours.forward(Rows(torch.cat((first, second)), positions, spans))
    alone = [run(ours, ours.new_cache(), token_ids).hidden for token_ids in (first, second)]
    assert_close("hidden", output.hidden, torch.cat(alone), RATIO)


def test_refuses_feature_layers_that_do_not_exist(models):
    ours = models[1]
    with pytest.raises(ValueError, match="feature layer 3 does not exist; the target has layers 0 to 2"):
        run(ours, ours.new_cache(), random_ids(1), feature_layers=(3,))


def config(**changes):
    plain = {**SHAPE, "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, **changes}
    return {key: value for key, value in plain.items() if value != "absent"}


def test_flat_and_nested_rope_keys_mean_the_same():
    flat = config(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    nested = config(rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0})
    by_layer_type = config(rope_parameters={"full_attention": nested["rope_parameters"]})
    assert ModelConfig.from_hf(flat) == ModelConfig.from_hf(nested) == ModelConfig.from_hf(by_layer_type)


def test_rope_that_would_change_midway_limits_the_context():
    dynamic = config(rope_scaling={"type": "dynamic", "factor": 2.0})
    longrope = config(rope_scaling={"type": "longrope", **LONG})
    assert ModelConfig.from_hf(dynamic).context_limit == 512
    assert ModelConfig.from_hf(longrope).context_limit == 128


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"architectures": ["OtterForCausalLM"]},
            "unknown architecture 'OtterForCausalLM'; known are LlamaFor",
        ),
        ({"architectures": "absent"}, "unknown architecture None"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"rms_norm_eps": "absent"}, "rms_norm_eps is missing"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"sliding_window": 4096}, "sliding_window=4096 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
        ({"hidden_size": 50}, "hidden_size 50 is not a multiple of num_attention_heads 6"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type 'spiral' is not supported; supported are"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type 'linear' needs factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "needs original_max_position_embeddings"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "twist": 1}}, "does not know twist=1"),
    ],
)
def test_refuses_what_it_would_have_to_guess(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(config(**changes))

"""GGUF loading: files written here from tiny models, broken ones, and the real SmolLM2 against transformers."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from ddtree.models.gguf_file import GgufFile
from ddtree.models.gguf_weights import _INNER, halves_from_pairs
from ddtree.models.registry import load_target
from tests.closeness import assert_close
from tests.models.tiny import feed, greedy, random_ids, reference

Kind = gguf.GGMLQuantizationType
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
STORED = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_1, Kind.Q5_0, Kind.Q4_1, Kind.Q4_0]


def gguf_name(name):
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, kind = name.rpartition(".")
    if stem in outer:
        return f"{outer[stem]}.{kind}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{ {hf: ours for ours, hf in _INNER.items()}[part] }.{kind}"


def pairs_from_halves(array, num_heads):
    """What the conversion to GGUF does to the query and key rows of arch llama."""
    return array.reshape(num_heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def write(model, path, kind=Kind.F32, extra=None, metadata=None):
    """Write `model` as the conversion scripts do; `metadata` overrides values, None leaves a key out."""
    config = model.config
    arch = {"llama": "llama", "qwen3": "qwen3"}[config.model_type]
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, arch)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "ä", "b"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    for key, value in values.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}.get(type(value))
        if add:
            add(f"{arch}.{key}", value)
    tensors = {gguf_name(name): tensor.numpy() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["output.weight"]
    for name, array in (tensors | (extra or {})).items():
        if arch == "llama" and ("attn_q." in name or "attn_k." in name):
            heads = config.num_attention_heads if "attn_q." in name else config.num_key_value_heads
            array = pairs_from_halves(array, heads)
        stored = kind if array.ndim == 2 else Kind.F32
        if stored is Kind.F32:
            writer.add_tensor(name, np.ascontiguousarray(array))
        else:
            writer.add_tensor(name, quantize(np.ascontiguousarray(array), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path):
    return load_target(path, "cpu", torch.float32)


def assert_same_logits(path, theirs):
    ours, token_ids = load(path), random_ids(40)
    with torch.inference_mode():
        expected = theirs(token_ids[None]).logits[0]
    assert_close("logits", feed(ours, ours.new_cache(), token_ids)[0], expected, 1e-5)


@pytest.mark.parametrize("kind", STORED, ids=lambda kind: kind.name)
def test_llama_in_every_storage_equals_transformers(tmp_path, kind):
    theirs = reference("Llama", **SHAPE)
    path = write(theirs, tmp_path / "model.gguf", kind)
    # Rounded weights make large errors in a random model: the reference gets the rounded ones too.
    for parameter in theirs.parameters():
        if parameter.ndim == 2:
            rounded = dequantize(quantize(parameter.detach().numpy(), kind), kind)
            parameter.data.copy_(torch.tensor(rounded))
    assert_same_logits(path, theirs)


def test_llama_tied_and_with_biases_equals_transformers(tmp_path):
    theirs = reference("Llama", **SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    write(theirs, tmp_path / "model.gguf")
    assert_same_logits(tmp_path, theirs)  # a folder with exactly one .gguf


def test_qwen3_equals_transformers(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e6}
    theirs = reference("Qwen3", **SHAPE, head_dim=32, rope_parameters=rope)
    assert_same_logits(write(theirs, tmp_path / "model.gguf"), theirs)


def test_llama3_frequency_factors_equal_transformers(tmp_path):
    llama3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    theirs = reference("Llama", **SHAPE, rope_parameters=llama3)
    plain = 10000.0 ** -(np.arange(0, 16, 2, dtype=np.float32) / 16)
    factors = plain / theirs.model.rotary_emb.inv_freq.numpy()
    assert_same_logits(write(theirs, tmp_path / "m.gguf", extra={"rope_freqs.weight": factors}), theirs)


@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_scaled_rope_equals_transformers(tmp_path, rope_type):
    metadata = {"rope.scaling.type": rope_type, "rope.scaling.factor": 4.0}
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0}
    if rope_type == "yarn":
        metadata["rope.scaling.original_context_length"] = 64
        rope["original_max_position_embeddings"] = 64
    theirs = reference("Llama", **SHAPE, rope_parameters=rope)
    assert_same_logits(write(theirs, tmp_path / "m.gguf", metadata=metadata), theirs)


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"block_count": None}, "llama.block_count is missing"),
        ({"expert_count": 8}, "mixtures of experts are not supported"),
        ({"rope.dimension_count": 8}, "llama.rope.dimension_count 8 differs from the head dim 16"),
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope' is not supported"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 2.0},
            "rope.scaling.attn_factor=2.0 is not",
        ),
        ({"block_count": 4}, r"model.layers.3.input_layernorm.weight: missing from"),
        ({"block_count": 2}, r"model.layers.2.*: in .*, but the model has no such tensor"),
    ],
)
def test_refuses_metadata_it_cannot_serve(tmp_path, metadata, message):
    path = write(reference("Llama", **SHAPE), tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(ValueError, match=message):
        load(path)


def test_a_tensor_left_over_is_named(tmp_path):
    extra = {"blk.0.otter.weight": np.zeros((2, 32), np.float32)}
    path = write(reference("Llama", **SHAPE), tmp_path / "model.gguf", extra=extra)
    with pytest.raises(ValueError, match=r"blk\.0\.otter\.weight: in .*, but the model has no such tensor"):
        load(path)


@pytest.mark.parametrize(
    "kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q2_K, Kind.Q3_K], ids=lambda kind: kind.name
)
def test_k_quants_are_read_whole(tmp_path, kind):
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (3, 2 * block_bytes), dtype=np.uint8)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("a", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GgufFile(path).tensor("a")
    assert tensor.shape == (3, 512) and tensor.isfinite().all()
    assert np.array_equal(tensor.numpy(), dequantize(raw, kind))


@pytest.mark.parametrize("share", [0.0, 0.00005, 0.002, 0.01, 0.5, 0.9999])
def test_a_truncated_file_says_so_and_what_to_do(tmp_path, share):
    path = write(reference("Llama", **SHAPE), tmp_path / "model.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=r"model\.gguf: .*download it again"):
        load(path)


def test_a_file_that_is_not_gguf_says_so(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_text("<html>404</html>")
    with pytest.raises(
        ValueError, match=r"expected magic b'GGUF', the file \(16 bytes\) starts with b'<htm'"
    ):
        load(path)


def test_a_folder_with_two_files_lists_them(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"2 \.gguf files \(a\.gguf, b\.gguf\); name the one to load"):
        load(tmp_path)


def test_pairs_and_halves_are_inverse():
    weight = torch.randn(48, 5)
    pairs = torch.from_numpy(pairs_from_halves(weight.numpy(), 6))
    assert not torch.equal(pairs, weight)
    assert torch.equal(halves_from_pairs(pairs, 6), weight)


@pytest.mark.real
@pytest.mark.long  # tests/audit/test_command.py holds the pair against transformers too, in fewer tokens
def test_smollm2_writes_what_transformers_writes(smollm2_path):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
    ours = load(smollm2_path)
    # "<|im_start|>user\nWrite a story.<|im_end|>\n<|im_start|>assistant\n" and "The capital of France is"
    for prompt, count in (
        ([1, 4093, 198, 19161, 253, 2701, 30, 2, 198, 1, 520, 9531, 198], 80),
        ([504, 3575, 282, 4649, 314], 30),
    ):
        prompt = torch.tensor(prompt)
        emitted = greedy(ours, ours.new_cache(), prompt, count)
        text = torch.cat((prompt, torch.tensor(emitted)))
        # One forward of theirs over prompt and answer: by induction, its argmaxes are its own greedy answer.
        with torch.inference_mode():
            expected = theirs(text[None], output_hidden_states=True)
        assert expected.logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == emitted
        logits, features = feed(ours, ours.new_cache(), text, chunk=50, feature_layers=(1, 15, 29))
        assert_close("logits", logits, expected.logits[0], 1e-4)
        hidden_states = torch.cat([expected.hidden_states[layer + 1][0] for layer in (1, 15, 29)], dim=-1)
        assert_close("features", features, hidden_states, 1e-4)

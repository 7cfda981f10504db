"""ModelConfig: what a target's checkpoint says about its shape, read once and checked at the edge.

A key that would have to be guessed is an error that names it; only what the architecture's own config class defaults
is defaulted. It knows `KNOWN_ARCHITECTURES`, and what more the hybrid and mixture families say is `family_config`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddtree.models.family_config import (
    HYBRID_ARCHITECTURES,
    LinearAttentionConfig,
    MoeConfig,
    need,
    read_layer_types,
    read_linear_attention,
    read_moe,
    text_part,
)
from ddtree.models.rope import RopeConfig

if TYPE_CHECKING:
    from ddtree.models.gguf_file import GgufFile

KNOWN_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", *HYBRID_ARCHITECTURES)
_GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LLAMA_THETA = 10_000.0  # LlamaConfig's default; configs of Llama 1 and 2 leave the key out


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only target."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    layer_types: tuple[str, ...] = ()  # empty: full attention in every layer
    linear_attention: LinearAttentionConfig | None = None
    moe: MoeConfig | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")
        if self.rope.partial_rotary_factor != 1.0 and self.linear_attention is None:
            raise ValueError(
                f"partial_rotary_factor {self.rope.partial_rotary_factor} is not supported by {self.architecture}"
            )

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers are linear attention, whose state no cache can cut back."""
        return self.linear_attention is not None

    @property
    def context_limit(self) -> int:
        """Most tokens a sequence may have."""
        return min(self.max_position_embeddings, self.rope.context_limit or self.max_position_embeddings)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json. ValueError names the key that is missing or not supported."""
        architecture, config = text_part(config)
        if architecture not in KNOWN_ARCHITECTURES:
            raise ValueError(
                f"unknown architecture {architecture!r}; known are {', '.join(KNOWN_ARCHITECTURES)}"
            )
        _refuse_unsupported(config, architecture in HYBRID_ARCHITECTURES)
        qwen = architecture != "LlamaForCausalLM"
        num_layers = need(config, "num_hidden_layers")
        moe = read_moe(architecture, config, num_layers)
        all_sparse = moe is not None and not moe.dense_layers
        hidden_size, num_heads = need(config, "hidden_size"), need(config, "num_attention_heads")
        head_dim = config.get("head_dim")
        if head_dim is None:
            # LlamaConfig derives it; Qwen's config classes do not, and their models differ from the quotient.
            head_dim = need(config, "head_dim") if qwen else _divide(hidden_size, num_heads)
        num_kv_heads = config.get("num_key_value_heads")
        if num_kv_heads is None:
            num_kv_heads = need(config, "num_key_value_heads") if qwen else num_heads
        return cls(
            architecture=architecture,
            vocab_size=need(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=0 if all_sparse else need(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=need(config, "rms_norm_eps"),
            max_position_embeddings=need(config, "max_position_embeddings"),
            rope=RopeConfig.from_hf(config, default_theta=None if qwen else _LLAMA_THETA),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            qk_norm=qwen,
            attention_bias=config.get("attention_bias", False),
            mlp_bias=not qwen and config.get("mlp_bias", False),
            layer_types=read_layer_types(architecture, config, num_layers),
            linear_attention=read_linear_attention(architecture, config),
            moe=moe,
        )

    @classmethod
    def from_gguf(cls, reader: GgufFile) -> ModelConfig:
        """Read the metadata of a GGUF file. ValueError names the key that is missing or not supported."""
        arch = reader.need("general.architecture")
        if arch not in _GGUF_ARCHITECTURES:
            known = ", ".join(sorted(_GGUF_ARCHITECTURES))
            raise ValueError(f"{reader.path}: unknown GGUF architecture {arch!r}; known are {known}")
        if reader.metadata.get(f"{arch}.expert_count", 0):
            raise ValueError(f"{reader.path}: {arch}.expert_count: mixtures of experts are not supported")
        hidden_size = reader.need(f"{arch}.embedding_length")
        num_heads = reader.need(f"{arch}.attention.head_count")
        head_dim = reader.metadata.get(f"{arch}.attention.key_length") or _divide(hidden_size, num_heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            length = reader.metadata.get(f"{arch}.{key}", head_dim)
            if length != head_dim:
                raise ValueError(f"{reader.path}: {arch}.{key} {length} differs from the head dim {head_dim}")
        return cls(
            architecture=_GGUF_ARCHITECTURES[arch],
            vocab_size=reader.tensors["token_embd.weight"].shape[0],
            hidden_size=hidden_size,
            intermediate_size=reader.need(f"{arch}.feed_forward_length"),
            num_layers=reader.need(f"{arch}.block_count"),
            num_heads=num_heads,
            num_kv_heads=reader.metadata.get(f"{arch}.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=reader.need(f"{arch}.attention.layer_norm_rms_epsilon"),
            max_position_embeddings=reader.need(f"{arch}.context_length"),
            rope=_rope_from_gguf(reader, arch),
            tie_word_embeddings="output.weight" not in reader.tensors,
            qk_norm=arch == "qwen3",
            attention_bias="blk.0.attn_q.bias" in reader.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in reader.tensors,
        )


def _divide(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ValueError(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    return hidden_size // num_heads


def _refuse_unsupported(config: Mapping[str, Any], is_hybrid: bool) -> None:
    """Refuse what would change the output and is not implemented, naming key and value."""
    refused = [
        ("hidden_act", config.get("hidden_act", "silu") != "silu"),
        ("quantization_config", bool(config.get("quantization_config"))),
        ("use_sliding_window", bool(config.get("use_sliding_window"))),
        # Without `use_sliding_window` (Qwen's switch, which defaults to off) the window itself is the switch.
        (
            "sliding_window",
            bool(config.get("sliding_window")) and config.get("model_type") not in ("qwen3", "qwen3_moe"),
        ),
        (
            "layer_types",
            not is_hybrid and any(kind != "full_attention" for kind in config.get("layer_types") or ()),
        ),
    ]
    for key, unsupported in refused:
        if unsupported:
            raise ValueError(f"{key}={config.get(key)!r} is not supported")


def _rope_from_gguf(reader: GgufFile, arch: str) -> RopeConfig:
    theta = reader.metadata.get(f"{arch}.rope.freq_base", _LLAMA_THETA if arch == "llama" else None)
    if theta is None:
        raise ValueError(f"{reader.path}: {arch}.rope.freq_base is missing; it cannot be guessed")
    if "rope_freqs.weight" in reader.tensors:
        factors = reader.tensor("rope_freqs.weight").tolist()
        return RopeConfig(theta=theta, rope_type="factors", short_factor=tuple(factors))
    scaling = f"{arch}.rope.scaling"
    rope_type = reader.metadata.get(f"{scaling}.type", "none")
    if rope_type == "none":
        return RopeConfig(theta=theta)
    if rope_type not in ("linear", "yarn"):
        raise ValueError(
            f"{reader.path}: {scaling}.type {rope_type!r} is not supported; use none, linear or yarn"
        )
    known = {f"{scaling}.{key}" for key in ("type", "factor", "original_context_length", "finetuned")}
    for key in reader.metadata:
        if key.startswith(f"{scaling}.") and key not in known:
            raise ValueError(f"{reader.path}: {key}={reader.metadata[key]!r} is not supported")
    values = {"rope_type": rope_type, "rope_theta": theta, "factor": reader.need(f"{scaling}.factor")}
    if rope_type == "yarn":
        values["original_max_position_embeddings"] = reader.need(f"{scaling}.original_context_length")
    return RopeConfig.from_hf({"rope_parameters": values})

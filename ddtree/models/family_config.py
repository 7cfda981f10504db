"""What the configs of the Qwen3.5, Qwen3-Next and Qwen3-MoE families say beyond a dense decoder's.

`text_part` finds the language model inside a multimodal config; the readers take linear attention, layer types and
experts from it. As in `config`, a key that would be guessed is an error that names it; what a family's own config
class defaults is defaulted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LINEAR, FULL = "linear_attention", "full_attention"
HYBRID_ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")
# A multimodal checkpoint is served as the language model inside it.
_MULTIMODAL = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
# A text config that was taken out of a multimodal one does not name its architecture.
_BY_MODEL_TYPE = {"qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}
_MOE_ARCHITECTURES = ("Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3MoeForCausalLM")
_SHARED_EXPERT = ("Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")
# The families' config classes default these; published configs carry them.
_PARTIAL_ROTARY_FACTOR = 0.25
_FULL_ATTENTION_INTERVAL = 4
_NORM_TOPK_PROB = {"Qwen3MoeForCausalLM": False, "Qwen3NextForCausalLM": True, "Qwen3_5MoeForCausalLM": True}
# Image tokens have three positions; a text token has the same one three times, which is plain rotary embedding.
_MROPE_KEYS = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class LinearAttentionConfig:
    """The shape of a Gated-DeltaNet layer."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"linear attention: {name} must be >= 1, got {value}")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads {self.num_value_heads} is not a multiple of "
                f"linear_num_key_heads {self.num_key_heads}"
            )
        if self.conv_width < 2:
            raise ValueError(f"linear_conv_kernel_dim must be >= 2, got {self.conv_width}")

    @property
    def keys_size(self) -> int:
        """Width of the keys of all heads, which is that of the queries too."""
        return self.num_key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        """Width of the values of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values side by side go through the short convolution."""
        return 2 * self.keys_size + self.values_size


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts, and the one that every token visits."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int | None  # None: no shared expert
    normalise_weights: bool  # the chosen experts' weights add up to 1
    dense_layers: frozenset[int]  # layers with one plain MLP instead

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok must lie in 1 ... {self.num_experts} (num_experts), got {self.experts_per_token}"
            )


def text_part(config: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The architecture that serves `config`, and the config of its language model in the form `config` reads.

    ValueError names the key that is missing or the value that is not implemented.
    """
    declared = (config.get("architectures") or [_BY_MODEL_TYPE.get(config.get("model_type"))])[0]
    architecture = _MULTIMODAL.get(declared, declared)
    if "text_config" in config and declared in _MULTIMODAL:
        outer, config = config, dict(config["text_config"])
        # Where both say it, transformers goes by the outer one; weights are quantised as a whole.
        for key in ("tie_word_embeddings", "quantization_config"):
            if outer.get(key) is not None:
                config[key] = outer[key]
    elif declared in _MULTIMODAL:
        raise ValueError(
            f"text_config is missing from config.json; {declared} keeps its language model there"
        )
    if architecture not in HYBRID_ARCHITECTURES:
        return architecture, config
    _refuse_unimplemented(config)
    return architecture, {"partial_rotary_factor": _PARTIAL_ROTARY_FACTOR, **_with_text_rope(config)}


def read_layer_types(architecture: str, config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """One of LINEAR and FULL per layer; empty for an architecture that knows full attention only."""
    if architecture not in HYBRID_ARCHITECTURES:
        return ()
    kinds = config.get("layer_types")
    if kinds is None:
        interval = config.get("full_attention_interval", _FULL_ATTENTION_INTERVAL)
        kinds = [LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers)]
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for num_hidden_layers {num_layers}")
    for kind in kinds:
        if kind not in (LINEAR, FULL):
            raise ValueError(f"layer_types={kind!r} is not supported; supported are {LINEAR} and {FULL}")
    return tuple(kinds)


def read_linear_attention(architecture: str, config: Mapping[str, Any]) -> LinearAttentionConfig | None:
    """The Gated-DeltaNet layers' shape; None where there are none."""
    if architecture not in HYBRID_ARCHITECTURES:
        return None
    return LinearAttentionConfig(
        num_key_heads=need(config, "linear_num_key_heads"),
        num_value_heads=need(config, "linear_num_value_heads"),
        key_dim=need(config, "linear_key_head_dim"),
        value_dim=need(config, "linear_value_head_dim"),
        conv_width=need(config, "linear_conv_kernel_dim"),
    )


def read_moe(architecture: str, config: Mapping[str, Any], num_layers: int) -> MoeConfig | None:
    """The experts; None for a dense architecture."""
    if architecture not in _MOE_ARCHITECTURES:
        return None
    # transformers 5 writes qwen3_moe's under its newer name.
    num_experts = config.get("num_local_experts") or need(config, "num_experts")
    normalise = config.get("norm_topk_prob", _NORM_TOPK_PROB[architecture])
    if architecture == "Qwen3_5MoeForCausalLM" and not normalise:
        raise ValueError(f"norm_topk_prob={normalise!r} is not supported: {architecture} always normalises")
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=need(config, "num_experts_per_tok"),
        intermediate_size=need(config, "moe_intermediate_size"),
        shared_intermediate_size=(
            need(config, "shared_expert_intermediate_size") if architecture in _SHARED_EXPERT else None
        ),
        normalise_weights=bool(normalise),
        dense_layers=frozenset(layer for layer in range(num_layers) if layer in dense or (layer + 1) % step),
    )


def need(config: Mapping[str, Any], key: str) -> Any:
    """The value of `key`, or a ValueError that names it."""
    if config.get(key) is None:
        raise ValueError(f"{key} is missing from config.json; it cannot be guessed")
    return config[key]


def _with_text_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` without what its rotary keys say about images."""
    plain = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(plain.get(key), Mapping):
            plain[key] = {name: value for name, value in plain[key].items() if name not in _MROPE_KEYS}
            for name in ("rope_type", "type"):
                if plain[key].get(name) == "mrope":
                    plain[key][name] = "default"
    return plain


def _refuse_unimplemented(config: Mapping[str, Any]) -> None:
    """Refuse what would change the output of a hybrid model and is not implemented, naming key and value."""
    implemented = {
        "attn_output_gate": (True, None),
        "output_gate_type": ("swish", "silu", None),
        "mamba_ssm_dtype": ("float32", None),
    }
    for key, values in implemented.items():
        if config.get(key) not in values:
            raise ValueError(f"{key}={config[key]!r} is not supported")

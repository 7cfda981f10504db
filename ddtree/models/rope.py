"""Rotary position embedding, in every form in which checkpoints publish it.

`RopeConfig.from_hf` reads the flat form (`rope_theta` + `rope_scaling`) and the nested one (`rope_parameters`);
`frequencies` turns it into numbers. Types: default, linear, dynamic, yarn, llama3, longrope, and `factors` (GGUF's
`rope_freqs.weight`).

Dynamic and longrope change every frequency once the sequence outgrows a length, which no cache of rotated keys can
follow; they are served with the frequencies that hold up to that length, and `context_limit` says where it ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Keys of each type: those that must be there, those that may be.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "yarn": (
        ("original_max_position_embeddings",),
        ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "longrope": (
        ("original_max_position_embeddings", "short_factor", "long_factor"),
        ("factor", "attention_factor"),
    ),
}
_COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")


@dataclass(frozen=True)
class RopeConfig:
    """One published form of rotary embedding; fields that a type does not use are None."""

    theta: float
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None  # divisors of the frequencies, one each
    context_limit: int | None = None  # tokens up to which these frequencies hold; None means no limit

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], default_theta: float | None = None) -> RopeConfig:
        """Read the rotary keys of a config.json.

        `default_theta` is what the architecture's own config class assumes when `rope_theta` is absent; None means
        that absence is an error. ValueError names an unknown type, an unknown key or a missing one.
        """
        scaling = _one_dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        rope_type = scaling.get("rope_type", scaling.get("type", "default"))
        if rope_type not in _KEYS:
            raise ValueError(f"rope_type {rope_type!r} is not supported; supported are {sorted(_KEYS)}")
        theta = scaling.get("rope_theta", config.get("rope_theta", default_theta))
        if theta is None:
            raise ValueError("rope_theta is missing from config.json; it cannot be guessed")
        values = {key: value for key, value in scaling.items() if value is not None}
        # Phi-style configs keep the pretraining length beside the dict, and transformers lets that one win.
        outer = config.get("original_max_position_embeddings")
        if outer is not None and rope_type in ("yarn", "llama3", "longrope"):
            values["original_max_position_embeddings"] = outer
        _check_keys(rope_type, values)
        max_positions = config.get("max_position_embeddings")
        if rope_type in ("yarn", "longrope") and "factor" not in values:
            if max_positions is None:
                raise ValueError(f"rope_type {rope_type!r} needs factor or max_position_embeddings")
            values["factor"] = max_positions / values["original_max_position_embeddings"]
        partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        limits = {"dynamic": max_positions, "longrope": values.get("original_max_position_embeddings")}
        fields = {key: values[key] for key in (*_KEYS[rope_type][0], *_KEYS[rope_type][1]) if key in values}
        fields.pop("long_factor", None)
        if "short_factor" in fields:
            fields["short_factor"] = tuple(fields["short_factor"])
        return cls(
            theta=float(theta),
            rope_type=rope_type,
            partial_rotary_factor=1.0 if partial is None else float(partial),
            context_limit=limits.get(rope_type),
            **fields,
        )

    def frequencies(self, head_dim: int) -> tuple[torch.Tensor, float]:
        """Angle per position of each rotated pair, [rotary dim / 2] float32 on the CPU, and the factor that cos and
        sin are multiplied by.
        """
        dim = int(head_dim * self.partial_rotary_factor)
        wavelengths = self.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        plain = 1.0 / wavelengths
        if self.rope_type == "linear":
            return plain / self.factor, 1.0
        if self.rope_type == "llama3":
            return _llama3(self, plain), 1.0
        if self.rope_type == "yarn":
            return _yarn(self, wavelengths, dim), _yarn_attention_factor(self)
        if self.rope_type in ("longrope", "factors"):
            factors = torch.tensor(self.short_factor, dtype=torch.float32)
            if factors.shape != plain.shape:
                raise ValueError(
                    f"rope_type {self.rope_type!r}: expected {len(plain)} frequency factors, got {len(factors)}"
                )
            return 1.0 / (factors * wavelengths), _longrope_attention_factor(self)
        return plain, 1.0


def _one_dict(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The flat dict inside parameters that are keyed by layer type; refuses layer types that differ."""
    per_layer_type = [value for value in parameters.values() if isinstance(value, Mapping)]
    if not per_layer_type:
        return parameters
    if any(value != per_layer_type[0] for value in per_layer_type):
        raise ValueError(
            f"rope_parameters differ by layer type ({sorted(parameters)}), which is not supported"
        )
    return per_layer_type[0]


def _check_keys(rope_type: str, values: Mapping[str, Any]) -> None:
    required, optional = _KEYS[rope_type]
    for key in required:
        if key not in values:
            raise ValueError(f"rope_type {rope_type!r} needs {key}, which is missing from config.json")
    unknown = sorted(set(values) - {*required, *optional, *_COMMON_KEYS})
    if unknown:
        raise ValueError(f"rope_type {rope_type!r} does not know {unknown[0]}={values[unknown[0]]!r}")


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend in between."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(plain / rope.factor, plain, blend.clamp(0, 1))


def _yarn(rope: RopeConfig, wavelengths: torch.Tensor, dim: int) -> torch.Tensor:
    """Extrapolate pairs that turn often in the pretraining length, interpolate those that turn rarely."""

    def pair_that_turns(turns: float) -> float:
        length = rope.original_max_position_embeddings
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.beta_fast or 32), pair_that_turns(rope.beta_slow or 1)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first or 0.001)
    return torch.lerp(1.0 / wavelengths, 1.0 / (rope.factor * wavelengths), ramp.clamp(0, 1))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor is None or rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))

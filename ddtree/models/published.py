"""How published checkpoints name and store tensors, where it is not as the model does.

`Naming` finds the language model inside a multimodal file, and experts stored one by one or fused; `leave_aside`
is the declared rule for what rides along in a file and is not served.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from ddtree.models.layers import NamedTensors
from ddtree.models.weights import TensorSource

logger = logging.getLogger(__name__)

_INSIDE_MULTIMODAL = "model.language_model."
_EXPERTS = ".mlp.experts."
# Architecture -> prefix of the tensors that text generation does not read -> what they are.
_MTP = {"mtp.": "the multi-token prediction layer"}
_VISION_AND_MTP = {"model.visual.": "the vision tower", **_MTP}
LEFT_ASIDE: Mapping[str, Mapping[str, str]] = {
    "Qwen3_5ForCausalLM": _VISION_AND_MTP,
    "Qwen3_5MoeForCausalLM": _VISION_AND_MTP,
    "Qwen3NextForCausalLM": _MTP,
}


@dataclass(frozen=True)
class Naming:
    """One checkpoint's names for the model's tensors."""

    prefix: str = "model."  # of everything but the head
    experts_apart: bool = False  # experts.{i}.gate_proj.weight instead of the 3-D experts.gate_up_proj

    @classmethod
    def of(cls, names: Collection[str]) -> Naming:
        """Read it off the names of a checkpoint's tensors."""
        inside = f"{_INSIDE_MULTIMODAL}embed_tokens.weight" in names
        apart = any(f"{_EXPERTS}0." in name for name in names)
        return cls(_INSIDE_MULTIMODAL if inside else "model.", apart)

    def name(self, name: str) -> str:
        """The checkpoint's name of the model's tensor `name`."""
        return self.prefix + name.removeprefix("model.") if name.startswith("model.") else name

    def tensors(self, destinations: NamedTensors) -> NamedTensors:
        """Name and destination of every checkpoint tensor, from the model's own."""
        for name, target in destinations:
            if self.experts_apart and _EXPERTS in name:
                yield from _expert_tensors(self.name(name), target)
            else:
                yield self.name(name), target


def leave_aside(source: TensorSource, architecture: str) -> TensorSource:
    """`source` without the tensors that `LEFT_ASIDE` declares; says how many there are and of what.

    A warning, since that is seen where nobody has set up logging: in every command and in a caller's own Python.
    """
    rules = LEFT_ASIDE.get(architecture, {})
    for prefix, meaning in rules.items():
        count = sum(name.startswith(prefix) for name in source.shapes)
        if count:
            logger.warning(
                "%s: %d tensors %s* left aside: %s is not served", source.name, count, prefix, meaning
            )
    aside = tuple(rules)
    kept = {name: shape for name, shape in source.shapes.items() if not name.startswith(aside)}
    return source if len(kept) == len(source.shapes) else _PartOf(source, kept)


class _PartOf:
    """Some of the tensors of another source."""

    def __init__(self, source: TensorSource, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.name, self.shapes = source.name, shapes
        self._source = source

    def read(self, name: str) -> torch.Tensor:
        return self._source.read(name)


def _expert_tensors(name: str, target: torch.Tensor) -> NamedTensors:
    """Split a fused `gate_up_proj` [E, 2F, C] or `down_proj` [E, C, F] into its experts' matrices."""
    prefix, _, kind = name.rpartition(".")
    for expert, matrix in enumerate(target):
        if kind == "gate_up_proj":
            gate, up = matrix.chunk(2)
            yield f"{prefix}.{expert}.gate_proj.weight", gate
            yield f"{prefix}.{expert}.up_proj.weight", up
        else:
            yield f"{prefix}.{expert}.{kind}.weight", matrix

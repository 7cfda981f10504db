"""A decoder whose layers are not all alike: full or linear attention, a dense MLP or experts.

Letters: R packed rows, C model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ddtree.caches.kv import KVCache
from ddtree.caches.model_cache import ModelCache
from ddtree.caches.recurrent import RecurrentCache
from ddtree.caches.rows import Span
from ddtree.models.config import ModelConfig
from ddtree.models.family_config import LINEAR
from ddtree.models.layers import MLP, NamedTensors
from ddtree.models.llama import Llama
from ddtree.models.moe import MoE


class StackLayer(nn.Module):
    """A token mixer, then an MLP, each on the normalised residual stream. `mixer_name` is the checkpoint's."""

    def __init__(
        self,
        input_layernorm: nn.Module,
        mixer_name: str,
        mixer: nn.Module,
        post_attention_layernorm: nn.Module,
        mlp: nn.Module,
    ) -> None:
        super().__init__()
        self.mixer_name = mixer_name
        self.input_layernorm, self.mixer = input_layernorm, mixer
        self.post_attention_layernorm, self.mlp = post_attention_layernorm, mlp

    def checkpoint_tensors(self, prefix: str) -> NamedTensors:
        yield f"{prefix}.input_layernorm.weight", self.input_layernorm.weight.data
        yield from self.mixer.checkpoint_tensors(f"{prefix}.{self.mixer_name}")
        yield f"{prefix}.post_attention_layernorm.weight", self.post_attention_layernorm.weight.data
        yield from self.mlp.checkpoint_tensors(f"{prefix}.mlp")

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        spans: Sequence[Span],
        layer: int,
    ) -> torch.Tensor:
        """[R, C] -> [R, C]."""
        hidden = hidden + self.mixer(self.input_layernorm(hidden), rotary, spans, layer)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Stack(Llama):
    """A `TargetModel`: Llama's embedding, head and forward around layers that a family makes."""

    def __init__(self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        # Everything of Llama's but its layers and its norm.
        super().__init__(replace(config, num_layers=0, layer_types=()), device, dtype)
        self.config = config
        self.layers = nn.ModuleList(self.make_layer(index) for index in range(config.num_layers))
        self.norm = self.make_norm()

    def make_layer(self, index: int) -> StackLayer:
        """Layer `index`, without values."""
        mixer_name, mixer = self.make_mixer(index)
        return StackLayer(self.make_norm(), mixer_name, mixer, self.make_norm(), self.make_mlp(index))

    def make_norm(self) -> nn.Module:
        """A norm over the model width."""
        raise NotImplementedError

    def make_mixer(self, index: int) -> tuple[str, nn.Module]:
        """The attention of layer `index`, and its name in the checkpoint."""
        raise NotImplementedError

    def make_mlp(self, index: int) -> nn.Module:
        """A dense MLP, or experts where the config has them."""
        config, placed = self.config, {"device": self.device, "dtype": self.dtype}
        if config.moe is not None and index not in config.moe.dense_layers:
            return MoE(config.hidden_size, config.moe, **placed)
        return MLP(config.hidden_size, config.intermediate_size, bias=False, **placed)

    def finish_loading(self) -> None:
        """Derive what is not in the checkpoint as such; once."""
        for module in self.modules():
            if module is not self and hasattr(module, "finish_loading"):
                module.finish_loading()

    def new_cache(self) -> ModelCache:
        """An empty cache for one sequence; linear layers always get the one that knows trees."""
        config, linear = self.config, self.config.linear_attention

        def recurrent() -> RecurrentCache:
            heads = (linear.num_value_heads, linear.key_dim, linear.value_dim)
            return RecurrentCache(*heads, linear.conv_channels, linear.conv_width, self.dtype, self.device)

        def full() -> KVCache:
            return KVCache(config.num_kv_heads, config.head_dim, self.dtype, self.device)

        kinds = config.layer_types or (None,) * config.num_layers
        return ModelCache([recurrent() if kind == LINEAR else full() for kind in kinds])

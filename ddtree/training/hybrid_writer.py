"""A hybrid target writes thousands of answers at a time: one decode step per position, states and caches in place.

All sequences of a batch share their step, as in `training.sample`: while `t < prefix length` the next token is the prompt's, then it
is drawn, until a stop token; what follows that is padding. Letters as in `hybrid`; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from ddtree.models.family_config import LINEAR
from ddtree.training.hybrid import HybridTarget
from ddtree.training.sample import FORCED, GENERATED, USER_TOKEN

CHECK_STEPS = 16  # steps between two looks at whether every sequence has stopped


class HybridWriter:
    """The caches of one batch, and the step."""

    def __init__(self, target: HybridTarget, batch: int, length: int) -> None:
        self.target, self.batch, self.length = target, batch, length
        config, shape, device = target.config, target.config.linear_attention, target.device
        self.cos, self.sin = target.rotary(torch.arange(length, device=device))
        self.states, self.windows, self.keys, self.values = {}, {}, {}, {}
        for index, kind in enumerate(config.layer_types):
            if kind == LINEAR:
                size = (batch, shape.num_value_heads, shape.key_dim, shape.value_dim)
                self.states[index] = torch.zeros(size, device=device)
                size = (batch, shape.conv_channels, shape.conv_width)
                self.windows[index] = torch.zeros(size, device=device, dtype=target.dtype)
            else:
                size = (batch, config.num_kv_heads, length, config.head_dim)
                self.keys[index] = torch.zeros(size, device=device, dtype=target.dtype)
                self.values[index] = torch.zeros_like(self.keys[index])

    @torch.no_grad()
    def step(self, token: torch.Tensor, step: int) -> torch.Tensor:
        """Logits `[B, V]` after tokens `[B]` at position `step`."""
        target, x = self.target, self.target.embed(token)[:, None]
        for index, kind in enumerate(target.config.layer_types):
            prefix = f"model.layers.{index}"
            mixed = target.norm(x, f"{prefix}.input_layernorm")
            if kind == LINEAR:
                x = x + self.recall(mixed, f"{prefix}.linear_attn", index)
            else:
                x = x + self.attend(mixed, f"{prefix}.self_attn", index, step)
            x = x + target.mlp(target.norm(x, f"{prefix}.post_attention_layernorm"), f"{prefix}.mlp")
        return target.logits(target.norm(x, "model.norm")[:, 0]).float()

    def recall(self, x: torch.Tensor, prefix: str, index: int) -> torch.Tensor:
        """One token of a Gated-DeltaNet layer, `[B, 1, C]` to `[B, 1, C]`: the recurrence itself."""
        target = self.target
        window = torch.cat([self.windows[index][:, :, 1:], target.linear(x, f"{prefix}.in_proj_qkv").transpose(1, 2)], dim=2)
        self.windows[index] = window
        weight = target.tensors[f"{prefix}.conv1d.weight"][:, 0].to(target.dtype)
        convolved = F.silu((window * weight).sum(-1)[:, None])
        query, key, value = (part[:, :, 0] for part in target.probes(convolved))
        decay, beta = (part[:, 0] for part in target.gates(x, prefix))
        state = self.states[index]
        state *= decay.exp()[..., None, None]
        written = beta[..., None] * (value - torch.einsum("bhkv,bhk->bhv", state, key))
        state.addcmul_(key.unsqueeze(-1), written.unsqueeze(-2))
        return target.close(torch.einsum("bhkv,bhk->bhv", state, query)[:, None], x, prefix)

    def attend(self, x: torch.Tensor, prefix: str, index: int, step: int) -> torch.Tensor:
        """One token of a full-attention layer, `[B, 1, C]` to `[B, 1, C]`."""
        target = self.target
        rotary = (self.cos[step : step + 1], self.sin[step : step + 1])
        query, key, value, gate = target.project_attention(x, prefix, rotary)
        self.keys[index][:, :, step], self.values[index][:, :, step] = key[:, :, 0], value[:, :, 0]
        keys, values = self.keys[index][:, :, : step + 1], self.values[index][:, :, : step + 1]
        # the group of query heads of a key head plays the query length: keys are read once
        query = query.unflatten(1, (keys.shape[1], -1)).squeeze(3)
        attended = F.scaled_dot_product_attention(query, keys, values).flatten(1)[:, None]
        return target.linear(attended * gate.sigmoid(), f"{prefix}.o_proj")


@torch.no_grad()
def write(
    target: HybridTarget,
    prompts: Sequence[Sequence[int]],
    temperatures: np.ndarray,
    length: int,
    stop_ids: Sequence[int],
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Continue every prompt to a stop token or `length` positions.

    Returns tokens `[B, length]` (uint16), classes `[B, length]` as `training.sample` has them (prompts are user tokens, padding is
    forced) and how many positions of each are in use `[B]`.
    """
    batch, device = len(prompts), target.device
    prefix_lengths = torch.tensor([min(len(prompt), length) for prompt in prompts], device=device)
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : min(len(prompt), length)] = torch.tensor(prompt[:length])
    tokens = tokens.to(device)
    writer = HybridWriter(target, batch, length)
    generator = torch.Generator(device).manual_seed(seed)
    inverse = torch.tensor(temperatures, dtype=torch.float32, device=device)
    greedy, inverse = inverse == 0, 1 / inverse.clamp_min(1e-3)
    stops = torch.tensor(stop_ids, device=device)
    ends = torch.full((batch,), length, device=device)
    first_free = int(prefix_lengths.min())
    for step in range(1, length):
        logits = writer.step(tokens[:, step - 1], step - 1)
        if step < first_free:
            continue
        noise = torch.empty_like(logits).exponential_(generator=generator).log_().neg_()
        drawn = torch.where(greedy[:, None], logits, logits * inverse[:, None] + noise).argmax(-1)
        free = (step >= prefix_lengths) & (step < ends)
        tokens[:, step] = torch.where(step < prefix_lengths, tokens[:, step], torch.where(free, drawn, 0))
        ends = torch.where(free & torch.isin(drawn, stops), step + 1, ends)
        if step % CHECK_STEPS == 0 and bool((ends <= step).all()):
            break
    position = torch.arange(length, device=device)
    classes = torch.where(position < prefix_lengths[:, None], USER_TOKEN, GENERATED)
    classes = torch.where(position < ends[:, None], classes, FORCED)
    return tokens.cpu().numpy().astype(np.uint16), classes.to(torch.uint8).cpu().numpy(), ends.cpu().numpy()

"""The hybrid target (Qwen3.5's architecture) as plain tensors: a dense batched forward with taps, for training.

The served target runs packed rows over caches; here all sequences have the same length, so a causal attention and the chunked delta
rule do. It reads the tensors of a checkpoint under their published names; `tests/training/test_hybrid.py` holds it equal to the
served model. With tensors that require gradients it trains the target itself.
Letters: B sequences, T tokens, C model width, H query heads, G key-value heads, D head dim, Hk / Hv key / value heads of a linear
layer, K / V their dims, L taps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F

from ddtree.models.config import ModelConfig
from ddtree.models.family_config import LINEAR

CHUNK = 64  # tokens of the delta rule solved at once
L2_EPS = 1e-6


class HybridTarget:
    """Dense forward of a Qwen3.5 target; the interface that `DenseTarget` has for attention-only ones."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        """`tensors` by published name ("model.layers.0.linear_attn.A_log", ...), used as they are; `dtype` of the products."""
        self.config, self.tensors, self.dtype = config, tensors, dtype
        self.eps = config.rms_norm_eps
        self.embedding = tensors["model.embed_tokens.weight"]
        self.head = self.embedding if config.tie_word_embeddings else tensors["lm_head.weight"]
        self.device = self.embedding.device
        # half-precision logits keep three more bits than bfloat16: fewer false ties under argmax
        self.head_dtype = torch.float16 if dtype == torch.bfloat16 and self.device.type == "cuda" else dtype
        self.logits_head = self.head.detach().to(self.head_dtype)
        self.final_norm = 1 + tensors["model.norm.weight"].detach()
        frequencies, self.rotary_factor = config.rope.frequencies(config.head_dim)
        self.frequencies = frequencies.double()

    @classmethod
    def load(cls, folder: Path, device: torch.device | str, dtype: torch.dtype) -> HybridTarget:
        """A frozen target from its folder of config.json and safetensors; matrices in `dtype`, the rest in float32."""
        import json

        from ddtree.models.weights import SafetensorsSource

        config = ModelConfig.from_hf(json.loads((Path(folder) / "config.json").read_text()))
        source = SafetensorsSource(Path(folder))
        kinds = {name: dtype if len(shape) == 2 else torch.float32 for name, shape in source.shapes.items()}
        return cls(config, {name: source.read(name).to(device, kind) for name, kind in kinds.items()}, dtype)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[...]` ids to `[..., C]`."""
        return F.embedding(token_ids, self.embedding).to(self.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., C]` after the final norm to `[..., V]`."""
        return F.linear(hidden.to(self.head_dtype), self.logits_head)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Zero-centred RMSNorm of `[..., C]` in float32; the result in the products' dtype."""
        scale = 1 + self.tensors[f"{name}.weight"]
        return (F.rms_norm(x.float(), (x.shape[-1],), None, self.eps) * scale).to(self.dtype)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"].to(self.dtype))

    @torch.no_grad()
    def forward(self, token_ids: torch.Tensor, taps: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, T]` ids to the taps' features `[B, T, L C]` and the hidden states after the final norm `[B, T, C]`.

        Tap i is the output of layer i.
        """
        return self.run(token_ids, taps, self.config.num_layers)

    @torch.no_grad()
    def features(self, token_ids: torch.Tensor, taps: tuple[int, ...]) -> torch.Tensor:
        """`[B, T]` ids to the taps' features `[B, T, L C]`; stops at the last tap."""
        return self.run(token_ids, taps, max(taps) + 1)[0]

    def run(self, token_ids: torch.Tensor, taps: tuple[int, ...], depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, over the first `depth` layers, with gradients where the tensors have them."""
        length, last = token_ids.shape[1], self.config.num_layers - 1
        rotary = self.rotary(torch.arange(length, device=self.device))
        x, outputs = F.embedding(token_ids, self.embedding), {}  # training weights keep the residual stream in float32
        for index in range(depth):
            prefix = f"model.layers.{index}"
            mixed = self.norm(x, f"{prefix}.input_layernorm")
            if self.config.layer_types[index] == LINEAR:
                x = x + self.recall(mixed, f"{prefix}.linear_attn")
            else:
                x = x + self.attend(mixed, f"{prefix}.self_attn", rotary)
            x = x + self.mlp(self.norm(x, f"{prefix}.post_attention_layernorm"), f"{prefix}.mlp")
            if index in taps:
                # as in the served model, the last layer's output is taken after the final norm
                outputs[index] = self.norm(x, "model.norm") if index == last else x
        taken = [outputs[tap] for tap in taps]
        return torch.cat(taken, dim=-1) if taken else x[..., :0], self.norm(x, "model.norm")

    def mlp(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        gated = F.silu(self.linear(x, f"{prefix}.gate_proj")) * self.linear(x, f"{prefix}.up_proj")
        return self.linear(gated, f"{prefix}.down_proj")

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[len(positions), rotary dim]` in the products' dtype; the angles in float64."""
        angles = torch.outer(positions.double(), self.frequencies.to(self.device))
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos() * self.rotary_factor, angles.sin() * self.rotary_factor
        return cos.float().to(self.dtype), sin.float().to(self.dtype)

    def project_attention(self, x: torch.Tensor, prefix: str, rotary):
        """`[B, T, C]` to rotated queries `[B, H, T, D]`, rotated keys and values `[B, G, T, D]` and the gate `[B, T, H D]`."""
        config = self.config
        # q_proj's rows are each head's query, then its gate
        query, gate = self.linear(x, f"{prefix}.q_proj").unflatten(-1, (config.num_heads, -1)).chunk(2, dim=-1)
        key = self.linear(x, f"{prefix}.k_proj").unflatten(-1, (config.num_kv_heads, -1))
        value = self.linear(x, f"{prefix}.v_proj").unflatten(-1, (config.num_kv_heads, -1))
        query, key = self.norm(query, f"{prefix}.q_norm"), self.norm(key, f"{prefix}.k_norm")
        query, key = (turn(part.transpose(1, 2), *rotary) for part in (query, key))
        return query, key, value.transpose(1, 2), gate.flatten(-2)

    def attend(self, x: torch.Tensor, prefix: str, rotary) -> torch.Tensor:
        """Gated causal attention, `[B, T, C]` to `[B, T, C]`."""
        query, key, value, gate = self.project_attention(x, prefix, rotary)
        grouped = self.config.num_heads != self.config.num_kv_heads
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.linear(attended.transpose(1, 2).flatten(-2) * gate.sigmoid(), f"{prefix}.o_proj")

    def gates(self, x: torch.Tensor, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Log decay and beta `[B, T, Hv]` float32."""
        step = F.softplus(self.linear(x, f"{prefix}.in_proj_a").float() + self.tensors[f"{prefix}.dt_bias"].float())
        decay = -self.tensors[f"{prefix}.A_log"].float().exp() * step
        return decay, self.linear(x, f"{prefix}.in_proj_b").float().sigmoid()

    def probes(self, convolved: torch.Tensor):
        """Convolved `[B, T, 2 Hk K + Hv V]` to normalised queries (scaled) and keys, and values, `[B, Hv, T, K or V]` float32."""
        shape = self.config.linear_attention
        query, key, value = convolved.float().split((shape.keys_size, shape.keys_size, shape.values_size), dim=-1)
        query, key = (part.unflatten(-1, (shape.num_key_heads, -1)) for part in (query, key))
        query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + L2_EPS) for part in (query, key))
        repeats = shape.num_value_heads // shape.num_key_heads
        query, key = (part.repeat_interleave(repeats, dim=2).transpose(1, 2) for part in (query, key))
        return query * shape.key_dim**-0.5, key, value.unflatten(-1, (shape.num_value_heads, -1)).transpose(1, 2)

    def recall(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        """A Gated-DeltaNet layer, `[B, T, C]` to `[B, T, C]`, from an empty state."""
        shape, length = self.config.linear_attention, x.shape[1]
        weight = self.tensors[f"{prefix}.conv1d.weight"].to(self.dtype)
        mixed = F.pad(self.linear(x, f"{prefix}.in_proj_qkv").transpose(1, 2), (shape.conv_width - 1, 0))
        convolved = F.silu(F.conv1d(mixed, weight, groups=shape.conv_channels)).transpose(1, 2)
        decay, beta = (part.transpose(1, 2) for part in self.gates(x, prefix))
        query, key, value = self.probes(convolved)
        padding = -length % CHUNK
        if padding:
            # rows of zeros behind the last: beta 0 writes nothing, and nobody reads them
            query, key, value = (F.pad(part, (0, 0, 0, padding)) for part in (query, key, value))
            decay, beta = F.pad(decay, (0, padding)), F.pad(beta, (0, padding))
        recalled = gated_delta_chunks(query, key, value, decay, beta)[:, :, :length].transpose(1, 2)
        return self.close(recalled, x, prefix)

    def close(self, recalled: torch.Tensor, x: torch.Tensor, prefix: str) -> torch.Tensor:
        """Norm per head, gate and output projection of `recalled [B, T, Hv, V]`; x is the layer's input."""
        normed = F.rms_norm(recalled, (recalled.shape[-1],), None, self.eps).to(self.dtype) * self.tensors[f"{prefix}.norm.weight"]
        gate = self.linear(x, f"{prefix}.in_proj_z").view(normed.shape)
        return self.linear((normed * F.silu(gate.float())).to(self.dtype).flatten(-2), f"{prefix}.out_proj")


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first dimensions of `x [..., T, D]` by `cos`, `sin [T, rotary dim]`."""
    rotary_dim = cos.shape[-1]
    first, second = x[..., :rotary_dim].chunk(2, dim=-1)
    turned = x[..., :rotary_dim] * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, x[..., rotary_dim:]], dim=-1)


def gated_delta_chunks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The gated delta rule from an empty state, chunk by chunk (design.md §3 with a causal mask); differentiable.

    `query`, `key [B, H, T, K]`, `value [B, H, T, V]`, log `decay` and `beta [B, H, T]`, T a multiple of CHUNK, float32 -> `[B, H, T, V]`.
    """
    num_chunks, key_dim = query.shape[2] // CHUNK, key.shape[-1]
    query, key, value = (part.unflatten(2, (num_chunks, CHUNK)) for part in (query, key, value))
    decay, beta = decay.unflatten(2, (num_chunks, CHUNK)).cumsum(-1), beta.unflatten(2, (num_chunks, CHUNK)).unsqueeze(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).tril()
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()
    weighted = key * beta
    system = torch.matmul(weighted, key.transpose(-1, -2)) * between
    from_start = decay.exp().unsqueeze(-1)
    right_side = torch.cat([value * beta, weighted * from_start], dim=-1)
    solved = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    rows, by_state = solved.split((value.shape[-1], key_dim), dim=-1)
    attention = torch.matmul(query, key.transpose(-1, -2)) * between
    query, last = query * from_start, decay[..., -1:]
    key = key * (last - decay).exp().unsqueeze(-1)
    state, outs = None, []
    for index in range(num_chunks):
        u = rows[:, :, index]
        if state is not None:
            u = u - torch.matmul(by_state[:, :, index], state)
        out = torch.matmul(attention[:, :, index], u)
        outs.append(out if state is None else out + torch.matmul(query[:, :, index], state))
        written = torch.matmul(key[:, :, index].transpose(-1, -2), u)
        state = written if state is None else state * last[:, :, index].unsqueeze(-1).exp() + written
    return torch.cat(outs, dim=2)

"""Compile, without a GPU, the CUDA kernels of SGLang 0.5.17 that it would compile at start (its Llama and Qwen3.5 in bf16, sm90).

    CUDA_HOME=... TVM_FFI_CACHE_DIR=FOLDER python -m benchmarks.sglang_kernels

With nvcc 13.0 and SGLang's bundle on the path (`benchmarks/sglang_bundle.sh`). A start with the same TVM_FFI_CACHE_DIR then loads
them; one that is missing there is compiled, which takes about 20 s a kernel.

    python -m benchmarks.sglang_kernels check dense|hybrid [float32]

On the card, beside the start of the servers: every kernel that their forwards call, in bf16 or fp32 and their shapes, one after the
other, whatever fails. A first start then finds those of Triton in its cache. `dense` is SmolLM2's part, `hybrid` what hybrid-tiny has more.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F

ROTARY_WIDTHS = (64, 16)  # SmolLM2, hybrid-tiny
KV_ROW_BYTES = (384, 256)  # 3 heads of 64 in bf16; 2 heads: hybrid-tiny, and SmolLM2 padded on two ranks
WIDTHS = (576, 256, 64)  # SmolLM2, hybrid-tiny, a head of either
EPSILON = 1e-6
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64  # SmolLM2
KEY_HEADS, VALUE_HEADS, CONV_WIDTH = 2, 4, 512  # hybrid-tiny's recurrent layers, head dim 64: 2 q, 2 k, 4 v
DTYPE = torch.bfloat16  # `check`'s
NODES, LENGTHS = 17, (50, 70)  # nodes of a tree with its root; committed tokens of two requests


def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """RMSNorm of rows in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * scale


def rows(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(shape, device=device).to(DTYPE)


def norms(device: str) -> None:
    """The four norms of `sgl_kernel`, to 2⁻⁷; AssertionError names the operator and width that is off."""
    import sgl_kernel

    for width in WIDTHS:
        for prefix, offset in (("", 0.0), ("gemma_", 1.0)):
            x, residual, weight = (rows(n, width, device=device) for n in (17, 17, 1))
            weight = weight[0]
            name = f"{prefix}rmsnorm"
            found = getattr(sgl_kernel, name)(x, weight, EPSILON)
            compare(f"{name} at {width}", found, norm(x, weight.float() + offset))
            name, total = f"{prefix}fused_add_rmsnorm", x.float() + residual.float()
            getattr(sgl_kernel, name)(x, residual, weight, EPSILON)
            compare(f"{name} at {width}", x, norm(total, weight.float() + offset))
            compare(f"{name} at {width}, residual", residual, total)


def compare(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2**-7, msg=lambda text: f"{name}: {text}")


def finite(*found: torch.Tensor) -> None:
    assert all(bool(each.isfinite().all()) for each in found), "not all finite"


def modules(device: str) -> None:
    """SGLang's own for SmolLM2, compiled all at once where the bundle lacks them: it has bf16's."""
    from sglang.kernels.jit.utils.arch import get_jit_cuda_arch
    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
    from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module

    os.environ["TVM_FFI_CUDA_ARCH_LIST"] = get_jit_cuda_arch().target_name  # each compilation sets and unsets it otherwise
    sizes = [width * DTYPE.itemsize for width in (KV_HEADS * HEAD_DIM, 2 * HEAD_DIM)]
    jobs = [(activation_module, DTYPE), (_jit_fused_rope_module, True, HEAD_DIM, DTYPE, DTYPE)]
    jobs += [(_jit_kvcache_module, size, size) for size in sizes]
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(lambda job: job[0](*job[1:]), jobs))


def activation(device: str) -> None:
    from sglang.kernels.ops.activation.activation import silu_and_mul

    for width in (1536, 576):
        x = rows(NODES, 2 * width, device=device)
        gate, up = x.float().chunk(2, dim=-1)
        compare(f"silu_and_mul at {width}", silu_and_mul(x), F.silu(gate) * up)


def rotary(device: str) -> None:
    from sglang.kernels.ops.attention.rope import apply_rope_with_cos_sin_cache_inplace

    qkv = rows(NODES, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device=device)
    q = qkv[:, : HEADS * HEAD_DIM].view(NODES, HEADS, HEAD_DIM)
    k = qkv[:, HEADS * HEAD_DIM : -KV_HEADS * HEAD_DIM].view(NODES, KV_HEADS, HEAD_DIM)
    angles = torch.rand(2048, HEAD_DIM // 2, device=device) * 6
    cache, positions = torch.cat([angles.cos(), angles.sin()], dim=-1), torch.arange(NODES, device=device) + 100
    first, second = q.float().chunk(2, dim=-1)
    cos, sin = (each[:, None] for each in cache[positions].chunk(2, dim=-1))
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    apply_rope_with_cos_sin_cache_inplace(positions=positions, q=q, k=k, cos_sin_cache=cache, is_neox=True)
    compare("rotary", q, expected)


def cache_rows(device: str) -> None:
    from sglang.kernels.ops.kvcache.kvcache import can_use_store_cache, store_cache

    for width in (KV_HEADS * HEAD_DIM, 2 * HEAD_DIM):
        size = width * DTYPE.itemsize
        assert can_use_store_cache(size, size), f"rows of {size} bytes"
        keys, values = (rows(NODES, width, device=device) for _ in range(2))
        slots = torch.arange(NODES, device=device) + 5
        pools = [torch.zeros(40, width, device=device, dtype=DTYPE) for _ in range(2)]
        store_cache(keys, values, *pools, slots, size_limit=40)
        for pool, each in zip(pools, (keys, values), strict=True):
            compare(f"rows of {size} bytes", pool[slots], each.float())


def positions(device: str) -> None:
    from sglang.kernels.ops.attention.clamp_position import clamp_position_cuda

    found = clamp_position_cuda(torch.tensor([0, 1, 9], device=device))
    assert found.tolist() == [0, 0, 8], f"positions {found.tolist()}"


def attention(device: str) -> None:
    """Triton's: a verify of 17 and of 65 nodes under a mask in bytes (in graphs) and in bools (eager), and a prompt's prefill."""
    for heads, kv_heads in ((HEADS, KV_HEADS), (4, 2)):
        for nodes, mask_dtype in ((NODES, torch.uint8), (65, torch.uint8), (NODES, torch.bool), (40, None)):
            extend(heads, kv_heads, nodes, mask_dtype, device)


def extend(heads: int, kv_heads: int, nodes: int, mask_dtype: torch.dtype | None, device: str) -> None:
    """Attention of `nodes` new rows of each of two requests, compared with its definition."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    q = rows(2 * nodes, heads, HEAD_DIM, device=device)
    k, v = (rows(2 * nodes, kv_heads, HEAD_DIM, device=device) for _ in range(2))
    pool_k, pool_v = (rows(300, kv_heads, HEAD_DIM, device=device) for _ in range(2))
    slots = [torch.randperm(300, device=device)[:length] for length in LENGTHS]
    own = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()
    if mask_dtype is not None:
        own &= torch.rand(nodes, nodes, device=device) < 0.5
        own |= torch.eye(nodes, dtype=torch.bool, device=device)
    seen = [torch.cat([torch.ones(nodes, length, dtype=torch.bool, device=device), own], dim=1) for length in LENGTHS]
    starts = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
    mask_starts = torch.tensor([0, *(each.numel() for each in seen)], device=device).cumsum(0)
    mask = None if mask_dtype is None else torch.cat([each.flatten() for each in seen]).to(mask_dtype)
    out = torch.empty_like(q)
    extend_attention_fwd(
        q, k, v, out, pool_k, pool_v, torch.arange(3, device=device) * nodes, starts.int(), torch.cat(slots), mask, True,
        None if mask is None else mask_starts, nodes, 1.0, 1.0, HEAD_DIM**-0.5,
    )
    for number, length in enumerate(LENGTHS):
        part = slice(number * nodes, (number + 1) * nodes)
        keys, values = (torch.cat([pool[slots[number]], new[part]]).float() for pool, new in ((pool_k, k), (pool_v, v)))
        expected = F.scaled_dot_product_attention(
            q[part].float().transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), attn_mask=seen[number], enable_gqa=True
        )
        assert keys.shape[0] == length + nodes
        compare(f"attention, {heads} heads, {nodes} rows, mask {mask_dtype}", out[part], expected.transpose(0, 1))


def decoding(device: str) -> None:
    """Triton's decode attention, as plain servers call it."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    for heads, kv_heads in ((HEADS, KV_HEADS), (4, 2)):
        q = rows(2, heads, HEAD_DIM, device=device)
        pool_k, pool_v = (rows(300, kv_heads, HEAD_DIM, device=device) for _ in range(2))
        starts, slots = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int(), torch.randperm(300, device=device)[: sum(LENGTHS)]
        scores = torch.zeros(2, heads, 8, HEAD_DIM, device=device)
        out, splits = torch.empty_like(q), torch.full((2,), 8, dtype=torch.int32, device=device)
        decode_attention_fwd(
            q, pool_k, pool_v, out, starts, slots, scores, scores[..., 0].contiguous(), splits, 8, HEAD_DIM**-0.5, 1.0, 1.0, use_pdl=True
        )
        keys, values = (pool[slots[: LENGTHS[0]]].float().transpose(0, 1) for pool in (pool_k, pool_v))
        expected = F.scaled_dot_product_attention(q[0].float()[:, None], keys, values, enable_gqa=True)
        compare(f"decode attention, {heads} heads", out[0], expected[:, 0])


def recurrent_prefill(device: str) -> None:
    from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule
    from sglang.kernels.ops.attention.fla.fused_gdn_gating import fused_gdn_gating
    from sglang.kernels.ops.attention.triton_gdn_fused_proj import (
        fused_qkv_split_gdn_prefill,
        fused_qkvzba_split_reshape_cat_contiguous,
    )
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn

    total, width = sum(LENGTHS), CONV_WIDTH + VALUE_HEADS * HEAD_DIM
    heads = (KEY_HEADS, VALUE_HEADS, HEAD_DIM, HEAD_DIM)
    starts = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()
    places, states = torch.tensor([3, 5], dtype=torch.int32, device=device), torch.zeros(8, VALUE_HEADS, HEAD_DIM, HEAD_DIM, device=device)
    mixed, _, b, a = fused_qkvzba_split_reshape_cat_contiguous(rows(total, width, device=device), rows(total, 2 * VALUE_HEADS, device=device), *heads)
    mixed = causal_conv1d_fn(
        mixed.transpose(0, 1), rows(CONV_WIDTH, 4, device=device), None, conv_states=torch.zeros(8, CONV_WIDTH, 3, device=device, dtype=torch.bfloat16),
        query_start_loc=starts, seq_lens_cpu=list(LENGTHS), cache_indices=places, has_initial_state=torch.zeros(2, dtype=torch.bool, device=device),
    ).transpose(0, 1)
    q, k, v = fused_qkv_split_gdn_prefill(mixed, KEY_HEADS, *heads, HEAD_DIM)
    g, beta = fused_gdn_gating(torch.rand(VALUE_HEADS, device=device), a, b, rows(VALUE_HEADS, device=device))
    out, _, _ = chunk_gated_delta_rule(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=states, initial_state_indices=places, cu_seqlens=starts, use_qk_l2norm_in_kernel=True
    )
    finite(out, states)


def recurrent_rounds(device: str) -> None:
    """A decode step, and a verify of trees with the commit of a path's states."""
    from sglang.kernels.ops.attention.fla.fused_recurrent import (
        fused_recurrent_gated_delta_rule_packed_decode,
    )
    from sglang.kernels.ops.attention.fla.fused_sigmoid_gating_recurrent import (
        fused_sigmoid_gating_delta_rule_update,
    )
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update
    from sglang.kernels.ops.mamba.mamba_state_scatter_triton import (
        fused_conv_window_scatter_with_mask,
        fused_mamba_state_scatter_with_mask,
    )

    rate, bias, weight = torch.rand(VALUE_HEADS, device=device), rows(VALUE_HEADS, device=device), rows(CONV_WIDTH, 4, device=device)
    places = torch.tensor([3, 5], dtype=torch.int32, device=device)
    convs, states = rows(1, 8, CONV_WIDTH, 3, device=device), torch.randn(1, 8, VALUE_HEADS, HEAD_DIM, HEAD_DIM, device=device)
    a, b = (rows(2, VALUE_HEADS, device=device) for _ in range(2))
    mixed = causal_conv1d_update(rows(2, CONV_WIDTH, device=device), convs[0], weight, None, "silu", conv_state_indices=places)
    out = mixed.new_empty(2, 1, VALUE_HEADS, HEAD_DIM)
    fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=mixed, a=a, b=b, A_log=rate, dt_bias=bias, scale=HEAD_DIM**-0.5, initial_state=states[0], out=out,
        ssm_state_indices=places, use_qk_l2norm_in_kernel=True,
    )
    finite(out)
    # Trees of a root with a chain below its first child, and all others as the root's children.
    links = torch.full((2, 2, NODES), -1, dtype=torch.int32, device=device)
    links[0, :, :4], links[1, :, 1] = torch.tensor([1, 2, 3, 4], dtype=torch.int32, device=device), 5
    links[1, :, 5:-1] = torch.arange(6, NODES, dtype=torch.int32, device=device)
    parents, scratch = torch.zeros_like(links[0]), torch.arange(2, dtype=torch.int32, device=device)
    windows = torch.zeros(1, 3, NODES, CONV_WIDTH, 3, device=device, dtype=torch.bfloat16)
    steps = torch.zeros(1, 3, NODES, VALUE_HEADS, HEAD_DIM, HEAD_DIM, device=device)
    mixed = causal_conv1d_update(
        rows(2, NODES, CONV_WIDTH, device=device).transpose(1, 2), convs[0], weight, None, "silu", conv_state_indices=places,
        intermediate_conv_window=windows[0], intermediate_state_indices=scratch, retrieve_next_token=links[0],
        retrieve_next_sibling=links[1], retrieve_parent_token=parents,
    ).transpose(1, 2).view(2 * NODES, -1)
    q, k, v = (part.view(1, 2 * NODES, -1, HEAD_DIM) for part in mixed.split([128, 128, 256], dim=-1))
    a, b = (rows(2 * NODES, VALUE_HEADS, device=device) for _ in range(2))
    out = fused_sigmoid_gating_delta_rule_update(
        A_log=rate, dt_bias=bias, q=q.contiguous(), k=k.contiguous(), v=v.contiguous(), a=a, b=b, initial_state_source=states[0],
        initial_state_indices=places, cu_seqlens=torch.arange(3, device=device, dtype=torch.int32) * NODES,
        use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0, is_kda=False, disable_state_update=True,
        intermediate_states_buffer=steps[0], intermediate_state_indices=scratch, cache_steps=NODES, retrieve_parent_token=parents,
    )
    last = torch.tensor([4, 0], device=device)
    fused_mamba_state_scatter_with_mask(states, steps, places, last)
    fused_conv_window_scatter_with_mask(convs, windows, places, last)
    finite(out, states, convs)
    expected = [0, 0, 1, 2, 3] + [0] * (NODES - 5)
    assert parents.tolist() == [expected] * 2, f"parents {parents[0].tolist()}, expected {expected}"
    torch.testing.assert_close(states[0, places.long()], steps[0, scratch.long(), last])


def gates(device: str) -> None:
    """What is fused around a hybrid's attention: the gated norm, norm with rotary and gate, the sigmoid."""
    from sglang.kernels.ops.attention.fla.layernorm_gated import layernorm_fn
    from sglang.kernels.ops.attention.fused_qk_rmsnorm_rope_gate import fused_qk_gemma_rmsnorm_rope_gate
    from sglang.kernels.ops.elementwise.elementwise import fused_sigmoid_mul

    x, z, weight = rows(4 * NODES, HEAD_DIM, device=device), rows(4 * NODES, HEAD_DIM, device=device), rows(HEAD_DIM, device=device)
    compare("gated norm", layernorm_fn(x, weight, None, z=z, eps=EPSILON, is_rms_norm=True), norm(x, weight.float()) * F.silu(z.float()))
    q_gate, k = rows(NODES, 8 * HEAD_DIM, device=device), rows(NODES, 2 * HEAD_DIM, device=device)
    at = torch.arange(NODES, device=device)
    q, k, gate = fused_qk_gemma_rmsnorm_rope_gate(
        q_gate, k, weight, weight, torch.rand(2048, 16, device=device), at, EPSILON, 4, 2, HEAD_DIM, 16, has_gate=True
    )
    finite(q, k, fused_sigmoid_mul(q.view(NODES, -1), gate.view(NODES, -1), inplace=True))


PARTS = {
    "dense": (norms, modules, activation, rotary, cache_rows, positions, attention, decoding),
    "hybrid": (recurrent_rounds, recurrent_prefill, gates),
}


def check(part: str, device: str = "cuda") -> bool:
    """Run the part's kernels, a line each; False if one failed."""
    torch.manual_seed(0)
    sound = True
    for each in PARTS[part]:
        started, fault = time.perf_counter(), ""
        try:
            each(device)
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # whatever it is, the others are looked at
            sound, fault = False, f" FAILED: {type(error).__name__}: {' '.join(str(error).split())[:600]}"
        print(f"{each.__name__} {time.perf_counter() - started:.1f} s{fault}", flush=True)
    return sound


def compile_all() -> None:
    """Every module into TVM_FFI_CACHE_DIR, one after the other."""
    import sglang.kernels.jit.utils.arch as arch

    arch._init_jit_cuda_arch_once()
    arch._CUDA_ARCH = arch.ArchInfo(9, 0, "a")
    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module, _jit_rotary_embedding_module
    from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module

    half, single = torch.bfloat16, torch.float32
    jobs = [(activation_module, (half,)), (_jit_rotary_embedding_module, ())]
    jobs += [(_jit_clamp_position_module, (dtype,)) for dtype in (torch.int64, torch.int32)]
    jobs += [(_jit_fused_rope_module, (True, width, half, half)) for width in ROTARY_WIDTHS]
    jobs += [(_jit_kvcache_module, (size, size)) for size in KV_ROW_BYTES]
    # SmolLM2 in fp32.
    jobs += [(activation_module, (single,)), (_jit_fused_rope_module, (True, HEAD_DIM, single, single))]
    jobs += [(_jit_kvcache_module, (2 * size, 2 * size)) for size in KV_ROW_BYTES]
    for build, arguments in jobs:
        started = time.perf_counter()
        build(*arguments)
        print(build.__name__, arguments, f"{time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]:
        DTYPE = getattr(torch, sys.argv[3]) if sys.argv[3:] else DTYPE
        sys.exit(not check(sys.argv[2]))
    compile_all()

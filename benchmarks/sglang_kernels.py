"""Compile, without a GPU, the CUDA kernels of SGLang 0.5.17 that it would compile at start (its Llama and Qwen3.5 in bf16, sm90).

    CUDA_HOME=... TVM_FFI_CACHE_DIR=FOLDER python -m benchmarks.sglang_kernels

With nvcc 13.0 and SGLang's bundle on the path (`benchmarks/sglang_bundle.sh`). A start with the same TVM_FFI_CACHE_DIR then loads
them; one that is missing there is compiled, which takes about 20 s a kernel.

    python -m benchmarks.sglang_kernels check

On the card: the norms of `sgl_kernel` against their definition, which no start gets past without.
"""

from __future__ import annotations

import sys
import time

import torch

ROTARY_WIDTHS = (64, 16)  # SmolLM2, hybrid-tiny
KV_ROW_BYTES = (384, 256)  # 3 heads of 64 in bf16; 2 heads: hybrid-tiny, and SmolLM2 padded on two ranks
WIDTHS = (576, 256, 64)  # SmolLM2, hybrid-tiny, a head of either
EPSILON = 1e-6


def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """RMSNorm of rows in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * scale


def check(device: str = "cuda") -> None:
    """The four norms in bf16, to 2⁻⁷; AssertionError names the operator and width that is off."""
    import sgl_kernel

    torch.manual_seed(0)
    for width in WIDTHS:
        for prefix, offset in (("", 0.0), ("gemma_", 1.0)):
            x, residual, weight = (torch.randn(n, width, device=device).bfloat16() for n in (17, 17, 1))
            weight = weight[0]
            name = f"{prefix}rmsnorm"
            found = getattr(sgl_kernel, name)(x, weight, EPSILON)
            compare(f"{name} at {width}", found, norm(x, weight.float() + offset))
            name, total = f"{prefix}fused_add_rmsnorm", x.float() + residual.float()
            getattr(sgl_kernel, name)(x, residual, weight, EPSILON)
            compare(f"{name} at {width}", x, norm(total, weight.float() + offset))
            compare(f"{name} at {width}, residual", residual, total)
    print(f"norms as defined at widths {WIDTHS}, through flashinfer: {sgl_kernel.elementwise._has_flashinfer}")


def compare(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2**-7, msg=lambda text: f"{name}: {text}")


def compile_all() -> None:
    """Every module into TVM_FFI_CACHE_DIR, one after the other."""
    import sglang.kernels.jit.utils.arch as arch

    arch._init_jit_cuda_arch_once()
    arch._CUDA_ARCH = arch.ArchInfo(9, 0, "a")
    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module, _jit_rotary_embedding_module
    from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module

    half = torch.bfloat16
    jobs = [(activation_module, (half,)), (_jit_rotary_embedding_module, ())]
    jobs += [(_jit_clamp_position_module, (dtype,)) for dtype in (torch.int64, torch.int32)]
    jobs += [(_jit_fused_rope_module, (True, width, half, half)) for width in ROTARY_WIDTHS]
    jobs += [(_jit_kvcache_module, (size, size)) for size in KV_ROW_BYTES]
    for build, arguments in jobs:
        started = time.perf_counter()
        build(*arguments)
        print(build.__name__, arguments, f"{time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    check() if sys.argv[1:] == ["check"] else compile_all()

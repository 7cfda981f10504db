"""Compile, without a GPU, the CUDA kernels of SGLang 0.5.17 that it would compile at start (its Llama and Qwen3.5 in bf16, sm90).

    CUDA_HOME=... TVM_FFI_CACHE_DIR=FOLDER python -m benchmarks.sglang_kernels

With nvcc 13.0 and SGLang's bundle on the path (`benchmarks/sglang_gpu.sh fetch`). A start with the same TVM_FFI_CACHE_DIR then loads
them; one that is missing there is compiled, which takes about 20 s a kernel.
"""

from __future__ import annotations

import time

import torch

ROTARY_WIDTHS = (64, 16)  # SmolLM2, hybrid-tiny
KV_ROW_BYTES = (384, 256)  # 3 heads of 64 in bf16; 2 heads: hybrid-tiny, and SmolLM2 padded on two ranks


def main() -> None:
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
    main()

"""The four norms of `sgl_kernel` in torch: `sglang_gpu.sh` appends this to its `elementwise.py` where its own fail their check.

Slower, and the same function. `input`, `residual` [n, C] bf16, `weight` [C]; the fused ones write both in place.
"""

import torch


def _scaled(x, scale, eps):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * scale


def _rmsnorm_internal(input, weight, eps, out, enable_pdl, offset=0.0):
    found = _scaled(input, weight.float() + offset, eps).to(input.dtype)
    return found if out is None else out.copy_(found)


def _gemma_rmsnorm_internal(input, weight, eps, out, enable_pdl):
    return _rmsnorm_internal(input, weight, eps, out, enable_pdl, offset=1.0)


def _fused_add_rmsnorm_internal(input, residual, weight, eps, enable_pdl, offset=0.0):
    residual.add_(input)
    input.copy_(_scaled(residual, weight.float() + offset, eps))


def _gemma_fused_add_rmsnorm_internal(input, residual, weight, eps, enable_pdl):
    _fused_add_rmsnorm_internal(input, residual, weight, eps, enable_pdl, offset=1.0)

"""The four norms of `sgl_kernel` in torch, for fp32, which its own do not take (but in one of them); for every dtype where a file
`norms_in_torch` lies beside them: `sglang_gpu.sh` appends this to their `elementwise.py`, and writes that file where they fail their check.

Slower, and the same function. `input`, `residual` [n, C], `weight` [C]; the fused ones write both in place.
"""

from pathlib import Path

import torch

_ALL = Path(__file__).with_name("norms_in_torch").exists()


def _scaled(x, scale, eps):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * scale


def _norm_by(own, offset):
    def norm(input, weight, eps, out, enable_pdl):
        if not _ALL and input.dtype != torch.float32:
            return own(input, weight, eps, out, enable_pdl)
        found = _scaled(input, weight.float() + offset, eps).to(input.dtype)
        return found if out is None else out.copy_(found)

    return norm


def _fused_norm_by(own, offset):
    def norm(input, residual, weight, eps, enable_pdl):
        if not _ALL and input.dtype != torch.float32:
            return own(input, residual, weight, eps, enable_pdl)
        residual.add_(input)
        input.copy_(_scaled(residual, weight.float() + offset, eps))

    return norm


for _prefix, _offset in (("", 0.0), ("_gemma", 1.0)):
    for _name, _by in ((f"{_prefix}_rmsnorm_internal", _norm_by), (f"{_prefix}_fused_add_rmsnorm_internal", _fused_norm_by)):
        globals()[_name] = _by(globals()[_name], _offset)

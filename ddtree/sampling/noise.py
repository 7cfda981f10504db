"""Gumbel noise keyed by (request, absolute position, token id), from a counter-based generator.

argmax(log p + G) with independent Gumbel G is a draw from p. Keying G by the absolute position of the token to be
drawn makes the draw at a prefix the same whether it is reached by plain decoding or inside a tree, alone or in a batch.
Each position of an emitted text uses its own noise once, so the law is untouched (docs: design of lossless sampling).

The generator is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): one
stream per position, the token id as its counter. All of it is wrapping 64-bit integer arithmetic, so CPU and CUDA
agree bit for bit on the uniforms, and on the float32 noise up to the last bit of their fp64 logarithms.

Letters: P positions, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

MASK64 = (1 << 64) - 1
# SplitMix64's increment and its finaliser: xor with a right shift, then multiply.
GOLDEN = 0x9E3779B97F4A7C15
FINALISER = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def noise_key(seed: int, choice_index: int, prompt_token_ids: Sequence[int]) -> int:
    """Stable unsigned 64-bit key of a request's noise.

    BLAKE2b, 8 bytes, over little-endian int64: the seed (modulo 2^64), the choice index, the prompt's ids. The choice
    index keeps the choices of `n` > 1 apart; the prompt keeps requests that share a seed uncorrelated.
    """
    header = (seed & MASK64).to_bytes(8, "little") + choice_index.to_bytes(8, "little", signed=True)
    prompt = np.asarray(prompt_token_ids, dtype="<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(header + prompt, digest_size=8).digest(), "little")


def gumbel_noise(
    key: int, positions: Sequence[int] | Tensor, vocab_size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """`[P, V]` float32 standard Gumbel noise; row p depends on the key and `positions[p]` alone.

    `positions [P]` are the absolute positions of the tokens to be drawn, each >= 0. G = -log(-log1p(-u)) in fp64, from
    52-bit uniforms u = (bits + 1/2) * 2^-52: the half step keeps out u = 0, whose G is +inf, and 1 is never reached.
    """
    positions = positions.tolist() if isinstance(positions, Tensor) else positions
    streams = torch.tensor([_signed(_mix(key + _mix(int(position)))) for position in positions], dtype=torch.int64)
    counters = torch.arange(1, vocab_size + 1, device=device).mul_(_signed(GOLDEN))
    noise = torch.empty(len(streams), vocab_size, dtype=torch.float32, device=device)
    if noise.is_cuda:
        noise.copy_(_gumbel(counters + streams.to(device)[:, None]))
        return noise
    # Row by row on the CPU: the passes below then stay inside the cache.
    for row, stream in zip(noise, streams.tolist(), strict=True):
        row.copy_(_gumbel(counters + stream))
    return noise


def _gumbel(bits: Tensor) -> Tensor:
    """fp64 Gumbel noise from SplitMix64 states, int64, used up in place."""
    shifted = torch.empty_like(bits)
    for shift, factor in FINALISER:
        torch.bitwise_right_shift(bits, shift, out=shifted)
        # torch shifts int64 arithmetically; the mask makes it logical.
        bits.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            bits.mul_(_signed(factor))
    bits.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
    # 1 - u is exact in fp64 at this grain, so log(1 - u) is log1p(-u), in two thirds of the time.
    complements = bits.to(torch.float64).mul_(-(2.0**-52)).add_(1 - 2.0**-53)
    return complements.log_().neg_().log_().neg_()


def _mix(value: int) -> int:
    """One SplitMix64 output for the state `value`, on the host."""
    value = (value + GOLDEN) & MASK64
    for shift, factor in FINALISER:
        value = ((value ^ (value >> shift)) * factor) & MASK64
    return value


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value

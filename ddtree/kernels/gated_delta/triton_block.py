"""What the gated delta kernels do to one block of rows: pieces that run inside them.

Letters: n rows of a block (a power of two), K key dim, V value dim, as tiles padded to powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

L2_EPS = tl.constexpr(1e-6)  # as in closed_form


@triton.jit
def inverse_norms(rows):
    """[n, K] -> [n] fp32: what makes each row one of length 1."""
    rows = rows.to(tl.float32)
    return tl.rsqrt(tl.sum(rows * rows, axis=1) + L2_EPS)


@triton.jit
def dot_rows(rows, other_rows):
    """[n, K] x [m, K] -> [n, m] fp32. Products of bf16 and fp16 are exact in the tensor cores."""
    if rows.dtype == tl.float32:
        return tl.dot(rows, tl.trans(other_rows), input_precision="tf32x3")
    return tl.dot(rows, tl.trans(other_rows))


@triton.jit
def dot_matrix(rows, matrix, total):
    """total [n, V] + rows [n, K] x matrix [K, V] fp32, to about fp32."""
    if rows.dtype == tl.bfloat16:
        # Three bf16 parts, cut off and not rounded, hold all 24 bits of an fp32 number: only the additions round.
        high = _upper_half(matrix)
        rest = matrix - high
        middle = _upper_half(rest)
        total = tl.dot(rows, _as_bf16(rest - middle), total)
        total = tl.dot(rows, _as_bf16(middle), total)
        return tl.dot(rows, _as_bf16(high), total)
    return tl.dot(rows.to(tl.float32), matrix, total, input_precision="tf32x3")


@triton.jit
def _upper_half(numbers):
    """fp32 without the lower 16 bits."""
    return (numbers.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _as_bf16(numbers):
    """fp32 whose lower 16 bits are 0, moved and not converted, which is slow."""
    return (numbers.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def related(ancestor_mask, mask_stride, rows, columns, present, there, CAUSAL: tl.constexpr):
    """[n, m] bool: column is row or its ancestor; false where `present` [n] or `there` [m] is."""
    both = present[:, None] & there[None, :]
    earlier = columns[None, :] <= rows[:, None]
    if CAUSAL:
        result = earlier & both
    else:
        marks = tl.load(ancestor_mask + rows[:, None] * mask_stride + columns[None, :], mask=both, other=0)
        result = earlier & (marks != 0)
    return result


@triton.jit
def path_sums(log_decay, ancestor_mask, mask_stride, rows, present, end, VALUE_HEADS: tl.constexpr, SUMMED: tl.constexpr,
              CAUSAL: tl.constexpr):  # fmt: skip
    """[n] fp64: the log decays along each row's path, itself included; the path lies before row `end`."""
    sums = tl.zeros(rows.shape, tl.float64)
    for other in range(0, end, SUMMED):
        columns = other + tl.arange(0, SUMMED)
        there = columns < end
        on_path = related(ancestor_mask, mask_stride, rows, columns, present, there, CAUSAL)
        terms = tl.load(log_decay + columns * VALUE_HEADS, mask=there, other=0.0).to(tl.float64)
        sums += tl.sum(tl.where(on_path, terms[None, :], 0.0), axis=1)
    return sums


@triton.jit
def decay_between(log_decays, other_log_decays, related):
    """exp(c_i - c_j) [n, m] fp32 where `related` [n, m], else 0; from sums [n] and [m] fp64."""
    # Two floats hold a sum as well as the exp can tell, at the speed of fp32 where fp64 is slow.
    high, other_high = log_decays.to(tl.float32), other_log_decays.to(tl.float32)
    low = (log_decays - high.to(tl.float64)).to(tl.float32)
    other_low = (other_log_decays - other_high.to(tl.float64)).to(tl.float32)
    difference = (high[:, None] - other_high[None, :]) + (low[:, None] - other_low[None, :])
    # Masked before the exp: between rows that are not on one path the difference can be large and positive.
    return tl.where(related, tl.exp(tl.where(related, difference, 0.0)), 0.0)


@triton.jit
def unit_lower_solve(lower, right, SIZE: tl.constexpr, DIAGONAL: tl.constexpr):
    """U [n, V] with (I + lower) U = right; `lower` [n, n] is 0 on and above the diagonal, n = SIZE.

    Blocked forward substitution. The blocks of DIAGONAL rows on the diagonal are inverted side by side; then, sweep by
    sweep, U <- T (right - off U) with T their inverses and `off` all below them: sweep b makes block b final, as nothing
    that a block needs changes any more once the blocks before it are.
    """
    if SIZE <= DIAGONAL:
        solution = _apply(_inverse(tl.reshape(lower, (1, SIZE, SIZE)), SIZE), right, SIZE, SIZE)
    else:
        COUNT: tl.constexpr = SIZE // DIAGONAL
        block = tl.arange(0, COUNT)
        on_diagonal = block[:, None, None, None] == block[None, None, :, None]
        small = tl.sum(tl.where(on_diagonal, tl.reshape(lower, (COUNT, DIAGONAL, COUNT, DIAGONAL)), 0.0), axis=2)
        inverses = _inverse(small, DIAGONAL)
        row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
        off = tl.where(row // DIAGONAL != column // DIAGONAL, lower, 0.0)
        solution = _apply(inverses, right, SIZE, DIAGONAL)
        for _ in tl.static_range(COUNT - 1):
            rest = right - tl.dot(off, solution, input_precision="tf32x3")
            solution = _apply(inverses, rest, SIZE, DIAGONAL)
    return solution


@triton.jit
def unit_lower_inverse(lower, SIZE: tl.constexpr):
    """(I + lower)^-1 [n, n], `lower` being 0 on and above the diagonal; n = SIZE = 16 or 32.

    32 rows are two inverses of 16 in IEEE fp32, side by side, joined in three-part TF32: IEEE products of 32 rows spill.
    """
    if SIZE == 16:
        inverse = tl.reshape(_inverse(tl.reshape(lower, (1, 16, 16)), 16), (16, 16))
    else:
        block = tl.arange(0, 2)
        on_diagonal = block[:, None, None, None] == block[None, None, :, None]
        small = tl.sum(tl.where(on_diagonal, tl.reshape(lower, (2, 16, 2, 16)), 0.0), axis=2)
        inverses = _inverse(small, 16)
        inverse = tl.reshape(tl.where(on_diagonal, inverses[:, :, None, :], 0.0), (32, 32))
        row, column = tl.arange(0, 32)[:, None], tl.arange(0, 32)[None, :]
        corner = tl.where(row // 16 != column // 16, lower, 0.0)
        product = tl.dot(inverse, corner, input_precision="tf32x3")
        inverse = tl.dot(0.0 - product, inverse, inverse, input_precision="tf32x3")
    return inverse


@triton.jit
def _apply(inverses, rows, SIZE: tl.constexpr, DIAGONAL: tl.constexpr):
    """Each block of `rows` [n, V] by its own of `inverses` [n / DIAGONAL, DIAGONAL, DIAGONAL]."""
    if SIZE == DIAGONAL:
        return tl.dot(tl.reshape(inverses, (SIZE, SIZE)), rows, input_precision="tf32x3")
    blocks = tl.reshape(rows, (SIZE // DIAGONAL, DIAGONAL, rows.shape[1]))
    return tl.reshape(tl.dot(inverses, blocks, input_precision="tf32x3"), (SIZE, rows.shape[1]))


@triton.jit
def _inverse(lower, SIZE: tl.constexpr):
    """(I + lower)^-1 [count, n, n] fp32, `lower` being 0 on and above the diagonal; n = 16 or 32.

    The inverse of [[A, 0], [C, B]] is [[A', 0], [-B' C A', B']]: from blocks of 2 rows to 4, 8, 16, 32, in IEEE fp32. Each
    factor is a part of the inverse itself, whose entries are bounded by 1 here (products of contractions), so nothing cancels,
    as it would between high powers of `lower`.
    """
    row, column = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, lower, 0.0)
    for level in tl.static_range(1, 5):
        if 2**level < SIZE:
            pair = row // 2 ** (level + 1) == column // 2 ** (level + 1)
            corner = tl.where(pair & (row // 2**level != column // 2**level), lower, 0.0)
            product = tl.dot(inverse, corner, input_precision="ieee")
            inverse -= tl.dot(product, inverse, input_precision="ieee")
    return inverse

"""What of the gated delta rule needs no solved row: weights between blocks of rows, inverses, what the state recalls.

The first launch, or the first two, of `triton_phases`; letters as in `triton_block`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ddtree.kernels.gated_delta.triton_block import (
    L2_EPS,
    decay_between,
    dot_matrix,
    dot_rows,
    path_sums,
    related,
    unit_lower_inverse,
)


@triton.jit
def sum_kernel(
    log_decay, ancestor_mask, starts, row_slots, log_decays, mask_stride,
    VALUE_HEADS: tl.constexpr, ROWS: tl.constexpr, SUMMED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head, sequence = tl.program_id(1) % VALUE_HEADS, tl.program_id(1) // VALUE_HEADS
    first = tl.load(starts + sequence).to(tl.int64)
    num_rows = (tl.load(starts + sequence + 1) - first).to(tl.int32)
    if num_rows <= block * ROWS:
        return
    if not CAUSAL:
        ancestor_mask += first * mask_stride
    rows = block * ROWS + tl.arange(0, ROWS)
    present = rows < num_rows
    if row_slots is not None:
        present &= tl.load(row_slots + first + rows, mask=rows < num_rows, other=-1) >= 0
    end = tl.minimum((block + 1) * ROWS, num_rows)
    places = first * VALUE_HEADS + head
    sums = path_sums(log_decay + places, ancestor_mask, mask_stride, rows, present, end, VALUE_HEADS, SUMMED, CAUSAL)
    tl.store(log_decays + places + rows * VALUE_HEADS, sums, mask=rows < num_rows)


@triton.jit
def prepare_kernel(
    mixed, log_decay, beta, ancestor_mask, states, slots, starts, row_slots, keys, solved, log_decays,
    to_keys, to_queries, recalled, mixed_stride, mask_stride, scale, pairs,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr, KEY_SLICE: tl.constexpr, PAIR_SLICE: tl.constexpr, VALUE_TILE: tl.constexpr, ROWS: tl.constexpr,
    SUMMED: tl.constexpr, CAUSAL: tl.constexpr, GIVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Roles of a block of rows and a value head: the block's own system; then one for each tile of the value dim; then one for
    # each block before it, which does all value heads of a key head, so their programs share these blocks among them.
    role, block = tl.program_id(0), tl.program_id(2)
    head, sequence = tl.program_id(1) % VALUE_HEADS, tl.program_id(1) // VALUE_HEADS
    group: tl.constexpr = VALUE_HEADS // KEY_HEADS
    value_tiles: tl.constexpr = (VALUE_DIM + VALUE_TILE - 1) // VALUE_TILE
    other = (role - 1 - value_tiles) * group + head % group
    if other >= block:
        return
    first = tl.load(starts + sequence).to(tl.int64)
    num_rows = (tl.load(starts + sequence + 1) - first).to(tl.int32)
    if num_rows <= block * ROWS:
        return
    key_head = head // group
    mixed += first * mixed_stride
    queries = mixed + key_head * KEY_DIM
    raw_keys = queries + KEY_HEADS * KEY_DIM
    if not CAUSAL:
        ancestor_mask += first * mask_stride
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    present = inside
    if row_slots is not None:
        present &= tl.load(row_slots + first + rows, mask=inside, other=-1) >= 0
    log_decay += first * VALUE_HEADS
    beta += first * VALUE_HEADS
    tile = (block * (block + 1) // 2) * (ROWS * ROWS) + tl.arange(0, ROWS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    head_stride = tl.cast(pairs, tl.int64) * (ROWS * ROWS)
    if role == 0:
        _own_weights(
            queries, raw_keys, log_decay + head, beta + head, ancestor_mask, rows, present, block, num_rows,
            to_keys + tl.program_id(1) * head_stride, to_queries + tl.program_id(1) * head_stride, tile + block * (ROWS * ROWS),
            log_decays + first * VALUE_HEADS + head, keys + (first * KEY_HEADS + key_head) * KEY_DIM, head % group == 0,
            mixed_stride, mask_stride, scale,
            KEY_HEADS, VALUE_HEADS, KEY_DIM, KEY_TILE, PAIR_SLICE, ROWS, SUMMED, CAUSAL, GIVEN, STAGES,
        )  # fmt: skip
    elif role <= value_tiles:
        slot = tl.load(slots + sequence).to(tl.int64)
        _recall(
            queries, raw_keys, mixed + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM,
            log_decay + head, log_decays + first * VALUE_HEADS + head, beta + head, ancestor_mask,
            states + (slot * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM), rows, present, role - 1, block, num_rows,
            solved + (first * VALUE_HEADS + head) * VALUE_DIM, recalled + (first * VALUE_HEADS + head) * VALUE_DIM,
            mixed_stride, mask_stride, scale,
            VALUE_HEADS, KEY_DIM, VALUE_DIM, KEY_TILE, KEY_SLICE, VALUE_TILE, ROWS, SUMMED, CAUSAL, GIVEN, STAGES,
        )  # fmt: skip
    else:
        columns = other * ROWS + tl.arange(0, ROWS)
        there = columns < num_rows
        if row_slots is not None:
            there &= tl.load(row_slots + first + columns, mask=there, other=-1) >= 0
        group_start = (sequence * VALUE_HEADS + key_head * group) * head_stride
        _pair_weights(
            queries, raw_keys, log_decay + key_head * group, log_decays + first * VALUE_HEADS + key_head * group,
            beta + key_head * group, ancestor_mask,
            rows, present, columns, there, block, other, num_rows,
            to_keys + group_start, to_queries + group_start, tile + other * (ROWS * ROWS), head_stride,
            mixed_stride, mask_stride, scale,
            group, VALUE_HEADS, KEY_DIM, KEY_TILE, PAIR_SLICE, ROWS, SUMMED, CAUSAL, GIVEN, STAGES,
        )  # fmt: skip


@triton.jit
def _sums(
    log_decay, log_decays, ancestor_mask, mask_stride, rows, present, end,
    VALUE_HEADS: tl.constexpr, SUMMED: tl.constexpr, CAUSAL: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """[n] fp64, the log decays along each row's path: from `log_decays` where they are GIVEN there."""
    if GIVEN:
        sums = tl.load(log_decays + rows * VALUE_HEADS, mask=present, other=0.0)
    else:
        sums = path_sums(log_decay, ancestor_mask, mask_stride, rows, present, end, VALUE_HEADS, SUMMED, CAUSAL)
    return sums


@triton.jit
def _own_weights(
    queries, raw_keys, log_decay, beta, ancestor_mask, rows, present, block, num_rows,
    to_keys, to_queries, tile, log_decays, keys, writes_keys, mixed_stride, mask_stride, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_TILE: tl.constexpr, SLICE: tl.constexpr,
    ROWS: tl.constexpr, SUMMED: tl.constexpr, CAUSAL: tl.constexpr, GIVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block's own system, inverted, the weights of its solved rows in its own outputs, its sums and unit keys."""
    inside, end = rows < num_rows, tl.minimum((block + 1) * ROWS, num_rows)
    sums = _sums(log_decay, log_decays, ancestor_mask, mask_stride, rows, present, end, VALUE_HEADS, SUMMED, CAUSAL, GIVEN)
    if not GIVEN:
        tl.store(log_decays + rows * VALUE_HEADS, sums, mask=inside)
    by_query, by_key, key_norm = _products(
        queries, raw_keys, rows, rows, present, present, mixed_stride, scale, KEY_DIM, KEY_TILE, SLICE, ROWS, STAGES
    )
    strength = tl.load(beta + rows * VALUE_HEADS, mask=present, other=0.0).to(tl.float32)
    weights = decay_between(sums, sums, related(ancestor_mask, mask_stride, rows, rows, present, present, CAUSAL))
    tl.store(to_queries + tile, by_query * weights)
    system = tl.where(rows[None, :] < rows[:, None], by_key * weights * strength[:, None], 0.0)
    tl.store(to_keys + tile, unit_lower_inverse(system, ROWS))
    if writes_keys:
        along_key = tl.arange(0, KEY_TILE)
        in_key = (along_key < KEY_DIM)[None, :]
        key = tl.load(raw_keys + rows[:, None] * mixed_stride + along_key[None, :], mask=present[:, None] & in_key, other=0.0)
        places = rows[:, None] * (KEY_HEADS * KEY_DIM) + along_key[None, :]
        tl.store(keys + places, key.to(tl.float32) * key_norm[:, None], mask=inside[:, None] & in_key)


@triton.jit
def _pair_weights(
    queries, raw_keys, log_decay, log_decays, beta, ancestor_mask, rows, present, columns, there, block, other, num_rows,
    to_keys, to_queries, tile, head_stride, mixed_stride, mask_stride, scale,
    GROUP: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_TILE: tl.constexpr, SLICE: tl.constexpr,
    ROWS: tl.constexpr, SUMMED: tl.constexpr, CAUSAL: tl.constexpr, GIVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """By which the solved rows of block `other` reach those of `block`, in each value head of a key head."""
    by_query, by_key, _ = _products(
        queries, raw_keys, rows, columns, present, there, mixed_stride, scale, KEY_DIM, KEY_TILE, SLICE, ROWS, STAGES
    )
    reached = related(ancestor_mask, mask_stride, rows, columns, present, there, CAUSAL)
    end, other_end = tl.minimum((block + 1) * ROWS, num_rows), (other + 1) * ROWS
    for member in range(GROUP):
        terms, given = log_decay + member, log_decays + member
        sums = _sums(terms, given, ancestor_mask, mask_stride, rows, present, end, VALUE_HEADS, SUMMED, CAUSAL, GIVEN)
        other_sums = _sums(terms, given, ancestor_mask, mask_stride, columns, there, other_end, VALUE_HEADS, SUMMED, CAUSAL, GIVEN)
        strength = tl.load(beta + member + rows * VALUE_HEADS, mask=present, other=0.0).to(tl.float32)
        weights = decay_between(sums, other_sums, reached)
        written = member * head_stride + tile
        tl.store(to_queries + written, by_query * weights)
        tl.store(to_keys + written, by_key * weights * (0.0 - strength)[:, None])


@triton.jit
def _recall(
    queries, raw_keys, values, log_decay, log_decays, beta, ancestor_mask, states, rows, present, value_tile, block, num_rows,
    solved, recalled, mixed_stride, mask_stride, scale,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_TILE: tl.constexpr, KEY_SLICE: tl.constexpr,
    VALUE_TILE: tl.constexpr, ROWS: tl.constexpr, SUMMED: tl.constexpr, CAUSAL: tl.constexpr, GIVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What the committed state says to a block of rows: the right sides of the solve, and a part of the outputs."""
    inside, end = rows < num_rows, tl.minimum((block + 1) * ROWS, num_rows)
    strength = tl.load(beta + rows * VALUE_HEADS, mask=present, other=0.0).to(tl.float32)
    along_value = value_tile * VALUE_TILE + tl.arange(0, VALUE_TILE)
    in_value = (along_value < VALUE_DIM)[None, :]
    value_places = rows[:, None] * mixed_stride + along_value[None, :]
    value = tl.load(values + value_places, mask=present[:, None] & in_value, other=0.0)
    from_key = tl.zeros([ROWS, VALUE_TILE], tl.float32)
    from_query = tl.zeros([ROWS, VALUE_TILE], tl.float32)
    key_square = tl.zeros([ROWS], tl.float32)
    query_square = tl.zeros([ROWS], tl.float32)
    for part in tl.range(0, KEY_TILE, KEY_SLICE, num_stages=STAGES):
        along = part + tl.arange(0, KEY_SLICE)
        places = rows[:, None] * mixed_stride + along[None, :]
        mask = present[:, None] & (along < KEY_DIM)[None, :]
        key = tl.load(raw_keys + places, mask=mask, other=0.0)
        query = tl.load(queries + places, mask=mask, other=0.0)
        state_mask = (along < KEY_DIM)[:, None] & in_value
        state = tl.load(states + along[:, None] * VALUE_DIM + along_value[None, :], mask=state_mask, other=0.0)
        from_key = dot_matrix(key, state, from_key)
        from_query = dot_matrix(query, state, from_query)
        key_square += tl.sum(key.to(tl.float32) * key.to(tl.float32), axis=1)
        query_square += tl.sum(query.to(tl.float32) * query.to(tl.float32), axis=1)
    sums = _sums(log_decay, log_decays, ancestor_mask, mask_stride, rows, present, end, VALUE_HEADS, SUMMED, CAUSAL, GIVEN)
    from_state = tl.exp(sums.to(tl.float32))
    from_key *= (from_state * tl.rsqrt(key_square + L2_EPS))[:, None]
    from_query *= (from_state * tl.rsqrt(query_square + L2_EPS) * scale)[:, None]
    written = rows[:, None] * (VALUE_HEADS * VALUE_DIM) + along_value[None, :]
    tl.store(solved + written, strength[:, None] * (value.to(tl.float32) - from_key), mask=inside[:, None] & in_value)
    tl.store(recalled + written, from_query, mask=inside[:, None] & in_value)


@triton.jit
def _products(
    queries, raw_keys, rows, columns, present, there, mixed_stride, scale,
    KEY_DIM: tl.constexpr, KEY_TILE: tl.constexpr, SLICE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of unit queries (scaled) and of unit keys of `rows` with unit keys of `columns`, [ROWS, ROWS] each; what makes the keys units."""
    by_query = tl.zeros([ROWS, ROWS], tl.float32)
    by_key = tl.zeros([ROWS, ROWS], tl.float32)
    key_square = tl.zeros([ROWS], tl.float32)
    query_square = tl.zeros([ROWS], tl.float32)
    other_square = tl.zeros([ROWS], tl.float32)
    for part in tl.range(0, KEY_TILE, SLICE, num_stages=STAGES):
        along = part + tl.arange(0, SLICE)
        in_part = (along < KEY_DIM)[None, :]
        places = rows[:, None] * mixed_stride + along[None, :]
        query = tl.load(queries + places, mask=present[:, None] & in_part, other=0.0)
        key = tl.load(raw_keys + places, mask=present[:, None] & in_part, other=0.0)
        other_key = tl.load(raw_keys + columns[:, None] * mixed_stride + along[None, :], mask=there[:, None] & in_part, other=0.0)
        by_query += dot_rows(query, other_key)
        by_key += dot_rows(key, other_key)
        key_square += tl.sum(key.to(tl.float32) * key.to(tl.float32), axis=1)
        query_square += tl.sum(query.to(tl.float32) * query.to(tl.float32), axis=1)
        other_square += tl.sum(other_key.to(tl.float32) * other_key.to(tl.float32), axis=1)
    key_norm, other_norm = tl.rsqrt(key_square + L2_EPS), tl.rsqrt(other_square + L2_EPS)[None, :]
    by_query *= (scale * tl.rsqrt(query_square + L2_EPS))[:, None] * other_norm
    return by_query, by_key * key_norm[:, None] * other_norm, key_norm

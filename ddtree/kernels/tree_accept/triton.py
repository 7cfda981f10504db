"""The acceptance walk in Triton: one program a sequence, which holds all of its nodes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _accept_kernel(
    token_ids, parents, starts, counts, target_tokens, path, path_lengths, emitted, bonus_tokens,
    PATH: tl.constexpr, PATH_BLOCK: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    start, count = tl.load(starts + b), tl.load(counts + b)
    nodes, steps = tl.arange(0, NODES), tl.arange(0, PATH_BLOCK)
    parent = tl.load(parents + start + nodes, mask=nodes < count, other=-1)
    drafted = parent >= 0
    token = tl.load(token_ids + start + nodes, mask=drafted, other=0)
    wanted = tl.load(target_tokens + start + parent, mask=drafted, other=0)
    # Known before the walk: which nodes their parents would be followed to.
    parent = tl.where(drafted & (token == wanted), parent, -1)
    walked = tl.zeros([PATH_BLOCK], tl.int32)
    length = tl.minimum(count, 1)
    node = tl.minimum(count, 0)
    child = tl.min(tl.where(parent == 0, nodes, NODES), axis=0)
    while (child < NODES) & (length < PATH):
        walked = tl.where(steps == length, child, walked)
        length += 1
        node = child
        child = tl.min(tl.where(parent == node, nodes, NODES), axis=0)
    kept = steps < length
    tokens = tl.load(target_tokens + start + walked, mask=kept, other=0)
    inside = steps < PATH
    tl.store(path + b * PATH + steps, walked, mask=inside)
    tl.store(emitted + b * PATH + steps, tokens, mask=inside)
    tl.store(path_lengths + b, length)
    tl.store(bonus_tokens + b, tl.load(target_tokens + start + node, mask=count > 0, other=0))


def accept_pooled_triton(
    token_ids: torch.Tensor,
    parents: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    target_tokens: torch.Tensor,
    path_rows: int,
    *,
    max_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `accept_pooled`; `max_rows` is the most rows of one sequence."""
    num_sequences, device = len(counts), counts.device
    path = torch.empty(num_sequences, path_rows, dtype=torch.int32, device=device)
    emitted = torch.empty(num_sequences, path_rows, dtype=torch.int64, device=device)
    path_lengths = torch.empty(num_sequences, dtype=torch.int32, device=device)
    bonus_tokens = torch.empty(num_sequences, dtype=torch.int64, device=device)
    nodes = triton.next_power_of_2(max_rows)
    _accept_kernel[(num_sequences,)](
        token_ids, parents, starts, counts, target_tokens.contiguous(), path, path_lengths, emitted, bonus_tokens,
        PATH=path_rows, PATH_BLOCK=triton.next_power_of_2(path_rows), NODES=nodes, num_warps=4 if nodes <= 512 else 8,
    )  # fmt: skip
    return path, path_lengths, emitted, bonus_tokens

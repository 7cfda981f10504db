"""The obvious twin of the acceptance walk: one sequence and one step at a time. Nobody optimises it."""

from __future__ import annotations

import torch


def accept_pooled_reference(
    token_ids: torch.Tensor,
    parents: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    target_tokens: torch.Tensor,
    path_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Same arguments and result as `accept_pooled`, the trees' buffers taken apart."""
    num_sequences = len(counts)
    path = torch.zeros(num_sequences, path_rows, dtype=torch.int32, device=parents.device)
    emitted = torch.zeros(num_sequences, path_rows, dtype=torch.int64, device=parents.device)
    path_lengths = torch.zeros(num_sequences, dtype=torch.int32, device=parents.device)
    bonus_tokens = torch.zeros(num_sequences, dtype=torch.int64, device=parents.device)
    for b, (start, count) in enumerate(zip(starts.tolist()[:-1], counts.tolist(), strict=True)):
        node, length = (0, 0) if count else (-1, 0)
        while node >= 0 and length < path_rows:
            token = int(target_tokens[start + node])
            path[b, length], emitted[b, length], bonus_tokens[b] = node, token, token
            length += 1
            children = [i for i in range(count) if parents[start + i] == node and token_ids[start + i] == token]
            node = children[0] if children else -1
        path_lengths[b] = length
    return path, path_lengths, emitted, bonus_tokens

"""What SGLang's tree verify takes, on the device: B trees of N nodes each, and what was accepted of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ddtree.sglang.trees import NO_NODE, PackedTrees


@dataclass(frozen=True, eq=False)
class Nodes:
    """The trees of a batch."""

    token_ids: torch.Tensor  # [B, N] int64
    positions: torch.Tensor  # [B, N] int64
    # int32, as SGLang's graphs hold links: its recurrent layers' kernel is then compiled once, not once more for eager rounds.
    next_token: torch.Tensor  # [B, N] int32
    next_sibling: torch.Tensor  # [B, N] int32
    mask: torch.Tensor  # [sum of N * (context length + N)] bool

    @classmethod
    def of(cls, packed: PackedTrees, device: torch.device) -> Nodes:
        """Upload what the host has packed."""
        token_ids, positions, mask = (torch.from_numpy(a).to(device) for a in (packed.token_ids, packed.positions, packed.mask))
        links = (torch.from_numpy(link).to(device, torch.int32) for link in (packed.next_token, packed.next_sibling))
        return cls(token_ids, positions, *links, mask)


@dataclass(frozen=True, eq=False)
class Accepted:
    """The paths of a batch as SGLang takes them."""

    lengths: torch.Tensor  # [B] int32
    index: torch.Tensor  # [B, N] int64: each path's nodes as rows of the batch, then -1
    token_ids: torch.Tensor  # [B, N] int64: what was emitted, then 0
    target_tokens: torch.Tensor  # [B * N] int64: the target's choice after every node


class Report:
    """The paths on their way to the host; whatever is queued meanwhile runs beside."""

    def __init__(self, accepted: Accepted) -> None:
        rows = torch.cat([accepted.lengths[:, None].to(torch.int64), accepted.index], dim=1)
        self._host = torch.empty(rows.shape, dtype=torch.int64, pin_memory=rows.is_cuda)
        self._host.copy_(rows, non_blocking=True)
        self._done = torch.cuda.Event() if rows.is_cuda else None
        if self._done is not None:
            self._done.record()

    def paths(self) -> list[np.ndarray]:
        """Each sequence's accepted nodes, root first. Waits for the device."""
        if self._done is not None:
            self._done.synchronize()
        rows = self._host.numpy()
        return [row[1 : 1 + row[0]] - row[1] for row in rows]  # the first is the root, where the batch's rows of the tree begin


def links_of(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`parents [B, N]` as two links a node, [B, N] int32 each: its first child and its parent's next one, or -1."""
    num_nodes = parents.shape[1]
    node = torch.arange(num_nodes, dtype=torch.int32, device=parents.device)
    after = torch.full((), num_nodes, dtype=torch.int32, device=parents.device)
    children = parents[:, None, :] == node[:, None]  # [b, parent, child]
    siblings = (parents[:, None, :] == parents[:, :, None]) & (node > node[:, None])  # [b, node, later one]
    links = (torch.where(each, node, after).amin(-1) for each in (children, siblings))
    return tuple(torch.where(link == num_nodes, NO_NODE, link) for link in links)


def whole_mask(tree_mask: torch.Tensor, places: torch.Tensor, context_lengths: Sequence[int]) -> torch.Tensor:
    """SGLang's mask of a batch, as `PackedTrees.mask`: `tree_mask` [B, N, N] bool at `places` [B, N, N], true before it."""
    num_nodes = tree_mask.shape[-1]
    size = sum(num_nodes * (length + num_nodes) for length in context_lengths)
    mask = torch.ones(size, dtype=torch.bool, device=tree_mask.device)
    mask[places.flatten()] = tree_mask.flatten()
    return mask


def mask_offsets(context_lengths: Sequence[int], num_nodes: int) -> np.ndarray:
    """[B] int64: where each sequence's part of the mask begins."""
    sizes = num_nodes * (np.asarray(context_lengths, dtype=np.int64) + num_nodes)
    return np.cumsum(sizes) - sizes


def accepted_of(
    path: torch.Tensor, lengths: torch.Tensor, emitted: torch.Tensor, target_tokens: torch.Tensor, num_nodes: int
) -> Accepted:
    """From `path` [B, P] and `emitted` [B, P] of `lengths` [B], whatever stands behind those; P may be more than N."""
    count, width = path.shape[0], min(path.shape[1], num_nodes)
    first = torch.arange(0, count * num_nodes, num_nodes, device=path.device)[:, None]
    live = torch.arange(width, device=path.device) < lengths[:, None]
    index = torch.full((count, num_nodes), NO_NODE, dtype=torch.int64, device=path.device)
    index[:, :width] = torch.where(live, path[:, :width] + first, NO_NODE)
    token_ids = torch.zeros_like(index)
    token_ids[:, :width] = torch.where(live, emitted[:, :width], 0)
    return Accepted(lengths.to(torch.int32), index, token_ids, target_tokens)

"""A round's draft, build and accept on the device, over SGLang's slots: the engine's own device round (`engine.device_round`),
whose verify and commit are SGLang's.

B sequences that a round is captured for, b that take part, N nodes of a padded tree, K block slots, P path rows, T most tokens
of a request, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ddtree.engine.device_round import DeviceRound, RoundShape
from ddtree.engine.graphs import Graph
from ddtree.engine.sequence import Sequence
from ddtree.kernels.fused import argmax
from ddtree.kernels.sample import choose_filtered_pooled, choose_pooled
from ddtree.models.conditioning import Conditioning
from ddtree.models.pooled_dflash import PooledDFlash
from ddtree.sampling.params import SamplingParams
from ddtree.sglang.nodes import Accepted, Nodes, accepted_of, links_of, mask_offsets, whole_mask
from ddtree.sglang.slots import SlotPool

if TYPE_CHECKING:  # it imports SGLang
    from ddtree.sglang.target_face import TargetFace

UPLOADED = ("lengths", "roots", "budgets", "depths", "keys", "temperatures", "offsets")  # [B] int64 each, a round


@dataclass(eq=False)
class SlotTable:
    """Where the tokens of B sequences lie: `pages` of one token each, those of the block in flight behind them."""

    pages: torch.Tensor  # [B, T + K] int32
    context_lengths: torch.Tensor  # [B] int32


class SlotState:
    """What `DeviceRound` reads of an engine's `PooledState`, for the B sequences of one round."""

    dummy, ends = 0, None

    def __init__(self, pool: SlotPool, target: TargetFace, conditioning: Conditioning | None, count: int, most_tokens: int) -> None:
        self.device, self.conditioning = pool.keys.device, conditioning
        block = pool.model.config.block_size

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.table = SlotTable(zeros(count, most_tokens + block, dtype=torch.int32), zeros(count, dtype=torch.int32))
        self.drafter = PooledDFlash(pool.model, target, self.table, 0, pool)
        self.noise_keys, self.temperatures = zeros(count, dtype=torch.int64), zeros(count, dtype=torch.float32)


class SlotRound(DeviceRound):
    """Static buffers of one round shape, and graphs of its draft and its build."""

    def __init__(
        self, state: SlotState, shape: RoundShape, req_to_token: torch.Tensor, pool: SlotPool, target: TargetFace, *, graphs: bool, memory=None
    ) -> None:
        """`req_to_token` [requests, T] int32 is SGLang's table. `memory`: a pool that graphs may share."""
        super().__init__(state, shape, graphs=False)
        device, count = state.device, shape.num_sequences
        self.req_to_token, self.target = req_to_token, target
        self.slots.copy_(torch.arange(count))
        self.uploaded = torch.zeros(len(UPLOADED), count, dtype=torch.int64, device=device)
        self.rows = torch.zeros(count, dtype=torch.int64, device=device)
        self.host_upload = torch.zeros(self.uploaded.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        staged = torch.arange(count * self.num_slots, dtype=torch.int32, device=device) + pool.first_staged
        self.staged = staged.view(count, self.num_slots)
        self.sampling: list[SamplingParams] = []
        self.target_tokens = torch.zeros(self.trees.num_rows, dtype=torch.int64, device=device)
        self.nodes: tuple[torch.Tensor, ...] = ()
        self.candidates: tuple[torch.Tensor, ...] = ()
        self.draft_graph = Graph(self._draft, device, graphs, memory)
        self.build_graph = Graph(self._build, device, graphs, memory)

    def begin(self, sequences: SequenceOf[Sequence], rows: torch.Tensor, depths: SequenceOf[int]) -> None:
        """Upload who takes part, in which `rows` [b] of SGLang's table, and queue their drafts."""
        self.num_real, self.lengths = len(sequences), [sequence.context_length for sequence in sequences]
        upload = self.host_upload.numpy()
        upload[:] = 0
        upload[UPLOADED.index("budgets")] = -1
        columns = {
            "lengths": self.lengths,
            "roots": [sequence.root_token for sequence in sequences],
            "budgets": [sequence.tree_budget if depth else 0 for sequence, depth in zip(sequences, depths, strict=True)],
            "depths": depths,
            "keys": [_signed(sequence.noise.key) if sequence.noise is not None else 0 for sequence in sequences],
            "temperatures": np.array([s.request.sampling.temperature for s in sequences], dtype=np.float32).view(np.int32),
            "offsets": mask_offsets(self.lengths, self.shape.rows_each),
        }
        for row, name in zip(upload, UPLOADED, strict=True):
            row[: self.num_real] = columns[name]
        self.uploaded.copy_(self.host_upload, non_blocking=True)
        self.rows[: self.num_real] = rows
        self.sampling = [sequence.request.sampling for sequence in sequences]
        self.draft_graph.replay()

    def finish(self) -> Nodes:
        """Queue the trees of what was drafted."""
        self.build_graph.replay()
        # Copies, for SGLang keeps what it verifies until the next round has begun.
        token_ids, positions, first, sibling = (each[: self.num_real].clone() for each in self.nodes[:4])
        tree_mask, places = (each[: self.num_real] for each in self.nodes[4:])
        return Nodes(token_ids, positions, first, sibling, whole_mask(tree_mask, places, self.lengths))

    def accept_logits(self, logits: torch.Tensor) -> Accepted:
        """Our own choice after each node, greedy or by the request's keyed noise, and our walk; `logits` [b * N, V]."""
        chosen, count = self._choose(logits), self.num_real
        self.target.share(chosen)
        self.target_tokens[: len(chosen)] = chosen
        path, lengths, emitted, _ = self.accept(self.target_tokens)
        return accepted_of(path[:count], lengths[:count], emitted[:count], chosen, self.shape.rows_each)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Everything once, uncaptured and for nobody, with logits of either kind that SGLang may hand over."""
        self._draft()
        self._build()
        for dtype in {torch.float32, self.target.dtype}:
            self._choose(torch.zeros(self.trees.num_rows, self.target.config.vocab_size, dtype=dtype, device=self.state.device))
        self.accept(self.target_tokens)

    def parents(self) -> list[np.ndarray]:
        """Of each tree's nodes. Waits for the device."""
        each = self.trees.parents.view(-1, self.shape.rows_each)[: self.num_real].cpu().numpy()
        return [parents[:count] for parents, count in zip(each, self.trees.counts.tolist(), strict=False)]

    def _draft(self) -> None:
        """Candidates of every depth."""
        lengths, roots, budgets, depths, keys, temperatures, _ = self.uploaded
        state, table = self.state, self.state.table
        table.context_lengths.copy_(lengths)
        self.budgets.copy_(budgets)
        self.num_depths.copy_(depths)
        state.noise_keys.copy_(keys)
        state.temperatures.copy_(temperatures.to(torch.int32).view(torch.float32))
        table.pages[:, : self.req_to_token.shape[1]] = self.req_to_token[self.rows]
        table.pages.scatter_(1, lengths[:, None] + torch.arange(self.num_slots, device=lengths.device), self.staged)
        self.candidates = self.draft(roots)

    def _build(self) -> None:
        """The first rank's trees, as SGLang verifies them; padding hangs below the root, where nothing is accepted."""
        lengths, roots, _, _, _, _, offsets = self.uploaded
        trees, (count, num_nodes) = self.trees, (len(lengths), self.shape.rows_each)
        self.build(roots, self.candidates)
        self.target.share(trees.token_ids, trees.parents, trees.depths, trees.counts, trees.ancestor_mask)
        node = torch.arange(num_nodes, device=lengths.device)
        live = (node < trees.counts[:, None]) | (node == 0)
        parents = torch.where(live, trees.parents.view(count, -1), 0)
        depths = torch.where(live, trees.depths.view(count, -1), 1)
        tree_mask = trees.ancestor_mask.view(count, num_nodes, num_nodes).bool() | (node == 0)
        widths = (lengths + num_nodes)[:, None]
        places = (offsets[:, None] + node * widths + lengths[:, None])[:, :, None] + node
        self.nodes = (
            trees.token_ids.view(count, -1), lengths[:, None] + depths, *links_of(parents), tree_mask, places,
        )  # fmt: skip

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.shape.sampled:
            return argmax(logits)
        trees, num_rows = self.trees, len(logits)
        streams, temperatures = self._sampling(trees.row_slots[:num_rows], trees.depths[:num_rows] + 1)
        if not any(each.filtered for each in self.sampling):
            return choose_pooled(logits, temperatures, streams)
        kinds = ((torch.int32, "top_k"), (torch.float64, "top_p"), (torch.float64, "min_p"))
        columns = (torch.tensor([getattr(each, name) for each in self.sampling], dtype=dtype) for dtype, name in kinds)
        filters = (column.to(logits.device).repeat_interleave(self.shape.rows_each) for column in columns)
        return choose_filtered_pooled(logits, temperatures, streams, *filters)


def _signed(key: int) -> int:
    """64 bits as torch's int64 has them."""
    return key - (1 << 64) if key >> 63 else key

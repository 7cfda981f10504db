"""The decode round on the device: the same five steps as `decode_round`, as one function that a CUDA graph can hold.

The host uploads nothing and reads one small report. Letters: B sequences, N rows a sequence (root included), K block
slots, P path rows (at most K), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ddtree.caches.pooled_rows import STEP, TREE, PooledRows, consecutive_rows
from ddtree.engine.graphs import WARM_UPS, Graph, Marks
from ddtree.engine.pooled_state import NEVER, PooledState
from ddtree.engine.round_report import RoundReport, report_width
from ddtree.engine.stats import STAGES
from ddtree.kernels.fused import argmax
from ddtree.kernels.sample import choose_filtered_pooled, choose_pooled, streams_pooled
from ddtree.kernels.tree_accept import accept_pooled
from ddtree.kernels.tree_build import (
    TreeBuffers,
    best_path_pooled,
    build_ddtree_pooled,
    top_candidates_pooled,
)
from ddtree.sampling.choose import LEAST_TEMPERATURE, RANK_LOGITS


@dataclass(frozen=True)
class RoundShape:
    """What a round is captured for."""

    num_sequences: int
    max_budget: int  # 0: plain decoding
    sampled: bool = False  # whether any sequence draws; greedy alone needs no noise
    conditioned: bool = False  # whether trees are ranked with the adapter's scores
    absorbs: bool = True  # whether the drafter's context follows; plain requests do without
    chain: bool = False  # whether trees do without branching
    filtered: bool = False  # whether any sequence draws from what top-k, top-p or min-p keep

    @property
    def rows_each(self) -> int:
        return 1 + self.max_budget


class Lane:
    """One of the graphs of a round, with its own report and times, so that a round can run while another's are read."""

    def __init__(self, device_round: DeviceRound, graphs: bool, pool, warm_ups: int = WARM_UPS) -> None:
        self.device_round, device = device_round, device_round.state.device
        self.marks = Marks(STAGES, device)
        self.host_report = torch.zeros(device_round.report.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.done = torch.cuda.Event() if device.type == "cuda" else None
        self.graph = Graph(self._work, device, graphs, pool, warm_ups)

    def _work(self) -> None:
        self.device_round.run(self.marks)
        self.host_report.copy_(self.device_round.report, non_blocking=True)

    def launch(self) -> None:
        self.graph.replay()
        if self.done is not None:
            self.done.record()

    def wait(self) -> np.ndarray:
        """Wait for the round; its report, [sequences that take part, ...] int64. Another launch does not touch the copy."""
        return self.wait_for_all()[: self.device_round.num_real].numpy().copy()

    def wait_for_all(self) -> torch.Tensor:
        """The report itself, padding too, once it is there."""
        if self.done is not None:
            self.done.synchronize()
        return self.host_report


class DeviceRound:
    """Static buffers and the graphs of one round shape."""

    def __init__(self, state: PooledState, shape: RoundShape, *, graphs: bool = True, pool=None) -> None:
        self.state, self.shape = state, shape
        device, count = state.device, shape.num_sequences
        self.slots = torch.full((count,), state.dummy, dtype=torch.int32, device=device)
        self.budgets = torch.full((count,), shape.max_budget, dtype=torch.int32, device=device)
        block = state.drafter.config.block_size if state.drafter is not None else 1
        self.num_slots = min(block, 1 + shape.max_budget) if self._shrinkable else block
        self.num_depths = torch.full((count,), self.num_slots - 1, dtype=torch.int32, device=device)
        self.path_rows = self.num_slots if shape.max_budget else 1
        if shape.max_budget:
            num = 0 if shape.chain else self.num_candidates  # a chain's path is chosen before it is built
            self.trees = TreeBuffers(count, shape.max_budget, device, num_candidates=num)
        self.report = torch.zeros(count, report_width(self.path_rows, shape.rows_each), dtype=torch.int64, device=device)
        self.live_slots, self.live_budgets = self.slots, self.budgets
        self.num_real = 0  # sequences that take part; the others are padding
        self.lanes = [Lane(self, graphs, pool), Lane(self, graphs, pool, warm_ups=0)]  # the first has warmed up for both
        self._next = 0

    @property
    def num_candidates(self) -> int:
        """Per depth, where they are scored below each parent; 0 where they are not."""
        return self.state.conditioning.num_candidates if self.shape.conditioned else 0

    @property
    def _shrinkable(self) -> bool:
        return self.state.drafter is not None and self.state.drafter.config.shrinkable_block

    def run(self, mark: Marks) -> None:
        """Emit at least one token for every sequence; the last one emitted is its next root."""
        state, slots, budgets = self.state, self.slots, self.budgets
        if state.ends is not None:
            # Whoever ended in the last round, unknown to the host, takes part as padding does.
            ended = state.ended[slots.long()]
            slots, budgets = torch.where(ended, state.dummy, slots), torch.where(ended, -1, budgets)
        self.live_slots, self.live_budgets = slots, budgets
        roots = state.roots[slots.long()]
        mark(0)
        if self.shape.max_budget:
            candidates = self.draft(roots)
            mark(1)
            rows = self.build(roots, candidates)
        else:
            mark(1)
            rows = consecutive_rows(STEP, roots[:, None], slots, state.table.context_lengths)
        mark(2)
        target_tokens = self.verify(rows)
        mark(3)
        if self.shape.max_budget:
            path, lengths, emitted, bonus = self.accept(target_tokens)
            kept, bonus = self.cut(lengths, emitted, bonus)
            mark(4)
            state.target.pool.commit(slots, rows.starts, path, kept)
        else:  # one row each, permanent already
            path, lengths, emitted, bonus = torch.zeros_like(slots)[:, None], torch.ones_like(slots), target_tokens[:, None], target_tokens
            kept, bonus = self.cut(lengths, emitted, bonus)
            mark(4)
        self.commit(rows, path, kept, bonus)
        self._report(path, lengths, emitted)
        mark(5)

    def draft(self, roots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best tokens of each depth: ids [B, K - 1, M] and log-probabilities alike, or [B, K - 1, M, M] below each parent;
        of a chain M = 1."""
        states, logits = self.state.drafter.draft(roots, self.live_slots, self.num_slots)
        num = self.num_candidates or (1 if self.shape.chain else min(self.shape.max_budget, logits.shape[-1]))
        streams = temperatures = None
        if self.shape.sampled:
            depths = torch.arange(1, self.num_slots, device=roots.device)
            streams, temperatures = self._sampling(self.live_slots.repeat_interleave(self.num_slots - 1), depths.repeat(len(roots)))
        token_ids, log_probs = top_candidates_pooled(logits.flatten(0, 1), num, streams=streams, temperatures=temperatures)
        token_ids, log_probs = token_ids.view(len(roots), -1, num), log_probs.view(len(roots), -1, num)
        if self.num_candidates:
            log_probs = self.condition(roots, states, logits, token_ids, log_probs)
            if self.shape.chain:
                token_ids, log_probs = best_path_pooled(token_ids, log_probs)
        return token_ids, log_probs

    def condition(self, roots, states, logits, token_ids, ranking) -> torch.Tensor:
        """The ranking [B, D, M] below each parent: [B, D, M, M], depth 1 below the root alone."""
        state, log_probs = self.state, ranking
        strengths = torch.ones_like(roots, dtype=torch.float32)
        if self.shape.sampled:
            logits = logits.float()
            log_probs = logits.gather(2, token_ids) - logits.logsumexp(dim=-1, keepdim=True)
            temperatures = state.temperatures[self.live_slots.clamp(min=0).long()]
            strengths = torch.where(temperatures > 0, RANK_LOGITS / temperatures.clamp(min=LEAST_TEMPERATURE), 1.0)
        return state.conditioning.transitions(states, roots, token_ids, log_probs, ranking, strengths)

    def build(self, roots: torch.Tensor, candidates: tuple[torch.Tensor, torch.Tensor]) -> PooledRows:
        """The best prefixes below each root, packed."""
        table, trees = self.state.table, self.trees
        build_ddtree_pooled(
            roots, *candidates, self.live_budgets, self.num_depths, self.shape.max_budget, self.live_slots, table.context_lengths, trees
        )
        return PooledRows(
            mode=TREE,
            token_ids=trees.token_ids,
            positions=trees.positions,
            starts=trees.starts,
            slots=self.live_slots,
            row_slots=trees.row_slots,
            row_indices=trees.row_indices,
            parents=trees.parents,
            ancestor_mask=trees.ancestor_mask,
            max_rows=self.shape.rows_each,
        )

    def verify(self, rows: PooledRows) -> torch.Tensor:
        """One target forward over all nodes -> the token after each, [R] int64."""
        features = self.state.features if self.shape.absorbs else None
        logits = self.state.target.logits(self.state.target(rows, features))
        if not self.shape.sampled:
            return argmax(logits)
        depths = self.trees.depths + 1 if rows.mode == TREE else torch.ones_like(rows.row_indices)
        streams, temperatures = self._sampling(rows.row_slots, depths)
        if not self.shape.filtered:
            return choose_pooled(logits, temperatures, streams)
        state, places = self.state, rows.row_slots.clamp(min=0).long()
        filters = (state.top_ks[places], state.top_ps[places], state.min_ps[places])
        return choose_filtered_pooled(logits, temperatures, streams, *filters)

    def accept(self, target_tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Follow the target's tokens: path [B, P], its lengths [B], emitted tokens [B, P], bonus tokens [B]."""
        return accept_pooled(self.trees, target_tokens, self.path_rows)

    def cut(self, lengths: torch.Tensor, emitted: torch.Tensor, bonus: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How much of each path is kept, as `engine.finish.scan` cuts it at a stop id or the last token that was asked for,
        and the token there. Only where a slot's states are wanted afterwards; else they may go beyond the end."""
        state, places = self.state, self.live_slots.long()
        if state.ends is None:
            return lengths, bonus
        number = torch.arange(1, emitted.shape[1] + 1, dtype=torch.int32, device=emitted.device)
        stops = (emitted[:, :, None] == state.stop_ids[places][:, None]).any(-1) & (number <= lengths[:, None])
        stop = torch.where(stops, number, NEVER).amin(1)
        left = state.ends[places] - state.table.context_lengths[places]
        kept = torch.minimum(lengths, torch.minimum(stop, left))
        state.ended.index_copy_(0, places, (kept == stop) | (kept == left))
        return kept, emitted.gather(1, (kept.long() - 1).clamp_(min=0)[:, None])[:, 0]

    def commit(self, rows: PooledRows, path: torch.Tensor, lengths: torch.Tensor, bonus: torch.Tensor) -> None:
        """Count the path's tokens in; its features become the drafter's context; the bonus token is the next root."""
        state, places = self.state, self.live_slots.long()
        state.table.context_lengths.index_add_(0, places, lengths)
        state.roots.index_copy_(0, places, bonus)
        if self.shape.absorbs and state.drafter is not None:
            index = (rows.starts[:-1, None] + path).long().clamp_(max=rows.num_rows - 1)
            state.drafter.absorb(state.features[index], self.live_slots, lengths)
        state.table.context_lengths[state.dummy :].zero_()

    def _sampling(self, row_slots: torch.Tensor, depths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per row: the noise stream of the token `depths` positions below the root, and the temperature."""
        state, places = self.state, row_slots.clamp(min=0).long()
        positions = state.table.context_lengths[places] + depths
        return streams_pooled(state.noise_keys[places], positions), state.temperatures[places]

    def _report(self, path: torch.Tensor, lengths: torch.Tensor, emitted: torch.Tensor) -> None:
        """All that the host will want, in one copy."""
        count = self.shape.num_sequences
        parts = [lengths[:, None], emitted, path]
        if self.shape.max_budget:
            trees = self.trees
            scores = trees.scores.view(torch.int32)
            parts.append(trees.counts[:, None])
            parts += [t.view(count, -1) for t in (trees.token_ids, trees.parents, trees.depths, scores)]
        torch.cat([part.to(torch.int64) for part in parts], dim=1, out=self.report)

    @torch.inference_mode()
    def launch(self, slots: list[int], roots: list[int] | None, budgets: list[int], depths: list[int]) -> Lane:
        """Upload who takes part (padded with the dummy slot), and queue the round; waits for nothing on the device. `roots` None:
        those that the round before will have left there."""
        self.num_real, device = len(slots), self.state.device
        padding = self.shape.num_sequences - len(slots)
        columns = [slots + [self.state.dummy] * padding, budgets + [-1] * padding, depths + [0] * padding, (roots or []) + [0] * padding]
        values = torch.tensor(columns if roots else columns[:3], pin_memory=device.type == "cuda").to(device, non_blocking=True)
        for buffer, column in zip((self.slots, self.budgets, self.num_depths), values, strict=False):
            buffer.copy_(column)
        if roots:
            self.state.roots.index_copy_(0, values[0], values[3])
        return self.relaunch()

    def relaunch(self) -> Lane:
        """Queue the round again for the same sequences, in the next lane."""
        lane = self.lanes[self._next]
        self._next = (self._next + 1) % len(self.lanes)
        lane.launch()
        return lane

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Rounds over other slots, such as for timing: who takes part and what nobody has read yet are as before afterwards."""
        reports = [lane.wait_for_all().clone() for lane in self.lanes]
        uploaded = (self.slots, self.budgets, self.num_depths)
        before, num_real, number = [buffer.clone() for buffer in uploaded], self.num_real, self._next
        try:
            yield
        finally:
            for lane, report in zip(self.lanes, reports, strict=True):
                lane.wait_for_all().copy_(report)
            for buffer, values in zip(uploaded, before, strict=True):
                buffer.copy_(values)
            self.num_real, self._next = num_real, number

    def read(self, report: np.ndarray) -> RoundReport:
        """What a lane's report says."""
        return RoundReport(report, self.path_rows, self.shape.max_budget > 0)

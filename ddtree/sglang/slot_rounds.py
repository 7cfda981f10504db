"""Which rounds run on the device (`slot_round`), and one captured for each number of sequences."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import TYPE_CHECKING

import torch

from ddtree.engine.device_round import RoundShape
from ddtree.engine.device_rounds import BATCHES
from ddtree.engine.drafter import Drafter
from ddtree.engine.graphs import bucket_of
from ddtree.engine.sequence import Sequence
from ddtree.kernels.compiling import compile_ahead
from ddtree.kernels.tree_build.buffers import MAX_BUDGET
from ddtree.models.adapter import PAIRWISE
from ddtree.sglang.slot_round import SlotRound, SlotState
from ddtree.sglang.slots import SlotPool

if TYPE_CHECKING:  # it imports SGLang
    from ddtree.sglang.target_face import TargetFace

logger = logging.getLogger(__name__)


def decode_graphs(server_args) -> bool:
    """Whether SGLang captures its decoding, by whichever of its arguments switch that off; which there are differs by release."""
    settled = getattr(getattr(server_args, "cuda_graph_config", None), "decode", None)
    backends = (getattr(settled, "backend", None), getattr(server_args, "cuda_graph_backend_decode", None))
    off = ("disable_cuda_graph", "disable_decode_cuda_graph")
    return "disabled" not in backends and not any(getattr(server_args, name, False) for name in off)


class SlotRounds:
    """The rounds of a drafter over a `SlotPool`, whose staged rows are those of `staged_rows`."""

    def __init__(
        self, drafter: Drafter, pool: SlotPool, target: TargetFace, req_to_token: torch.Tensor, num_nodes: int, most_running: int, *, graphs: bool
    ) -> None:
        """`num_nodes` of a padded tree. `graphs` off: rounds are launched kernel by kernel."""
        self.drafter, self.pool, self.target, self.req_to_token = drafter, pool, target, req_to_token
        self.num_nodes, self.graphs = num_nodes, graphs and pool.keys.is_cuda
        self.most_running = min(most_running, BATCHES[-1])
        self._memory = torch.cuda.graph_pool_handle() if self.graphs else None
        self._rounds: dict[tuple[int, bool], SlotRound] = {}

    @staticmethod
    def staged_rows(most_running: int, block_size: int) -> int:
        """Rows of a pool that blocks in flight take."""
        return bucket_of(min(most_running, BATCHES[-1]), BATCHES) * block_size

    def capture(self) -> None:
        """Every round that may come, the largest first, as memory is then shared best; nothing without graphs."""
        if not self.graphs or not self._serves:
            return
        largest = bucket_of(self.most_running, BATCHES)
        shapes = [(count, sampled) for count in reversed(BATCHES) if count <= largest for sampled in (True, False)]
        compile_ahead([partial(self._rehearse, *shape) for shape in shapes], self.pool.keys.device)
        try:
            for shape in shapes:
                self._round(*shape)
        except RuntimeError as error:  # slower, and right as ever
            logger.error("DDTREE: its rounds cannot be captured and are launched kernel by kernel: %s", error)
            self.graphs = False
            self._rounds.clear()

    def takes(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether a round of these needs nothing of the host: neither penalties nor grammars."""
        return self._serves and len(sequences) <= self.most_running and all(each.adjuster is None for each in sequences)

    def begin(self, sequences: SequenceOf[Sequence], rows: torch.Tensor) -> SlotRound:
        """The round of these sequences, in which `rows` [b] of SGLang's table, with their drafts queued."""
        count = bucket_of(len(sequences), BATCHES) if self.pool.keys.is_cuda else len(sequences)  # padding costs a CPU time
        for sequence in sequences:
            sequence.drafter_state = self.pool  # so it drafts
        depths = [self.drafter.depth_limit(sequence) for sequence in sequences]
        found = self._round(count, any(not each.request.sampling.greedy for each in sequences))
        with torch.inference_mode():
            found.begin(sequences, rows, depths)
        return found

    @property
    def _serves(self) -> bool:
        conditioning = self.drafter.conditioning
        # Scores that sum whole paths up are asked for level by level.
        return self.num_nodes - 1 <= MAX_BUDGET and (conditioning is None or conditioning.adapter.config.summary in PAIRWISE)

    def _round(self, count: int, sampled: bool) -> SlotRound:
        if (count, sampled) not in self._rounds:
            self._rounds[count, sampled] = self.make(count, sampled, self.graphs)
        return self._rounds[count, sampled]

    def _rehearse(self, count: int, sampled: bool) -> None:
        self.make(count, sampled, graphs=False).rehearse()

    def make(self, count: int, sampled: bool, graphs: bool) -> SlotRound:
        """A round of up to `count` sequences; `sampled`: whether any draws."""
        conditioning = self.drafter.conditioning
        shape = RoundShape(count, self.num_nodes - 1, sampled, conditioning is not None, absorbs=False)
        state = SlotState(self.pool, self.target, conditioning, count, self.req_to_token.shape[1])
        return SlotRound(state, shape, self.req_to_token, self.pool, self.target, graphs=graphs, memory=self._memory)

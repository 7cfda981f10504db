"""RecurrentCache: the committed conv and recurrent state of one Gated-DeltaNet layer of one sequence.

Letters: n staged rows, C conv channels, W conv width, Hk key heads, Hv value heads, K key dim, V value dim.
Neither state can be cut back, so rows are only ever staged beside it, and commit folds the path in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddtree.kernels.causal_conv import causal_conv_commit, causal_conv_tree
from ddtree.kernels.gated_delta import (
    StagedRows,
    gated_delta_commit,
    gated_delta_prefill,
    gated_delta_tree,
)


class RecurrentCache:
    """Both states, and what committing the rows staged by the round in flight will need.

    In one forward the layer calls `stage_conv`, then `stage`, over the same rows.
    """

    def __init__(
        self,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_channels: int,
        conv_width: int,
        dtype: torch.dtype,
        device: torch.device | str,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.context_length = 0
        # Outside inference mode: an inference tensor could not be written to from ordinary code later.
        with torch.inference_mode(False):
            self.conv_state = torch.zeros(conv_width - 1, conv_channels, dtype=dtype, device=device)
            self.recurrent_state = torch.zeros(
                num_value_heads, key_dim, value_dim, dtype=state_dtype, device=device
            )
        self._conv_inputs: torch.Tensor | None = None  # [n, C]
        self._staged: StagedRows | _Consecutive | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the committed states; staged rows live from a forward to its commit only."""
        return self.conv_state.nbytes + self.recurrent_state.nbytes

    @property
    def row_bytes(self) -> int:
        return 0

    @property
    def state_bytes(self) -> int:
        return self.num_bytes

    def reserve(self, num_rows: int) -> None:
        """Nothing: the states do not grow with the context."""

    def copy_rows(self, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        return ()

    def copy_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the conv state [W - 1, C] and the recurrent state [Hv, K, V] after the committed tokens."""
        return self.conv_state.clone(), self.recurrent_state.clone()

    def restore(self, rows: tuple[torch.Tensor, ...], state: tuple[torch.Tensor, ...], num_rows: int) -> None:
        """Take the two states after `num_rows` tokens more."""
        conv_state, recurrent_state = state
        self.conv_state.copy_(conv_state)
        self.recurrent_state.copy_(recurrent_state)
        self.context_length += num_rows
        self._drop_staged()

    def stage_conv(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parents: torch.Tensor | None
    ) -> torch.Tensor:
        """Convolve the rows `x` [n, C] by `weight` [C, W] over their ancestors and the committed inputs; [n, C].

        `parents` [n] int64, -1 for the root; None means consecutive tokens. Staging again without a commit
        replaces what was staged, so a round that failed halfway leaves no trace.
        """
        self._drop_staged()
        self._conv_inputs = x
        return causal_conv_tree(x, weight, bias, self.conv_state, parents)

    def stage(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        ancestor_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """The gated delta rule over the same rows: `query`, `key` [n, Hk, K], `value` [n, Hv, V], `g` (log decay)
        and `beta` [n, Hv], `ancestor_mask` [n, n] bool or None for consecutive tokens -> [n, Hv, V].
        """
        rows = (query, key, value, g, beta)
        if ancestor_mask is None and key.shape[0] > 1:
            out, state = gated_delta_prefill(*rows, self.recurrent_state)
            self._staged = _Consecutive(rows, state)
        else:
            out, self._staged = gated_delta_tree(*rows, ancestor_mask, self.recurrent_state)
        return out

    def commit(self, path: torch.Tensor) -> None:
        """Fold the staged rows `path` ([p] int64, root first, hence ascending) into both states; drop the others."""
        length = path.shape[0]
        if length > 0:
            staged, inputs = self._staged, self._conv_inputs
            assert staged is not None and inputs is not None, (
                "nothing is staged, so there is no path to commit"
            )
            assert length <= staged.num_rows == inputs.shape[0], (
                f"path of {length} rows, but {staged.num_rows} and {inputs.shape[0]} (conv) are staged"
            )
            self.conv_state.copy_(causal_conv_commit(inputs, self.conv_state, path))
            if isinstance(staged, StagedRows):
                state = gated_delta_commit(self.recurrent_state, staged, path)
            else:
                state = staged.state_after(length, self.recurrent_state)
            self.recurrent_state.copy_(state)
        self.context_length += length
        self._drop_staged()

    def reset(self) -> None:
        """Forget everything, keep the memory."""
        self.context_length = 0
        self.conv_state.zero_()
        self.recurrent_state.zero_()
        self._drop_staged()

    def _drop_staged(self) -> None:
        self._conv_inputs = None
        self._staged = None


@dataclass(frozen=True, eq=False)
class _Consecutive:
    """A staged chunk of consecutive tokens: a path is its first p rows."""

    rows: tuple[torch.Tensor, ...]  # query, key, value, g, beta as staged
    state: torch.Tensor  # [Hv, K, V] after all of them

    @property
    def num_rows(self) -> int:
        return self.rows[0].shape[0]

    def state_after(self, length: int, state: torch.Tensor) -> torch.Tensor:
        """The state after the first `length` rows, from the committed `state`. The whole chunk is the usual case
        and was computed with its output; a shorter path is computed again.
        """
        if length == self.num_rows:
            return self.state
        return gated_delta_prefill(*(rows[:length] for rows in self.rows), state)[1]

"""The obvious twins of the pooled kernels: one sequence at a time, by the single-sequence functions.

Arguments as in `pooled`. They look at the indices on the host; the kernels do not.
"""

from __future__ import annotations

from ddtree.kernels.causal_conv.gates import gates_twin
from ddtree.kernels.causal_conv.sequence import causal_conv_commit, causal_conv_prefill, causal_conv_tree


def tree(x, weight, bias, states, slots, starts, row_slots, row_indices, parents, out, gates) -> None:
    bounds = starts.tolist()
    for slot, start, stop in zip(slots.tolist(), bounds[:-1], bounds[1:], strict=True):
        if stop > start:
            up = None if parents is None else parents[start:stop].long()
            out[start:stop] = causal_conv_tree(x[start:stop], weight, bias, states[slot], up)
    out[: x.shape[0]].masked_fill_(row_slots[:, None] < 0, 0)
    if gates is not None:
        gates_twin(gates)


def step(x, weight, bias, states, slots, starts, out, gates) -> None:
    bounds = starts.tolist()
    for slot, start, stop in zip(slots.tolist(), bounds[:-1], bounds[1:], strict=True):
        if stop > start:
            rows = slice(start, start + 1)
            out[rows], states[slot] = causal_conv_prefill(x[rows], weight, bias, states[slot])
    if gates is not None:
        gates_twin(gates)


def commit(x, states, slots, starts, path, path_lengths) -> None:
    lengths = path_lengths.tolist()
    for slot, start, nodes, length in zip(slots.tolist(), starts.tolist()[:-1], path, lengths, strict=True):
        rows = start + nodes[:length].long()
        for layer in range(states.shape[0]):
            states[layer, slot] = causal_conv_commit(x[layer], states[layer, slot], rows)


def prefill(x, weight, bias, states, slots, starts, max_rows, out, gates) -> None:
    bounds = starts.tolist()
    for slot, start, stop in zip(slots.tolist(), bounds[:-1], bounds[1:], strict=True):
        if stop - start > max_rows:
            raise ValueError(f"a sequence has {stop - start} rows, max_rows is {max_rows}")
        if stop > start:
            out[start:stop], states[slot] = causal_conv_prefill(x[start:stop], weight, bias, states[slot])
    if gates is not None:
        gates_twin(gates)

"""The gated delta rule step by step: the twin against the recurrence, the kernel against the twin, and a token's bits as a
tree's node, as a token of a prompt and in what is committed."""

from __future__ import annotations

import pytest
import torch

from ddtree.kernels.gated_delta import (
    COMMITS,
    NODES,
    TOKENS,
    Walks,
    gated_delta_tree_reference,
    gated_delta_walk_pooled,
    leaf_walks,
    walk_twin,
)
from ddtree.kernels.lineage import lineage_pooled_reference
from tests.kernels.recurrent_pools import (
    DEVICE,
    LARGE,
    ODD,
    SMALL,
    WAYS,
    Layout,
    Round,
    integers,
    needs_triton,
    poison,
)
from tests.kernels.trees import TREES, ancestor_mask, leaf_paths, longest_path, random_parents, worst_error

CLOSE = 1e-5
REACH = 16
LAYOUTS = {
    "one row": Layout([TREES["one"]]),
    "a tree": Layout([random_parents(9, 4)], padding=2),
    "several": Layout([random_parents(5, 5), None, random_parents(3, 3), TREES["two"], None], padding=1),
    "chain": Layout([torch.arange(-1, 7)], padding=0),
}


def run(way: str, *arguments) -> None:
    if way == "twin":
        return walk_twin.walk(*arguments)
    needs_triton(way)
    from ddtree.kernels.gated_delta import triton_walk

    return triton_walk.walk(*arguments)


def nodes_of(layout: Layout) -> Walks:
    """Down to each leaf."""
    slots, indices = layout.row_slots, layout.row_indices
    lineage = lineage_pooled_reference(slots, indices, layout.parents, REACH).to(DEVICE)
    return leaf_walks(lineage, slots, indices)


def run_nodes(way: str, given: Round, out: torch.Tensor | None = None) -> torch.Tensor:
    out = given.out() if out is None else out
    run(way, given.mixed[None], given.log_decay[None], given.beta[None], given.states[None], nodes_of(given.layout), given.shape, out)
    return out


@pytest.mark.parametrize("trees", [["random65"], ["chain65", "star65"], ["two", "random17", "one"]])
def test_walks_to_leaves_write_every_row_once(trees):
    layout = Layout([TREES[name] for name in trees])
    lineage = lineage_pooled_reference(layout.row_slots, layout.row_indices, layout.parents, 128)
    walks, written = leaf_walks(lineage.to(DEVICE), layout.row_slots, layout.row_indices), []
    assert walks.kind == NODES
    for walk, (first, length, wanted) in enumerate(zip(walks.firsts.tolist(), walks.lengths.tolist(), walks.wanted.tolist(), strict=True)):
        path = lineage[walk, 128 - length :].tolist() if length > 0 else []
        written += [first + local for local in path[wanted:]]
    count = sum(layout.counts)
    assert sorted(written) == list(range(count))
    assert (walks.lengths[count:] == 0).all(), "padding is nobody's"
    leaves = sum(len(leaf_paths(tree)) for tree in layout.trees)
    assert int((walks.lengths > 0).sum()) == leaves


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_every_node_is_walked_to_from_its_sequences_state(way, layout):
    given = Round.random(LAYOUTS[layout], ODD if layout == "a tree" else SMALL)
    before = given.states.clone()
    out = run_nodes(way, given)
    assert torch.equal(given.states, before)
    for _, slot, rows, parents in given.layout.sequences():
        case = [tensor.cpu() for tensor in (*given.heads(rows), given.states[slot].double())]
        expected, _ = gated_delta_tree_reference(*case[:-1], ancestor_mask(parents), case[-1])
        assert worst_error(out[rows].cpu(), expected) <= CLOSE
    assert not out[sum(given.layout.counts) :].any(), "padding comes out as 0"


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_rows_are_walked_in_fp32(way):
    given = Round.random(LAYOUTS["several"], SMALL, torch.bfloat16)
    out = run_nodes(way, given, given.out(torch.bfloat16))
    expected = run_nodes("twin", given.changed(mixed=given.mixed.float()))
    assert worst_error(out.float(), expected) <= 2.0**-7


def texts(num_walks: int, length: int, shape, dtype=torch.float32):
    """Consecutive tokens of several sequences, and their walk."""
    given = Round.random(Layout([torch.arange(-1, length - 1)] * num_walks, padding=0), shape, dtype)
    paths = torch.arange(length, device=DEVICE, dtype=torch.int32).repeat(num_walks, 1)
    starts = given.layout.starts
    return given, Walks(TOKENS, given.layout.slots, starts[:-1], paths, starts.diff())


@pytest.mark.parametrize("way", WAYS)
def test_a_text_at_once_is_its_parts_one_after_another(way):
    """A state that is carried over, and one that is committed from a tree's rows, are those of the text."""
    given, walks = texts(2, 5, SMALL)
    inputs = (given.mixed[None], given.log_decay[None], given.beta[None])
    whole, out = given.states.clone(), given.out()
    run(way, *inputs, whole[None], walks, SMALL, out)
    parts, pieces = given.states.clone(), given.out()
    for first, count in ((0, 2), (2, 1), (3, 2)):
        own = Walks(TOKENS, walks.slots, walks.firsts + first, walks.paths[:, :count].contiguous(), torch.full_like(walks.lengths, count))
        run(way, *inputs, parts[None], own, SMALL, pieces)
    committed = given.states.clone()
    run(way, *inputs, committed[None], walks._replace(kind=COMMITS), SMALL, None)
    nodes = run_nodes(way, given)
    assert torch.equal(pieces, out) and torch.equal(parts, whole)
    assert torch.equal(committed, whole) and torch.equal(nodes, out)
    unused = [slot for slot in range(given.layout.num_slots) if slot not in walks.slots.tolist()]
    assert torch.equal(whole[unused], given.states[unused])


@pytest.mark.parametrize("way", WAYS)
def test_a_path_is_folded_into_the_states_of_all_layers(way):
    layout = LAYOUTS["several"]
    layers = [Round.random(layout, SMALL) for _ in range(2)]
    mixed, log_decay, beta, states = (torch.stack([getattr(each, name) for each in layers]) for name in ("mixed", "log_decay", "beta", "states"))
    before, paths = states.clone(), [longest_path(tree).tolist() if tree is not None else [] for tree in layout.trees]
    padded = [path + [10**6] * (12 - len(path)) for path in paths]
    walks = Walks(COMMITS, layout.slots, layout.starts[:-1], integers(padded), integers([len(path) for path in paths]))
    run(way, mixed, log_decay, beta, states, walks, SMALL, None)
    for layer, each in enumerate(layers):
        for index, slot, rows, _ in layout.sequences():
            path = torch.tensor(paths[index])
            query, key, value, g, strength = (part[path] for part in each.heads(rows))
            chain = ancestor_mask(torch.arange(-1, len(path) - 1)).to(DEVICE)
            state = before[layer, slot].double()
            _, staged = gated_delta_tree_reference(query, key, value, g, strength, chain, state)
            from ddtree.kernels.gated_delta import gated_delta_commit_reference

            expected = gated_delta_commit_reference(state, staged, torch.arange(len(path), device=DEVICE))
            assert worst_error(states[layer, slot], expected) <= CLOSE
        idle = [slot for slot in range(layout.num_slots) if slot not in [s for _, s, _, _ in layout.sequences()]]
        assert torch.equal(states[layer, idle], before[layer, idle])


@pytest.mark.parametrize("way", WAYS)
def test_nan_stays_on_its_path(way):
    given = Round.random(LAYOUTS["a tree"], SMALL)
    before = run_nodes(way, given)
    given.mixed[4] = torch.nan
    after = run_nodes(way, given)
    below = ancestor_mask(given.layout.trees[0])[:, 4]
    assert after[:9][below].isnan().any()
    assert torch.equal(after[:9][~below], before[:9][~below])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixed": torch.zeros(1, 4, 5)}, r"mixed must be \[L, R, 96\]"),
        ({"states": torch.zeros(1, 3, 2, 16, 30)}, r"states must be \[1, S, 2, 16, 32\]"),
        ({"beta": torch.zeros(1, 4, 3)}, r"beta must be \[1, 4, 2\]"),
        ({"out": None}, "out must be there"),
    ],
)
def test_bad_input_is_named(changes, message):
    walks = Walks(TOKENS, *(torch.zeros(size, dtype=torch.int32) for size in (1, 1, (1, 4), 1)))
    given = {"mixed": torch.zeros(1, 4, 96), "log_decay": torch.zeros(1, 4, 2), "beta": torch.zeros(1, 4, 2)}
    given |= {"states": torch.zeros(1, 3, 2, 16, 32), "walks": walks, "shape": SMALL, "out": torch.zeros(4, 2, 32)} | changes
    with pytest.raises(ValueError, match=message):
        gated_delta_walk_pooled(*given.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_true_shapes_have_the_same_bits_every_way_on_a_gpu(dtype):
    given, walks = texts(3, 14, LARGE, dtype)
    inputs = (given.mixed[None], given.log_decay[None], given.beta[None])
    whole, out = given.states.clone(), given.out(dtype)
    gated_delta_walk_pooled(*inputs, whole[None], walks, LARGE, out)
    assert torch.equal(run_nodes("kernel", given, given.out(dtype)), out)
    committed = given.states.clone()
    gated_delta_walk_pooled(*inputs, committed[None], walks._replace(kind=COMMITS), LARGE)
    assert torch.equal(committed, whole)
    parts, pieces = given.states.clone(), given.out(dtype)
    for first, count in ((0, 1), (1, 9), (10, 4)):
        own = Walks(TOKENS, walks.slots, walks.firsts + first, walks.paths[:, :count].contiguous(), torch.full_like(walks.lengths, count))
        gated_delta_walk_pooled(*inputs, parts[None], own, LARGE, pieces)
    assert torch.equal(pieces, out) and torch.equal(parts, whole)
    expected = poison(*out.shape)
    walk_twin.walk(*(each.float() for each in inputs), given.states.clone()[None], walks, LARGE, expected)
    assert worst_error(out.float(), expected) <= (CLOSE if dtype == torch.float32 else 2.0**-7)

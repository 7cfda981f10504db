"""The gated delta rule over a pool: the twin and the Triton kernels against the recurrence, sequence by sequence."""

import pytest
import torch

from ddtree.kernels.gated_delta import (
    gated_delta_commit_pooled,
    gated_delta_prefill_pooled,
    gated_delta_prefill_reference,
    gated_delta_step_pooled,
    gated_delta_tree,
    gated_delta_tree_pooled,
    gated_delta_tree_reference,
    pooled_twins,
)
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
from tests.kernels.trees import TREES, ancestor_mask, longest_path, random_parents, worst_error

CLOSE = 1e-5
ROUNDED = 2.0**-7  # of a bf16 result; the interpreter cuts off instead of rounding

LAYOUTS = {
    "one row": Layout([TREES["one"]]),
    "a tree": Layout([random_parents(37, 12)]),
    "several": Layout([random_parents(17, 17), None, random_parents(5, 3), TREES["two"], None]),
    "chain": Layout([torch.arange(-1, 39)], padding=0),
}


def run(way: str, name: str, *arguments, **tiles) -> None:
    """`tree`, `step`, `commit` or `prefill`, by the twin or by the kernel (in its interpreter without a GPU)."""
    if way == "twin":
        return getattr(pooled_twins, name)(*arguments)
    needs_triton(way)
    from ddtree.kernels.gated_delta import triton_prefill, triton_state, triton_tree

    homes = {"tree": triton_tree, "prefill": triton_prefill, "step": triton_state, "commit": triton_state}
    return getattr(homes[name], name)(*arguments, **tiles)


def run_tree(way: str, given: Round, causal: bool = False, out: torch.Tensor | None = None, **tiles):
    """(out, keys, solved, log_decays) of poisoned buffers."""
    layout = given.layout
    written = (given.out() if out is None else out, *given.staged())
    mask = None if causal else layout.ancestor_mask
    rows = (given.mixed, given.log_decay, given.beta, mask, given.states)
    indices = (layout.slots, layout.starts, max(layout.counts), given.shape)
    run(way, "tree", *rows, *indices, *written, **tiles)
    return written


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_every_sequence_runs_from_its_own_state_along_every_path(way, layout):
    given = Round.random(LAYOUTS[layout], ODD if layout == "a tree" else SMALL)
    before = given.states.clone()
    out, keys, solved, log_decays = run_tree(way, given, causal=layout == "chain")
    assert torch.equal(given.states, before)
    for _, slot, rows, parents in given.layout.sequences():
        mask = ancestor_mask(parents)
        case = [tensor.cpu() for tensor in (*given.heads(rows), given.states[slot].double())]
        expected, staged = gated_delta_tree_reference(*case[:-1], mask, case[-1])
        assert worst_error(out[rows].cpu(), expected) <= CLOSE
        assert worst_error(keys[rows].cpu(), staged.keys) <= CLOSE
        assert worst_error(solved[rows].cpu(), staged.solved) <= CLOSE
        assert worst_error(log_decays[rows].cpu(), staged.log_decays) <= 1e-12
    for written in (out, keys, solved, log_decays):
        assert written[sum(given.layout.counts) :].isnan().all()


@pytest.mark.parametrize("tiles", [(16, 64, 16), (32, 16, 32), "three launches of 16", "three launches of 32", "four launches of 16", "four launches of 32"])
def test_how_a_launch_is_cut_up_changes_rounding_only(tiles):
    needs_triton("kernel")
    from ddtree.kernels.gated_delta.triton_phases import PhaseTiles
    from ddtree.kernels.gated_delta.triton_tree import TreeTiles

    if isinstance(tiles, str):
        tiles = PhaseTiles(rows=int(tiles[-2:]), summed_from=2 if tiles.startswith("four") else 99)
    else:
        tiles = TreeTiles(*tiles, 4, 1)
    given = Round.random(Layout([random_parents(70, 9)]), SMALL)
    expected = run_tree("twin", given)
    for actual, twin in zip(run_tree("kernel", given, tiles=tiles), expected, strict=True):
        assert worst_error(actual[:70], twin[:70]) <= CLOSE
        assert actual[70:].isnan().all()


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_rows_are_computed_in_fp32(way):
    given = Round.random(LAYOUTS["several"], SMALL, torch.bfloat16)
    out, *staged = run_tree(way, given, out=given.out(torch.bfloat16))
    expected, *expected_staged = run_tree("twin", given.changed(mixed=given.mixed.float()))
    rows = slice(0, sum(given.layout.counts))
    assert worst_error(out[rows].float(), expected[rows]) <= ROUNDED
    for actual, twin in zip(staged, expected_staged, strict=True):
        assert worst_error(actual[rows], twin[rows]) <= CLOSE


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_padding_inside_a_sequence_reaches_nothing(way, causal):
    """A bucket of rows is longer than the tree in it; padding may see itself, and hold anything."""
    given = Round.random(Layout([random_parents(40, 12), TREES["two"]]), SMALL)
    layout, expected = given.layout, run_tree("twin", given, causal)
    real = torch.cat((torch.arange(40), torch.arange(60, 62))).to(DEVICE)
    rows = 64
    spread = [poison(rows, *tensor.shape[1:]) for tensor in (given.mixed, given.log_decay, given.beta)]
    for tensor, packed in zip(spread, (given.mixed, given.log_decay, given.beta), strict=True):
        tensor[real] = packed[:42]
    mask = torch.zeros(rows, 60, dtype=torch.uint8, device=DEVICE)
    mask[torch.arange(60), torch.arange(60)] = 1
    mask[real, :40] = layout.ancestor_mask[:42]
    row_slots = torch.full((rows,), -1, dtype=torch.int32, device=DEVICE)
    row_slots[real] = 1
    written = [poison(rows, *tensor.shape[1:], dtype=tensor.dtype) for tensor in expected]
    starts, mask = integers([0, 60, 62]), None if causal else mask
    run(way, "tree", *spread, mask, given.states, layout.slots, starts, 60, SMALL, *written, row_slots)
    for actual, alone in zip(written, expected, strict=True):
        assert worst_error(actual[real], alone[:42]) <= CLOSE
        assert not actual[40:60].any()
        assert actual[62:].isnan().all()


@pytest.mark.parametrize("node", [1, 20])
def test_a_sibling_moves_nothing_outside_its_subtree_by_a_bit(node):
    parents = random_parents(37, 12)
    given = Round.random(Layout([TREES["two"], parents]), SMALL)
    outside = torch.cat((torch.ones(2, dtype=torch.bool), ~ancestor_mask(parents)[:, node])).to(DEVICE)
    mixed, log_decay = given.mixed.clone(), given.log_decay.clone()
    mixed[2 + node] *= 1e3
    log_decay[2 + node] = -3.0
    before = run_tree("kernel", given)
    after = run_tree("kernel", given.changed(mixed=mixed, log_decay=log_decay))
    assert not torch.equal(after[0][2 + node], before[0][2 + node])
    for new, old in zip(after, before, strict=True):
        assert torch.equal(new[:39][outside], old[:39][outside])


@pytest.mark.parametrize("way", WAYS)
def test_commit_folds_each_path_into_every_layer(way):
    layout = Layout([random_parents(19, 1), None, random_parents(9, 9), TREES["two"]])
    layers = [Round.random(layout, SMALL) for _ in range(2)]
    states = torch.stack([given.states for given in layers])
    staged = [torch.stack(buffers) for buffers in zip(*(run_tree(way, given)[1:] for given in layers), strict=True)]
    paths = {index: longest_path(parents) for index, _, _, parents in layout.sequences()}
    paths[3] = paths[3][:0]  # aborted
    path = torch.full((len(layout.trees), 20), 99, dtype=torch.int32, device=DEVICE)
    for index, nodes in paths.items():
        path[index, : len(nodes)] = nodes
    lengths = integers([len(paths.get(index, ())) for index in range(len(layout.trees))])
    before = states.clone()
    run(way, "commit", states, *staged, layout.slots, layout.starts, path, lengths)
    touched = set()
    for index, slot, rows, _ in layout.sequences():
        if len(paths[index]):
            touched.add(slot)
            for layer, given in enumerate(layers):
                along = [tensor[paths[index].to(DEVICE)].cpu() for tensor in given.heads(rows)]
                _, expected = gated_delta_prefill_reference(*along, before[layer, slot].double().cpu())
                assert worst_error(states[layer, slot].cpu(), expected, dims=2) <= CLOSE
    assert len(touched) == 2
    for slot in set(range(layout.num_slots)) - touched:
        assert torch.equal(states[:, slot], before[:, slot])


@pytest.mark.parametrize("shape", [SMALL, ODD], ids=["small", "odd"])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_commits_its_row(way, shape):
    given = Round.random(Layout([TREES["one"], None, TREES["one"]]), shape)
    layout, states, out = given.layout, given.states.clone(), given.out()
    run(way, "step", given.mixed, given.log_decay, given.beta, states, layout.slots, layout.starts, shape, out)
    for _, slot, rows, _ in layout.sequences():
        case = [tensor.cpu() for tensor in (*given.heads(rows), given.states[slot].double())]
        expected, state = gated_delta_prefill_reference(*case)
        assert worst_error(out[rows].cpu(), expected) <= CLOSE
        assert worst_error(states[slot].cpu(), state, dims=2) <= CLOSE
    idle = sorted(set(range(layout.num_slots)) - {slot for _, slot, _, _ in layout.sequences()})
    assert torch.equal(states[idle], given.states[idle])
    assert out[2:].isnan().all()


@pytest.mark.parametrize("lengths", [[1], [16], [33], [70], [5, None, 40, 1, 17]], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_prefill_runs_any_number_of_tokens_of_each_sequence(way, lengths):
    chains = [None if length is None else torch.arange(-1, length - 1) for length in lengths]
    given = Round.random(Layout(chains), ODD if lengths == [33] else SMALL)
    layout, states, out = given.layout, given.states.clone(), given.out()
    run(way, "prefill", given.mixed, given.log_decay, given.beta, states, layout.slots, layout.starts, given.shape, out)
    for _, slot, rows, _ in layout.sequences():
        case = [tensor.cpu() for tensor in (*given.heads(rows), given.states[slot].double())]
        expected, state = gated_delta_prefill_reference(*case)
        assert worst_error(out[rows].cpu(), expected) <= CLOSE
        assert worst_error(states[slot].cpu(), state, dims=2) <= CLOSE
    assert out[sum(layout.counts) :].isnan().all()
    idle = sorted(set(range(layout.num_slots)) - {slot for _, slot, _, _ in layout.sequences()})
    assert torch.equal(states[idle], given.states[idle])


def test_wrong_sizes_are_refused_by_name():
    given = Round.random(LAYOUTS["a tree"], SMALL)
    layout, staged = given.layout, given.staged()
    rows, indices = (given.mixed, given.log_decay, given.beta), (layout.slots, layout.starts)
    with pytest.raises(ValueError, match="ancestor_mask has 37 columns, max_rows is 64"):
        gated_delta_tree_pooled(
            *rows, layout.ancestor_mask, given.states, *indices, 64, SMALL, given.out(), *staged
        )
    with pytest.raises(ValueError, match=r"mixed must be \[R, 96\]"):
        gated_delta_step_pooled(given.mixed[:, :90], *rows[1:], given.states, *indices, SMALL, given.out())
    with pytest.raises(ValueError, match=r"states must be \[S, 2, 16, 32\]"):
        gated_delta_prefill_pooled(*rows, given.states[..., :16], *indices, SMALL, given.out())
    with pytest.raises(ValueError, match="stack the layers"):
        gated_delta_commit_pooled(given.states, *staged, *indices, integers([[0]]), integers([1]))


def expected_tree(given: Round, rows: slice, parents: torch.Tensor, slot: int):
    """By the closed form in fp64, which its own tests hold against the recurrence."""
    mask = ancestor_mask(parents).to(DEVICE)
    return gated_delta_tree(*given.heads(rows), mask, given.states[slot].double())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "counts", [[1], [16], [17], [32], [33], [64], [65], [128], [256], [257], [1025], [65, None, 3, 130, 1]]
)
def test_trees_of_true_shape_on_a_gpu(counts, dtype):
    trees = [None if count is None else random_parents(count, 20, seed=count) for count in counts]
    given = Round.random(Layout(trees), LARGE, dtype)
    out, keys, solved, log_decays = run_tree("kernel", given)
    again = run_tree("kernel", given)
    for index, slot, rows, parents in given.layout.sequences():
        expected, staged = expected_tree(given, rows, parents, slot)
        assert worst_error(out[rows], expected) <= CLOSE
        assert worst_error(keys[rows], staged.keys) <= CLOSE
        assert worst_error(solved[rows], staged.solved) <= CLOSE
        assert worst_error(log_decays[rows], staged.log_decays) <= 1e-12
        path = longest_path(parents).to(torch.int32)
        lengths = torch.zeros(len(counts), dtype=torch.int32, device=DEVICE)
        lengths[index] = len(path)
        paths = path.repeat(len(counts), 1).to(DEVICE)
        states = given.states.clone()[None]
        buffers = (keys[None], solved[None], log_decays[None])
        run("kernel", "commit", states, *buffers, given.layout.slots, given.layout.starts, paths, lengths)
        along = [tensor[path.long().to(DEVICE)] for tensor in given.heads(rows)]
        alone = poison(len(path), LARGE.num_value_heads, LARGE.value_dim)
        replayed = given.states.clone()
        mixed, gates = given.mixed[rows][path.long()], [t[rows][path.long()] for t in (given.log_decay, given.beta)]
        run("kernel", "prefill", mixed, *gates, replayed, integers([slot]), integers([0, len(path)]), LARGE, alone)
        _, last = gated_delta_tree(*along, None, given.states[slot].double())
        assert worst_error(alone, expected[path.long()]) <= CLOSE
        assert worst_error(states[0, slot], replayed[slot], dims=2) <= CLOSE
        assert last.num_rows == len(path)
    for first, second in zip((out, keys, solved, log_decays), again, strict=True):
        assert torch.equal(first.nan_to_num(), second.nan_to_num())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_sibling_moves_nothing_outside_its_subtree_on_a_gpu():
    parents = random_parents(257, 20)
    given = Round.random(Layout([parents]), LARGE, torch.bfloat16)
    before = run_tree("kernel", given)
    for node in (1, 40, 200):
        outside = ~ancestor_mask(parents)[:, node].to(DEVICE)
        mixed = given.mixed.clone()
        mixed[node] *= 1e3
        for new, old in zip(run_tree("kernel", given.changed(mixed=mixed)), before, strict=True):
            assert torch.equal(new[:257][outside], old[:257][outside])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_512_steps_do_not_drift_from_prefill_on_a_gpu():
    given = Round.random(Layout([torch.arange(-1, 511)]), LARGE, torch.bfloat16)
    rows, slot = slice(0, 512), given.layout.slots
    stepped, prefilled = given.states.clone(), given.states.clone()
    outs, out = [], given.out()
    for row in range(512):
        one = slice(row, row + 1)
        outs.append(poison(1, LARGE.num_value_heads, LARGE.value_dim))
        gates = (given.log_decay[one], given.beta[one])
        run("kernel", "step", given.mixed[one], *gates, stepped, slot, integers([0, 1]), LARGE, outs[-1])
    run("kernel", "prefill", *(t[rows] for t in (given.mixed, given.log_decay, given.beta)), prefilled, slot, integers([0, 512]), LARGE, out)
    assert worst_error(torch.cat(outs), out[rows]) <= CLOSE
    assert worst_error(stepped[int(slot)], prefilled[int(slot)], dims=2) <= CLOSE

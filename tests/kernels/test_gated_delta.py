"""The closed form of the gated delta rule against the per-path recurrence."""

import pytest
import torch

from ddtree.kernels.gated_delta import (
    gated_delta_commit,
    gated_delta_commit_reference,
    gated_delta_prefill,
    gated_delta_prefill_reference,
    gated_delta_tree,
    gated_delta_tree_reference,
)
from tests.kernels.trees import TREES, ancestor_mask, leaf_paths, longest_path, vector_cases, worst_error

EXACT = 1e-12  # fp64 throughout
CLOSE = 1e-5  # fp32 inputs and state, decays accumulated in fp64

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 12, 10


def log_decays(kind: str, num_rows: int) -> torch.Tensor:
    """[N, Hv] fp32; `strong then weak`: the rows that a path starts with forget all, the rest almost nothing."""
    weak = -0.1 * torch.rand(num_rows, VALUE_HEADS)
    strong = torch.full_like(weak, -20.0)
    if kind == "weak":
        return weak
    if kind == "strong":
        return strong
    if kind == "strong then weak":
        return torch.where(torch.arange(num_rows)[:, None] < num_rows // 3, strong, weak * 0.01)
    return torch.where(torch.rand(num_rows, VALUE_HEADS) < 0.3, strong, weak)


def write_strengths(kind: str, num_rows: int) -> torch.Tensor:
    """beta [N, Hv] fp32."""
    if kind == "inside":
        return torch.rand(num_rows, VALUE_HEADS)
    if kind == "zero or one":
        return torch.rand(num_rows, VALUE_HEADS).round()
    return torch.full((num_rows, VALUE_HEADS), float(kind))


def inputs(num_rows: int, decay: str = "mixed", beta: str = "inside") -> list[torch.Tensor]:
    """query, key, value, g, beta and the committed state, fp32."""
    return [
        torch.randn(num_rows, KEY_HEADS, KEY_DIM),
        torch.randn(num_rows, KEY_HEADS, KEY_DIM),
        torch.randn(num_rows, VALUE_HEADS, VALUE_DIM),
        log_decays(decay, num_rows),
        write_strengths(beta, num_rows),
        torch.randn(VALUE_HEADS, KEY_DIM, VALUE_DIM),
    ]


def double(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.double() for tensor in tensors]


@pytest.mark.parametrize("beta", ["inside", "zero or one", "0", "1"])
@pytest.mark.parametrize("decay", ["weak", "strong", "strong then weak", "mixed"])
@pytest.mark.parametrize("tree", TREES)
def test_closed_form_equals_the_recurrence_along_every_path(tree, decay, beta):
    parents = TREES[tree]
    mask, path = ancestor_mask(parents), longest_path(parents)
    single = inputs(len(parents), decay, beta)
    *rows, state = double(single)
    expected, _ = gated_delta_tree_reference(*rows, mask, state)
    # The committed state is replayed from scratch, along the path alone.
    _, expected_state = gated_delta_prefill_reference(*(tensor[path] for tensor in rows), state)

    for (*given, before), limit in (((*rows, state), EXACT), (single, CLOSE)):
        out, staged = gated_delta_tree(*given, mask, before)
        after = gated_delta_commit(before, staged, path)
        assert out.dtype == after.dtype == before.dtype
        assert worst_error(out, expected) <= limit
        assert worst_error(after, expected_state, dims=2) <= limit


@pytest.mark.parametrize("tree", ["two", "star65", "random65"])
def test_every_leaf_can_be_committed(tree):
    parents = TREES[tree]
    *rows, state = double(inputs(len(parents)))
    _, staged = gated_delta_tree(*rows, ancestor_mask(parents), state)
    for path in leaf_paths(parents):
        for stop in range(1, len(path) + 1):
            after = gated_delta_commit(state, staged, path[:stop])
            _, expected = gated_delta_prefill_reference(*(tensor[path[:stop]] for tensor in rows), state)
            assert worst_error(after, expected, dims=2) <= EXACT


def test_the_twin_stages_and_commits_the_same():
    parents = TREES["random65"]
    mask, path = ancestor_mask(parents), longest_path(parents)
    *rows, state = double(inputs(len(parents), "weak"))
    _, staged = gated_delta_tree(*rows, mask, state)
    _, expected = gated_delta_tree_reference(*rows, mask, state)
    for field in ("keys", "solved", "log_decays"):
        assert worst_error(getattr(staged, field), getattr(expected, field)) <= EXACT
    after = gated_delta_commit(state, staged, path)
    assert worst_error(after, gated_delta_commit_reference(state, expected, path), dims=2) <= EXACT


def test_an_empty_path_leaves_the_state():
    *rows, state = inputs(17)
    before = state.clone()
    _, staged = gated_delta_tree(*rows, ancestor_mask(TREES["random17"]), state)
    assert torch.equal(gated_delta_commit(state, staged, torch.empty(0, dtype=torch.int64)), before)
    assert torch.equal(state, before)


@pytest.mark.parametrize("tree", ["star65", "random65", "narrow257"])
@pytest.mark.parametrize("node", [1, 7, 40, 63])
def test_a_sibling_moves_nothing_outside_its_subtree_by_a_bit(tree, node):
    parents = TREES[tree]
    mask = ancestor_mask(parents)
    outside = ~mask[:, node]
    *rows, state = inputs(len(parents))
    before, staged_before = gated_delta_tree(*rows, mask, state)
    for tensor in rows:
        tensor[node] *= 1e3
    after, staged = gated_delta_tree(*rows, mask, state)
    assert not torch.equal(after[node], before[node])
    assert torch.equal(after[outside], before[outside])
    for path in leaf_paths(parents):
        if node not in path:
            assert torch.equal(
                gated_delta_commit(state, staged, path), gated_delta_commit(state, staged_before, path)
            )


@pytest.mark.parametrize("num_padding", [1, 8])
def test_nan_in_padding_rows_reaches_nothing(num_padding):
    parents = TREES["random17"]
    num_rows = len(parents)
    *rows, state = inputs(num_rows)
    expected, staged_expected = gated_delta_tree(*rows, ancestor_mask(parents), state)
    padded = [torch.cat((t, torch.full((num_padding, *t.shape[1:]), torch.nan))) for t in rows]
    # What the mask says of padding is anybody's guess, too.
    mask = torch.ones(num_rows + num_padding, num_rows + num_padding, dtype=torch.bool)
    mask[:num_rows, :num_rows] = ancestor_mask(parents)
    valid = torch.arange(num_rows + num_padding) < num_rows
    out, staged = gated_delta_tree(*padded, mask, state, valid)
    assert worst_error(out[:num_rows], expected) <= CLOSE
    assert not out[num_rows:].any()
    path = longest_path(parents)
    after = gated_delta_commit(state, staged, path)
    assert worst_error(after, gated_delta_commit(state, staged_expected, path), dims=2) <= CLOSE
    twin, _ = gated_delta_tree_reference(*padded, mask, state, valid)
    assert worst_error(out, twin) <= CLOSE


@pytest.mark.parametrize("decay", ["weak", "strong then weak", "mixed"])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 130, 300])
def test_prefill_equals_the_recurrence(length, decay):
    single = inputs(length, decay)
    expected, expected_state = gated_delta_prefill_reference(*double(single))
    for given, limit in ((double(single), EXACT), (single, CLOSE)):
        for chunk in (1, 63, 64, 65, 512):
            out, state = gated_delta_prefill(*given, chunk)
            assert worst_error(out, expected) <= limit
            assert worst_error(state, expected_state, dims=2) <= limit


def test_prefill_in_any_two_pieces_is_the_same():
    *rows, state = double(inputs(130, "weak"))
    out, after = gated_delta_prefill(*rows, state)
    for cut in (1, 2, 63, 64, 65, 129):
        first, between = gated_delta_prefill(*(tensor[:cut] for tensor in rows), state)
        second, last = gated_delta_prefill(*(tensor[cut:] for tensor in rows), between)
        assert worst_error(torch.cat((first, second)), out) <= EXACT
        assert worst_error(last, after, dims=2) <= EXACT


def test_512_single_steps_do_not_drift_from_prefill():
    *rows, state = inputs(512, "weak")
    expected, expected_state = gated_delta_prefill_reference(*double([*rows, state]))
    prefilled, prefilled_state = gated_delta_prefill(*rows, state)
    root, outs = torch.zeros(1, dtype=torch.int64), []
    for row in range(512):
        out, staged = gated_delta_tree(*(tensor[row : row + 1] for tensor in rows), None, state)
        state = gated_delta_commit(state, staged, root)
        outs.append(out)
    stepped = torch.cat(outs)
    assert worst_error(stepped, expected) <= CLOSE
    assert worst_error(state, expected_state, dims=2) <= CLOSE
    assert worst_error(stepped, prefilled) <= CLOSE
    assert worst_error(state, prefilled_state, dims=2) <= CLOSE


def test_bfloat16_inputs_are_computed_in_fp32():
    parents = TREES["random17"]
    *rows, state = inputs(len(parents))
    rows = [tensor.bfloat16() for tensor in rows]
    out, staged = gated_delta_tree(*rows, ancestor_mask(parents), state)
    expected, _ = gated_delta_tree(*(tensor.float() for tensor in rows), ancestor_mask(parents), state)
    assert out.dtype == torch.bfloat16 and staged.solved.dtype == torch.float32
    assert torch.equal(out, expected.bfloat16())


@pytest.mark.parametrize("tree", ["star65", "random65"])
def test_reading_the_flattened_tree_as_consecutive_tokens_is_wrong(tree):
    """The negative control: what a plain cache does must not pass for the tree."""
    *rows, state = inputs(65, "weak")
    expected, _ = gated_delta_tree(*rows, ancestor_mask(TREES[tree]), state)
    flattened, _ = gated_delta_tree(*rows, None, state)
    assert torch.linalg.vector_norm(flattened - expected) > 0.1 * torch.linalg.vector_norm(expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tree", ["one", "random17", "random65", "narrow257", "deep1025"])
def test_on_a_gpu_likewise(tree):
    parents = TREES[tree]
    mask, path = ancestor_mask(parents), longest_path(parents)
    *rows, state = inputs(len(parents), "strong then weak")
    expected, _ = gated_delta_tree_reference(*double(rows), mask, state.double())
    _, expected_state = gated_delta_prefill_reference(*(t[path].double() for t in rows), state.double())
    rows, (mask, path, state) = [t.cuda() for t in rows], [t.cuda() for t in (mask, path, state)]
    out, staged = gated_delta_tree(*rows, mask, state)
    assert worst_error(out.cpu(), expected) <= CLOSE
    assert worst_error(gated_delta_commit(state, staged, path).cpu(), expected_state, dims=2) <= CLOSE
    prefilled = gated_delta_prefill(*(tensor[path] for tensor in rows), state)[0]
    assert worst_error(prefilled.cpu(), expected[path.cpu()]) <= CLOSE
    if len(parents) > 2:
        for tensor in rows:
            tensor[7] *= 1e3
        changed, _ = gated_delta_tree(*rows, mask, state)
        assert torch.equal(changed[~mask[:, 7]], out[~mask[:, 7]])


def test_values_from_outside_the_package():
    for case in vector_cases("gated_delta_tree.npz"):
        rows = [case[name].transpose(0, 1) for name in ("q", "k", "v", "g", "beta")]
        mask = ancestor_mask(case["parents"])
        for run in (gated_delta_tree, gated_delta_tree_reference):
            out, staged = run(*rows, mask, case["state"])
            assert worst_error(out, case["out"].transpose(0, 1)) <= EXACT
            after = gated_delta_commit(case["state"], staged, case["path"])
            assert worst_error(after, case["state_after"], dims=2) <= EXACT

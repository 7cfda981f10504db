"""The short convolution and the gates over a pool: the twins and the Triton kernels, sequence by sequence."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from ddtree.kernels.causal_conv import (
    Gates,
    causal_conv_commit_pooled,
    causal_conv_commit_reference,
    causal_conv_prefill_reference,
    causal_conv_tree_pooled,
    causal_conv_tree_reference,
    gates,
    gates_pooled,
    pooled_twins,
)
from tests.kernels.recurrent_pools import DEVICE, WAYS, Layout, integers, needs_triton, poison
from tests.kernels.trees import TREES, longest_path, random_parents, worst_error

CLOSE = 1e-5
ROUNDED = 2.0**-7  # of a bf16 result; the interpreter cuts off instead of rounding
HEADS = 3

SEVERAL = Layout([random_parents(9, 8), None, TREES["two"], random_parents(5, 3), TREES["one"]], padding=2)
ONE_EACH = Layout([TREES["one"], None, TREES["one"]])


@dataclass(frozen=True)
class Inputs:
    """Of L layers; x, a and b are columns of one projection, whose padding rows are NaN."""

    layout: Layout
    x: torch.Tensor  # [L, R, C]
    a: torch.Tensor  # [L, R, HEADS]
    b: torch.Tensor
    weight: torch.Tensor  # [C, W]
    bias: torch.Tensor | None
    states: torch.Tensor  # [L, S, W - 1, C]

    @classmethod
    def random(cls, layout, channels=40, width=4, dtype=torch.float32, bias=False, heads=HEADS) -> "Inputs":
        projected = torch.randn(2, layout.num_rows, channels + 2 * heads + 3).to(dtype)
        projected[:, layout.num_rows - layout.padding :] = torch.nan
        projected = projected.to(DEVICE)
        x, a, b, _ = projected.split((channels, heads, heads, 3), dim=-1)
        weight, bias_row = torch.randn(channels, width), torch.randn(channels)
        states = torch.randn(2, layout.num_slots, width - 1, channels)
        weight, bias_row, states = (tensor.to(DEVICE, dtype) for tensor in (weight, bias_row, states))
        return cls(layout, x, a, b, weight, bias_row if bias else None, states)

    @property
    def convolution(self) -> tuple:
        """The arguments that are the same in every call, for the first layer."""
        return self.x[0], self.weight, self.bias

    def new_gates(self, rows: slice = slice(None)) -> Gates:
        generator = torch.Generator().manual_seed(1)
        decay_rate, dt_bias = torch.randn(2, self.a.shape[-1], generator=generator).to(DEVICE)
        return Gates.of(self.a[0][rows], self.b[0][rows], -decay_rate.exp(), dt_bias)

    def out(self) -> torch.Tensor:
        return poison(*self.x.shape[1:], dtype=self.x.dtype)


def run(way: str, name: str, *arguments) -> None:
    """`tree`, `step`, `commit` or `prefill`, by the twin or by the kernel (in its interpreter without a GPU)."""
    if way == "twin":
        return getattr(pooled_twins, name)(*arguments)
    needs_triton(way)
    from ddtree.kernels.causal_conv import triton_rows, triton_state

    homes = {"tree": triton_rows, "prefill": triton_rows, "step": triton_state, "commit": triton_state}
    return getattr(homes[name], name)(*arguments)


def expected_gates(given: Gates, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """log_decay and beta by the model's own formulas, in fp64."""
    steps = given.a[rows].double() + given.dt_bias.double()
    return given.decay_rate.double() * F.softplus(steps), given.b[rows].double().sigmoid()


def check_gates(given: Gates, rows: slice) -> None:
    limit = ROUNDED if given.a.dtype == torch.bfloat16 else CLOSE
    for actual, expected in zip((given.log_decay, given.beta), expected_gates(given, rows), strict=True):
        assert worst_error(actual[rows], expected) <= limit


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("width, channels, bias", [(4, 520, True), (2, 40, False), (3, 40, True)])
@pytest.mark.parametrize("way", WAYS)
def test_windows_are_a_rows_own_ancestors_then_its_sequences_state(way, width, channels, bias, consecutive):
    given = Inputs.random(SEVERAL, channels, width, bias=bias)
    layout, out, gate = SEVERAL, given.out(), given.new_gates()
    before = given.states.clone()
    parents = None if consecutive else layout.parents
    indices = (layout.slots, layout.starts, layout.row_slots, layout.row_indices, parents)
    run(way, "tree", *given.convolution, given.states[0], *indices, out, gate)
    assert torch.equal(given.states, before)
    for _, slot, rows, tree in layout.sequences():
        case = [None if t is None else t.double().cpu() for t in (given.x[0, rows], given.weight, given.bias)]
        up = None if consecutive else tree
        expected = causal_conv_tree_reference(*case, given.states[0, slot].double().cpu(), up)
        assert worst_error(out[rows].cpu(), expected) <= CLOSE
    real = slice(0, sum(layout.counts))
    assert not out[real.stop :].any()
    check_gates(gate, real)
    without = given.out()
    run(way, "tree", *given.convolution, given.states[0], *indices, without, None)
    assert torch.equal(without[real], out[real])


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of the interpreter, in a sigmoid that is 0
@pytest.mark.parametrize("factor", [1e3, float("nan")])
@pytest.mark.parametrize("way", WAYS)
def test_a_row_moves_nothing_outside_its_subtree_by_a_bit(way, factor):
    layout = Layout([TREES["star65"][:20]])
    given = Inputs.random(layout)
    indices = (layout.slots, layout.starts, layout.row_slots, layout.row_indices, layout.parents)
    before, after = given.out(), given.out()
    run(way, "tree", *given.convolution, given.states[0], *indices, before, None)
    changed = given.x[0].clone()
    changed[7] *= factor
    run(way, "tree", changed, given.weight, given.bias, given.states[0], *indices, after, None)
    others = [row for row in range(20) if row != 7]
    assert torch.equal(after[others], before[others]) and not torch.equal(after[7], before[7])


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_commits_its_row(way, width):
    given = Inputs.random(ONE_EACH, width=width, bias=True)
    layout, states, out, gate = ONE_EACH, given.states[0].clone(), given.out(), given.new_gates()
    run(way, "step", *given.convolution, states, layout.slots, layout.starts, out, gate)
    for _, slot, rows, _ in layout.sequences():
        case = [t.double().cpu() for t in (given.x[0, rows], given.weight, given.bias, given.states[0, slot])]
        expected, state = causal_conv_prefill_reference(*case)
        assert worst_error(out[rows].cpu(), expected) <= CLOSE
        assert torch.equal(states[slot].double().cpu(), state)
    idle = sorted(set(range(layout.num_slots)) - {slot for _, slot, _, _ in layout.sequences()})
    assert torch.equal(states[idle], given.states[0, idle])
    assert out[2:].isnan().all()
    check_gates(gate, slice(0, 2))


@pytest.mark.parametrize("lengths", [[6, 0, 2, 0, 1], [1, 0, 1, 2, 1], [0, 0, 0, 3, 0]])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_commit_keeps_the_last_inputs_of_the_path_in_every_layer(way, width, lengths):
    trees = [TREES["chain65"][:8], None, TREES["two"], random_parents(9, 2), TREES["one"]]
    layout = Layout(trees)
    given = Inputs.random(layout, width=width)
    states = given.states.clone()
    path = torch.full((len(trees), 8), 99, dtype=torch.int32, device=DEVICE)
    expected = given.states.cpu()
    for index, slot, rows, parents in layout.sequences():
        nodes = longest_path(parents)[: lengths[index]]
        path[index, : len(nodes)] = nodes
        for layer in range(2):
            staged = given.x[layer, rows].cpu()
            expected[layer, slot] = causal_conv_commit_reference(staged, expected[layer, slot], nodes)
    run(way, "commit", given.x, states, layout.slots, layout.starts, path, integers(lengths))
    assert torch.equal(states.cpu(), expected)


@pytest.mark.parametrize("lengths", [[1], [2], [3], [16], [37], [2, None, 19, 1, 16]], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_prefill_runs_any_number_of_tokens_of_each_sequence(way, lengths):
    layout = Layout([None if length is None else torch.arange(-1, length - 1) for length in lengths])
    given = Inputs.random(layout, channels=300, bias=True)
    real = slice(0, sum(layout.counts))
    states, out, gate = given.states[0].clone(), given.out(), given.new_gates(real)
    x, indices = given.x[0, real], (layout.slots, layout.starts, max(layout.counts))
    run(way, "prefill", x, given.weight, given.bias, states, *indices, out, gate)
    for _, slot, rows, _ in layout.sequences():
        case = [t.double().cpu() for t in (given.x[0, rows], given.weight, given.bias, given.states[0, slot])]
        expected, state = causal_conv_prefill_reference(*case)
        assert worst_error(out[rows].cpu(), expected) <= CLOSE
        assert torch.equal(states[slot].double().cpu(), state)
    assert out[real.stop :].isnan().all()
    idle = sorted(set(range(layout.num_slots)) - {slot for _, slot, _, _ in layout.sequences()})
    assert torch.equal(states[idle], given.states[0, idle])
    check_gates(gate, real)


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_is_computed_in_fp32(way):
    given = Inputs.random(SEVERAL, dtype=torch.bfloat16)
    layout, out, gate = SEVERAL, given.out(), given.new_gates()
    indices = (layout.slots, layout.starts, layout.row_slots, layout.row_indices, layout.parents)
    run(way, "tree", *given.convolution, given.states[0], *indices, out, gate)
    exact = [None if t is None else t.float() for t in (*given.convolution, given.states[0])]
    expected = given.out().float()
    run("twin", "tree", *exact, *indices, expected, None)
    real = slice(0, sum(layout.counts))
    assert worst_error(out[real].float(), expected[real]) <= ROUNDED
    check_gates(gate, real)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [-100.0, -30.0, 0.0, 19.9, 20.1, 100.0])
def test_gates_keep_their_digits_far_out(way, value):
    projected = torch.full((3, 70), value, device=DEVICE)
    rate, bias = -torch.ones(70, device=DEVICE), torch.zeros(70, device=DEVICE)
    given = Gates.of(projected, projected, rate, bias)
    if way == "twin":
        gates.gates_twin(given)
    else:
        needs_triton(way)
        from ddtree.kernels.causal_conv.triton_gates import run_gates

        run_gates(given)
    log_decay, beta = expected_gates(given, slice(None))
    assert worst_error(given.log_decay, log_decay) <= CLOSE
    assert worst_error(given.beta, beta) <= CLOSE
    for actual, same in zip(gates_pooled(projected, projected, rate, bias), given[-2:], strict=True):
        assert worst_error(actual, same) <= CLOSE


def test_wrong_sizes_are_refused_by_name():
    given, layout = Inputs.random(SEVERAL), SEVERAL
    indices = (layout.slots, layout.starts, layout.row_slots, layout.row_indices, layout.parents)
    with pytest.raises(ValueError, match=r"x must be \[R, 40\]"):
        causal_conv_tree_pooled(given.x[0, :, :39], *given.convolution[1:], given.states[0], *indices, given.out())
    with pytest.raises(ValueError, match=r"states must be \[S, 3, 40\]"):
        causal_conv_tree_pooled(*given.convolution, given.states[0, :, :2], *indices, given.out())
    with pytest.raises(ValueError, match=r"x \[L, R, C\] and states \[L, S, W - 1, C\] differ"):
        path = integers([[0]] * 5)
        causal_conv_commit_pooled(given.x[:1], given.states, layout.slots, layout.starts, path, integers([0] * 5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("counts", [[1], [17], [65], [257], [1025], [65, None, 3, 1]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_true_shapes_on_a_gpu(dtype, counts):
    layout = Layout([None if count is None else random_parents(count, 20, seed=count) for count in counts])
    given = Inputs.random(layout, channels=10240, dtype=dtype, heads=48)
    indices = (layout.slots, layout.starts, layout.row_slots, layout.row_indices, layout.parents)
    real = slice(0, sum(layout.counts))
    limit = ROUNDED if dtype == torch.bfloat16 else CLOSE
    results = []
    for way in WAYS:
        out, states, gate = given.out(), given.states.clone(), given.new_gates()
        run(way, "tree", *given.convolution, states[0], *indices, out, gate)
        rows, slot = next((rows, slot) for _, slot, rows, _ in layout.sequences())
        prefilled = given.out()
        indices_alone = (integers([slot]), integers([0, rows.stop]), rows.stop)
        run(way, "prefill", given.x[0, rows], given.weight, None, states[1], *indices_alone, prefilled, None)
        results.append((out[real], prefilled[: rows.stop], gate.log_decay[real], gate.beta[real], states))
    for kernel, twin in zip(results[1], results[0], strict=True):
        assert worst_error(kernel.float(), twin.double()) <= limit
    assert torch.equal(results[1][-1], results[0][-1])

"""Drawing for rows of many requests against the host's choice with the host's noise: the twin, and Triton."""

import pytest
import torch

from ddtree.kernels.sample import (
    choose_filtered_pooled,
    choose_filtered_pooled_reference,
    choose_pooled,
    choose_pooled_reference,
    rank_scores_pooled_reference,
    streams_pooled,
    streams_pooled_reference,
)
from ddtree.sampling.choose import choose
from ddtree.sampling.noise import gumbel_noise, noise_key
from ddtree.sampling.params import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TWINS = {
    "choose": choose_pooled_reference,
    "choose_filtered": choose_filtered_pooled_reference,
    "rank_scores": rank_scores_pooled_reference,
    "streams": streams_pooled_reference,
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """In the interpreter a few hundred tokens are to be several tiles."""
    if DEVICE == "cpu" and pytest.importorskip("triton"):
        monkeypatch.setattr("ddtree.kernels.sample.triton.TILE", 256)
        monkeypatch.setattr("ddtree.kernels.sample.triton_filtered.LISTED", 32)
        monkeypatch.setattr("ddtree.kernels.sample.triton_filtered.TILE", 512)
        monkeypatch.setattr("ddtree.kernels.top_tokens.triton.TILE", 512)


def function(way: str, name: str):
    if way == "twin":
        return TWINS[name]
    pytest.importorskip("triton")
    from ddtree.kernels.sample import triton, triton_filtered

    home = triton_filtered if name == "choose_filtered" else triton
    return getattr(home, f"{name}_pooled_triton")


def signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key


def request_streams(way: str, requests: list[tuple[int, int]]) -> torch.Tensor:
    """Of (seed, position) each."""
    keys = torch.tensor([signed(noise_key(seed, 0, [0, 4])) for seed, _ in requests], device=DEVICE)
    positions = torch.tensor([position for _, position in requests], dtype=torch.int32, device=DEVICE)
    return function(way, "streams")(keys, positions)


def check_draws(way: str, rows: int, vocab_size: int, temperatures: list[float]) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = (torch.randn(rows, vocab_size, generator=generator) * 3).bfloat16()
    logits[:, 0] = logits.amax(dim=1)  # token id 0 ties with the best
    logits[:, 1] = -torch.inf
    each = [temperatures[row % len(temperatures)] for row in range(rows)]
    requests = [(row % 3, 1000 + 7 * row) for row in range(rows)]
    drawn = function(way, "choose")(
        logits.to(DEVICE), torch.tensor(each, device=DEVICE), request_streams(way, requests)
    )
    assert drawn.dtype == torch.int64
    for row, (temperature, (seed, position)) in enumerate(zip(each, requests, strict=True)):
        noise = gumbel_noise(noise_key(seed, 0, [0, 4]), [position], vocab_size)
        expected = choose(logits[row : row + 1], SamplingParams(temperature=temperature), noise)
        assert int(drawn[row]) == int(expected), (row, temperature)


@pytest.mark.parametrize("vocab_size", [1, 2, 97, 1003])
@pytest.mark.parametrize("way", ["twin", "triton"])
def test_rows_of_any_temperature_draw_the_hosts_token(way, vocab_size):
    if vocab_size == 1:
        logits = torch.zeros(2, 1, device=DEVICE)
        temperatures, streams = torch.tensor([0.0, 1.0], device=DEVICE), request_streams(way, [(0, 0), (1, 1)])
        assert function(way, "choose")(logits, temperatures, streams).tolist() == [0, 0]
        return
    check_draws(way, 5, vocab_size, [0.0, 0.7, 1.0, 5.0, 1e-30])


@pytest.mark.parametrize("way", ["twin", "triton"])
def test_the_uniform_bits_are_the_hosts(way):
    """At flat logits and a huge temperature the noise alone decides."""
    logits, temperatures = torch.zeros(6, 1099, device=DEVICE), torch.full((6,), 1e20, device=DEVICE)
    requests = [(3, 0), (3, 1), (3, 2**31 - 1), (4, 0), (5, 77), (2**40, 5)]
    drawn = function(way, "choose")(logits, temperatures, request_streams(way, requests))
    for token, (seed, position) in zip(drawn.tolist(), requests, strict=True):
        assert token == int(gumbel_noise(noise_key(seed, 0, [0, 4]), [position], 1099).argmax())


@pytest.mark.parametrize("way", ["twin", "triton"])
def test_padding_of_nan_gives_some_token_and_changes_no_other(way):
    logits = torch.randn(4, 600)
    temperatures, streams = torch.tensor([0.0, 1.0, 0.0, 1.0]), request_streams(way, [(0, row) for row in range(4)])
    arguments = (temperatures.to(DEVICE), streams)
    before = function(way, "choose")(logits.to(DEVICE), *arguments)
    logits[2:] = torch.nan
    after = function(way, "choose")(logits.to(DEVICE), *arguments)
    assert torch.equal(after[:2], before[:2])
    assert ((after >= 0) & (after < 600)).all()


@pytest.mark.parametrize("way", ["twin", "triton"])
def test_ranking_noise_is_the_hosts(way):
    logits = torch.randn(3, 700) * 4
    logits[0, 5] = -torch.inf
    temperatures = torch.tensor([0.6, 0.0, 2.0])
    scores = function(way, "rank_scores")(
        logits.to(DEVICE), temperatures.to(DEVICE), request_streams(way, [(1, 10), (1, 11), (1, 12)])
    ).cpu()
    assert torch.equal(scores[1], logits[1])
    noise = gumbel_noise(noise_key(1, 0, [0, 4]), [10, 11, 12], 700)
    for row in (0, 2):
        expected = 0.8 * (logits[row] - logits[row].max()) / temperatures[row] + 0.67 * noise[row]
        assert torch.allclose(scores[row], expected, atol=1e-4)


def check_filtered(way: str, logits: torch.Tensor, each: list[SamplingParams], draws: int) -> None:
    """Every row draws `draws` times, at positions of its own, what the host would."""
    rows, vocab_size = logits.shape
    columns = {
        "temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float64, "min_p": torch.float64,
    }  # fmt: skip
    temperatures, *filters = (
        torch.tensor([getattr(params, name) for params in each], dtype=dtype, device=DEVICE)
        for name, dtype in columns.items()
    )
    for draw in range(draws):
        requests = [(row, 17 + draw) for row in range(rows)]
        arguments = (logits.to(DEVICE), temperatures, request_streams(way, requests), *filters)
        drawn = function(way, "choose_filtered")(*arguments).tolist()
        for row, params in enumerate(each):
            noise = gumbel_noise(noise_key(row, 0, [0, 4]), [17 + draw], vocab_size)
            assert drawn[row] == int(choose(logits[row : row + 1], params, noise)), (row, params)


@pytest.mark.parametrize("way", ["twin", "triton"])
def test_filters_keep_what_the_hosts_keep(way):
    each = [
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.5, top_k=20, top_p=0.9),
        SamplingParams(temperature=0.7, top_p=0.95),
        SamplingParams(temperature=1.0, top_k=7, top_p=0.999, min_p=0.01),
        SamplingParams(temperature=2.0, min_p=0.3),
        SamplingParams(),
        SamplingParams(temperature=1.0, top_p=1e-6),
    ]
    logits = (torch.randn(len(each), 300) * 3).bfloat16()
    logits[:, 7] = logits.amax(dim=1)  # ties at every cut
    logits[0, 2] = logits[0].max()
    logits[3, 50:] = -torch.inf
    check_filtered(way, logits, each, draws=1)


@pytest.mark.parametrize("way", ["twin", "triton"])
def test_flat_rows_keep_more_than_the_list(way):
    each = [
        SamplingParams(temperature=5.0, top_k=200, top_p=0.8, min_p=0.001),
        SamplingParams(temperature=9.0, min_p=0.2),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=60),
    ]
    logits = torch.randn(len(each), 400).bfloat16()
    logits[-1] = 0.0  # the cut goes through equals
    check_filtered(way, logits, each, draws=1)


def test_bad_input_is_named():
    logits, streams = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="temperatures must be float32"):
        choose_pooled(logits, torch.zeros(2, dtype=torch.float64), streams)
    with pytest.raises(ValueError, match=r"logits must be \[R, V\]"):
        choose_pooled(logits, torch.zeros(3), streams)
    with pytest.raises(ValueError, match=r"top_ps must be \[2\] torch.float64"):
        few = torch.zeros(2, dtype=torch.int32)
        choose_filtered_pooled(logits, torch.zeros(2), streams, few, torch.ones(2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"keys must be \[2\] int64"):
        streams_pooled(torch.zeros(2), torch.zeros(2, dtype=torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [49_152, 248_320])
def test_true_shapes_on_the_device(vocab_size):
    check_draws("triton", 65, vocab_size, [0.0, 0.3, 0.8, 1.0, 1.5])


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.5, 3.0])  # the flat rows keep more than the list
def test_filters_on_true_shapes_on_the_device(spread):
    params = [
        SamplingParams(temperature=0.8, top_p=0.95),
        SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
        SamplingParams(temperature=1.0, min_p=0.05),
        SamplingParams(temperature=1.0, top_k=5000),
        SamplingParams(temperature=1.0),
        SamplingParams(),
    ]
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(12, 248_320, generator=generator) * spread).bfloat16()
    check_filtered("triton", logits, params * 2, draws=2)

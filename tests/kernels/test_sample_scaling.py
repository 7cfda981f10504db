"""The host and the device divide logits by a temperature with the same float operations: one bit apart, and a draw may be another token.

Both sides have their own code (`sampling.choose`, and the twin in `kernels.sample.reference`), as neither room may import the other.
"""

import pytest
import torch

from ddtree.kernels.sample import (
    choose_pooled_reference,
    rank_scores_pooled_reference,
    streams_pooled_reference,
)
from ddtree.kernels.sample.reference import scaled
from ddtree.sampling.choose import _scale, choose, rank_scores
from ddtree.sampling.noise import gumbel_noise, noise_key
from ddtree.sampling.params import SamplingParams

TEMPERATURES = (1e-3, 0.1, 0.3, 0.6, 0.7, 1.0, 1.3, 3.0, 100.0)
VOCAB, POSITION = 700, 41


def rows(kind: str, dtype: torch.dtype) -> torch.Tensor:
    """[6, VOCAB] logits, or [6, 1]."""
    logits = (torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(7)) * 6).to(dtype)
    if kind == "forbidden":  # as a grammar leaves them
        logits[:, 1::3] = -torch.inf
    elif kind == "all but one forbidden":
        logits[:, 1:] = -torch.inf
    elif kind == "tied":  # token id 0 and others with the best
        logits[:, [0, 5, 300]] = logits.amax(dim=-1, keepdim=True)
        logits[3:] = 0
    return logits[:, :1] if kind == "one candidate" else logits


KINDS = ("spread", "forbidden", "all but one forbidden", "tied", "one candidate")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_host_and_device_scale_rank_and_draw_alike_to_the_last_bit(kind, dtype):
    logits = rows(kind, dtype)
    seeds = range(len(logits))
    keys = torch.tensor([key - (1 << 64) if key >> 63 else key for key in (noise_key(seed, 0, [0]) for seed in seeds)])
    streams = streams_pooled_reference(keys, torch.full((len(logits),), POSITION))
    noise = torch.cat([gumbel_noise(noise_key(seed, 0, [0]), [POSITION], logits.shape[1]) for seed in seeds])
    for temperature in TEMPERATURES:
        params, temperatures = SamplingParams(temperature=temperature), torch.full((len(logits),), temperature)
        host = _scale(logits, params)
        assert host.dtype == torch.float32 and torch.equal(host, scaled(logits, temperatures)), temperature
        assert torch.equal(host == 0, logits == logits.amax(dim=-1, keepdim=True))  # a best token's own is 0, ties included
        ranked = rank_scores_pooled_reference(logits, temperatures, streams).log_softmax(dim=-1)
        assert torch.equal(rank_scores(logits, params, noise), ranked), temperature
        drawn = choose_pooled_reference(logits, temperatures, streams)
        assert torch.equal(choose(logits, params, noise), drawn), temperature
        if kind in ("all but one forbidden", "one candidate"):
            assert drawn.tolist() == [0] * len(logits)


def test_these_rows_would_show_a_product_with_the_inverse():
    """What PyTorch makes of a division by a number on a GPU."""
    logits = rows("spread", torch.float32)
    below = logits - logits.amax(dim=-1, keepdim=True)
    inexact = [each for each in TEMPERATURES if each != 1.0]
    for temperature in inexact:
        divisor = torch.full((len(logits),), temperature)
        assert not torch.equal(below * (1 / divisor)[:, None], scaled(logits, divisor)), temperature

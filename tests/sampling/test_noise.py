"""The noise is a fixed function of its key, and looks like independent Gumbel draws."""

from __future__ import annotations

import hashlib
import math
import struct

import numpy as np
import pytest
import torch

from ddtree.sampling.noise import gumbel_noise, noise_key

MASK64 = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """One output of the published generator, in Python integers."""
    z = (state + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def naive_gumbel(key: int, position: int, token: int) -> float:
    stream = splitmix64((key + splitmix64(position)) & MASK64)
    bits = splitmix64((stream + token * 0x9E3779B97F4A7C15) & MASK64) >> 12
    return -math.log(-math.log1p(-(bits + 0.5) * 2.0**-52))


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1].item()


def test_generator_is_splitmix64():
    # First outputs for the seed 1234567, as published with the generator.
    assert splitmix64(1234567) == 6457827717110365317
    assert splitmix64(1234567 + 0x9E3779B97F4A7C15) == 3203168211198807973


@pytest.mark.parametrize("key", [0, 1, MASK64, noise_key(5, 0, (1, 2, 3))])
def test_noise_is_the_naive_noise(key):
    positions = [0, 1, 7, 2**40]
    noise = gumbel_noise(key, positions, 300, "cpu")
    assert noise.dtype == torch.float32
    naive = [[naive_gumbel(key, position, token) for token in range(300)] for position in positions]
    torch.testing.assert_close(noise, torch.tensor(naive, dtype=torch.float32), rtol=0, atol=1e-6)


def test_key_is_stable_and_keeps_its_inputs_apart():
    packed = struct.pack("<qq3q", -7, 2, 5, 0, 9)
    assert noise_key(-7, 2, (5, 0, 9)) == int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
    assert noise_key(-7, 2, [5, 0, 9]) == noise_key(-7, 2, np.array([5, 0, 9])) == noise_key(2**64 - 7, 2, (5, 0, 9))
    variants = [(0, 0, ()), (1, 0, ()), (0, 1, ()), (0, 0, (0,)), (0, 0, (0, 0)), (0, 0, (1, 0)), (0, 0, (0, 1))]
    keys = {noise_key(*variant) for variant in variants}
    assert len(keys) == len(variants)
    assert all(0 <= key <= MASK64 for key in keys)


def test_a_row_depends_on_its_position_alone():
    whole = gumbel_noise(11, range(20), 5000, "cpu")
    assert torch.equal(gumbel_noise(11, [3, 17, 3], 5000, "cpu"), whole[[3, 17, 3]])
    assert torch.equal(gumbel_noise(11, torch.tensor([19]), 5000, "cpu"), whole[19:])
    assert torch.equal(gumbel_noise(11, [4], 777, "cpu")[0], whole[4, :777])
    assert gumbel_noise(11, [], 5, "cpu").shape == (0, 5)


def test_distribution_is_gumbel():
    noise = gumbel_noise(noise_key(1, 0, (4, 5)), range(20), 50_000, "cpu").double().flatten()
    n = len(noise)
    assert torch.isfinite(noise).all()
    assert abs(noise.mean() - 0.5772156649) < 5 * (math.pi**2 / 6 / n) ** 0.5
    assert abs(noise.var() - math.pi**2 / 6) < 5 * (5.4 - 1) ** 0.5 * math.pi**2 / 6 / n**0.5
    cdf = torch.exp(-torch.exp(-noise.sort().values))
    steps = torch.arange(n, dtype=torch.float64) / n
    distance = torch.maximum((cdf - steps).abs(), (cdf - steps - 1 / n).abs()).max()
    assert distance * n**0.5 < 2.0  # Kolmogorov: exceeded once in 1,500 draws; the key is fixed


def test_neighbours_are_uncorrelated():
    vocab_size, bound = 20_000, 5 / (10 * 20_000) ** 0.5
    base = gumbel_noise(noise_key(1, 0, (4,)), range(11), vocab_size, "cpu")
    assert abs(correlation(base[:10, :-1], base[:10, 1:])) < bound
    assert abs(correlation(base[:10], base[1:])) < bound
    assert abs(correlation(base[:10, :-1], base[1:, 1:])) < bound
    for other in (noise_key(2, 0, (4,)), noise_key(1, 1, (4,)), noise_key(1, 0, (5,)), noise_key(1, 0, (4,)) + 1):
        assert abs(correlation(base, gumbel_noise(other, range(11), vocab_size, "cpu"))) < bound
        assert abs(correlation(base[1:], gumbel_noise(other, range(10), vocab_size, "cpu"))) < bound


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("across", ["positions", "seeds"])
def test_argmax_draws_from_the_softmax(seed, across):
    probs = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.04, 0.01])
    if across == "positions":
        noise = gumbel_noise(noise_key(seed, 0, ()), range(3000), 6, "cpu")
    else:
        keys = (noise_key(100_000 * seed + i, 0, ()) for i in range(3000))
        noise = torch.cat([gumbel_noise(key, [12], 6, "cpu") for key in keys])
    counts = torch.bincount((probs.log() + noise).argmax(dim=-1), minlength=6)
    chi_square = ((counts - 3000 * probs) ** 2 / (3000 * probs)).sum().item()
    assert chi_square < 20.5  # 5 degrees of freedom: exceeded once in 1,000 draws; the keys are fixed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu():
    cpu, cuda = (gumbel_noise(3, range(9), 50_000, device).cpu() for device in ("cpu", "cuda"))
    # The uniforms agree bit for bit; fp64 logarithms may differ in the last place, which rarely survives rounding.
    torch.testing.assert_close(cuda, cpu, rtol=2e-7, atol=1e-7)
    assert (cuda == cpu).float().mean() > 0.9999

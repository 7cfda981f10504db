"""Trees that the kernel tests share, and the one way they measure an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

VECTORS = Path(__file__).resolve().parents[3] / "shared" / "vectors"


def random_parents(num_rows: int, reach: int, seed: int = 0) -> torch.Tensor:
    """[N] int64: each row's parent is one of the `reach` rows before it."""
    rng = np.random.default_rng(seed)
    return torch.tensor([-1] + [int(rng.integers(max(0, row - reach), row)) for row in range(1, num_rows)])


def deep_parents(num_rows: int, depth: int, seed: int = 0) -> torch.Tensor:
    """[N] int64: a chain of `depth` steps, then rows that hang anywhere."""
    parents = random_parents(num_rows, num_rows, seed)
    parents[: depth + 1] = torch.arange(-1, depth)
    return parents


TREES = {
    "one": torch.tensor([-1]),
    "two": torch.tensor([-1, 0]),
    "star65": torch.tensor([-1] + [0] * 64),
    "chain65": torch.arange(-1, 64),
    "chain300": torch.arange(-1, 299),
    "random17": random_parents(17, 17),
    "random65": random_parents(65, 20),
    "narrow257": random_parents(257, 4),
    "random1025": random_parents(1025, 300),
    "deep1025": deep_parents(1025, 300),
}


def ancestor_mask(parents: torch.Tensor) -> torch.Tensor:
    """[N, N] bool: each row sees itself and its ancestors."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents.tolist()):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


def leaf_paths(parents: torch.Tensor) -> list[torch.Tensor]:
    """The path to each leaf, root first."""
    mask = ancestor_mask(parents)
    leaves = set(range(len(parents))) - set(parents.tolist())
    return [mask[leaf].nonzero().flatten() for leaf in sorted(leaves)]


def longest_path(parents: torch.Tensor) -> torch.Tensor:
    return max(leaf_paths(parents), key=len)


def worst_error(actual: torch.Tensor, expected: torch.Tensor, dims: int = 1) -> float:
    """The largest error (norm) over the vectors of the last `dims` dimensions, relative to the expected one's norm;
    absolute where that is 0 or about to leave the normal numbers.

    Below fp64, relative to the root mean square of all their norms: where q and k are almost at right angles the
    output is a small difference of large numbers, and no fp32 computation knows its leading digits.
    """
    dim = tuple(range(-dims, 0))
    error = torch.linalg.vector_norm(actual.double() - expected.double(), dim=dim)
    norm = torch.linalg.vector_norm(expected.double(), dim=dim)
    assert torch.isfinite(error).all()
    if actual.dtype != torch.float64:
        norm = norm.square().mean().sqrt().expand_as(error)
    floor = 1e6 * torch.finfo(actual.dtype).tiny
    return float(torch.where(norm > floor, error / norm.clamp_min(floor), error).max())


def vector_cases(name: str) -> list[dict[str, torch.Tensor]]:
    """The cases of one file of reference values kept beside the repository; skips where they are not."""
    path = VECTORS / name
    if not path.is_file():
        pytest.skip(f"reference values {name} are not beside this checkout (../shared/vectors)")
    with np.load(path) as arrays:
        cases: dict[str, dict[str, torch.Tensor]] = {}
        for key in arrays.files:
            case, field = key.split(".")
            cases.setdefault(case, {})[field] = torch.from_numpy(arrays[key])
    return list(cases.values())

"""How far the scores of a served adapter may be from its twin's: never as far as the limit by rounding, further by what is wrong with it."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ddtree.audit.adapter_twin import AdapterTwin
from ddtree.audit.scoring import SUMS_NATS
from ddtree.engine.scoring import PathScorer
from ddtree.models.adapter import SUMMARIES, Adapter, AdapterConfig
from ddtree.models.conditioning import Conditioning

SIZE, WIDTH, RANK, VOCAB, SLOTS, CANDIDATES = 96, 64, 32, 300, 9, 48
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class Case:
    """A random adapter whose corrections are about a nat, and one block to score along one path."""

    def __init__(self, summary: str, dtype: torch.dtype, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.adapter = Adapter(AdapterConfig(SIZE, SLOTS, WIDTH, RANK, summary), dtype=dtype).requires_grad_(False)
        for name, parameter in self.adapter.named_parameters():
            parameter.normal_(0.0, 0.3 if parameter.ndim == 1 or "depth" in name else parameter.shape[1] ** -0.5)
        self.adapter.out.weight[-2] *= 0.1  # of the drafter's own
        embedding, head = torch.randn(VOCAB, SIZE).to(dtype), (torch.randn(VOCAB, SIZE) / SIZE**0.5).to(dtype)
        config, lm_head = SimpleNamespace(vocab_size=VOCAB), SimpleNamespace(weight=head)
        self.model = SimpleNamespace(embed_tokens=embedding, lm_head=lm_head, embed=lambda ids: F.embedding(ids, embedding), config=config)
        self.slots = torch.randn(SLOTS, SIZE).to(dtype)
        own, self.token_ids = (2 * torch.randn(SLOTS - 1, VOCAB)).log_softmax(dim=-1).topk(CANDIDATES, dim=-1)
        self.own, self.ranks = own, np.random.default_rng(seed).integers(0, 4, SLOTS - 2)

    def twin(self) -> tuple[np.ndarray, np.ndarray]:
        """Scores along the path and their limits, [D, M] each."""
        path = [5, *self.token_ids[np.arange(SLOTS - 2), self.ranks].tolist()]
        found, limits = AdapterTwin(self.adapter, self.model).rows(self.slots, path, self.token_ids.numpy(), self.own.numpy())
        return found, limits + SUMS_NATS

    def served(self, adapter: Adapter | None = None, tables: bool = False, slots: torch.Tensor | None = None) -> np.ndarray:
        conditioning = Conditioning(adapter or self.adapter, self.model, tables=tables)
        return PathScorer(conditioning, self.slots if slots is None else slots, 5, self.token_ids, self.own, self.own, 1.0).along(self.ranks)


@DTYPES
@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize("summary", SUMMARIES)
def test_rounding_stays_well_within_the_limit(summary, tables, dtype):
    for seed in range(4):
        case = Case(summary, dtype, seed)
        due, limits = case.twin()
        assert (np.abs(case.served(tables=tables) - due) <= 0.6 * limits).all()
        assert np.median(limits) < (5e-4 if dtype == torch.float32 else 0.6)


def shifted(name: str):
    return lambda adapter: getattr(adapter, name).copy_(getattr(adapter, name).roll(1, dims=0))


def without(name: str):
    return lambda adapter: getattr(adapter, name).weight.zero_()


def without_bias(name: str):
    return lambda adapter: getattr(adapter, name).bias.zero_()


PLANTED = {
    "depth by one": shifted("depth"),
    "grandparents' depth by one": shifted("grandparent_depth"),
    "no bias of mix": without_bias("mix"),
    "no bias of grandparents' mix": without_bias("grandparent_mix"),
    "no bias of out": without_bias("out"),
    "no root": without("root_token"),
    "no parent's slot": without("parent_slot"),
    "no grandparents": without("grandparent_token"),
    "no weight of the drafter's own": lambda adapter: adapter.out.weight[-2].zero_(),
    "nothing elsewhere": lambda adapter: (adapter.out.weight[-1].zero_(), adapter.out.bias[-1].zero_()),
}


@DTYPES
@pytest.mark.parametrize("planted", PLANTED)
def test_one_term_amiss_is_further_off_than_that(planted, dtype):
    case = Case("grandparent", dtype)
    due, limits = case.twin()
    wrong = copy.deepcopy(case.adapter)
    PLANTED[planted](wrong)
    apart = np.abs(case.served(wrong) - due)
    assert (apart > limits).any()

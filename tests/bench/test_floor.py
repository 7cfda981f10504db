"""The floor from known weights, and ceilings that are measured."""

import pytest
import torch

from ddtree.bench import floor
from ddtree.bench.floor import Ceilings, Work
from tests.bench.fakes import tiny_llama


def test_ceilings_are_positive(monkeypatch):
    monkeypatch.setattr(floor, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(floor, "MATMUL_WIDTH", {"cpu": 64})
    ceilings = floor.measure_ceilings(torch.device("cpu"), torch.float32)
    assert ceilings.bytes_per_s > 0 and ceilings.flops_per_s > 0


def test_bytes_bound_few_rows_and_flops_bound_many():
    work = Work(weight_bytes=1000, row_flops=50, context_bytes=2, state_bytes=0, attention_flops=1)
    ceilings = Ceilings(bytes_per_s=100, flops_per_s=100)
    assert floor._least(work, ceilings, rows=1, context=0) == 10
    assert floor._least(work, ceilings, rows=1, context=100) == 12
    assert floor._least(work, ceilings, rows=40, context=0) == 20


@pytest.mark.parametrize("tied", [True, False])
def test_a_small_target_counts_its_weights(tied):
    model = tiny_llama(tied)
    work = floor.target_work(model)
    read = sum(p.nbytes for p in model.parameters()) - (0 if tied else model.embed_tokens.nbytes)
    assert work.weight_bytes == read and work.context_bytes == 2 * 2 * 2 * 4 * 4

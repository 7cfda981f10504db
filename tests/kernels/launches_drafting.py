"""Launches of the drafting and drawing kernels at true shapes, for `tests.kernels.compiling`."""

from __future__ import annotations

import torch

from ddtree.kernels.sample.triton import (
    choose_pooled_triton,
    rank_scores_pooled_triton,
    streams_pooled_triton,
)
from ddtree.kernels.sample.triton_filtered import choose_filtered_pooled_triton
from ddtree.kernels.top_tokens.triton import top_tokens_triton
from ddtree.kernels.tree_accept.triton import accept_pooled_triton
from ddtree.kernels.tree_build import TreeBuffers
from ddtree.kernels.tree_build.triton import build_ddtree_pooled_triton
from ddtree.kernels.tree_build.triton_conditioned import build_conditioned_pooled_triton

VOCAB_SIZE = 248_320


def candidates(num, dtype):
    return lambda: top_tokens_triton(torch.empty(15, VOCAB_SIZE, dtype=dtype), num)


def build(max_budget, num_sequences=1):
    def launch() -> None:
        ids = torch.zeros(num_sequences, 15, max_budget, dtype=torch.int64)
        few = torch.zeros(num_sequences, dtype=torch.int32)
        trees = TreeBuffers(num_sequences, max_budget, "cpu")
        roots = torch.zeros(num_sequences, dtype=torch.int64)
        build_ddtree_pooled_triton(roots, ids, ids.float(), few, few, max_budget, few, few, trees)

    return launch


def build_conditioned(max_budget, width=64):
    def launch() -> None:
        ids, few = torch.zeros(1, 15, width, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
        trees = TreeBuffers(1, max_budget, "cpu", num_candidates=width)
        roots, table = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 15, width, width)
        build_conditioned_pooled_triton(roots, ids, table, few, few, max_budget, few, few, trees)

    return launch


def accept(max_budget):
    def launch() -> None:
        trees = TreeBuffers(1, max_budget, "cpu")
        arrays = (trees.token_ids, trees.parents, trees.starts, trees.counts, trees.token_ids)
        accept_pooled_triton(*arrays, 16, max_rows=trees.rows_each)

    return launch


def draw():
    logits, streams = torch.empty(16, VOCAB_SIZE, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int64)
    choose_pooled_triton(logits, torch.ones(16), streams_pooled_triton(streams, streams))
    rank_scores_pooled_triton(logits, torch.ones(16), streams)


def draw_filtered():
    logits, streams = torch.empty(16, VOCAB_SIZE, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int64)
    ones = torch.ones(16, dtype=torch.float64)
    choose_filtered_pooled_triton(logits, torch.ones(16), streams, torch.ones(16, dtype=torch.int32), ones, ones)


def launches():
    for num, dtype in ((16, torch.bfloat16), (128, torch.bfloat16), (1024, torch.float32)):
        yield f"candidates {num}", candidates(num, dtype)
    for max_budget in (15, 127, 256, 512, 1024):
        yield f"build {max_budget}", build(max_budget)
    yield "build 64 x 8", build(64, 8)
    for max_budget, width in ((16, 64), (64, 64), (64, 16), (256, 64), (1024, 64)):
        yield f"build conditioned {max_budget}, {width} candidates", build_conditioned(max_budget, width)
    yield "accept 127", accept(127)
    yield "accept 1024", accept(1024)
    yield "draw", draw
    yield "draw filtered", draw_filtered

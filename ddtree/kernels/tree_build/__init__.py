"""Draft trees on the device: the drafter's best tokens, and the best prefixes of them (DDTree, arXiv 2604.12989)."""

from __future__ import annotations

from ddtree.kernels.tree_build.buffers import TreeBuffers
from ddtree.kernels.tree_build.build import build_ddtree_pooled
from ddtree.kernels.tree_build.candidates import top_candidates_pooled, top_candidates_topk
from ddtree.kernels.tree_build.chain import best_path_pooled, best_path_pooled_reference
from ddtree.kernels.tree_build.reference import build_ddtree_pooled_reference, top_candidates_reference

__all__ = [
    "TreeBuffers",
    "best_path_pooled",
    "best_path_pooled_reference",
    "build_ddtree_pooled",
    "build_ddtree_pooled_reference",
    "top_candidates_pooled",
    "top_candidates_reference",
    "top_candidates_topk",
]

"""The gated delta rule: a whole draft tree in closed form, its commit, one step, and prefill in chunks.

`sequence`: of one sequence, in plain PyTorch. `pooled`: of all sequences of a round, their states in a pool.
`walk`: the same, step by step, so that no token's bits depend on how it was computed.

Letters: N tree rows, T prompt tokens, Hk key heads, Hv value heads (value head h uses key head h // (Hv / Hk)),
K key dim, V value dim. Per value head, with the state S [K, V],

    S <- exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q

where q and k are L2-normalised and q is scaled by K^-1/2. The derivation of the closed form is in `closed_form`.
"""

from ddtree.kernels.gated_delta.pooled import (
    gated_delta_commit_pooled,
    gated_delta_prefill_pooled,
    gated_delta_step_pooled,
    gated_delta_tree_pooled,
)
from ddtree.kernels.gated_delta.reference import (
    gated_delta_commit_reference,
    gated_delta_prefill_reference,
    gated_delta_tree_reference,
)
from ddtree.kernels.gated_delta.sequence import (
    CHUNK,
    gated_delta_commit,
    gated_delta_prefill,
    gated_delta_tree,
)
from ddtree.kernels.gated_delta.staged import StagedRows
from ddtree.kernels.gated_delta.walk import COMMITS, NODES, TOKENS, Walks, gated_delta_walk_pooled, leaf_walks

__all__ = [
    "CHUNK",
    "COMMITS",
    "NODES",
    "TOKENS",
    "StagedRows",
    "Walks",
    "gated_delta_commit",
    "gated_delta_commit_pooled",
    "gated_delta_commit_reference",
    "gated_delta_prefill",
    "gated_delta_prefill_pooled",
    "gated_delta_prefill_reference",
    "gated_delta_step_pooled",
    "gated_delta_tree",
    "gated_delta_tree_pooled",
    "gated_delta_tree_reference",
    "gated_delta_walk_pooled",
    "leaf_walks",
]

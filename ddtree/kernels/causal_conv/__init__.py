"""The short causal convolution: depthwise, over each row's own ancestors, then SiLU; its commit; the layer's gates.

`sequence`: of one sequence, in plain PyTorch. `pooled`: of all sequences of a round, their states in a pool.

Letters: N tree rows, T consecutive rows, C channels, W kernel width (2 or more).
The last column of the weight belongs to the row itself, the one before to its parent, and so on; above the root come
the committed inputs, which are the state [W - 1, C], oldest first (zeros before the first token). Computed in fp32,
or fp64 when the rows are; the result has the rows' dtype.
"""

from ddtree.kernels.causal_conv.gates import Gates, gates_pooled
from ddtree.kernels.causal_conv.pooled import (
    causal_conv_commit_pooled,
    causal_conv_prefill_pooled,
    causal_conv_step_pooled,
    causal_conv_tree_pooled,
)
from ddtree.kernels.causal_conv.reference import (
    causal_conv_commit_reference,
    causal_conv_prefill_reference,
    causal_conv_tree_reference,
)
from ddtree.kernels.causal_conv.sequence import causal_conv_commit, causal_conv_prefill, causal_conv_tree

__all__ = [
    "Gates",
    "causal_conv_commit",
    "causal_conv_commit_pooled",
    "causal_conv_commit_reference",
    "causal_conv_prefill",
    "causal_conv_prefill_pooled",
    "causal_conv_prefill_reference",
    "causal_conv_step_pooled",
    "causal_conv_tree",
    "causal_conv_tree_pooled",
    "causal_conv_tree_reference",
    "gates_pooled",
]

"""How long the drafter's trees are accepted on held-out text, without running the engine.

On greedy text the target's choice after every accepted prefix is the text's own next token, so a tree built from the
drafter's marginals can be walked along the text. An acceptance length counts the bonus token and is at most K.
Letters: S sequences, T tokens, K block size, D = K - 1 depths.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch

from ddtree.engine.scoring import condition
from ddtree.models.drafter_config import DrafterConfig
from ddtree.sampling.params import SamplingParams
from ddtree.training.blocks import build_blocks
from ddtree.training.config import TrainingConfig
from ddtree.training.data import Batch, Data
from ddtree.training.packed import PackedDrafter
from ddtree.training.sample import GENERATED
from ddtree.tree.accept import accept
from ddtree.tree.build import Candidates, build_chain, build_ddtree
from ddtree.tree.draft_tree import DraftTree

BUDGETS = (16, 64, 256)
CANDIDATES = 64  # per depth; a tree of 256 nodes rarely looks further
ANCHORS_PER_SEQUENCE = 16
SEQUENCES_PER_FORWARD = 16


@dataclass(frozen=True)
class Evaluation:
    """Means over the anchors; `loss` is the unweighted cross entropy over all depths."""

    num_anchors: int
    loss: float
    chain: float
    budgets: dict[int, float]
    top1_by_depth: tuple[float, ...]

    def as_json(self) -> dict:
        return asdict(self)

    def line(self) -> str:
        trees = ", ".join(f"budget {budget} {length:.2f}" for budget, length in self.budgets.items())
        depths = " ".join(f"{share:.2f}" for share in self.top1_by_depth)
        return f"{self.num_anchors} anchors: loss {self.loss:.3f}, acceptance chain {self.chain:.2f}, {trees}; top-1 {depths}"


def acceptance_length(tree: DraftTree, continuation: np.ndarray) -> int:
    """Acceptance length of a tree whose target writes `continuation [D]` below the root."""
    following = np.append(continuation, -1)  # below the last depth nothing can be accepted
    return accept(tree, following[tree.depths]).acceptance_length


def held_out_batches(data: Data, num_anchors: int, block_size: int) -> list[tuple[Batch, torch.Tensor]]:
    """Greedy sequences and their anchors `[S, A]`, each followed by a whole block of generated tokens.

    The choice depends on the data alone, so evaluations of one run compare.
    """
    rng, batches = np.random.default_rng(7), []
    for shard in data.held_out:
        length = shard.tokens.shape[1]
        if length <= block_size:
            continue
        generated = np.lib.stride_tricks.sliding_window_view(shard.classes == GENERATED, block_size - 1, axis=1)
        possible = generated[:, 1:].all(axis=2)  # [S, T - K + 1]: tokens a+1 .. a+K-1 for anchor a
        possible[:, 0] = False
        rows = np.flatnonzero((shard.temperatures == 0) & (possible.sum(axis=1) >= ANCHORS_PER_SEQUENCE))
        wanted = -(-num_anchors // (ANCHORS_PER_SEQUENCE * len(data.held_out)))
        rows = rows[:wanted]
        for start in range(0, len(rows), SEQUENCES_PER_FORWARD):
            chosen = rows[start : start + SEQUENCES_PER_FORWARD]
            anchors = [np.sort(rng.choice(np.flatnonzero(possible[row]), ANCHORS_PER_SEQUENCE, replace=False)) for row in chosen]
            batches.append((data.batch_of(shard, chosen), torch.from_numpy(np.stack(anchors)).to(data.device)))
    return batches


@torch.no_grad()
def evaluate(
    packed: PackedDrafter, data: Data, config: TrainingConfig | DrafterConfig, num_anchors: int, conditioning=None
) -> Evaluation | None:
    """Acceptance of chains and trees on held-out greedy text; None when there is no such text.

    With a `Conditioning` the trees are its adapter's; `loss` and `top1_by_depth` are the drafter's own all the same."""
    size, depth = config.block_size, config.block_size - 1
    losses, lengths, top1 = [], [], []
    for batch, anchors in held_out_batches(data, num_anchors, size):
        num_rows = anchors.shape[1] * size
        blocks = build_blocks(batch.tokens, batch.classes, anchors, size, num_rows, config.mask_token_id, 0.0)
        hidden = packed(packed.target.features(batch.tokens, config.target_layer_ids), blocks)
        log_probs = packed.target.logits(hidden).unflatten(1, (-1, size))[:, :, 1:].flatten(0, 1).float().log_softmax(-1)
        labels = blocks.labels.unflatten(1, (-1, size))[:, :, 1:].flatten(0, 1)  # [S A, D]
        losses.append(-log_probs.gather(2, labels[..., None]).mean().item())
        top = log_probs.topk(min(CANDIDATES, log_probs.shape[-1]), dim=-1)
        values, indices, real = top.values.cpu().numpy(), top.indices.cpu().numpy(), labels.cpu().numpy()
        top1.append((indices[:, :, 0] == real).mean(axis=0))
        roots = batch.tokens.gather(1, anchors).flatten().tolist()
        states = hidden.unflatten(1, (-1, size)).flatten(0, 1)
        for place, (root, value, index, continuation) in enumerate(zip(roots, values, indices, real, strict=True)):
            if conditioning is None:
                candidates = Candidates(index.astype(np.int64), np.minimum(value, 0.0).astype(np.float32))
            else:
                logits = packed.target.logits(states[place, 1:])
                candidates = condition(conditioning, states[place].float(), root, logits, SamplingParams(), None)
            trees = [build_chain(root, candidates, depth), *(build_ddtree(root, candidates, budget) for budget in BUDGETS)]
            lengths.append([acceptance_length(tree, continuation) for tree in trees])
    if not lengths:
        return None
    chain, *trees = np.mean(lengths, axis=0).tolist()
    shares = tuple(round(float(share), 4) for share in np.mean(top1, axis=0))
    return Evaluation(len(lengths), float(np.mean(losses)), chain, dict(zip(BUDGETS, trees, strict=True)), shares)

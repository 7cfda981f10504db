"""Tiny random models of transformers, saved and loaded as ours, and the ways to run both."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from ddtree.caches.rows import Rows, Span
from ddtree.models.registry import load_target
from ddtree.tree.draft_tree import DraftTree

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}


def reference(kind: str, **changes):
    """A random `kind` ("Llama", "Qwen3") of transformers whose biases and norms are not trivial either."""
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


def saved_and_loaded(model, folder):
    """Save `model` as sharded safetensors and load it as ours."""
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return load_target(folder, "cpu", torch.float32)


def random_ids(count: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count,))


@torch.inference_mode()
def run(model, cache, token_ids, parents=None, feature_layers=()):
    """One forward over consecutive tokens, or over a tree's nodes; nothing is committed."""
    count, start = len(token_ids), cache.context_length
    if parents is None:
        positions, span = torch.arange(start, start + count), Span(cache, 0, count, None, None)
    else:
        mask = torch.from_numpy(tree_of(parents).ancestor_mask())
        positions = start + mask.sum(1) - 1
        span = Span(cache, 0, count, mask, torch.tensor(parents))
    return model.forward(Rows(token_ids, positions, (span,)), feature_layers)


def feed(model, cache, token_ids, chunk=None, feature_layers=()):
    """Prefill in chunks, committing each; returns (logits [T, V], features) of all tokens."""
    logits, features = [], []
    for piece in token_ids.split(chunk or len(token_ids)):
        output = run(model, cache, piece, feature_layers=feature_layers)
        cache.commit(torch.arange(len(piece)))
        logits.append(model.logits(output.hidden))
        features.append(output.features)
    return torch.cat(logits), torch.cat(features) if feature_layers else None


def greedy(model, cache, token_ids, count):
    """`count` tokens after the prompt, one per forward."""
    last = feed(model, cache, token_ids)[0][-1:].argmax(-1)
    emitted = [int(last)]
    while len(emitted) < count:
        last = feed(model, cache, last)[0][-1:].argmax(-1)
        emitted.append(int(last))
    return emitted


def random_parents(num_nodes: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [-1] + [int(rng.integers(max(0, node - 4), node)) for node in range(1, num_nodes)]


def tree_of(parents) -> DraftTree:
    zeros = np.zeros(len(parents))
    return DraftTree(zeros, np.array(parents, dtype=np.int32), zeros, zeros)


def path_to(node: int, parents) -> list[int]:
    """Nodes from the root to `node`."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path

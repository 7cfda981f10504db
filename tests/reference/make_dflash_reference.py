"""Write `dflash_reference.npz`: what z-lab's own DFlash package computes on tiny random drafters.

The package pins its own transformers, so this script runs in an environment apart and never in the test suite:

    python -m venv reference-env
    reference-env/bin/pip install torch==2.13.0 transformers==5.15.0 numpy
    reference-env/bin/pip install --no-deps dflash==0.1.0
    reference-env/bin/python tests/reference/make_dflash_reference.py tests/reference/dflash_reference.npz

Each case plays several rounds with the package's own cache handling, as its `dflash_generate` does: draft with
the newest context, crop the cache back to the committed length, accept some tokens, go on. Stored in float32:
`weights/<set>/<tensor>` (z-lab's names), `<case>/config` (JSON, z-lab's form), `<case>/weights` (name of the
set), `<case>/rounds`, and per round `features [T, L*C]`, `embeddings [K, C]`, `hidden [K, C]`, `logits [K, V]`.
Compared by `tests/models/test_dflash.py`.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from dflash.model import DFlashDraftModel, _crop_to, _make_cache
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

VOCAB_SIZE = 24

BASE = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB_SIZE,
    "num_target_layers": 6,
    "max_position_embeddings": 256,
    "attention_bias": False,
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
    "use_sliding_window": False,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 23, "target_layer_ids": [1, 4]},
}
SLIDING = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALED_HEAD = {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}

# Prompt lengths and accepted counts walk the context across the window and past it.
CASES = {
    "full_block4": {"block_size": 4},
    "full_block8": {},
    "full_block1": {"block_size": 1},
    "causal_block8": {"is_causal": True},
    "sliding_window8": {**SLIDING, "sliding_window": 8},
    "sliding_window3": {**SLIDING, "sliding_window": 3},
    "sliding_bidirectional": {**SLIDING, "sliding_window": 4, "is_causal": False},
    "sliding_causal_everywhere": {**SLIDING, "sliding_window": 8, "is_causal": True},
    "mha_bias_block4": {"block_size": 4, "num_key_value_heads": 4, "attention_bias": True},
    "yarn": {"rope_theta": None, "rope_parameters": YARN},
    "scaled_head": {"dflash_config": {**BASE["dflash_config"], **SCALED_HEAD}},
}
PROMPT_LENGTH = 5
ACCEPTED = (3, 1, 4, 2, 8)


def make_model(config: dict, state: dict[str, torch.Tensor] | None) -> DFlashDraftModel:
    """The package's model in float32; random weights, norms included, unless `state` is given."""
    model = DFlashDraftModel(Qwen3Config(**{k: v for k, v in config.items() if v is not None})).float().eval()
    if state is not None:
        model.load_state_dict(state)
        return model
    for name, parameter in model.named_parameters():
        scale = 0.3 if parameter.ndim > 1 else 0.2
        offset = 1.0 if "norm" in name else 0.0
        parameter.data = offset + scale * torch.randn(parameter.shape)
    return model


@torch.inference_mode()
def play(model: DFlashDraftModel, config: dict, head: torch.nn.Linear) -> list[dict[str, torch.Tensor]]:
    """Rounds of one drafter over a growing context; the last draft is shorter, as at the end of a reply."""
    width, num_layers = config["hidden_size"], len(config["dflash_config"]["target_layer_ids"])
    cache = _make_cache(model.config)
    start, fresh, rounds = 0, PROMPT_LENGTH, []
    for index, accepted in enumerate(ACCEPTED):
        start += fresh
        block = config["block_size"] if index < len(ACCEPTED) - 1 else max(1, config["block_size"] - 3)
        features = torch.randn(1, fresh, num_layers * width)
        embeddings = torch.randn(1, block, width)
        hidden = model(
            target_hidden=features,
            noise_embedding=embeddings,
            position_ids=torch.arange(start - fresh, start + block)[None],
            past_key_values=cache,
            use_cache=True,
        )
        _crop_to(cache, start)
        logits = model.compute_logits(hidden, head)
        rounds.append(
            {"features": features[0], "embeddings": embeddings[0], "hidden": hidden[0], "logits": logits[0]}
        )
        fresh = accepted
    return rounds


def main(path: str) -> None:
    torch.manual_seed(20)
    head = torch.nn.Linear(BASE["hidden_size"], VOCAB_SIZE, bias=False)
    arrays: dict[str, np.ndarray] = {"head": head.weight.detach().numpy()}
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, changes in CASES.items():
        config = {**BASE, **changes}
        weights = "mha" if config["attention_bias"] else "gqa"
        model = make_model(config, states.get(weights))
        states.setdefault(weights, {key: value.clone() for key, value in model.state_dict().items()})
        rounds = play(model, config, head)
        arrays[f"{name}/config"] = np.array(json.dumps(config))
        arrays[f"{name}/weights"] = np.array(weights)
        arrays[f"{name}/rounds"] = np.array(len(rounds))
        for index, tensors in enumerate(rounds):
            arrays |= {f"{name}/{index}/{key}": value.numpy() for key, value in tensors.items()}
    for weights, state in states.items():
        arrays |= {f"weights/{weights}/{key}": value.numpy() for key, value in state.items()}
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])

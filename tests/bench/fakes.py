"""Text for the scripted engine, a letter per token; a Llama small enough to run at once."""

from __future__ import annotations

import torch

from ddtree.models.config import ModelConfig
from ddtree.models.llama import Llama
from tests.scripted import EOS, VOCAB


class Letters:
    """What `offline.Text` is to a real model."""

    eos_token_ids = frozenset({EOS})

    def encode(self, messages):
        joined = "|".join(message["content"] for message in messages)
        return tuple(ord(char) % VOCAB for char in joined)[-60:]

    def decode(self, token_ids):
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)


def tiny_llama(tied: bool = True) -> Llama:
    """Random weights, 2 layers, vocabulary 13."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
    }
    model = Llama(ModelConfig.from_hf(config), "cpu", torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.finish_loading()
    return model

"""Text for the scripted engine: a letter per token, a prompt per conversation."""

from __future__ import annotations

from tests.scripted import EOS, VOCAB


class Letters:
    """What `offline.Text` is to a real model."""

    eos_token_ids = frozenset({EOS})

    def encode(self, messages):
        joined = "|".join(message["content"] for message in messages)
        return tuple(ord(char) % VOCAB for char in joined)[-60:]

    def decode(self, token_ids):
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)

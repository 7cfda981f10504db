"""What bytes a token stands for, read from the tokenizer's own decoder."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: the 256 printable characters in which byte-level BPE writes bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    table.update((chr(256 + place), byte) for place, byte in enumerate(rest))
    return table


class Vocabulary:
    """Bytes of each token: exact for byte-level BPE and for SentencePiece vocabularies with byte tokens."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        steps = _decoder_steps(backend)
        names = [step["type"] for step in steps]
        self.is_byte_level = names == ["ByteLevel"]
        self.has_byte_tokens = "ByteFallback" in names
        self._byte_of_char = byte_of_char()
        self._space = _space_mark(steps)
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self._bytes: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes, specials included; b"" for an id that no token has."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._look_up(token_id)
        return found

    def has(self, token_id: int) -> bool:
        """Is there a token of this id? A model's embedding may be padded with ids that have none."""
        return self._backend.id_to_token(token_id) is not None

    def is_byte_token(self, token_id: int) -> bool:
        """Does the token stand for one raw byte (`<0x0A>`)? Then only its neighbours tell what it reads as."""
        token = self._backend.id_to_token(token_id) if self.has_byte_tokens else None
        return token is not None and BYTE_TOKEN.fullmatch(token) is not None

    def _look_up(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            # The decoder's own rule: a token with any character outside the alphabet is plain text.
            in_alphabet = all(char in self._byte_of_char for char in token)
            return bytes(self._byte_of_char[char] for char in token) if in_alphabet else token.encode()
        if token_id in self._added:
            return token.encode()
        if self.has_byte_tokens and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return (token.replace(self._space, " ") if self._space else token).encode()


def _decoder_steps(backend: Backend) -> list[dict]:
    """The decoder as a flat list of its steps' JSON; empty without a decoder."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _space_mark(steps: list[dict]) -> str | None:
    """The character that stands for a space (`▁`), if the decoder turns one into it."""
    for step in steps:
        if step["type"] == "Metaspace":
            return step["replacement"]
        if step["type"] == "Replace" and step["content"] == " ":
            return step["pattern"].get("String")
    return None

"""Token ids <-> text, exactly as transformers does it; which tokens are special, and which end a generation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from ddtree.text.load import load_pretrained
from ddtree.text.parse import CALL_END, CALL_START, THINK_END, THINK_START
from ddtree.text.vocabulary import Vocabulary

# Markers that close a turn. One counts as an end only if it is a token and the model's own template writes it.
CHAT_END_MARKERS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eot|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
)


class Tokenizer:
    """A model's tokenizer. Safe to share between threads: nothing in it changes after loading."""

    def __init__(self, pretrained, generation_eos_ids: Iterable[int] = ()) -> None:
        """`pretrained` is a fast transformers tokenizer; `generation_eos_ids` come from the generation config."""
        self.pretrained = pretrained
        self.backend = pretrained.backend_tokenizer
        # A published file may carry a cut or a padding; transformers resets both on each call.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocabulary = Vocabulary(self.backend)
        self._generation_eos_ids = frozenset(generation_eos_ids)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a folder with tokenizer files or with one .gguf, or from a .gguf; ValueError where there is none."""
        path = Path(path)
        # Beside a lone .gguf may lie another model's configuration; the file itself names its EOS.
        return cls(load_pretrained(path), read_eos_ids(path) if path.is_dir() else ())

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that decoding skips: the added tokens marked special, whatever they look like."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a generation: generation config, tokenizer, and the chat end marker, together."""
        ids = set(self._generation_eos_ids)
        if self.pretrained.eos_token_id is not None:
            ids.add(self.pretrained.eos_token_id)
        template = self.chat_template or ""
        for marker in CHAT_END_MARKERS:
            token_id = self.backend.token_to_id(marker)
            if token_id is not None and marker in template:
                ids.add(token_id)
        return frozenset(ids)

    @cached_property
    def thought_tag_ids(self) -> frozenset[int]:
        """The thought's tags where they are tokens of their own; some tokenizers mark them special."""
        return self._ids_of(THINK_START, THINK_END)

    @cached_property
    def call_tag_ids(self) -> frozenset[int]:
        """The tags of tool calls, likewise."""
        return self._ids_of(CALL_START, CALL_END)

    def _ids_of(self, *tags: str) -> frozenset[int]:
        ids = (self.backend.token_to_id(tag) for tag in tags)
        return frozenset(token_id for token_id in ids if token_id is not None)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id; a model's embedding may be padded beyond it."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def chat_template(self) -> str | None:
        """The source of the model's chat template (the default one of several), or None."""
        return self.chat_template_for(tools=False)

    def chat_template_for(self, tools: bool) -> str | None:
        """As `chat_template`, but the model's own template for tools, where it has one and `tools` are given."""
        template = self.pretrained.chat_template
        if not isinstance(template, dict):
            return template
        return (template.get("tool_use") if tools else None) or template.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; with the tokenizer's own special tokens for a completion, without for a rendered chat.

        ValueError for text that is not Unicode (half a surrogate pair, as JSON can carry).
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"text cannot be encoded: {_describe(text)}") from error

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids, spaces untouched; ids outside the vocabulary read as nothing."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """The exact bytes of one token: b"" for a skipped special token or an unknown id."""
        if skip_special_tokens and token_id in self.special_ids:
            return b""
        return self.vocabulary.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """One token alone, for people to read; a piece of a character reads as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")


def read_eos_ids(folder: Path) -> frozenset[int]:
    """`eos_token_id` of generation_config.json, or of config.json without one; a number or a list."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}: not JSON ({error})") from error
        # Multimodal checkpoints keep the language model's settings one level down.
        eos = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
        if eos is None:
            return frozenset()
        return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset()


def _describe(text: object) -> str:
    if not isinstance(text, str):
        return f"expected a string, got {type(text).__name__}"
    place = next((i for i, char in enumerate(text) if 0xD800 <= ord(char) <= 0xDFFF), 0)
    return f"half a surrogate pair at character {place}"

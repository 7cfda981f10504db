"""hybrid-tiny's tokenizer: a byte-level BPE of 2,048 entries and a chat template, both by Qwen's conventions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE = 2048
END_OF_TEXT, IM_START, IM_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
THINK, THINK_END = "<think>", "</think>"
SPECIAL = (END_OF_TEXT, IM_START, IM_END)
ADDED = (*SPECIAL, THINK, THINK_END, MASK)  # behind the words, in this order; the drafter's mask is the last id

# Qwen3.5's own: contractions, words with one leading sign or space, every digit alone, signs, line ends.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def train(texts: Iterable[str]) -> Tokenizer:
    """The tokenizer of these texts; ValueError if they hold too few different words to fill it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    num_words = VOCAB_SIZE - len(ADDED)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=num_words, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != num_words:
        raise ValueError(f"the texts give {tokenizer.get_vocab_size()} entries of {num_words}; train on more text")
    for name in ADDED:
        # Qwen's thought tags are tokens but not special: decoding shows them.
        token = AddedToken(name, special=name not in (THINK, THINK_END), normalized=False)
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copyfile(TEMPLATE, folder / TEMPLATE.name)
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "errors": "replace",
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(name)): _described(name, name not in (THINK, THINK_END)) for name in ADDED
        },
        "additional_special_tokens": [IM_START, IM_END, MASK],
    }
    _dump(folder / "tokenizer_config.json", config)
    ids = {name: tokenizer.token_to_id(name) for name in (IM_END, END_OF_TEXT)}
    _dump(folder / "generation_config.json", {"eos_token_id": list(ids.values()), "pad_token_id": ids[END_OF_TEXT]})


def _described(name: str, special: bool) -> dict:
    return {"content": name, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": special}


def _dump(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""Model, drafter and tokenizer: each check of the loading contract, by config and tensor names, before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ddtree.doctor.checks import FAILED, OK, WARNING, Check, passed_or_failed
from ddtree.models.drafter_files import open_drafter
from ddtree.models.registry import target_files

AREA = "compatibility"
OTHER_DRAFTER = "use the drafter that was trained for this target (--drafter)"


def target_checks(config, tokenizer) -> Iterator[Check]:
    """The target by itself, and its tokenizer."""
    layers = f"{config.num_layers} layers, width {config.hidden_size}, {config.vocab_size} tokens"
    yield Check(AREA, "architecture", OK, f"{config.architecture}: {layers}")
    yield Check(AREA, "RoPE of the target", OK, rope_of(config.rope, config.context_limit))
    if config.is_hybrid:
        linear = sum(kind != "full_attention" for kind in config.layer_types)
        yield Check(AREA, "hybrid", OK, f"{linear} of {config.num_layers} layers are recurrent: trees are read along their paths")
    yield tokenizer_check(config, tokenizer)
    eos = sorted(tokenizer.eos_token_ids)
    found = ", ".join(f"{token_id} {tokenizer.token_text(token_id)!r}" for token_id in eos) or "none"
    remedy = "add eos_token_id to generation_config.json: without one every answer runs to max_tokens"
    yield Check(AREA, "end of text", OK if eos else WARNING, found, "" if eos else remedy)
    template = "the model's own" if tokenizer.chat_template else "none"
    remedy = "chat completions will be refused; raw completions work"
    yield Check(AREA, "chat template", OK if tokenizer.chat_template else WARNING, template, "" if tokenizer.chat_template else remedy)


def tokenizer_check(config, tokenizer) -> Check:
    """Every id of the tokenizer needs a row of the embedding."""
    size = tokenizer.backend.get_vocab_size(with_added_tokens=True)
    found = f"{size} tokens, the target's embedding has {config.vocab_size} rows"
    return passed_or_failed(AREA, "tokenizer", size <= config.vocab_size, found, "use the tokenizer that came with this model")


def drafter_checks(drafter, target, tokenizer, folder: Path) -> Iterator[Check]:
    """Both sides of everything that a drafter must share with its target."""
    same = drafter.hidden_size == target.hidden_size
    yield _both("hidden size", same, drafter.hidden_size, target.hidden_size)
    apart = abs(drafter.vocab_size - target.vocab_size)
    try:
        drafter.check_against(target)
        fault = ""
    except ValueError as error:
        fault = str(error)
    padded = "" if not apart else f" ({apart} rows apart{', padding' if 'vocabulary' not in fault else ''})"
    yield _both("vocabulary", "vocabulary" not in fault, drafter.vocab_size, f"{target.vocab_size}{padded}")
    trained = drafter.num_target_layers
    if trained is not None:
        yield _both("layers of the target", trained == target.num_layers, trained, target.num_layers)
    ids = list(drafter.target_layer_ids)
    yield _both("target_layer_ids", max(ids) < target.num_layers, ids, f"layers 0 to {target.num_layers - 1}")
    mask = drafter.mask_token_id
    yield _both("mask token", mask < target.vocab_size, mask, f"{target.vocab_size} embedding rows")
    yield Check(AREA, "block size", OK, f"{drafter.block_size}: up to {drafter.block_size - 1} tokens deep")
    yield Check(AREA, "RoPE of the drafter", OK, rope_of(drafter.rope, drafter.max_position_embeddings))
    yield drafter_tokenizer_check(tokenizer, folder)
    yield passed_or_failed(AREA, "drafter and target", not fault, fault or "they fit each other", OTHER_DRAFTER)


def drafter_tokenizer_check(tokenizer, folder: Path) -> Check:
    """Known only where the drafter brings a tokenizer of its own."""
    file = (folder if folder.is_dir() else folder.parent) / "tokenizer.json"
    if not file.is_file() or folder.suffix == ".gguf":
        return Check(AREA, "tokenizer of the drafter", OK, "it brings none: the target's is used")
    from ddtree.text import Tokenizer

    try:
        own = Tokenizer.load(folder).backend.get_vocab()
    except ValueError as error:
        return Check(AREA, "tokenizer of the drafter", WARNING, str(error), "it cannot be compared with the target's")
    theirs = tokenizer.backend.get_vocab()
    differing = [word for word, token_id in own.items() if theirs.get(word, token_id) != token_id]
    found = "the same ids as the target's" if not differing else f"{len(differing)} tokens have other ids, first {differing[0]!r}"
    return passed_or_failed(AREA, "tokenizer of the drafter", not differing, found, OTHER_DRAFTER)


def rope_of(rope, limit: int | None) -> str:
    """`default, theta 1e+06, 8192 tokens`."""
    return f"{rope.rope_type}, theta {rope.theta:g}" + (f", {limit} tokens" if limit else "")


def read_target(path: Path):
    """(what is wrong or None, config or None, tensor shapes)."""
    try:
        config, shapes = target_files(path)
    except (ValueError, OSError) as error:
        remedy = "give a supported model's folder or .gguf file; the message says what is wrong with this one"
        return Check(AREA, "architecture", FAILED, str(error), remedy), None, {}
    return None, config, shapes


def read_drafter(path: Path):
    """As `read_target`, of a drafter."""
    try:
        files = open_drafter(path)
    except (ValueError, OSError) as error:
        return Check(AREA, "drafter", FAILED, str(error), "give a DFlash drafter's folder or .gguf file (--drafter)"), None, {}
    return None, files.config, files.tensors.shapes


def _both(name: str, passed: bool, drafter, target) -> Check:
    return passed_or_failed(AREA, name, passed, f"drafter {drafter}, target {target}", OTHER_DRAFTER)

"""A drafter's files: where its config and tensors lie, and which of them are its own.

safetensors in z-lab's names, or GGUF with the same names and the config as JSON in the string field `dflash.config`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from ddtree.models.drafter_config import DrafterConfig
from ddtree.models.gguf_file import GgufFile
from ddtree.models.weights import SafetensorsSource, TensorSource

logger = logging.getLogger(__name__)

GGUF_ARCHITECTURE = "dflash"
GGUF_CONFIG_KEY = "dflash.config"
# The draft vocabulary: d2t[i] is target id - i of draft token i, t2d[v] whether target token v is in it.
D2T, T2D = "d2t", "t2d"
# speculators saves frozen copies of the target's own tensors; the served target is the better source.
_TARGET_COPIES = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")


@dataclass(frozen=True, eq=False)
class DrafterFiles:
    """An opened checkpoint; nothing but the draft vocabulary is read yet."""

    config: DrafterConfig
    tensors: TensorSource
    draft_token_ids: torch.Tensor | None  # [draft_vocab_size] int64, target ids


def open_drafter(path: Path) -> DrafterFiles:
    """Open `path`: a folder with config.json and safetensors or one .gguf file, or a .gguf file alone.

    Raises:
        FileNotFoundError: there is no such path.
        ValueError: no config, no weights, or a config that is refused; messages name the file.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    gguf_path = _gguf_path(path)
    source: TensorSource = _GgufTensors(gguf_path) if gguf_path else SafetensorsSource(path)
    config_json = path / "config.json"
    if config_json.is_file():
        name, text = str(config_json), config_json.read_text()
    elif gguf_path and GGUF_CONFIG_KEY in source.file.metadata:
        name, text = f"{gguf_path} ({GGUF_CONFIG_KEY})", source.file.metadata[GGUF_CONFIG_KEY]
    else:
        where = f"no config.json beside it and no {GGUF_CONFIG_KEY} in it" if gguf_path else "no config.json"
        raise ValueError(f"{path}: {where}; add the drafter's config.json")
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name}: not JSON: {error}") from error
    config = DrafterConfig.from_hf(raw, name)
    return _own_tensors(config, source, is_speculators="transformer_layer_config" in raw)


class _GgufTensors:
    """GGUF tensors under the names they are stored by."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        self.name = str(path)
        self.shapes = {name: tensor.shape for name, tensor in self.file.tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        return self.file.tensor(name)


class _Without:
    """A source less the tensors that are accounted for otherwise."""

    def __init__(self, source: TensorSource, names: set[str]) -> None:
        self.name = source.name
        self.shapes = {name: shape for name, shape in source.shapes.items() if name not in names}
        self.read = source.read


def _gguf_path(path: Path) -> Path | None:
    """The one GGUF file of `path`, or None where safetensors are to be read."""
    if path.is_file():
        return None if path.suffix == ".safetensors" else path
    files = sorted(path.glob("*.gguf"))
    if not files or any(path.glob("*.safetensors")):
        return None
    if len(files) > 1:
        raise ValueError(
            f"{path}: {len(files)} .gguf files ({', '.join(f.name for f in files)}); name the one to load"
        )
    return files[0]


def _own_tensors(config: DrafterConfig, source: TensorSource, is_speculators: bool) -> DrafterFiles:
    mapping = {D2T, T2D} & set(source.shapes)
    copies = set()
    if is_speculators:
        copies = set(_TARGET_COPIES) & set(source.shapes)
        if config.draft_vocab_size is None:
            copies |= {"lm_head.weight"} & set(source.shapes)
    for name in sorted(copies):
        logger.info("%s: not used, the target's own takes its place", name)
    draft_token_ids = _draft_token_ids(config, source) if mapping or config.draft_vocab_size else None
    if config.draft_vocab_size is None:
        draft_token_ids = None
    return DrafterFiles(config, _Without(source, mapping | copies), draft_token_ids)


def _draft_token_ids(config: DrafterConfig, source: TensorSource) -> torch.Tensor:
    """The target's id of each draft token, from d2t or t2d; both must agree where both are there."""
    size = config.draft_vocab_size or config.vocab_size
    found = {}
    if D2T in source.shapes:
        offsets = source.read(D2T).long().flatten()
        found[D2T] = offsets + torch.arange(len(offsets))
    if T2D in source.shapes:
        found[T2D] = source.read(T2D).flatten().nonzero().flatten()
    if not found:
        raise ValueError(
            f"{D2T}: missing from {source.name}, expected [{size}] because the config's draft_vocab_size is {size}"
        )
    for name, token_ids in found.items():
        if len(token_ids) != size:
            raise ValueError(
                f"{name}: expected {size} draft tokens, checkpoint has {len(token_ids)} ({source.name})"
            )
        if int(token_ids.min()) < 0 or len(token_ids.unique()) != size:
            raise ValueError(f"{name}: its target ids are negative or repeat ({source.name})")
    if len(found) == 2 and not torch.equal(found[D2T].sort().values, found[T2D]):
        raise ValueError(f"{D2T} and {T2D} name different tokens ({source.name})")
    return found.get(D2T, found.get(T2D))

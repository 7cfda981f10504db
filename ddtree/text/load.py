"""Read a tokenizer with transformers; a GGUF's is converted once and kept beside the file.

The conversion takes seconds, the converted copy half of one. The copy's folder is named after the file's size and
time and the library's version, so a new file or a new transformers converts again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
FORMAT = 1  # raise when what is kept changes


def load_pretrained(path: Path):
    """The fast transformers tokenizer of a folder or a .gguf file; ValueError naming what was looked for."""
    if path.is_file() and path.suffix == ".gguf":
        return _load_gguf(path)
    if not path.is_dir():
        raise ValueError(f"{path}: no tokenizer there; expected a folder or a .gguf file")
    if any((path / name).is_file() for name in TOKENIZER_FILES):
        return _load_folder(path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _load_gguf(ggufs[0])
    raise ValueError(f"{path}: no tokenizer there; expected tokenizer.json or one .gguf, found {len(ggufs)} .gguf")


def _load_folder(folder: Path):
    from transformers import AutoTokenizer

    try:
        pretrained = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its parsers raise
        raise ValueError(f"{folder}: its tokenizer cannot be read ({type(error).__name__}: {error})") from error
    if getattr(pretrained, "backend_tokenizer", None) is None:
        raise ValueError(f"{folder}: {type(pretrained).__name__} has no fast form; a tokenizer.json is needed")
    return pretrained


def _load_gguf(path: Path):
    kept = _kept_folder(path)
    if (kept / "tokenizer.json").is_file():
        # A damaged copy is only a missing copy.
        with contextlib.suppress(ValueError):
            return _load_folder(kept)
        shutil.rmtree(kept, ignore_errors=True)
    from transformers import AutoTokenizer

    try:
        pretrained = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"{path}: its tokenizer cannot be read ({type(error).__name__}: {error})") from error
    _keep(pretrained, kept)
    return pretrained


def _kept_folder(path: Path) -> Path:
    import transformers

    stat = path.stat()
    key = f"{FORMAT} {stat.st_size} {stat.st_mtime_ns} {transformers.__version__}"
    return path.with_name(f".{path.stem}.tokenizer-{hashlib.sha256(key.encode()).hexdigest()[:12]}")


def _keep(pretrained, folder: Path) -> None:
    """Save the converted tokenizer by one rename; a folder that cannot be written costs only time."""
    with contextlib.suppress(OSError):
        scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        try:
            pretrained.save_pretrained(scratch)
            scratch.chmod(0o755)
            # Fails where another process was quicker: its copy stays, somebody may be reading it.
            os.replace(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

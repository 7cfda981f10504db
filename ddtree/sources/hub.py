"""A model on the Hugging Face Hub: safetensors, configuration and tokenizer files, never pickles."""

from __future__ import annotations

import re
from pathlib import Path

from ddtree.sources.errors import SourceError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WANTED = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]
UNWANTED = ["consolidated*", "original/*", "onnx/*", "*.onnx*"]


def is_hub_id(value: str) -> bool:
    """`org/name`, and not something that can only be a path."""
    return HUB_ID.fullmatch(value) is not None and not value.endswith(".gguf")


def snapshot(repo_id: str) -> Path:
    """Download (or find in the Hub's own cache) the model's files; SourceError where neither works."""
    # Imported here: it costs half a second, and an embedded model or a folder never needs it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except GatedRepoError as error:
        raise SourceError(f"{repo_id}: the Hub wants its terms accepted and a token (HF_TOKEN) first") from error
    except RepositoryNotFoundError as error:
        raise SourceError(f"{repo_id}: no such folder, and no such (or a private) model on the Hub") from error
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SourceError(
            f"{repo_id}: no such folder, and the Hub could not be reached and its cache has no copy ({first_line}); "
            "connect to the network, or pass a folder that has the model"
        ) from error

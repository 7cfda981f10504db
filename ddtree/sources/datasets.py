"""Files of a data set on the Hugging Face Hub: what is in it, and one of them on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ddtree.sources.errors import SourceError

Result = TypeVar("Result")


def dataset_files(repo_id: str) -> list[str]:
    """Paths of all files of a data set. SourceError where the Hub cannot say."""
    from huggingface_hub import list_repo_files

    return _reached(repo_id, lambda: list_repo_files(repo_id, repo_type="dataset"))


def dataset_file(repo_id: str, path: str) -> Path:
    """One file, downloaded or from the Hub's own cache. SourceError where neither works."""
    from huggingface_hub import hf_hub_download

    return Path(_reached(repo_id, lambda: hf_hub_download(repo_id, path, repo_type="dataset")))


def _reached(repo_id: str, ask: Callable[[], Result]) -> Result:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        return ask()
    except GatedRepoError as error:
        raise SourceError(f"{repo_id}: the Hub wants its terms accepted and a token (HF_TOKEN) first") from error
    except RepositoryNotFoundError as error:
        raise SourceError(f"{repo_id}: no such (or a private) data set on the Hub") from error
    # Offline, the Hub's client raises whatever its transport does.
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SourceError(
            f"{repo_id}: the Hub could not be reached and its cache has no copy ({first_line}); connect to the network, "
            "or give --prompts a set of the package or a JSONL file"
        ) from error

"""`--dataset`: a data set of the Hub as a JSONL file of prompts in the per-user cache, converted once, read offline later."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path

from ddtree.sources import SourceError, cache_dir
from ddtree.sources.datasets import dataset_file, dataset_files

READABLE = (".jsonl", ".json", ".csv", ".parquet")
PREFERRED = ("test", "validation", "train")  # splits, in the order in which they are taken
# Columns that hold what a user asks, in the order in which they are looked for.
COLUMNS = ("turns", "messages", "conversations", "prompt", "question", "problem", "instruction", "input", "text")
MOST_ROWS = 500


def dataset_prompts(name: str) -> Path:
    """`ORG/NAME` or `ORG/NAME:FILE` -> the JSONL file with `id` and `turns`. SourceError names what is wrong."""
    repo_id, _, wanted = name.partition(":")
    if repo_id.count("/") != 1:
        raise SourceError(f"--dataset {name}: expected ORG/NAME or ORG/NAME:FILE, a data set of the Hub")
    kept = cache_dir() / "datasets" / (name.replace("/", "--").replace(":", "--") + ".jsonl")
    if kept.is_file():
        return kept
    files = [file for file in dataset_files(repo_id) if file.endswith(READABLE)]
    chosen = _choose(name, wanted, files)
    prompts = list(_prompts(name, _rows(name, dataset_file(repo_id, chosen))))
    if not prompts:
        raise SourceError(f"--dataset {name}: {chosen} has no column {', '.join(COLUMNS)} with text in it")
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_name(f"{kept.name}.{os.getpid()}.part")
    part.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
    os.replace(part, kept)
    return kept


def _choose(name: str, wanted: str, files: list[str]) -> str:
    """The file asked for, or the first of the most telling split."""
    if wanted:
        if wanted not in files:
            raise SourceError(f"--dataset {name}: no such file; it has {', '.join(files[:8]) or 'none that can be read'}")
        return wanted
    for split in PREFERRED:
        for suffix in READABLE:
            found = [file for file in sorted(files) if split in Path(file).name and file.endswith(suffix)]
            if found:
                return found[0]
    if len(files) == 1:
        return files[0]
    listed = ", ".join(files[:8]) or f"none of {', '.join(READABLE)}"
    raise SourceError(f"--dataset {name}: which of its files? Name one as ORG/NAME:FILE; it has {listed}")


def _rows(name: str, path: Path) -> Iterator[dict]:
    """At most `MOST_ROWS` rows of a file, as dicts."""
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError:
            raise SourceError(
                f"--dataset {name}: {path.name} is Parquet, which needs pyarrow: pip install pyarrow, or name a .jsonl file "
                "of it as ORG/NAME:FILE"
            ) from None
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=MOST_ROWS):
            yield from batch.to_pylist()
            return
        return
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            rows: Iterator = csv.DictReader(file)
        elif path.suffix == ".jsonl":
            rows = (json.loads(line) for line in file if line.strip())
        else:
            whole = json.load(file)
            rows = iter(whole if isinstance(whole, list) else next((v for v in whole.values() if isinstance(v, list)), []))
        for number, row in enumerate(rows):
            if number >= MOST_ROWS:
                return
            if isinstance(row, dict):
                yield row


def _prompts(name: str, rows: Iterator[dict]) -> Iterator[dict]:
    """Each row's user turns; rows without any are left out."""
    for number, row in enumerate(rows):
        turns = next((found for column in COLUMNS if (found := _turns(row.get(column)))), None)
        if turns:
            yield {"id": f"{name.partition(':')[0].rpartition('/')[2]}-{number}", "turns": turns}


def _turns(value) -> list[str]:
    """User turns from a text, a list of texts, or a list of messages of either common form."""
    if isinstance(value, str):
        return [value] if value.strip() else []
    if not isinstance(value, list):
        return []
    if all(isinstance(each, str) for each in value):
        return [each for each in value if each.strip()]
    messages = [each for each in value if isinstance(each, dict)]
    said = [(each.get("role") or each.get("from"), each.get("content") or each.get("value")) for each in messages]
    return [text for role, text in said if role in ("user", "human") and isinstance(text, str) and text.strip()]

"""Let the trained target write its drafter's data: it answers the prepared prompts, greedily or warm.

    python -m recipes.hybrid_tiny.write --target RUN/target --data DATA --out SHARDS --minutes 0.6 [--part 0 --parts 4]

Shards are what `ddtree train fit` reads (tokens_, classes_, temperatures_NNNN.npy), one set per length, so that short answers carry no
padding. Several devices write at once, each its own part of the prompts. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from ddtree.text.tokenizer import Tokenizer
from ddtree.training.hybrid import HybridTarget
from ddtree.training.hybrid_writer import write

LENGTHS = (128, 256, 640)
TEMPERATURES, SHARES = (0.0, 0.7, 1.0), (0.7, 0.2, 0.1)


class Prompts:
    """The prepared prompts of one or several folders as flat ids and offsets."""

    def __init__(self, folders: list[Path]) -> None:
        self.ids = np.concatenate([np.load(folder / "prompts.npy") for folder in folders])
        lengths = [np.diff(np.load(folder / "prompt_offsets.npy")) for folder in folders]
        self.offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> list[int]:
        return self.ids[self.offsets[index] : self.offsets[index + 1]].astype(np.int64).tolist()


def save(
    folder: Path, number: int, tokens: np.ndarray, classes: np.ndarray, temperatures: np.ndarray, ends: np.ndarray, longest: int
) -> int:
    """Write one batch as a shard per length up to `longest`; returns the positions written."""
    total, shortest = 0, 0
    for place, length in enumerate((*(length for length in LENGTHS if length < longest), longest)):
        rows = np.flatnonzero((ends > shortest) & (ends <= length))
        shortest = length
        if len(rows) < 2:
            continue
        name = f"{number * len(LENGTHS) + place:04d}.npy"
        np.save(folder / f"tokens_{name}", tokens[rows, :length])
        np.save(folder / f"temperatures_{name}", temperatures[rows])
        np.save(folder / f"classes_{name}", classes[rows, :length])
        total += len(rows) * length
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders of prepared prompts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=0.6)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--length", type=int, default=LENGTHS[-1], help="most positions of a sequence, its prompt included")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    target = HybridTarget.load(args.target, args.device, dtype)
    stops = sorted(Tokenizer.load(args.target).eos_token_ids)
    prompts, started = Prompts(args.data), time.monotonic()
    rng = np.random.default_rng((args.seed, args.part))
    order = rng.permutation(np.arange(args.part, len(prompts), args.parts))
    # batches of prompts that are about as long: none waits for the others' prefixes
    order = order[: len(order) // args.batch * args.batch or len(order)]
    order = order[np.argsort(np.diff(prompts.offsets)[order], kind="stable")]
    batches = [order[start : start + args.batch] for start in range(0, len(order), args.batch)]
    total = 0
    for count, number in enumerate(rng.permutation(len(batches))):
        elapsed = time.monotonic() - started
        if count and elapsed * (count + 1) / count > args.minutes * 60:
            break
        chosen = [prompts[index] for index in batches[number]]
        temperatures = rng.choice(TEMPERATURES, size=len(chosen), p=SHARES).astype(np.float32)
        result = write(target, chosen, temperatures, args.length, stops, seed=args.seed * 1000 + int(number))
        total += save(args.out, args.part * 1000 + count, *result[:2], temperatures, result[2], args.length)
        print(f"write: part {args.part}, batch {count}, {total:,} positions, {time.monotonic() - started:.0f} s", flush=True)
    print(json.dumps({"part": args.part, "positions": total, "batches": count + 1, "seconds": round(time.monotonic() - started, 1)}))


if __name__ == "__main__":
    main()

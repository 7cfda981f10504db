"""SmolLM2 writes the prose that `hybrid-tiny` learns its English from: conversations and raw text, no code, no sums.

    python -m recipes.hybrid_tiny.sample_prose --smollm2 FILE.gguf --out SHARDS --tokens 12e6 --minutes 1 --seed 0

The sampler is `ddtree train sample`'s, with other shares of its openers and cooler answers. Several devices write at once, each with
its own seed and folder.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from ddtree.training import openers, sample
from ddtree.training.command import open_target
from ddtree.training.config import SamplingConfig

SHARES = {"general": 0.45, "writing": 0.35, "raw": 0.20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smollm2", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=lambda text: int(float(text)), default=12_000_000)
    parser.add_argument("--batch-tokens", type=lambda text: int(float(text)), default=4096 * 384)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    target = open_target(args.smollm2, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    config = replace(
        SamplingConfig(),
        tokens=args.tokens,
        minutes=args.minutes,
        batch_tokens=args.batch_tokens,
        lengths=(384,),
        temperatures=(0.0, 0.5, 0.8),
        temperature_shares=(0.3, 0.4, 0.3),
        user_cap=(128, 160),
        seed=1 + args.seed,
    )
    sample.sample(target, {**openers.load(), "shares": SHARES}, args.out, config)


if __name__ == "__main__":
    main()

"""The commands `sample`, `fit` and `adapter`; nothing here needs more than torch, numpy, safetensors and gguf."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch

from ddtree.training.config import AdapterTrainingConfig, SamplingConfig, TrainingConfig

CONFIGS = {"sample": SamplingConfig, "fit": TrainingConfig, "adapter": AdapterTrainingConfig}
HELP = {
    "tokens": "positions to write in all, e.g. 28e6",
    "minutes": "stop after the shard that ends within this time",
    "total_minutes": "training time of all runs together; drives the schedule",
    "minutes_this_run": "wall time of this command, warm-up and export included",
    "summary": "of the path before the parent: none, grandparent, recurrence or attention",
    "jointly": "let the drafter learn too; it is exported beside the adapter",
    "race": "optimizer:rate,... each trained for --race-seconds first; the best is used",
}


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """A flag for every field of a config class."""
    for field in dataclasses.fields(config):
        flag, kind = "--" + field.name.replace("_", "-"), type(field.default)
        if kind is bool:
            parser.add_argument(flag, action="store_true", help=HELP.get(field.name))
            continue
        convert = (lambda text: int(float(text))) if kind is int else kind
        if kind is tuple:
            convert = tuple_of(type(field.default[0]))
        parser.add_argument(flag, type=convert, default=field.default, help=HELP.get(field.name, f"default {field.default}"))


def tuple_of(kind: type):
    return lambda text: tuple(kind(part) for part in text.split(","))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ddtree train", description="sample data from a target, fit a drafter, and an adapter to it")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, config in CONFIGS.items():
        command = commands.add_parser(name)
        command.add_argument("--target", required=True, help="folder or .gguf of the target")
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        command.add_argument("--out", required=True, type=Path, help="folder to write into")
        if name != "sample":
            command.add_argument("--data", required=True, type=Path, help="folder that `sample` wrote")
        if name == "adapter":
            command.add_argument("--drafter", required=True, type=Path, help="folder of the drafter; it stays as it is")
        add_flags(command, config)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Run one command; with the same arguments again it goes on where it stopped."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "--adapter" in arguments[:1]:
        arguments[0] = "adapter"  # `ddtree train --adapter` is the same command
    args = build_parser().parse_args(arguments)
    config_class = CONFIGS[args.command]
    config = config_class(**{field.name: getattr(args, field.name) for field in dataclasses.fields(config_class)})
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = open_target(Path(args.target), device, dtype)
    if args.command == "sample":
        from ddtree.training import openers, sample

        if target.config.is_hybrid:
            raise SystemExit(f"--target {args.target}: sample knows attention-only targets; see recipes/hybrid_tiny/write.py")
        sample.sample(target, openers.load(), args.out, config)
    elif args.command == "adapter":
        from ddtree.training.adapter import fit_adapter
        from ddtree.training.data import Data

        fit_adapter(target, args.drafter, Data(args.data, device), args.out, config)
    else:
        from ddtree.training.data import Data
        from ddtree.training.trainer import fit

        fit(target, Data(args.data, device), args.out, config)


def open_target(path: Path, device: torch.device, dtype: torch.dtype):
    """The frozen target in `path`: a `HybridTarget` for a folder whose config has linear attention, else a `DenseTarget`."""
    from ddtree.models.config import ModelConfig
    from ddtree.models.registry import load_target
    from ddtree.training.features import DenseTarget
    from ddtree.training.hybrid import HybridTarget

    config_json = path / "config.json"
    if config_json.is_file() and ModelConfig.from_hf(json.loads(config_json.read_text())).is_hybrid:
        return HybridTarget.load(path, device, dtype)
    # dequantised in float32 and rounded once
    return DenseTarget(load_target(path, device, torch.float32), dtype)

"""`ddtree serve --engine sglang`: the SGLang command that serves the same model, and the refusal of what it cannot mean."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from ddtree.sglang.hooks import RUN_WITH

# Settings of ours that SGLang's command has a flag for; the others are our own engine's and server's.
UNDERSTOOD = (
    "engine", "engine_args", "model", "drafter", "tree_budget", "device", "dtype", "max_context", "host", "port",
    "served_model_name", "api_key", "max_running", "verbose", "gpu_memory_fraction",
)
DEFAULT = "default"  # the origin of a setting that nobody made


def command_of(args: Namespace, origins: Mapping[str, str], target: Path, drafter: Path | None) -> list[str]:
    """The command line, program included. `origins` says which settings somebody made.

    Raises:
        ValueError: a setting that SGLang has no word for, or a model or drafter that it cannot read.
    """
    unheard = [name for name, origin in origins.items() if origin != DEFAULT and name not in UNDERSTOOD]
    if unheard:
        flags = ", ".join("--" + name.replace("_", "-") for name in unheard)
        raise ValueError(f"{flags}: of ddtree's own engine, not of --engine sglang; leave out, or use --engine-args")
    _check_files(target, drafter)
    flags = {
        "model-path": target,
        "host": args.host,
        "port": args.port,
        "speculative-algorithm": "DDTREE",
        "speculative-draft-model-path": drafter,
        # Auto chooses budgets by what rounds cost in our own engine; SGLang's trees are all of one size.
        "speculative-num-draft-tokens": None if args.tree_budget == "auto" else args.tree_budget + 1,
        "device": None if args.device == "auto" else args.device,
        "dtype": args.dtype,
        "context-length": args.max_context,
        "served-model-name": _one_name(args.served_model_name),
        "api-key": args.api_key,
        "max-running-requests": args.max_running if origins.get("max_running", DEFAULT) != DEFAULT else None,
        "mem-fraction-static": args.gpu_memory_fraction,
        "log-level": "debug" if args.verbose else None,
    }
    given = [part for name, value in flags.items() if value is not None for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "sglang.launch_server", *given, *shlex.split(args.engine_args or "")]


def shown(command: list[str]) -> str:
    """The command for people to read and paste; a key is not shown."""
    hidden = [index + 1 for index, part in enumerate(command) if part == "--api-key"]
    return shlex.join("(set)" if index in hidden else part for index, part in enumerate(command))


def check_installed() -> None:
    """ValueError where there is no SGLang to run."""
    if importlib.util.find_spec("sglang") is None:
        raise ValueError(f'--engine sglang: SGLang is not installed; pip install "ddtree[sglang]" (or sglang=={RUN_WITH})')


def _one_name(names: list[str]) -> str | None:
    if len(names) > 1:
        raise ValueError(f"--served-model-name: SGLang serves under one name, got {', '.join(names)}; give one")
    return names[0] if names else None


def _check_files(target: Path, drafter: Path | None) -> None:
    if not (target.is_dir() and any(target.glob("*.safetensors"))):
        raise ValueError(f"MODEL {target}: SGLang is given folders of safetensors here; a GGUF is for ddtree's own engine")
    if drafter is None:
        raise ValueError("--engine sglang needs --drafter, a DFlash drafter: without one, run SGLang itself")
    if not drafter.is_dir():
        raise ValueError(f"--drafter {drafter}: SGLang reads the config.json beside the weights; give their folder")

"""What will be in memory, said in words before anything is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ddtree.sources import Source


def check_memory(args: argparse.Namespace, source: Source, say: Callable[[str], None]) -> None:
    """Keep to --gpu-memory-fraction, then say what weights take and how long a context the rest holds.

    ValueError where the weights alone do not fit. A checkpoint that cannot be read is left to the loader, which says why.
    """
    from ddtree.doctor.checks import FAILED, OK
    from ddtree.doctor.compatibility import read_drafter, read_target
    from ddtree.doctor.fitting import memory_checks
    from ddtree.engine.free_memory import keep_to
    from ddtree.engine.loading import pick_device, pick_dtype

    device = pick_device(args.device)
    if args.gpu_memory_fraction is not None:
        keep_to(device, args.gpu_memory_fraction)
    refused, target, shapes = read_target(source.target)
    if refused is not None:
        return
    drafter, drafter_shapes = None, {}
    if source.drafter is not None:
        refused, drafter, drafter_shapes = read_drafter(source.drafter)
        if refused is not None:
            return
    kinds = device, pick_dtype(args.dtype, device)
    for check in memory_checks(*kinds, target, shapes, drafter, drafter_shapes, args.max_context):
        if check.status == FAILED:
            raise ValueError(f"{source.target} does not fit into memory: {check.found}; {check.remedy}")
        remedy = "" if check.status == OK or not check.remedy else f"; {check.remedy}"
        say(f"memory, {check.name}: {check.found}{remedy}")

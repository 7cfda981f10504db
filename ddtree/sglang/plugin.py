"""The entry point that SGLang calls in each of its processes: makes `--speculative-algorithm DDTREE` known."""

from __future__ import annotations

import logging

from ddtree.sglang.hooks import REGISTRY, missing, refusal

logger = logging.getLogger(__name__)

NAME = "DDTREE"
ATTENTION_BACKEND = "torch_native"  # on a CPU; `masked_attention` stands behind this name there


def register() -> None:
    """Register the algorithm. Everything else that it needs is looked for when a server asks for it."""
    absent = missing(REGISTRY)
    if absent:
        logger.error("%s", refusal(absent))
        return
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from ddtree.sglang.algorithm import DDTreeAlgorithm

    SpeculativeAlgorithm.register(NAME, supports_overlap=False, spec_class=DDTreeAlgorithm)(worker_class)


def worker_class(server_args) -> type:
    """SGLang's factory of workers: the class, imported only where a worker is to run."""
    from ddtree.sglang.worker import DDTreeWorker

    return DDTreeWorker

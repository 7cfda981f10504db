"""ddtree serve --engine sglang: become SGLang's server, with DDTree as its speculative algorithm."""

from __future__ import annotations

import logging
import os

from ddtree.cli.settings import Settings, without_settings
from ddtree.sglang.command import check_installed, command_of, shown
from ddtree.sources import resolve

logger = logging.getLogger("ddtree")


def serve(settled: Settings) -> None:
    """Replace this process. ValueError, in one line, for whatever stands in the way."""
    check_installed()
    source = resolve(settled.args.model, settled.args.drafter)
    command = command_of(settled.args, settled.origins, source.target, source.drafter)
    logger.info("running %s", shown(command))
    os.execve(command[0], command, without_settings(os.environ))

"""ddtree serve: settle what was asked for, and hand it to one server or to a supervisor of several."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from ddtree.cli.logs import set_up_logging
from ddtree.cli.settings import settle

logger = logging.getLogger("ddtree")


def serve(flags: Sequence[str]) -> int:
    """Serve until a signal. ValueError, in one line, for whatever stands in the way."""
    settled = settle(flags, os.environ)
    args = settled.args
    set_up_logging(args.verbose, args.log_json, args.replica_index)
    if args.replica_index is None:
        for line in settled.describe():
            logger.info("%s", line)
    if args.engine == "sglang":
        from ddtree.cli.on_sglang import serve as become

        become(settled)
    # A supervisor has no use for torch, which takes seconds to import.
    if args.gpus is not None or (args.replicas or 1) > 1:
        from ddtree.cli.replicas import serve_replicas as serve_here
    else:
        from ddtree.cli.serve import serve as serve_here
    serve_here(args)
    logger.info("bye")
    return 0

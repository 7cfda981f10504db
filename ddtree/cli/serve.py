"""ddtree serve: listen at once, load behind it, end cleanly."""

from __future__ import annotations

import argparse
import logging

from ddtree.cli.fits import check_memory
from ddtree.cli.keys import keys_of, warn_if_open
from ddtree.cli.loaded import default_budget, find, load, start
from ddtree.server.app import create_app
from ddtree.server.facts import facts_of
from ddtree.server.metrics import Metrics
from ddtree.server.run import listen_on, listen_on_unix, run, url_of
from ddtree.server.settings import ServerSettings
from ddtree.server.worker import Worker
from ddtree.sources import Source

logger = logging.getLogger("ddtree")


def serve(args: argparse.Namespace) -> None:
    """Serve until a signal. ValueError, in one line, for whatever stands in the way."""
    keys = keys_of(args)
    # Before a download or a load, which would be in vain.
    sock = listen_on(args.host, args.port) if args.uds is None else listen_on_unix(args.uds)
    try:
        warn_if_open(sock, keys)
        source, tokenizer = find(args)
        settings = ServerSettings(
            served_names=tuple(dict.fromkeys((source.served_name, *args.served_model_name))),
            target=source.name,
            drafter=str(source.drafter) if source.drafter else None,
            ui=not args.no_ui,
            cors_origins=("*",) if args.cors_origin is None else tuple(filter(None, args.cors_origin)),
            more_api_keys=keys,
            max_body_bytes=args.max_body * 2**20,
            log_prompts=args.log_prompts,
        )
        url = url_of(sock)
        worker = Worker(lambda: _load(args, source, url), args.max_waiting, Metrics(settings.model))
        app = create_app(worker, tokenizer, settings)
        logger.info("loading %s from %s", settings.model, source.target)
        run(app, worker, sock, args.drain)
    finally:
        sock.close()


def _load(args: argparse.Namespace, source: Source, url: str):
    """In the engine's thread: the engine and its facts, with the lines that say what was loaded."""
    check_memory(args, source, logger.info)
    engine = load(args, source)
    budget = default_budget(args, source, engine, logger.info)
    start(source, engine, logger.info)  # also where the default is pinned: a request may still ask for "auto"
    facts = facts_of(engine, budget.size)
    drafter = f"{source.drafter.name}, block size {engine.block_size}, {facts.scoring}" if source.drafter else "none"
    alike = ", batch-invariant" if facts.batch_invariant else ""
    logger.info("model %s, device %s, dtype %s%s", source.served_name, facts.device, facts.dtype, alike)
    logger.info("context %d tokens, drafter %s", facts.max_context, drafter)
    logger.info("default tree budget %s (%s)", budget.size, budget.reason)
    logger.info("ready: %s/v1" if args.uds is None else "ready on %s", url)
    return engine, facts

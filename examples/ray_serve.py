"""The server as a Ray Serve deployment, for those who already have Ray: replicas, autoscaling, conversations that stay together.

    pip install "ray[serve]"
    DDTREE_MODEL=hybrid-tiny serve run examples.ray_serve:app        # from the root of the repository

Settings are those of `ddtree serve`, from the environment or a file (docs/cluster.md); what Ray decides (host, port, replicas)
is Ray's. REPLICAS and GPUS_EACH say how many there may be and what each takes. Requests with one X-Session-Id go to one replica.
"""

from __future__ import annotations

import functools
import os
import time

from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig

from ddtree.cli.keys import keys_of
from ddtree.cli.loaded import default_budget, find, load, start
from ddtree.cli.settings import settle
from ddtree.server.app import create_app
from ddtree.server.facts import facts_of
from ddtree.server.metrics import Metrics
from ddtree.server.settings import ServerSettings
from ddtree.server.worker import Worker

LEAST, MOST = (int(each) for each in os.environ.get("REPLICAS", "1-2").split("-"))
GPUS_EACH = float(os.environ.get("GPUS_EACH", 0))


@functools.cache
def served() -> tuple[FastAPI, Worker]:
    """This replica's app and the thread of its engine, which is loading."""
    args = settle([], os.environ).args
    source, tokenizer = find(args)

    def loaded():
        engine = load(args, source)
        budget = default_budget(args, source, engine, print)
        start(source, engine, print)
        return engine, facts_of(engine, budget.size)

    names = tuple(dict.fromkeys((source.served_name, *args.served_model_name)))
    settings = ServerSettings(names, source.name, str(source.drafter or ""), more_api_keys=keys_of(args))
    worker = Worker(loaded, args.max_waiting, Metrics(settings.model)).start()
    return create_app(worker, tokenizer, settings), worker


def build() -> FastAPI:
    """Called in each replica."""
    return served()[0]


@serve.deployment(
    name="ddtree",
    max_ongoing_requests=64,
    ray_actor_options={"num_cpus": 1, "num_gpus": GPUS_EACH},
    autoscaling_config={"min_replicas": LEAST, "max_replicas": MOST, "target_ongoing_requests": 8},
    request_router_config=RequestRouterConfig(
        request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
    ),
    health_check_period_s=5,
)
@serve.ingress(build)
class Server:
    """A replica: requests come once its engine is warm."""

    def __init__(self):
        worker = served()[1]
        while worker.state == "starting":
            time.sleep(0.1)
        self.check_health()

    def check_health(self) -> None:
        """Ray starts a replica again whose engine is not well."""
        worker = served()[1]
        if worker.state != "ready":
            raise RuntimeError(f"the engine is {worker.state}: {worker.failure}")


app = Server.bind()

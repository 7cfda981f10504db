"""What the supervisor answers for all replicas: /health, /stats and /metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ddtree.replicas.ask import Reply, ask
from ddtree.replicas.launch import Replica
from ddtree.replicas.merge import merge

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SUMMED = ("running", "waiting")
SHARED = ("model", "target", "drafter", "version", "dtype", "batch_invariant", "max_context", "block_size", "tree_budget")


def admin_app(replicas: Sequence[Replica], warm: Callable[[], bool]) -> Starlette:
    """The app; `warm` says whether all replicas have been ready once."""
    admin = Admin(replicas, warm)
    routes = [Route(f"/{name}", getattr(admin, name), methods=["GET"]) for name in ("health", "stats", "metrics")]
    return Starlette(routes=routes)


class Admin:
    """One method per route; they run in threads, since they ask and wait."""

    def __init__(self, replicas: Sequence[Replica], warm: Callable[[], bool]):
        self._replicas, self._warm = replicas, warm

    def health(self, request: Request) -> Response:
        """GET /health: 503 until all replicas have been ready, then 200 for as long as one is; "degraded" says which are not."""
        ready = [each for each in self._replicas if each.state == "ready"]
        total = len(self._replicas)
        counts = {"ready": len(ready), "total": total, "not_ready": [r.index for r in self._replicas if r not in ready]}
        if self._warm() and ready:
            return JSONResponse({"status": "ok" if len(ready) == total else "degraded", "replicas": counts})
        message = "no replica is ready" if self._warm() else f"{len(ready)} of {total} replicas are ready"
        code = "no_replica" if self._warm() else "starting"
        error = {"message": f"{message}: try again shortly", "type": "service_unavailable_error", "param": None, "code": code}
        return JSONResponse({"error": error, "replicas": counts}, 503, headers={"Retry-After": "2"})

    def stats(self, request: Request) -> Response:
        """GET /stats: sums, what all have in common, and each replica's own."""
        found = [json.loads(reply.body) if reply is not None else {} for reply in self._ask("/stats")]
        common = next((each for each in found if "dtype" in each), next(filter(None, found), {}))
        ready = sum(each.state == "ready" for each in self._replicas)
        return JSONResponse(
            {
                "state": "ready" if ready and self._warm() else "starting",
                **{name: sum(each.get(name, 0) for each in found) for name in SUMMED},
                **{name: common[name] for name in SHARED if name in common},
                "replicas": [
                    {"index": r.index, "place": r.launch.place, "pid": r.pid, "restarts": r.restarts}
                    | {key: value for key, value in own.items() if key not in SHARED}
                    | {"state": r.state}
                    for r, own in zip(self._replicas, found, strict=True)
                ],
            }
        )

    def metrics(self, request: Request) -> Response:
        """GET /metrics: every replica's, and whether it is up."""
        replies = self._ask("/metrics")
        texts = {r.index: reply.body.decode() for r, reply in zip(self._replicas, replies, strict=True) if reply}
        return Response(self._own_metrics() + merge(texts), media_type=METRICS_TYPE)

    def _own_metrics(self) -> str:
        lines = ["# HELP ddtree:replica_up Whether the replica is ready, 1 or 0.", "# TYPE ddtree:replica_up gauge"]
        lines += [f'ddtree:replica_up{{replica="{r.index}"}} {int(r.state == "ready")}' for r in self._replicas]
        lines.append("# HELP ddtree:replica_restarts_total Times that the replica was started again.")
        lines.append("# TYPE ddtree:replica_restarts_total counter")
        lines += [f'ddtree:replica_restarts_total{{replica="{r.index}"}} {r.restarts}' for r in self._replicas]
        return "\n".join(lines) + "\n"

    def _ask(self, target: str) -> list[Reply | None]:
        """All replicas at once, so that one that hangs costs one timeout; None for those that do not answer well."""
        with ThreadPoolExecutor(len(self._replicas)) as pool:
            replies = pool.map(lambda each: ask(each.launch.socket, target, timeout_s=2.0), self._replicas)
            return [reply if reply is not None and reply.status == 200 else None for reply in replies]

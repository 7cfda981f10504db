"""create_app(worker, tokenizer, settings): the routes of the OpenAI API and its neighbours."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ddtree import __version__
from ddtree.server import errors, faults, page
from ddtree.server.access import Access
from ddtree.server.batch import WorkerLike
from ddtree.server.handlers import Handlers
from ddtree.server.linger import Linger
from ddtree.server.settings import ServerSettings
from ddtree.server.text import Text
from ddtree.text import Tokenizer

# The token endpoints stand beside /v1 for history's sake; what they do is worth a key as well.
GUARDED = ("/v1", "/tokenize", "/detokenize")


def create_app(worker: WorkerLike, tokenizer: Tokenizer, settings: ServerSettings) -> FastAPI:
    """The app. Who makes the worker starts and stops it; the app only submits."""
    handlers = Handlers(worker, Text(tokenizer), settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        handlers.close()

    # Bodies are read by hand (strict JSON, size limit), so a generated schema would say nothing; ours is in openapi.py.
    app = FastAPI(title="ddtree", version=__version__, lifespan=lifespan, openapi_url=None)
    faults.install(app)
    routes = [
        ("POST", "/v1/chat/completions", handlers.chat),
        ("POST", "/v1/completions", handlers.completions),
        ("POST", "/v1/responses", handlers.responses),
        ("POST", "/v1/messages", handlers.messages),
        ("POST", "/v1/messages/count_tokens", handlers.count_tokens),
        ("GET", "/v1/models", handlers.models),
        ("GET", "/v1/models/{model_id:path}", handlers.model),
        ("POST", "/tokenize", handlers.tokenize),
        ("POST", "/detokenize", handlers.detokenize),
        ("GET", "/health", handlers.health),
        ("GET", "/version", handlers.version),
        ("GET", "/stats", handlers.stats),
        ("GET", "/metrics", handlers.metrics),
        ("GET", "/openapi.json", handlers.openapi),
    ]
    for method, path, handler in routes:
        # Load balancers probe with HEAD; FastAPI, unlike Starlette, does not add it to GET by itself.
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        app.add_api_route(path, handler, methods=methods, response_model=None)
    if settings.ui:
        page.install(app)
    if settings.api_keys:
        app.add_middleware(KeyGuard, api_keys=settings.api_keys)
    app.add_middleware(Linger, max_bytes=settings.max_body_bytes)
    if settings.cors_origins:
        # The outermost, as a preflight carries no key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id"],
        )
    app.add_middleware(Access, bodies=settings.log_prompts)
    return app


class KeyGuard:
    """401 for requests without the key. Plain ASGI, so that streams pass through untouched."""

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...]):
        self._app = app
        self._expected = [each.encode() for each in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _guarded(scope["path"]) and not self._has_key(scope):
            error = errors.Unauthorized("missing or wrong API key: send Authorization: Bearer <key>", code="invalid_api_key")
            response = JSONResponse(errors.body_for(scope["path"], error), error.status, headers=error.headers)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        # Anthropic's clients send the key bare, in a header of its own.
        keys = [given.strip()] if scheme.lower() == b"bearer" else []
        keys.append(headers.get(b"x-api-key", b""))
        # Every pair is compared, so that the time tells nothing.
        return sum(secrets.compare_digest(key, each) for key in keys for each in self._expected) > 0


def _guarded(path: str) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in GUARDED)

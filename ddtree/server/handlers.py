"""Request in, answer out: read and check the body, submit, gather or stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response

from ddtree import __version__
from ddtree.server import body as bodies
from ddtree.server.batch import Batch, Facts, WorkerLike
from ddtree.server.chat import ChatRequest
from ddtree.server.choices import Choice
from ddtree.server.completions import CompletionRequest
from ddtree.server.errors import ClientGone, InvalidRequest, ModelNotFound, said_as, shown
from ddtree.server.generation import Generation
from ddtree.server.messages import NAMES as MESSAGES_NAMES
from ddtree.server.messages import CountTokensRequest, MessagesRequest, tokenize_of
from ddtree.server.messages import chat_of as messages_chat
from ddtree.server.messages_wire import MessagesWire
from ddtree.server.openapi import document
from ddtree.server.prepare import Prepared, Prompt, completion_prompts, prepare
from ddtree.server.refusals import CHAT, COMPLETION, MESSAGES, NOTHING, RESPONSES, TOKENIZE, Table
from ddtree.server.responses import ResponsesRequest
from ddtree.server.responses import chat_of as responses_chat
from ddtree.server.responses import names as responses_names
from ddtree.server.responses_wire import ResponsesWire
from ddtree.server.settings import ServerSettings
from ddtree.server.stream import EventStream, WireShape, events, gone
from ddtree.server.text import Text
from ddtree.server.tokens import DetokenizeRequest, TokenizeRequest
from ddtree.server.wire import Wire
from ddtree.server.worker import unavailable

Result = TypeVar("Result")


class Handlers:
    """One method per route."""

    def __init__(self, worker: WorkerLike, text: Text, settings: ServerSettings):
        self._worker, self._text, self._settings = worker, text, settings
        self._started = time.time()
        # One thread: tokenising a long prompt must not hold up the event loop, and two at once gain nothing.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ddtree-text")

    def close(self) -> None:
        """Give the thread back."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        facts = self._facts()
        body = await self._read(request, ChatRequest, CHAT)
        return await self._generate(request, body, facts, lambda: [self._text.chat(body)], self._openai_wire(body))

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        facts = self._facts()
        body = await self._read(request, CompletionRequest, COMPLETION)
        prompts = partial(completion_prompts, body, self._text, facts.vocab_size)
        return await self._generate(request, body, facts, prompts, self._openai_wire(body))

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses"""
        facts = self._facts()
        body = await self._read(request, ResponsesRequest, RESPONSES)
        with said_as(responses_names(body)):
            chat = responses_chat(body)
            wire = partial(ResponsesWire, self._settings.model, body=body)
            return await self._generate(request, chat, facts, lambda: [self._text.chat(chat)], wire)

    async def messages(self, request: Request) -> Response:
        """POST /v1/messages"""
        facts = self._facts()
        body = await self._read(request, MessagesRequest, MESSAGES)
        with said_as(MESSAGES_NAMES):
            chat = messages_chat(body)
            wire = partial(MessagesWire, self._settings.model)
            return await self._generate(request, chat, facts, lambda: [self._text.chat(chat)], wire)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens"""
        self._facts()
        body = await self._read(request, CountTokensRequest, MESSAGES)
        with said_as(MESSAGES_NAMES):
            token_ids = await self._aside(lambda: self._tokenized(tokenize_of(body)))
        return JSONResponse({"input_tokens": len(token_ids)})

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        facts = self._facts()
        body = await self._read(request, TokenizeRequest, TOKENIZE)
        token_ids = await self._aside(lambda: self._tokenized(body))
        return JSONResponse({"tokens": token_ids, "count": len(token_ids), "max_model_len": facts.max_context})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        facts = self._facts()
        body = await self._read(request, DetokenizeRequest, NOTHING)
        wrong = next((token_id for token_id in body.tokens if token_id >= facts.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"tokens: ids lie in 0 ... {facts.vocab_size - 1}, got {wrong}", "tokens")
        return JSONResponse({"prompt": await self._aside(lambda: self._text.decode(body.tokens))})

    async def models(self) -> Response:
        """GET /v1/models"""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._settings.served_names]})

    async def model(self, model_id: str) -> Response:
        """GET /v1/models/{id}; ids may hold slashes."""
        if model_id not in self._settings.served_names:
            known = ", ".join(self._settings.served_names)
            raise ModelNotFound(f"no model {shown(model_id)} here, only {known}", "model", "model_not_found")
        return JSONResponse(self._model(model_id))

    async def health(self) -> Response:
        """GET /health: 200 once warm, for as long as the engine's thread lives."""
        self._facts()
        return JSONResponse({"status": "ok"})

    async def version(self) -> Response:
        """GET /version"""
        return JSONResponse({"version": __version__})

    async def stats(self) -> Response:
        """GET /stats"""
        facts = self._worker.facts
        known = {}
        if facts is not None:
            known = {
                "device": facts.device,
                "dtype": facts.dtype,
                "batch_invariant": facts.batch_invariant,
                "max_context": facts.max_context,
                "block_size": facts.block_size,
                "scoring": facts.scoring,
                "tree_budget": {"default": facts.default_tree_budget, "max": facts.max_tree_budget},
                "memory": facts.memory(),
            }
        return JSONResponse(
            {
                "state": self._worker.state,
                "running": self._worker.num_running,
                "waiting": self._worker.num_waiting,
                "model": self._settings.model,
                "target": self._settings.target,
                "drafter": self._settings.drafter,
                "version": __version__,
                "uptime_s": round(time.time() - self._started, 3),
                **known,
            }
        )

    async def openapi(self) -> Response:
        """GET /openapi.json"""
        return JSONResponse(document())

    async def metrics(self) -> Response:
        """GET /metrics: Prometheus text."""
        worker, facts = self._worker, self._worker.facts
        cache_use = facts.cache_use() if facts is not None else 0.0
        body = worker.metrics.render(worker.num_running, worker.num_waiting, cache_use)
        return Response(body, media_type=worker.metrics.content_type)

    async def _generate(
        self,
        request: Request,
        body: Generation,
        facts: Facts,
        prompts: Callable[[], list[Prompt]],
        shape: Callable[[Prepared], WireShape],
    ) -> Response:
        limit = self._settings.max_sequences
        prepared = await self._aside(lambda: prepare(body, prompts(), self._text, facts, limit))
        wire = shape(prepared)
        batch = await self._worker.submit(prepared.requests)
        if body.stream:
            return EventStream(events(batch, wire, self._settings.keep_alive_s), batch)
        return JSONResponse(wire.response(await self._gather(request, batch, prepared)))

    def _openai_wire(self, body: ChatRequest | CompletionRequest) -> Callable[[Prepared], WireShape]:
        """What shapes the answer to a chat or a completion."""

        def shape(prepared: Prepared) -> Wire:
            chat, shapers = isinstance(body, ChatRequest), None
            if body.num_logprobs is not None:
                shapers = tuple(self._text.logprobs(each, chat) for each in prepared.requests)
            trace = self._text.trace() if body.ddtree_trace else None
            flags = bool(body.return_token_ids), body.include_usage
            return Wire(self._settings.model, prepared, chat, *flags, shapers, trace)

        return shape

    async def _gather(self, request: Request, batch: Batch, prepared: Prepared) -> list[Choice]:
        """All choices, whole; ClientGone as soon as nobody waits for them."""
        choices = [Choice(index) for index in range(len(prepared.requests))]

        async def collect() -> None:
            async for piece in batch:
                choices[piece.index].add(piece)

        collector = asyncio.create_task(collect())
        leaver = asyncio.create_task(gone(request.receive))
        try:
            done, _ = await asyncio.wait({collector, leaver}, return_when=asyncio.FIRST_COMPLETED)
            if collector not in done:
                raise ClientGone
            collector.result()
        finally:
            collector.cancel()
            leaver.cancel()
            batch.close()
        return choices

    def _facts(self) -> Facts:
        if self._worker.state != "ready" or self._worker.facts is None:
            raise unavailable(self._worker)
        return self._worker.facts

    def _model(self, name: str) -> dict:
        return {
            "id": name,
            "object": "model",
            "created": int(self._started),
            "owned_by": "ddtree",
            "root": self._settings.model,
            "max_model_len": self._facts().max_context,
        }

    def _tokenized(self, body: TokenizeRequest) -> list[int]:
        if body.messages is not None:
            return list(self._text.chat(body).token_ids)
        return self._text.encode(body.prompt, "prompt", body.add_special_tokens is not False)

    async def _read(self, request: Request, model: type[bodies.Body], refused: Table) -> bodies.Body:
        return await bodies.read(request, model, self._settings.max_body_bytes, refused)

    async def _aside(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

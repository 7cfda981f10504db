"""A running server by its URL: the same prompts and rules over HTTP, at a concurrency or with Poisson arrivals.

Tokens are counted from the ids and the usage that the server sends, never from events: an event carries a round's
tokens. Under arrivals (`rate`) a request's clock starts when it was due, so that waiting for the server counts.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ddtree.bench.offline import Settings
from ddtree.bench.output import AUTO, CHAIN, FACTORISED, PLAIN, Output, scoring_of
from ddtree.bench.validity import SHORTEST
from ddtree.bench.workloads import Item, Prompt, answer_all
from ddtree.client import HttpNoise, ServerClient

TIMEOUT_S = 600.0
NO_CHAIN = "a request names a tree budget, and a chain is no budget: measure it in the process, without --url"


class Serving:
    """A client of one server. `transport` is httpx's, for tests."""

    def __init__(
        self,
        url: str,
        settings: Settings,
        concurrency: int | None = None,
        rate: float | None = None,
        api_key: str | None = None,
        transport=None,
    ):
        if any(scoring_of(config)[0] == CHAIN for config in settings.configs):
            raise ValueError(f"--budgets chain: {NO_CHAIN}; leave it out with --url")
        self.url, self.settings, self.rate = url.rstrip("/").removesuffix("/v1"), settings, rate
        # Arrivals without a limit are an open loop; without arrivals one request at a time.
        self.concurrency = concurrency or (None if rate else 1)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._transport = transport
        self.throughput: dict[str, list[float]] = {}  # configuration -> tokens per second of each pass
        self.client = ServerClient(url, api_key, Blocking(self._client))
        self.model = self.client.model()

    def facts(self) -> dict:
        """What the server says of itself: model, and where it can, drafter, dtype, device, mode, scoring and version."""
        names = ("drafter", "dtype", "device", "batch_invariant", "scoring", "version")
        stats = self.client.get("/stats") or {}
        known = {name: stats.get(name) for name in names}
        return {"model": self.client.model()} | {name: None if value == "" else value for name, value in known.items()}

    def inspect(self, prompts: Sequence[Prompt], say: Callable[[str], None]) -> tuple[list[Item], dict]:
        """As `Offline.inspect`: every configuration on every turn, one request at a time."""

        def ask(item: Item) -> dict[str, Output]:
            return {config: asyncio.run(self._pass([item], config, 1, None))[0] for config in self.settings.configs}

        return answer_all(prompts, ask, PLAIN, say)

    def near_tie(self, items: Sequence[Item]) -> Callable[[Output, Output, int], dict | None]:
        """For `validity.Rules`: re-scores a first difference by the server's log-probabilities after a fresh prefill."""
        by_id = {item.id: item for item in items}
        noise: list[HttpNoise] = []  # measured once, at the first difference
        exact = self.facts()["batch_invariant"]  # promises the same bits: there a tie is no excuse

        def judge(plain: Output, other: Output, position: int) -> dict | None:
            if exact or self.settings.sampling.temperature or position >= min(len(plain.token_ids), len(other.token_ids)):
                return None  # sampled margins need the noise of the draw, which no server tells
            if not noise:
                noise.append(HttpNoise.measure(self.client, self.model, self.facts()["dtype"]))
            body = {"messages": by_id[plain.item_id].as_messages()}
            if self.settings.thinking is not None:
                body["enable_thinking"] = self.settings.thinking
            prompt = self.client.token_ids(body)
            margin = None if prompt is None else noise[0].margin([*prompt, *plain.token_ids[:position]])
            if margin is None or margin > noise[0].limit:
                return None
            return {"margin": round(margin, 6), "noise": round(noise[0].measured or 0.0, 6)}

        return judge

    def measure(self, items: Sequence[Item], say: Callable[[str], None]) -> Iterator[Output]:
        """`repeats` passes of each configuration, in turn, in an order that turns around."""
        configs = self.settings.configs
        for repeat in range(self.settings.repeats):
            for config in configs if repeat % 2 else configs[::-1]:
                started = time.perf_counter()
                # Every configuration meets the same arrivals.
                outputs = asyncio.run(
                    self._pass(items, config, self.concurrency, self._arrivals(len(items), repeat))
                )
                seconds = time.perf_counter() - started
                tokens = sum(output.output_tokens for output in outputs)
                self.throughput.setdefault(config, []).append(tokens / seconds)
                yield from outputs
            say(f"pass {repeat + 1} of {self.settings.repeats}")

    def _arrivals(self, count: int, repeat: int) -> list[float] | None:
        """Seconds after the start at which each request is due: a Poisson process."""
        if not self.rate:
            return None
        rng = np.random.default_rng([self.settings.seed, repeat])
        return np.cumsum(rng.exponential(1 / self.rate, size=count)).tolist()

    async def _pass(
        self, items: Sequence[Item], config: str, limit: int | None, due: list[float] | None
    ) -> list[Output]:
        gate = asyncio.Semaphore(limit or max(len(items), 1))
        started = time.perf_counter()

        async def one(client, item: Item, at: float | None) -> Output:
            if at is not None:
                await asyncio.sleep(max(started + at - time.perf_counter(), 0))
            arrived = time.perf_counter()
            async with gate:
                return await self._request(
                    client, item, config, time.perf_counter() if at is None else arrived
                )

        async with self._client() as client:
            tasks = [one(client, item, due[i] if due else None) for i, item in enumerate(items)]
            return list(await asyncio.gather(*tasks))

    def _client(self):
        try:
            import httpx
        except ImportError:
            raise ValueError("--url needs httpx: install ddtree[test] or httpx") from None
        return httpx.AsyncClient(
            base_url=self.url, headers=self._headers, timeout=TIMEOUT_S, transport=self._transport
        )

    def body_of(self, item: Item, config: str) -> dict:
        """The request of one item under one configuration."""
        settings = self.settings
        body = {
            "model": self.model,
            "messages": item.as_messages(),
            "max_tokens": settings.max_tokens,
            "temperature": settings.sampling.temperature,
            "seed": settings.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "tree_budget": AUTO if config.startswith(AUTO) else int(config.removesuffix(FACTORISED)),
            **({"scoring": "factorised"} if config.endswith(FACTORISED) else {}),
            # Every prompt is asked several times: one found in a cache would flatter whoever comes second.
            "cache_prompt": False,
            "cache_salt": secrets.token_hex(8),  # the same to servers that know vLLM's field alone
        }
        if settings.ignore_eos:
            body["ignore_eos"] = True
        if settings.thinking is not None:
            body["enable_thinking"] = settings.thinking
        return body

    async def _request(self, client, item: Item, config: str, started: float) -> Output:
        import httpx

        reader = StreamReader(item.id, config)
        try:
            async with client.stream(
                "POST", "/v1/chat/completions", json=self.body_of(item, config)
            ) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    raise ValueError(f"{item.id}, budget {config}: status {answer.status_code}: {text[:300]}")
                async for line in answer.aiter_lines():
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        reader.feed(json.loads(line[5:]), time.perf_counter() - started)
        except httpx.HTTPError as error:
            raise ValueError(f"{item.id}, budget {config}: {type(error).__name__}: {error}") from None
        return reader.output()


class Blocking:
    """One request at a time of what makes an asynchronous client, as `ServerClient` sends them."""

    def __init__(self, make_client: Callable):
        self._make_client = make_client

    def get(self, path: str):
        return asyncio.run(self._request("GET", path))

    def post(self, path: str, json: dict):
        return asyncio.run(self._request("POST", path, json=json))

    async def _request(self, method: str, path: str, **options):
        async with self._make_client() as client:
            return await client.request(method, path, **options)


class StreamReader:
    """Takes the events of one answer with their times; `output()` at the end."""

    def __init__(self, item_id: str, config: str):
        self.item_id, self.config = item_id, config
        self.token_ids: list[int] = []
        self.reasoning, self.content, self.finish_reason = "", "", None
        self.stamps: list[float] = []  # of events that carried tokens or text
        self.usage: dict = {}
        self.report: dict | None = None

    def feed(self, event: dict, at_s: float) -> None:
        """One event. ValueError for the server's own error."""
        if "error" in event:
            raise ValueError(f"{self.item_id}, budget {self.config}: the stream failed: {event['error']}")
        self.usage = event.get("usage") or self.usage
        self.report = event.get("ddtree") or self.report
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            ids = choice.get("token_ids") or []
            reasoning, content = delta.get("reasoning_content") or "", delta.get("content") or ""
            if ids or reasoning or content:
                self.stamps.append(at_s)
            self.token_ids += ids
            self.reasoning += reasoning
            self.content += content
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    @property
    def text(self) -> str:
        """What the model wrote; a thought between its tags, so that the next turn's template knows it for one."""
        return f"<think>\n{self.reasoning}\n</think>\n\n{self.content}" if self.reasoning else self.content

    def output(self) -> Output:
        """What came. ValueError if the stream broke off before its end or counted nothing."""
        if not self.stamps or self.finish_reason is None:
            raise ValueError(
                f"{self.item_id}, budget {self.config}: the stream ended without a finish_reason or tokens"
            )
        if "completion_tokens" not in self.usage:
            raise ValueError(
                f"{self.item_id}, budget {self.config}: the server sends no usage; tokens cannot be counted"
            )
        if len(self.stamps) == 1 and self.usage["completion_tokens"] >= SHORTEST:
            raise ValueError(
                f"{self.item_id}, budget {self.config}: all {self.usage['completion_tokens']} tokens came in one event; the "
                "server, or what stands before it, does not stream, so that no decode speed can be measured"
            )
        report = self.report or {}
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Output(
            item_id=self.item_id,
            config=self.config,
            token_ids=tuple(self.token_ids),
            text=self.text,
            prompt_tokens=self.usage.get("prompt_tokens", 0),
            output_tokens=self.usage["completion_tokens"],
            finish_reason=self.finish_reason,
            mode=report.get("mode"),
            reason=report.get("reason"),
            tree_budget=report.get("tree_budget"),
            decode_rounds=report.get("decode_rounds", 0),
            nodes_verified=report.get("nodes_verified", 0),
            trimmed_tokens=report.get("trimmed_tokens", 0),
            cached_tokens=max(cached, report.get("cached_tokens", 0)),
            histogram={
                int(length): count for length, count in report.get("acceptance_histogram", {}).items()
            },
            ttft_s=self.stamps[0],
            e2e_s=self.stamps[-1],
            itl_s=tuple(b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False)),
            stage_s={
                name: report.get(f"{name}_ms", 0.0) / 1000
                for name in ("prefill", "draft", "verify")
                if report
            },
        )

"""Prometheus metrics, under the suffixes that vLLM's dashboards graph and the prefix `ddtree:`.

Fed by the engine's thread, rendered in the event loop; prometheus_client locks each value. Tokens, rounds and latencies
are booked as they come, so that graphs move while an answer is long; what is known at its end alone, then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ddtree.engine.request import Emission, Request, RequestStats, RoundCount

PREFIX = "ddtree:"
TTFT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
ITL_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
E2E_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
NODES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass
class Course:
    """One running request, as its latencies need it. Times in seconds of the monotonic clock."""

    num_prompt: int
    started: float
    last_emission: float | None = None


class Metrics:
    """One server's metrics, in a registry of their own, so that two servers in one process do not mix."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model: str = "", clock: Callable[[], float] = time.monotonic):
        self._clock, self._model = clock, model
        self._registry = CollectorRegistry()
        self._courses: dict[int, Course] = {}
        self._labelled: dict[tuple, object] = {}  # finding one costs microseconds, several times an emission
        self.running = self._gauge("num_requests_running", "Requests that decode or prefill now.")
        self.waiting = self._gauge("num_requests_waiting", "Requests queued.")
        self.cache_use = self._gauge("kv_cache_usage_perc", "Share of the context that running requests fill, 0 to 1.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that began to answer.")
        self._tokens = self._counter("generation_tokens", "Emitted tokens.")
        self._finished = self._counter("request_success", "Requests ended, by reason.", "finished_reason")
        self._ttft = self._histogram("time_to_first_token_seconds", "Submit to first token, queueing included.", TTFT_S)
        self._itl = self._histogram("inter_token_latency_seconds", "Gap between emissions of a request.", ITL_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Submit to last token.", E2E_S)
        self._queue = self._histogram("request_queue_time_seconds", "Submit to start of prefill.", TTFT_S)
        self._drafts = self._counter("spec_decode_num_drafts", "Rounds that verified a drafted tree.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafted nodes verified, roots excluded.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self._per_depth = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Rounds whose path reached the depth; 0 is depth 1.", "position"
        )
        self._preemptions = self._counter("num_preemptions", "Times that a request gave its memory up and was computed again.")
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens of requests that ended.")
        self._prefix_hits = self._counter("prefix_cache_hits", "Of them, those taken from an earlier prompt.")
        self._rounds = self._counter("decode_rounds", "Decode rounds, plain ones included.")
        self._nodes = self._histogram("tree_nodes", "Mean nodes of a request's trees, roots excluded.", NODES)
        self._budget = self._histogram("tree_budget", "Tree budget in force of a request.", NODES)

    def began(self, request_id: int, request: Request) -> None:
        """The engine took a request."""
        self._courses[request_id] = Course(len(request.prompt_token_ids), self._clock())

    def emitted(self, emission: Emission) -> None:
        """What one emission tells."""
        course = self._courses.get(emission.request_id)
        if course is None:
            return
        now = self._clock()
        if emission.token_ids:
            self._label(self._tokens).inc(len(emission.token_ids))
            if course.last_emission is None:
                self._label(self._prompt_tokens).inc(course.num_prompt)
                self._label(self._ttft).observe(now - course.started)
            else:
                self._label(self._itl).observe(now - course.last_emission)
            course.last_emission = now
        if emission.round is not None:
            self._book_round(emission.round)
        if emission.finish_reason:
            self._label(self._e2e).observe(now - course.started)
            self.ended(emission.request_id, emission.finish_reason)
            if emission.stats is not None:
                self._label(self._prefix_queries).inc(course.num_prompt)
                self._book(emission.stats)

    def ended(self, request_id: int, reason: str) -> None:
        """A request ended; `reason` is stop, length, error or abort. Unknown ids are ignored."""
        if self._courses.pop(request_id, None) is not None:
            self._finished.labels(self._model, reason).inc()

    def render(self, running: int, waiting: int, cache_use: float) -> bytes:
        """All metrics as Prometheus text, with the gauges as they are now."""
        self._label(self.running).set(running)
        self._label(self.waiting).set(waiting)
        self._label(self.cache_use).set(cache_use)
        return generate_latest(self._registry)

    def _book_round(self, count: RoundCount) -> None:
        self._label(self._rounds).inc()
        if not count.num_drafted:
            return
        self._label(self._drafts).inc()
        self._label(self._draft_tokens).inc(count.num_drafted)
        self._label(self._accepted).inc(count.acceptance_length - 1)
        for depth in range(count.acceptance_length - 1):
            self._label(self._per_depth, depth).inc()

    def _book(self, stats: RequestStats) -> None:
        self._label(self._preemptions).inc(stats.preemptions)
        self._label(self._prefix_hits).inc(stats.cached_tokens)
        if stats.ttft_s is not None:
            self._label(self._queue).observe(max(stats.ttft_s - stats.prefill_s, 0))
        if isinstance(stats.tree_budget, int):
            self._label(self._budget).observe(stats.tree_budget)
        if stats.nodes_verified:
            self._label(self._nodes).observe(stats.nodes_verified / stats.decode_rounds)

    def _label(self, metric, *labels):
        key = (metric, self._model, *labels)
        if key not in self._labelled:
            self._labelled[key] = metric.labels(self._model, *labels)
        return self._labelled[key]

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(PREFIX + name, help, ["model_name"], registry=self._registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, help, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, help: str, buckets) -> Histogram:
        return Histogram(PREFIX + name, help, ["model_name"], registry=self._registry, buckets=buckets)

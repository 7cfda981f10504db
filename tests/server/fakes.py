"""A byte-level toy tokenizer, an engine that speaks a script, and clients without a socket."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import jinja2

from ddtree.engine.finish import scan
from ddtree.engine.request import Emission, Request, RequestStats
from ddtree.server.app import create_app
from ddtree.server.batch import Facts
from ddtree.server.settings import ServerSettings
from ddtree.server.worker import Worker

EOS, TURN, VOCAB = 256, 257, 258
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
THINKING_TEMPLATE = PLAIN_TEMPLATE + "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"


class ByteTokenizer:
    """Ids 0 to 255 are bytes; EOS and TURN are special."""

    special_ids = frozenset({EOS, TURN})
    eos_token_ids = frozenset({EOS})
    thought_tag_ids = frozenset()
    call_tag_ids = frozenset()
    vocab_size = VOCAB

    def __init__(self, chat_template: str | None = PLAIN_TEMPLATE):
        self.chat_template = chat_template
        self.pretrained = self
        self.vocabulary = SimpleNamespace(is_byte_level=True, token_bytes=self.token_bytes)

    def chat_template_for(self, has_tools: bool) -> str | None:
        return self.chat_template

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        return bytes(t for t in token_ids if t < 256).decode(errors="replace")

    def apply_chat_template(self, messages, tools, chat_template, add_generation_prompt, tokenize, **options):
        template = jinja2.Environment().from_string(chat_template)
        return template.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **options)


class ScriptEngine:
    """Emits `script` (text, then EOS) to every request, `step_size` tokens a step, under the engine's own stop rule.

    `gate` holds every step back until it is set; `faults` raises in step() that many times; `refuse` in add().
    """

    def __init__(self, script="hello", step_size=3, max_running=8, faults=0, refuse=None, gate=None):
        self.script = [*script.encode(), EOS] if isinstance(script, str) else list(script)
        self.step_size, self.max_running, self.faults, self.refuse = step_size, max_running, faults, refuse
        self.gate = gate
        self.live: dict[int, list] = {}  # request id -> [request, number emitted]
        self.added: list[Request] = []
        self.aborted: list[int] = []
        self.fail_next: str | None = None

    @property
    def has_work(self):
        return bool(self.live)

    @property
    def num_running(self):
        return min(len(self.live), self.max_running)

    @property
    def num_waiting(self):
        return len(self.live) - self.num_running

    def add(self, request):
        if self.refuse:
            raise self.refuse
        self.added.append(request)
        self.live[len(self.added)] = [request, 0]
        return len(self.added)

    def abort(self, request_id):
        self.aborted.append(request_id)
        self.live.pop(request_id, None)

    def prepare_one(self):
        return False

    def step(self):
        if self.gate is not None and not self.gate.wait(0.02):
            return []
        if self.faults:
            self.faults -= 1
            raise RuntimeError("scripted fault")
        return [self._advance(request_id) for request_id in list(self.live)[: self.max_running]]

    def _advance(self, request_id):
        request, before = self.live[request_id]
        if self.fail_next:
            message, self.fail_next = self.fail_next, None
            del self.live[request_id]
            return Emission(request_id, (), "error", error=message, stats=RequestStats())
        size = self.step_size if before else 1  # the first token is prefill's own
        tokens = [self.script[(before + i) % len(self.script)] for i in range(size)]
        finish = scan(tokens, request, before)
        kept = tokens[: finish.num_kept] if finish else tokens
        self.live[request_id][1] += len(kept)
        if not finish:
            return Emission(request_id, tuple(kept))
        del self.live[request_id]
        stats = self._stats(request, before + len(kept), before, size)
        return Emission(request_id, tuple(kept), finish.finish_reason, finish.stop_reason, stats=stats)

    def _stats(self, request, output, before, size):
        budget = request.tree_budget if request.tree_budget == "auto" else min(request.tree_budget, 1024)
        stats = RequestStats(tree_budget=budget, block_size=8, output_tokens=output)
        rounds = -(-(output - 1) // self.step_size)
        stats.decode_rounds = rounds
        if rounds:
            stats.acceptance_histogram[self.step_size] = rounds
        stats.trimmed_tokens = rounds * self.step_size - (output - 1)
        stats.mode = "ddtree" if request.tree_budget else "target_only"
        stats.prefill_s, stats.decode_s, stats.ttft_s = 0.01, 0.02 * rounds, 0.011
        return stats


FACTS = Facts(max_context=512, vocab_size=VOCAB, default_tree_budget=16, block_size=8)


@contextmanager
def serving(
    engine=None, template=PLAIN_TEMPLATE, max_waiting=128, load=None, facts=FACTS, tokenizer=None, **settings
):
    """A client of the app over a real worker thread around a scripted engine."""
    engine = engine or ScriptEngine()
    worker = Worker(load or (lambda: (engine, facts)), max_waiting=max_waiting).start()
    options = {"served_names": ("toy", "org/alias"), "target": "toy"} | settings
    app = create_app(worker, tokenizer or ByteTokenizer(template), ServerSettings(**options))
    if load is None:
        wait_for(lambda: worker.state != "starting")
    try:
        yield Client(app, worker, engine)
    finally:
        if engine.gate is not None:
            engine.gate.set()
        worker.stop()


def wait_for(condition, timeout_s=30.0):
    """Poll until true; an assertion otherwise."""
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("condition not met in time")


class Client:
    """Blocking requests to an ASGI app; each runs on an event loop of its own."""

    def __init__(self, app, worker, engine):
        self.app, self.worker, self.engine = app, worker, engine

    def request(self, method, path, **options):
        async def go():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(go())

    def get(self, path, **options):
        return self.request("GET", path, **options)

    def post(self, path, body, **options):
        return self.request("POST", path, json=body, **options)

    def complete(self, prompt="hi", **fields):
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, content="hi", **fields):
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def stream(self, path, **fields):
        """The parsed chunks of a stream, and whether it ended with [DONE]."""
        response = self.post(path, {**fields, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_events(response.text)


def parse_events(text):
    """Chunks, and whether the last event was [DONE]."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    done = bool(data) and data[-1] == "[DONE]"
    return [json.loads(each) for each in data if each != "[DONE]"], done


async def call_and_leave(app, path, body, leave: asyncio.Event):
    """Drive the app by hand: send a body, disconnect when `leave` is set; returns what was sent back."""
    raw, sent = json.dumps(body).encode(), []
    inbox = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive():
        if inbox:
            return inbox.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("test", 1),
        "server": ("test", 80),
    }
    await app(scope, receive, send)
    return sent

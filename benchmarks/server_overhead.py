"""The server's own time per streamed token: JSON, SSE, detokenising, parsers, with an engine that costs nothing.

A stub engine emits a fixed text, `--step` tokens a round, as a real one would after speculation. The process's CPU time
over one stream, less that of a stream of one token, over the tokens between; the client reads raw bytes inside the same
process, so its share is in the figure; a socket's is not. The rows: plain; n = 4; logprobs with 5 alternatives; a
grammar (the masks of a tree of `--step` nodes per round, at the real vocabulary). The last line is JSON.

    python -m benchmarks.server_overhead
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np

from ddtree.engine.finish import scan
from ddtree.engine.request import Emission, Request, RequestStats
from ddtree.sampling.logprobs import TokenLogprob
from ddtree.server.app import create_app
from ddtree.server.batch import Facts
from ddtree.server.settings import ServerSettings
from ddtree.server.worker import Worker
from ddtree.sources import resolve
from ddtree.text import Tokenizer

TEXT = (
    "The mill wheel turns because water pushes against its paddles; a shaft carries the turning into the house, where two "
    'heavy stones grind grain into flour — "fein gemahlen", as the miller says. '
)
DOCUMENT = json.dumps({"lines": [TEXT] * 40}, ensure_ascii=False)
SCHEMA = {
    "type": "object",
    "properties": {"lines": {"type": "array", "items": {"type": "string"}}},
    "required": ["lines"],
}


class StubEngine:
    """Emits the same tokens to every request, `step` a round; costs what looking at a list costs."""

    def __init__(self, token_ids: list[int], step: int):
        self.token_ids, self.step_size = token_ids, step
        self.live: dict[int, list] = {}
        self.num_added = 0
        self.num_waiting = 0

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    @property
    def num_running(self) -> int:
        return len(self.live)

    def add(self, request: Request) -> int:
        self.num_added += 1
        self.live[self.num_added] = [request, 0]
        return self.num_added

    def abort(self, request_id: int) -> None:
        self.live.pop(request_id, None)

    def step(self) -> list[Emission]:
        return [self._advance(request_id) for request_id in list(self.live)]

    def prepare_one(self) -> bool:
        return False

    def _advance(self, request_id: int) -> Emission:
        request, before = self.live[request_id]
        new = self.token_ids[before : before + self.step_size]
        if request.grammar is not None:
            self._judge(request, before, new)
        finish = scan(new, request, before)
        kept = tuple(new[: finish.num_kept] if finish else new)
        self.live[request_id][1] += len(kept)
        logprobs = ()
        if request.num_logprobs is not None:
            top = tuple((token_id, -1.5) for token_id in range(300, 300 + request.num_logprobs))
            logprobs = tuple(TokenLogprob(token_id, -0.1, top) for token_id in kept)
        if not finish:
            return Emission(request_id, kept, logprobs=logprobs)
        del self.live[request_id]
        return Emission(request_id, kept, finish.finish_reason, stats=RequestStats(), logprobs=logprobs)

    def _judge(self, request: Request, before: int, new: list[int]) -> None:
        """What a round asks of a grammar: which nodes fit, and a mask after each token of the path."""
        request.grammar.follow(self.token_ids[:before])
        nodes = np.array([self.token_ids[before - 1] if before else 0, *new[:-1]])
        parents = np.arange(-1, len(nodes) - 1)
        request.grammar.fits(nodes, parents)
        for count in range(len(new)):
            request.grammar.allowed_after(new[:count])


async def stream(app, body: dict) -> int:
    """One streamed answer, read to its end; the number of bytes. RuntimeError where it is no answer."""
    inbox, size, tail = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}], 0, b""

    async def receive():
        if inbox:
            return inbox.pop()
        await asyncio.Event().wait()

    async def send(message):
        nonlocal size, tail
        piece = message.get("body", b"")
        size, tail = size + len(piece), (tail + piece)[-2000:]

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("bench", 1),
        "server": ("bench", 80),
    }
    await app(scope, receive, send)
    if b'"error"' in tail or b"[DONE]" not in tail:
        raise RuntimeError(f"the stub's answer to {body} failed, so nothing was measured: {tail!r}")
    return size


def measure(app, body: dict, num_tokens: int, repeats: int) -> list[float]:
    """Milliseconds of CPU time per token, once per repeat."""
    found = []
    for _ in range(repeats):
        times = []
        for cap in (1, num_tokens):
            started = time.process_time()
            asyncio.run(stream(app, body | {"max_tokens": cap}))
            times.append(time.process_time() - started)
        found.append((times[1] - times[0]) * 1000 / ((num_tokens - 1) * body.get("n", 1)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of a stream (default: 1500)")
    parser.add_argument("--steps", default="1,4", help="tokens a round emits, comma-separated (default: 1,4)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    args = parser.parse_args()
    tokenizer = Tokenizer.load(resolve("smollm2").target)
    token_ids = tokenizer.encode(DOCUMENT, add_special_tokens=False)[: args.tokens]
    schema = {"type": "json_schema", "json_schema": {"name": "lines", "schema": SCHEMA}}
    settings = {
        "plain": {},
        "n = 4": {"n": 4},
        "logprobs, 5 alternatives": {"logprobs": True, "top_logprobs": 5},
        "grammar": {"response_format": schema},
    }
    facts = Facts(max_context=8192, vocab_size=tokenizer.vocab_size)
    rows = []
    for step in (int(each) for each in args.steps.split(",")):
        worker = Worker(lambda step=step: (StubEngine(token_ids, step), facts)).start()
        while worker.state == "starting":
            time.sleep(0.01)
        app = create_app(worker, tokenizer, ServerSettings(served_names=("stub",)))
        for name, fields in settings.items():
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "seed": 1, **fields}
            measure(app, body, 100, 1)  # warm up
            found = measure(app, body, len(token_ids), args.repeats)
            rows.append({"step": step, "setting": name, "ms_per_token": round(statistics.median(found), 4)})
            rows[-1] |= {"least": round(min(found), 4), "most": round(max(found), 4)}
            print(
                f"{step} a round  {name:26} {rows[-1]['ms_per_token']:.4f} ms a token ({min(found):.4f}–{max(found):.4f})"
            )
        worker.stop()
    result = {"tokens": len(token_ids), "repeats": args.repeats, "python": platform.python_version(), "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""A server under bursty load, with clients that leave: is memory flat, is any token lost or doubled, how long are the gaps?

    python -m benchmarks.soak --minutes 15 --out soak.json

Starts `ddtree serve` as a process of its own and streams chats from it in bursts: a few shared system prompts, several turns, budgets
0, 8, 16 and auto, greedy and sampled; a share of the clients leaves midway. Every finished answer must equal, id for id, what the
same request got when it was alone and plain; a cut one must be its beginning. Resident memory of the server is sampled every
second: `growth_bytes` is the last fifth's median less the second fifth's. ITL is the gap between streamed events of a request.
The last line is JSON; the exit status is 1 where a token is wrong, a request was lost or one still runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

SYSTEMS = (
    None,
    "You are a careful assistant who explains machines in plain words and short sentences. " * 4,
    "Answer as a pirate would, but be polite, and never say more than you know. " * 5,
)
QUESTIONS = (
    "How does a steam engine work?",
    "Name three fruits.",
    "What is a governor?",
    "Write a line about the sea.",
    "Count from one to ten.",
    "What is 17 times 3?",
)
BUDGETS = (0, 8, 16, "auto")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--burst", type=int, default=8, help="most requests that arrive together")
    parser.add_argument("--pause", type=float, default=6.0, help="mean seconds between bursts")
    parser.add_argument("--cancel", type=float, default=0.15, help="share of the clients that leave midway")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--cache-memory", default="0.5", help="GiB, small enough that prefixes are forgotten")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "ddtree", "serve", args.model, "--port", str(port), "--max-context", "2048", "--no-ui"]
    server = subprocess.Popen([*command, "--cache-memory", args.cache_memory], stderr=subprocess.DEVNULL)
    try:
        result = asyncio.run(Soak(args, f"http://127.0.0.1:{port}", server.pid).run())
        result["server_died"] = server.poll() is not None
    finally:
        server.terminate()
        server.wait(30)
    result["command"] = "python -m benchmarks.soak " + " ".join(sys.argv[1:])
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    failed = ("wrong", "lost", "errors", "server_died")
    return int(any(result[name] for name in failed) or any(result["running_at_the_end"]))


class Soak:
    """One run against one server."""

    def __init__(self, args, url: str, pid: int):
        self.args, self.url, self.pid = args, url, pid
        self.random = random.Random(args.seed)
        self.expected: dict[str, list[int]] = {}
        self.gaps, self.ttfts, self.resident, self.cached = [], [], [], 0
        self.finished = self.cancelled = self.overloaded = self.tokens = 0
        self.wrong, self.lost, self.errors = [], [], []

    async def run(self) -> dict:
        async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=200)) as client:
            await self._warm(client)
            sampler = asyncio.create_task(self._sample())
            ends, calls = time.monotonic() + 60 * self.args.minutes, []
            while time.monotonic() < ends:
                for _ in range(self.random.randint(1, self.args.burst)):
                    calls.append(asyncio.create_task(self._call(client, self._body())))
                await asyncio.sleep(self.random.expovariate(1 / self.args.pause))
            done = await asyncio.gather(*calls, return_exceptions=True)
            self.errors += [repr(each) for each in done if isinstance(each, Exception)]
            sampler.cancel()
            for _ in range(20):  # those whose clients left end with their next round
                stats = (await client.get(f"{self.url}/stats")).json()
                if not stats["running"] + stats["waiting"]:
                    break
                await asyncio.sleep(0.5)
        return self._result(len(calls), stats)

    async def _warm(self, client) -> None:
        """Wait for the server; then every request once, alone and plain."""
        for _ in range(600):
            try:
                if (await client.get(f"{self.url}/health")).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.5)
        for system in range(len(SYSTEMS)):
            for question in range(len(QUESTIONS)):
                for temperature in (0.0, 0.8):
                    body = self._chat(system, question, temperature, 0)
                    answer = (await client.post(f"{self.url}/v1/chat/completions", json=body)).json()
                    self.expected[key_of(body)] = answer["choices"][0]["token_ids"]

    def _body(self) -> dict:
        rng = self.random
        body = self._chat(rng.randrange(len(SYSTEMS)), rng.randrange(len(QUESTIONS)), rng.choice((0.0, 0.8)), rng.choice(BUDGETS))
        return body | {"stream": True, "stream_options": {"include_usage": True}}

    def _chat(self, system: int, question: int, temperature: float, budget) -> dict:
        messages = [{"role": "system", "content": SYSTEMS[system]}] if SYSTEMS[system] else []
        messages.append({"role": "user", "content": QUESTIONS[question]})
        options = {"temperature": temperature, "seed": 7, "max_tokens": self.args.max_tokens, "return_token_ids": True}
        return {"model": self.args.model, "messages": messages, "tree_budget": budget, **options}

    async def _call(self, client, body: dict) -> None:
        expected, token_ids = self.expected[key_of(body)], []
        leaves_after = self.random.randrange(1, self.args.max_tokens) if self.random.random() < self.args.cancel else None
        started, last, finished = time.monotonic(), None, None
        async with client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
            if response.status_code == 429:
                self.overloaded += 1
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    self.errors.append(chunk["error"])
                    return
                self.cached += ((chunk.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                new = [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
                finished = next((c["finish_reason"] for c in chunk["choices"] if c.get("finish_reason")), finished)
                if new:
                    now = time.monotonic()
                    (self.ttfts if last is None else self.gaps).append(now - (started if last is None else last))
                    last = now
                    token_ids += new
                if leaves_after is not None and len(token_ids) >= leaves_after:
                    break
        self.tokens += len(token_ids)
        if finished is None:
            self.cancelled += 1
            if token_ids != expected[: len(token_ids)]:
                self.wrong.append({"body": body, "token_ids": token_ids})
            if leaves_after is None:
                self.lost.append(body)
            return
        self.finished += 1
        if token_ids != expected:
            self.wrong.append({"body": body, "token_ids": token_ids, "expected": expected})

    async def _sample(self) -> None:
        while True:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            self.resident.append(pages * os.sysconf("SC_PAGE_SIZE"))
            await asyncio.sleep(1)

    def _result(self, num_requests: int, stats: dict) -> dict:
        fifth = max(len(self.resident) // 5, 1)
        early, late = statistics.median(self.resident[fifth : 2 * fifth] or [0]), statistics.median(self.resident[-fifth:])
        return {
            "minutes": self.args.minutes,
            "requests": num_requests,
            "finished": self.finished,
            "cancelled": self.cancelled,
            "overloaded": self.overloaded,
            "tokens": self.tokens,
            "cached_tokens": self.cached,
            "wrong": self.wrong[:5],
            "num_wrong": len(self.wrong),
            "lost": self.lost[:5],
            "errors": self.errors[:5],
            "itl_s": percentiles(self.gaps),
            "ttft_s": percentiles(self.ttfts),
            "resident_bytes": {"second_fifth": early, "last_fifth": late, "most": max(self.resident)},
            "resident_bytes_by_minute": [statistics.median(self.resident[i : i + 60]) for i in range(0, len(self.resident), 60)],
            "growth_bytes": late - early,
            "running_at_the_end": [stats["running"], stats["waiting"]],
            "memory": stats["memory"],
            "load_average": os.getloadavg(),
        }


def key_of(body: dict) -> str:
    """What decides the answer; the budget does not."""
    return json.dumps([body["messages"], body["temperature"]])


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    return {name: round(ordered[min(int(len(ordered) * share), len(ordered) - 1)], 4) for name, share in (("p50", 0.5), ("p99", 0.99))}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())

"""Scripted actors for many requests at once, and the requests."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ddtree.caches.saved import CacheSize
from ddtree.engine.config import EngineConfig
from ddtree.engine.engine import Engine
from ddtree.engine.request import Request
from ddtree.sampling.params import SamplingParams
from tests.engine.test_decode_round import alone
from tests.scripted import EOS, VOCAB, ScriptedDrafter, ScriptedTarget

PROMPT = (3, 0, 5)
MEMORY = 2 * 480  # bytes: about one sequence of `max_context`


class Target(ScriptedTarget):
    """Says what a token takes, keeps a log of its forwards, and may have too little memory."""

    cache_size = CacheSize(row_bytes=1, state_bytes=40)
    most_rows = None
    poison = None  # of a request's prompt: its first token, whose rounds fail
    spoil_commits = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.log = []

    def prefill(self, sequence, token_ids, last):
        self.log.append(("prefill", sequence.request_id, len(token_ids)))
        return super().prefill(sequence, token_ids, last)

    def verify(self, sequences, trees):
        num_rows = sum(tree.num_nodes for tree in trees)
        self.log.append(("verify", tuple(s.request_id for s in sequences), num_rows))
        if self.most_rows and num_rows > self.most_rows:
            raise MemoryError("scripted: out of memory")
        if any(s.request.prompt_token_ids[0] == self.poison and s.num_emitted > 3 for s in sequences):
            raise RuntimeError("scripted poison")
        return super().verify(sequences, trees)

    def commit(self, sequences, paths):
        if self.spoil_commits and len(sequences) > 1:
            self.spoil_commits -= 1
            sequences[0].target_state.append(9)  # half of it is done
            raise RuntimeError("scripted commit fault")
        return super().commit(sequences, paths)


class Drafter(ScriptedDrafter):
    cache_size = CacheSize(row_bytes=1, state_bytes=0)


def engine_of(skill=0.6, **config) -> Engine:
    config = {"max_context": 400, "max_running": 8, "max_tree_budget": 64, **config}
    return Engine(Target(), Drafter(skill), EngineConfig(**config), VOCAB)


@lru_cache(maxsize=10_000)
def expected(request):
    return alone(replace(request, watcher=None))


def mixed(count: int, rng, longest_prompt: int = 60, most_tokens: int = 50) -> list[Request]:
    """Prompts, budgets, sampling and lengths of all kinds."""
    return [
        Request(
            tuple(rng.integers(0, VOCAB, rng.integers(1, longest_prompt)).tolist()),
            int(rng.integers(1, most_tokens)),
            SamplingParams(temperature=float(rng.choice([0.0, 0.8]))),
            seed=int(rng.integers(100)),
            tree_budget=int(rng.choice([0, 3, 16, 64])),
            eos_token_ids=frozenset({EOS}) if rng.random() < 0.3 else frozenset(),
        )
        for _ in range(count)
    ]

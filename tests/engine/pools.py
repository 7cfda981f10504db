"""Small random pairs over pools, on the CPU: a hybrid, and a dense one of SmolLM2's kind; what each says cold and alone."""

from __future__ import annotations

import torch

from ddtree.doctor.hybrid import DRAFTER, VOCAB, fill, random_hybrid
from ddtree.engine.config import EngineConfig
from ddtree.engine.drafter import Drafter
from ddtree.engine.engine import Engine
from ddtree.engine.pooled import pooled_engine
from ddtree.engine.request import Request
from ddtree.engine.target import Target
from ddtree.models.config import ModelConfig
from ddtree.models.dflash import DFlash
from ddtree.models.drafter_config import DrafterConfig
from ddtree.models.llama import Llama
from tests.engine.schedules import run_schedule, seeded

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
FAMILIES = ("hybrid", "llama")


class Pair:
    """A target and its drafter."""

    def __init__(self, family: str) -> None:
        self.is_hybrid = family == "hybrid"
        if self.is_hybrid:
            engine = random_hybrid("cpu", torch.float32)
            self.target, self.drafter = engine.target.model, engine.drafter.model
        else:
            generator = torch.Generator().manual_seed(1)
            with torch.inference_mode():
                target = Llama(ModelConfig.from_hf(LLAMA), "cpu", torch.float32)
                fill(target, generator)
                target.finish_loading()
                shapes = {**DRAFTER, "hidden_size": 24, "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 2]}}
                drafter = DFlash(DrafterConfig.from_hf(shapes), "cpu", torch.float32)
                fill(drafter, generator)
            self.target, self.drafter = target.eval(), drafter.eval()
        self._cold = {}

    def engine(self, *, num_tokens: int | None = None, conditioning=None, **config) -> Engine:
        """Over pools for `num_tokens` tokens."""
        config = {
            "max_context": 512,
            "max_tree_budget": 16,
            "prefill_chunk": 64,
            "max_running": 4,
            "prefix_bytes": 64 * 2**20,
            "snapshot_every": 64,
            **config,
        }
        return pooled_engine(self.target, self.drafter, EngineConfig(**config), num_tokens=num_tokens, conditioning=conditioning)

    def cold(self, request: Request) -> list[int]:
        """What the request gets alone, plainly and over buffers of its own, which remember nothing."""
        key = (request.prompt_token_ids, request.max_tokens, request.sampling, request.seed, request.choice_index, request.stop_token_ids)
        if key not in self._cold:
            engine = Engine(Target(self.target), None, EngineConfig(max_context=512), VOCAB)
            plain = Request(
                request.prompt_token_ids, request.max_tokens, request.sampling, seed=request.seed,
                choice_index=request.choice_index, stop_token_ids=request.stop_token_ids, cache_salt=None,
            )  # fmt: skip
            self._cold[key] = list(engine.generate(plain).token_ids)
        return self._cold[key]

    def with_drafter_cold(self) -> Engine:
        """The pair over buffers of its own."""
        return Engine(
            Target(self.target, self.drafter.config.target_layer_ids), Drafter(self.drafter, self.target), EngineConfig(max_context=512), VOCAB
        )


def tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, VOCAB - 1, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def ask(prompt, budget=8, max_tokens=12, **options) -> Request:
    return Request(tuple(prompt), max_tokens, tree_budget=budget, **options)


def check(pair: Pair, engine: Engine, request: Request) -> int:
    """The answer equals the cold one; returns its cached tokens, which were not computed again."""
    prefill, counts = engine.target.prefill, []

    def counted(sequence, token_ids, last):
        counts.append(len(token_ids))
        return prefill(sequence, token_ids, last)

    engine.target.prefill = counted
    try:
        emission = engine.generate(request)
    finally:
        engine.target.prefill = prefill
    assert list(emission.token_ids) == pair.cold(request)
    cached = emission.stats.cached_tokens
    assert sum(counts) == len(request.prompt_token_ids) - cached
    return cached


def check_pages(engine: Engine) -> None:
    """With nobody running, pages are held by what is remembered and by nobody else."""
    pages = engine.memory.pages
    held = engine.prefix.num_pages if engine.prefix is not None else 0
    assert pages.num_pages - pages.num_free == held
    if engine.prefix is not None:
        assert held * engine.memory.page_bytes == engine.prefix.num_bytes <= engine.prefix.limit_bytes
        engine.prefix.clear()
        assert engine.prefix.num_bytes == 0
    assert pages.num_free == pages.num_pages and not pages.holders.any()
    state = engine.device_rounds.state
    assert sorted(state._free) == list(range(state.dummy)), "every slot is back"


__all__ = ["FAMILIES", "Pair", "ask", "check", "check_pages", "run_schedule", "seeded", "tokens"]

"""The engine in this process: every configuration on the same prompts, in turn, looked at before it is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ddtree.bench.output import AUTO, CHAIN, PLAIN, Output, scoring_of
from ddtree.bench.ties import near_tie
from ddtree.bench.workloads import Item, Prompt, answer_all
from ddtree.engine.engine import Engine
from ddtree.engine.request import Request, RequestStats
from ddtree.engine.stats import STAGES
from ddtree.sampling.params import SamplingParams
from ddtree.text import render_chat


@dataclass(frozen=True)
class Settings:
    """How every request of a run is made."""

    configs: tuple[str, ...]  # "0" first
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    seed: int = 0
    ignore_eos: bool = False
    thinking: bool | None = None  # None: the template's own default
    repeats: int = 3


class Text:
    """Conversations to token ids and back, with a model's tokenizer."""

    def __init__(self, tokenizer, thinking: bool | None = None):
        self._tokenizer, self._thinking = tokenizer, thinking
        self.eos_token_ids = frozenset(tokenizer.eos_token_ids)

    def encode(self, messages: list[dict]) -> tuple[int, ...]:
        """The prompt's ids; a model without a chat template continues the last turn as it is."""
        if not self._tokenizer.chat_template:
            return tuple(self._tokenizer.encode(messages[-1]["content"]))
        rendered = render_chat(self._tokenizer, messages, enable_thinking=self._thinking)
        return tuple(self._tokenizer.encode(rendered, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)


class Offline:
    """Runs items on an engine; `text` is a `Text`, or what has its three names."""

    def __init__(self, engine: Engine, text, settings: Settings):
        self.engine, self.text, self.settings = engine, text, settings

    def inspect(self, prompts: Sequence[Prompt], say: Callable[[str], None]) -> tuple[list[Item], dict]:
        """Run every configuration on every turn once: the items, and `answers[item id][configuration]`. Also the warm-up."""
        return answer_all(
            prompts, lambda item: {config: self.run(item, config) for config in self.settings.configs}, PLAIN, say
        )

    def measure(self, items: Sequence[Item], say: Callable[[str], None]) -> Iterator[Output]:
        """`repeats` passes over the items. Configurations alternate on each item, in an order that turns around."""
        configs = self.settings.configs
        for repeat in range(self.settings.repeats):
            for number, item in enumerate(items):
                shift = (number + repeat) % len(configs)
                order = configs[shift:] + configs[:shift]
                for config in order if (number + repeat) % 2 else reversed(order):
                    yield self.run(item, config)
            say(f"pass {repeat + 1} of {self.settings.repeats}")

    def run(self, item: Item, config: str) -> Output:
        """One request, alone on the engine; the clock reads each emission as it comes."""
        engine, request = self.engine, self.request(item, config)
        started = time.perf_counter()
        request_id = engine.add(request)
        token_ids: list[int] = []
        stamps: list[float] = []
        while True:
            for emission in engine.step():
                if emission.request_id != request_id:
                    continue
                if emission.finish_reason == "error":
                    raise RuntimeError(f"{item.id}, configuration {config}: {emission.error}")
                stamps.append(time.perf_counter() - started)
                token_ids.extend(emission.token_ids)
                if emission.finish_reason:
                    return self._output(item, config, request, token_ids, stamps, emission)

    def request(self, item: Item, config: str) -> Request:
        """The request of one item under one configuration."""
        settings = self.settings
        name, scoring = scoring_of(config)
        budget = self.engine.block_size - 1 if name == CHAIN else name if name == AUTO else int(name)
        return Request(
            prompt_token_ids=self.text.encode(item.as_messages()),
            max_tokens=settings.max_tokens,
            sampling=settings.sampling,
            seed=settings.seed,
            tree_budget=budget,
            scoring=scoring,
            chain=name == CHAIN,
            eos_token_ids=frozenset() if settings.ignore_eos else self.text.eos_token_ids,
        )

    def near_tie(self, items: Sequence[Item]) -> Callable[[Output, Output, int], dict | None]:
        """For `validity.Rules`: re-scores a first difference with the target alone."""
        by_id = {item.id: item for item in items}
        # The batch-invariant mode promises the same bits: there a tie is no excuse.
        model = None if self.engine.config.batch_invariant else getattr(self.engine.target, "model", None)

        def judge(plain: Output, other: Output, position: int) -> dict | None:
            if model is None or position >= min(len(plain.token_ids), len(other.token_ids)):
                return None
            request = self.request(by_id[plain.item_id], PLAIN)
            before = (*request.prompt_token_ids, *plain.token_ids[:position])
            return near_tie(model, request, before, (plain.token_ids[position], other.token_ids[position]))

        return judge

    def _output(self, item: Item, config: str, request: Request, token_ids, stamps, emission) -> Output:
        stats: RequestStats = emission.stats
        return Output(
            item_id=item.id,
            config=config,
            token_ids=tuple(token_ids),
            text=self.text.decode(token_ids),
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=stats.output_tokens,
            finish_reason=emission.finish_reason,
            mode=stats.mode,
            reason=stats.reason,
            tree_budget=stats.tree_budget,
            decode_rounds=stats.decode_rounds,
            nodes_verified=stats.nodes_verified,
            trimmed_tokens=stats.trimmed_tokens,
            cached_tokens=stats.cached_tokens,
            histogram=dict(stats.acceptance_histogram),
            ttft_s=stamps[0],
            e2e_s=stamps[-1],
            itl_s=tuple(after - before for before, after in zip(stamps, stamps[1:], strict=False)),
            stage_s={stage: getattr(stats, f"{stage}_s") for stage in STAGES},
        )

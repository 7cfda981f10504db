"""A tiny random target and drafter with a tokenizer, for audits that find what a test plants."""

from __future__ import annotations

import torch

from ddtree.audit.lossless import Audit
from ddtree.audit.plan import Plan
from ddtree.audit.prompts import Prompt
from ddtree.engine.drafter import Drafter
from ddtree.text import Tokenizer
from tests.models.qwens import drafter_for, engine_around

PLAN = Plan(budgets=(0, 8, 24), max_tokens=18)


class NumberTokenizer:
    """Enough of a tokenizer for prompts that are ids already."""

    eos_token_ids = frozenset()
    special_ids = frozenset()
    chat_template = None

    class pretrained:
        bos_token_id = eos_token_id = None

    class backend:
        @staticmethod
        def encode(text, add_special_tokens=True):
            class Encoding:
                ids = [int(part) for part in text.split()]

            return Encoding

    def encode(self, text, add_special_tokens=True):
        return [int(part) for part in text.split()]

    def decode(self, token_ids, skip_special_tokens=True):
        return " ".join(map(str, token_ids))


def prompt_of(token_ids, name: str = "a") -> Prompt:
    ids = tuple(int(each) for each in token_ids)
    return Prompt(name, "raw", " ".join(map(str, ids)), ids)


def random_prompts(vocab_size: int, count: int = 2, length: int = 9) -> list[Prompt]:
    return [prompt_of(torch.randint(0, vocab_size - 1, (length + i,)), f"p{i}") for i in range(count)]


def engine_of(model, drafter=None):
    """An engine around a tiny target, with a random drafter of its own."""
    return engine_around(model, Drafter(drafter or drafter_for(model.config), model))


def audited(engine, tokenizer: Tokenizer | None = None, plan: Plan = PLAN, prompts=None, **options):
    """The result of an audit over two random prompts."""
    audit = Audit(engine, tokenizer or NumberTokenizer(), plan, **options)
    return audit.run(prompts or random_prompts(engine.vocab_size))

"""The embedded pair as it is served: one engine for the session, the server around it, and transformers beside it."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from ddtree.cli.loaded import load
from ddtree.engine.request import Request
from ddtree.sources import resolve
from ddtree.text import Tokenizer, render_chat

PROMPTS = Path(__file__).resolve().parents[3] / "shared" / "prompts"


class Pair:
    """SmolLM2 and its shipped drafter in float32 on the CPU."""

    def __init__(self):
        self.source = resolve("smollm2")
        options = Namespace(device="cpu", dtype="float32", max_context=2048, tree_budget=16)
        self.engine = load(options, self.source)
        self.tokenizer = Tokenizer.load(self.source.target)

    def chat_ids(self, text: str) -> tuple[int, ...]:
        prompt = render_chat(self.tokenizer, [{"role": "user", "content": text}])
        return tuple(self.tokenizer.encode(prompt, add_special_tokens=False))

    def answer(self, prompt, budget: int, max_tokens: int, sampling=None, seed: int = 0):
        options = {} if sampling is None else {"sampling": sampling}
        eos = frozenset(self.tokenizer.eos_token_ids)
        request = Request(tuple(prompt), max_tokens, seed=seed, tree_budget=budget, eos_token_ids=eos, **options)
        return self.engine.generate(request)


@pytest.fixture(scope="session")
def pair(smollm2_path) -> Pair:
    return Pair()


@pytest.fixture(scope="session")
def transformers_greedy(smollm2_path):
    """(prompt ids, max_tokens) -> the answer's ids, from transformers reading the same file."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()

    def greedy(prompt, max_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=[2],
            pad_token_id=2,
        )
        return output[0, ids.shape[1] :].tolist()

    return greedy


@pytest.fixture(scope="session")
def evaluation_prompts() -> list[str]:
    """First turns of the shared prompts, alternating between the sets; skips where they are not laid out."""
    if not PROMPTS.is_dir():
        pytest.skip("../shared/prompts is not there")
    files = [path.read_text(encoding="utf-8") for path in sorted(PROMPTS.glob("*.jsonl"))]
    sets = [[json.loads(line)["turns"][0] for line in text.splitlines()] for text in files]
    return [text for row in zip(*sets, strict=True) for text in row]

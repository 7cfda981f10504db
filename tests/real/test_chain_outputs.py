"""SmolLM2 with our drafter in the hands of others: z-lab's dflash and vLLM answer at temperature 0 as our engine does.

`tests/reference/make_chain_outputs.py` recorded them.
"""

import json
from functools import cache
from pathlib import Path

import pytest

RECORDED = Path(__file__).resolve().parents[1] / "reference" / "chain_outputs.json"
PROGRAMS = json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def answer(pair):
    """Ours to a prompt, once for all programs."""

    @cache
    def ask(prompt, max_tokens):
        return list(pair.answer(prompt, 4, max_tokens).token_ids)

    return lambda prompt, max_tokens: ask(tuple(prompt), max_tokens)


@pytest.mark.parametrize("program", PROGRAMS)
def test_another_program_says_the_same(answer, program):
    recorded = PROGRAMS[program]
    for prompt, said in zip(recorded["prompts"][:2], recorded["answers"], strict=False):
        assert answer(prompt, recorded["max_tokens"]) == said


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_another_program_says_the_same_to_every_prompt(answer, program):
    recorded = PROGRAMS[program]
    for prompt, said in zip(recorded["prompts"], recorded["answers"], strict=True):
        assert answer(prompt, recorded["max_tokens"]) == said

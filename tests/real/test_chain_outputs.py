"""SmolLM2 with our drafter in the hands of others: z-lab's dflash and vLLM answer at temperature 0 as our engine does.

`tests/reference/make_chain_outputs.py` recorded them.
"""

import json
from pathlib import Path

import pytest

RECORDED = Path(__file__).resolve().parents[1] / "reference" / "chain_outputs.json"
PROGRAMS = json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_another_program_says_the_same(pair, program):
    recorded = PROGRAMS[program]
    for prompt, answer in zip(recorded["prompts"][:2], recorded["answers"], strict=False):
        assert list(pair.answer(prompt, 4, recorded["max_tokens"]).token_ids) == answer


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_another_program_says_the_same_to_every_prompt(pair, program):
    recorded = PROGRAMS[program]
    for prompt, answer in zip(recorded["prompts"], recorded["answers"], strict=True):
        assert list(pair.answer(prompt, 4, recorded["max_tokens"]).token_ids) == answer

"""The self-test: a small audit of the model at hand, and of a random hybrid pair built in memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ddtree.audit.lossless import Audit
from ddtree.audit.plan import Plan
from ddtree.audit.prompts import RAW, Prompt, encode_all
from ddtree.doctor.checks import FAILED, OK, WARNING, Check
from ddtree.doctor.hybrid import VOCAB, random_hybrid

AREA = "self-test"
TEXTS = (("greeting", "Say hello in one short sentence."),)
PLAN = Plan(budgets=(0, 8), max_tokens=6, rounds=1)
HYBRID_PLAN = Plan(budgets=(0, 16), max_tokens=16)
AUDIT = "run `ddtree audit` on it for the whole picture; please report it with that command's last line"
SLOWER = "the output is right, only slower than it could be: run `ddtree audit --fidelity` on it"


def audit_check(name: str, engine, tokenizer, plan: Plan, prompts: list[Prompt], say: Callable[[str], None]) -> Check:
    """One audit as one line: failed where the output would be wrong, a warning for a faulty drafter."""
    started = time.perf_counter()
    try:
        result = Audit(engine, tokenizer, plan, say=say).run(prompts)
    except (ValueError, RuntimeError) as error:
        return Check(AREA, name, FAILED, f"{type(error).__name__}: {error}", AUDIT)
    seconds = time.perf_counter() - started
    found = f"{result.verdict.replace('_', ' ')}, drafter {result.drafter}: {result.runs} runs, {result.rounds_inspected} rounds, {seconds:.0f} s"
    if result.passed:
        return Check(AREA, name, OK, found)
    where = result.faults[0].where if result.faults else next((each.where for each in result.divergences if each.where), "")
    return Check(AREA, name, FAILED if result.exit_status == 1 else WARNING, f"{found}; {where}", AUDIT if result.exit_status == 1 else SLOWER)


def model_check(name: str, engine, tokenizer, say: Callable[[str], None]) -> Check:
    """Plain decoding against trees on one prompt in each form."""
    return audit_check(name, engine, tokenizer, PLAN, encode_all(tokenizer, TEXTS), say)


def hybrid_check(device: torch.device, dtype: torch.dtype, say: Callable[[str], None]) -> Check:
    """Recurrent layers under trees, in seconds; `ids` stand in for a tokenizer."""
    engine = random_hybrid(device, dtype)
    prompts = [Prompt(f"ids {i}", RAW, "", tuple((7 * i + 5 * k) % (VOCAB - 1) for k in range(9 + i))) for i in range(2)]
    plain = [Prompt(each.id, RAW, " ".join(map(str, each.token_ids)), each.token_ids) for each in prompts]
    return audit_check("random hybrid pair", engine, Numbers(), HYBRID_PLAN, plain, say)


class Numbers:
    """Token ids written as numbers: the tokenizer of a model that speaks no language."""

    eos_token_ids = special_ids = frozenset()
    chat_template = None

    def __init__(self) -> None:
        self.pretrained = self.backend = self
        self.bos_token_id = self.eos_token_id = None
        self.ids: list[int] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> Numbers:
        """As the `tokenizers` library answers: an object with `ids`."""
        found = Numbers()
        found.ids = [int(part) for part in text.split()]
        return found

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, token_ids))

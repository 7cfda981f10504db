"""A running server by its URL: the part of the audit that can be seen from outside, and a list of what cannot.

Of a ddtree server every answer is compared with its own plain decoding (`tree_budget: 0`), by token ids; of any other
OpenAI-compatible one with a second answer, and with a local model or transformers where one is given, by text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ddtree.audit.findings import (
    COUNTS,
    MISMATCH,
    NEAR_TIE,
    PROMPT,
    Divergence,
    Fault,
    Result,
    first_difference,
)
from ddtree.audit.plan import GROUP, Plan
from ddtree.audit.prompts import CHAT, RAW, Prompt, prompt_fault, switches_of
from ddtree.audit.served_checks import count_fault, prompt_faults, stop_piece, stream_fault
from ddtree.client import Answer, HttpNoise, Refused, ServerClient, answer_of, answer_of_stream

INSIDE = "layers, caches, commits, the drafter's own computation: audit the model in the process (ddtree audit MODEL)"
NO_BUDGET = "speculative against plain decoding: the server does not answer with a `ddtree` object, so it has no tree_budget to turn off"
EXACT = "the server is batch-invariant: no near tie between its own answers is excused"


@dataclass(frozen=True)
class Case:
    """One prompt in one form, as a server is asked it."""

    id: str
    form: str
    text: str
    thinking: bool | None = None
    temperature: float = 0.0

    @property
    def label(self) -> str:
        return Prompt(self.id, self.form, self.text, (), self.thinking).label

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.form == CHAT else "/v1/completions"


class ServedAudit:
    """`local` is a `served_local.Local`, a model of one's own to compare with; None without one."""

    def __init__(
        self,
        client: ServerClient,
        plan: Plan,
        tokenizer=None,
        local: Callable | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.client, self.plan, self.tokenizer, self.local, self.say = client, plan, tokenizer, local, say
        self.result = Result(budgets=list(plan.budgets), temperatures=list(plan.temperatures), url=client.url)
        self.lengths: dict[int, Counter] = {}
        self.model = client.model()
        self.is_ddtree = False
        self.noise: HttpNoise | None = None
        self.exact = False  # the batch-invariant mode promises the same bits: there a tie is no excuse

    def run(self, texts: Sequence[tuple[str, str]], thinking: Sequence[bool] | None = None) -> Result:
        """Every text in every form that the server takes."""
        cases = self._cases(texts, thinking)
        result = self.result
        result.prompts, result.reference = len(cases), "a local model" if self.local is not None else None
        if self.is_ddtree:
            result.drafter_rounds = 0
            stats = self.client.get("/stats") or {}
            self.noise = HttpNoise.measure(self.client, self.model, stats.get("dtype"))
            self.exact = bool(stats.get("batch_invariant"))
            result.noise, result.near_tie_limit = self.noise.measured, None if self.exact else self.noise.limit
            result.notes += [EXACT] if self.exact else []
        result.unchecked += [INSIDE] + ([] if self.is_ddtree else [NO_BUDGET])
        plain = {}
        for number, case in enumerate(cases, start=1):
            self.say(f"{number} of {len(cases)}: {case.label}")
            found = self._case(case)
            if found is not None:
                plain[case] = found
        self._side_by_side(plain)
        for budget, counts in sorted(self.lengths.items(), key=lambda item: (item[0] == "auto", item[0])):
            rounds = sum(counts.values())
            if rounds:
                result.acceptance_length[str(budget)] = round(sum(n * count for n, count in counts.items()) / rounds, 3)
        return result

    def _cases(self, texts, thinking) -> list[Case]:
        """Find out what the server is and which forms it takes."""
        forms, first = [], texts[0][1]
        for form in (CHAT, RAW):
            body = self._body(Case("probe", form, first), 0, max_tokens=2)
            try:
                answer = answer_of(self.client.post(Case("", form, "").path, body | {"tree_budget": 0, "return_token_ids": True}))
                self.is_ddtree = self.is_ddtree or answer.report is not None
            except Refused:
                try:
                    self.client.post(Case("", form, "").path, body)
                except Refused as error:
                    self.result.unchecked.append(f"the {form} form: {error}")
                    continue
            forms.append(form)
        if not forms:
            raise ValueError(f"--url {self.client.url}: neither chat nor raw completions are answered: {self.result.unchecked[-1]}")
        knows = CHAT in forms and self._knows_thinking(first)
        return [
            Case(name, form, text, switch, temperature)
            for number, (name, text) in enumerate(texts)
            for form in forms
            for switch in (switches_of(thinking, number, knows) if form == CHAT else (None,))
            for temperature in (self.plan.temperatures if self.is_ddtree else (0.0,))
        ]

    def _knows_thinking(self, text: str) -> bool:
        if not self.is_ddtree:
            self.result.unchecked.append("thinking on and off: there is no common field for it")
            return False
        rendered = [
            self.client.token_ids({"messages": [{"role": "user", "content": text}], "enable_thinking": switch})
            for switch in (True, False)
        ]
        return None not in rendered and rendered[0] != rendered[1]

    def _body(self, case: Case, budget: int, **changes) -> dict:
        body: dict = {"model": self.model, "max_tokens": self.plan.max_tokens, "temperature": case.temperature}
        body |= {"messages": [{"role": "user", "content": case.text}]} if case.form == CHAT else {"prompt": case.text}
        if self.is_ddtree:
            body |= {"tree_budget": budget, "return_token_ids": True, "seed": self.plan.seed}
            body |= {} if case.thinking is None else {"enable_thinking": case.thinking}
        return body | changes

    def _ask(self, case: Case, budget: int = 0, stream: bool = False, **changes) -> Answer:
        self.result.runs += 1
        body = self._body(case, budget, **changes)
        answer = (
            answer_of_stream(self.client.stream(case.path, body)) if stream else answer_of(self.client.post(case.path, body))
        )
        fault = count_fault(answer)
        if fault:
            self._book(COUNTS, f"{fault}, budget {budget}", case, budget)
        if budget and not changes:
            self.lengths.setdefault(budget, Counter()).update(answer.histogram)
        return answer

    def _case(self, case: Case) -> Answer | None:
        """The plain answer; None where nothing can be compared with it."""
        plain = self._ask(case)
        self.result.tokens += plain.output_tokens or 0
        for fault in prompt_faults(self.client, case, plain, self.is_ddtree) or self._own_prompt_faults(case):
            self._book(PROMPT, fault, case)
        again = self._ask(case)
        if again.text != plain.text:
            where = "plain decoding twice does not give the same answer"
            if self.is_ddtree:
                self._compare(case, plain, again, 0, "budget 0 again")
            else:
                self.result.unchecked.append(f"{case.label}: {where}, so nothing can be compared with it")
            return None
        for budget in self.plan.drafting if self.is_ddtree else ():
            answer = self._ask(case, budget)
            mode = (answer.report or {}).get("mode")
            if mode != "ddtree" and (answer.output_tokens or 0) > 2:
                self.result.notes.append(f"{case.label}: budget {budget} ran in mode {mode}: {(answer.report or {}).get('reason')}")
            self._compare(case, plain, answer, budget, f"budget {budget}")
        budget = next(iter(self.plan.drafting), 0)
        streamed = self._ask(case, budget, stream=True)
        fault = stream_fault(plain, streamed) if self.is_ddtree or streamed.text != again.text else None
        if fault:
            self._book("stream", f"{fault}, budget {budget}", case, budget)
        self._stops(case, plain, budget)
        if self.local is not None and not case.temperature:
            self._against_local(case, plain)
        return plain

    def _stops(self, case: Case, plain: Answer, budget: int) -> None:
        """Stops forged in the middle of the plain answer, and a cap."""
        piece = stop_piece(plain)
        if piece is not None:
            expected = replace(plain, text=plain.text[: plain.text.index(piece)], token_ids=None, finish_reason="stop", output_tokens=None)
            found = replace(self._ask(case, budget, stop=[piece]), token_ids=None, output_tokens=None)
            self._compare(case, expected, found, budget, f"budget {budget}, stop string {piece!r}", kind="stop")
        ids = plain.token_ids
        if self.is_ddtree and ids is not None and len(ids) > 3:
            stop = ids[len(ids) // 2]
            count = ids.index(stop) + 1
            found = self._ask(case, budget, stop_token_ids=[stop])
            expected = replace(plain, text=found.text, token_ids=ids[:count], finish_reason="stop", output_tokens=count)
            self._compare(case, expected, found, budget, f"budget {budget}, stop at token {stop}", kind="stop")
        half = (plain.output_tokens or 0) // 2
        if half:
            found = self._ask(case, budget, max_tokens=half)
            text = found.text if plain.text.startswith(found.text.rstrip("\ufffd")) else plain.text[: len(found.text)]
            kept = None if ids is None else ids[:half]
            expected = replace(plain, text=text, token_ids=kept, finish_reason="length", output_tokens=half)
            self._compare(case, expected, found, budget, f"budget {budget}, max_tokens {half}", kind="stop")

    def _side_by_side(self, plain: dict[Case, Answer]) -> None:
        """The same prompts at once, with mixed budgets, against each alone."""
        if any(fault.kind != PROMPT for fault in self.result.faults) or self.result.divergences or len(plain) < 2:
            return
        cases = list(plain)
        budgets = [*self.plan.drafting, 0] if self.is_ddtree else [0]
        for first in range(0, len(cases), GROUP):
            group = cases[first : first + GROUP]
            asked = [budgets[i % len(budgets)] for i in range(len(group))]
            with ThreadPoolExecutor(GROUP) as pool:
                answers = list(pool.map(self._ask, group, asked))
            self.result.packed += 1
            for case, budget, answer in zip(group, asked, answers, strict=True):
                self._compare(case, plain[case], answer, budget, f"budget {budget}, {len(group)} clients at once")

    def _compare(self, case: Case, plain: Answer, other: Answer, budget: int, name: str, kind: str | None = None) -> None:
        """Ids where both have them, else text; then how they ended."""
        by_ids = plain.token_ids is not None and other.token_ids is not None
        left, right = (plain.token_ids, other.token_ids) if by_ids else (plain.text, other.text)
        position = first_difference(left, right)
        if position is not None:
            self._diverged(case, left, right, position, by_ids, budget, name)
        elif plain.text != other.text:
            self._book("text", f"{name}: the same token ids read {other.text[-60:]!r}, not {plain.text[-60:]!r}", case, budget)
        elif plain.finish_reason != other.finish_reason:
            where = f"{name}: it ended by {other.finish_reason}, plain decoding by {plain.finish_reason}"
            self._book(kind or "stop", where, case, budget)
        elif None not in (plain.output_tokens, other.output_tokens) and plain.output_tokens != other.output_tokens:
            self._book(COUNTS, f"{name}: {other.output_tokens} completion tokens, expected {plain.output_tokens}", case, budget)

    def _diverged(self, case: Case, left, right, position: int, by_ids: bool, budget: int, name: str) -> None:
        margin, verdict = None, MISMATCH
        if by_ids and position < min(len(left), len(right)) and not case.temperature:
            prompt = self.client.token_ids(self._prompt_body(case))
            margin = None if prompt is None else self.noise.margin([*prompt, *left[:position]])
            verdict = NEAR_TIE if margin is not None and margin <= self.noise.limit and not self.exact else MISMATCH
        shown = [self._shown(each, position, by_ids) for each in (left, right)]
        where = "" if verdict == NEAR_TIE else f"only an audit in the process can tell: {INSIDE.partition(': ')[2]}"
        self.result.divergences.append(
            Divergence(case.id, case.form, case.thinking, name, budget, case.temperature, position, *shown, margin, verdict, where)
        )

    def _shown(self, side, position: int, by_ids: bool) -> str:
        if position >= len(side):
            return "(ended)"
        return repr((self.client.text_of([side[position]]) or str(side[position])) if by_ids else side[position : position + 12])

    def _prompt_body(self, case: Case) -> dict:
        if case.form == RAW:
            return {"prompt": case.text}
        body = {"messages": [{"role": "user", "content": case.text}]}
        return body if case.thinking is None else body | {"enable_thinking": case.thinking}

    def _own_prompt_faults(self, case: Case) -> list[str]:
        """With the model's tokenizer at hand, what the in-process audit says of the same ids."""
        ids = None if self.tokenizer is None else self.client.token_ids(self._prompt_body(case))
        if ids is None:
            return []
        found = prompt_fault(self.tokenizer, Prompt(case.id, case.form, case.text, tuple(ids), case.thinking))
        return [found] if found else []

    def _against_local(self, case: Case, plain: Answer) -> None:
        if plain.thought:
            self.result.unchecked.append(f"{case.label}: against the model here, since the server takes its thought apart")
            return
        for name, text, margin_at in self.local(case):
            position = first_difference(plain.text, text)
            if position is None:
                continue
            margin, verdict = margin_at(position)
            shown = [repr(each[position : position + 12]) or "(ended)" for each in (plain.text, text)]
            where = "" if verdict == NEAR_TIE else f"the server's plain answer is not that of {name}"
            self.result.divergences.append(
                Divergence(case.id, case.form, case.thinking, name, 0, 0.0, position, *shown, margin, verdict, where)
            )

    def _book(self, kind: str, where: str, case: Case, budget: int = 0) -> None:
        self.result.add(Fault(kind, f"{case.label}: {where}", case.id, budget))

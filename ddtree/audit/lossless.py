"""Is the output what the target alone writes? Every budget, honest and wrong drafters, forged stops, transformers.

Where two outputs differ, the target's margin is scored again from scratch: within the measured noise it is a near tie,
else a mismatch, and the inspector says where it comes from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from ddtree.audit.borrowed import drafting_with, generate_together
from ddtree.audit.drafters import ignorant, knowing
from ddtree.audit.drafting import DrafterAudit
from ddtree.audit.findings import (
    COUNTS,
    MISMATCH,
    NEAR_TIE,
    PROMPT,
    STOP,
    TARGET,
    Divergence,
    Fault,
    Result,
    first_difference,
)
from ddtree.audit.inside import Inside
from ddtree.audit.noise import Noise, measure_noise, rescored
from ddtree.audit.plan import GROUP, INSPECTED_BUDGET, Plan
from ddtree.audit.prompts import Prompt, prompt_fault
from ddtree.audit.stopping import StopWatcher, count_fault, stop_string_fault
from ddtree.engine.request import AUTO, Request
from ddtree.sampling.params import SamplingParams

TRANSFORMERS = "transformers"
MOST_LOCALISED = 3  # mismatches that are localised; the others are listed
LOCALISE_ROUNDS = 200
ALWAYS_WHOLE = 2  # prompts that every budget is tried on, whichever their form
MOST_PER_GROUP = 8  # prompts for each group: packing is one fault or none, not one per prompt


class Audit:
    """One engine, one tokenizer, one plan. `reference`: (prompt ids, max_tokens) -> transformers' greedy answer."""

    def __init__(
        self, engine, tokenizer, plan: Plan, reference: Callable | None = None, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.engine, self.tokenizer, self.plan, self.reference, self.say = engine, tokenizer, plan, reference, say
        self.result = Result(budgets=list(plan.budgets), temperatures=list(plan.temperatures))
        self.noise: Noise | None = None
        self.num_localised = 0
        self.lengths: dict[int, Counter] = {}
        self.inside = Inside(self)
        self._met: set[tuple[str, float]] = set()  # texts that some form was audited of, by temperature
        self.answers: dict[tuple[Prompt, float], list[int]] = {}  # plain decoding's, by prompt and temperature

    def run(self, prompts: Sequence[Prompt]) -> Result:
        """Everything, in the order in which faults explain one another."""
        result = self.result
        prompts = [prompt for prompt in prompts if self._room(prompt) > 0]
        result.prompts = len(prompts)
        result.drafter_rounds = None if self.engine.drafter is None else 0
        for prompt in prompts:
            found = prompt_fault(self.tokenizer, prompt)
            if found:
                result.add(Fault(PROMPT, found, prompt.id))
        self._check_drafter_config()
        for index, prompt in enumerate(prompts):
            self.say(f"{index + 1} of {len(prompts)}: {prompt.label}")
            for temperature in self.plan.temperatures:
                self._prompt(index, prompt, temperature)
        if self.plan.inspect:
            self.inside.look_at_sample(prompts)
        for temperature in self.plan.temperatures:
            self._side_by_side(prompts, temperature)
        if self.plan.inspect and result.packed and result.passed:
            self.inside.look_side_by_side(prompts)
        for budget, counts in sorted(self.lengths.items(), key=lambda item: (item[0] == AUTO, item[0])):
            rounds, emitted = sum(counts.values()), sum(length * count for length, count in counts.items())
            if rounds:
                result.acceptance_length[str(budget)] = round(emitted / rounds, 3)
        return result

    def _prompt(self, index: int, prompt: Prompt, temperature: float) -> None:
        """One prompt at one temperature."""
        engine, drafting = self.engine, self.plan.drafting
        request = self.request(prompt, temperature)
        plain = self.generate(request)
        if plain is None:
            return
        if self.noise is None:
            self._measure(prompt, plain)
        self.answers[prompt, temperature] = plain
        self.result.tokens += len(plain)
        self._check_stop(prompt, request, plain)
        # A text's other forms are other ids, no other engine: one budget in turn is enough for them.
        whole = index < ALWAYS_WHOLE or (prompt.id, temperature) not in self._met
        self._met.add((prompt.id, temperature))
        turn = index % max(len(drafting), 1)
        for budget in (drafting if whole else drafting[turn : turn + 1]) if engine.drafter is not None else ():
            self._against(prompt, request, plain, budget, None, f"budget {budget}")
        if drafting and whole:
            self._scripted(index, prompt, request, plain)
        if self.reference is not None and whole and not temperature:
            self._against_reference(prompt, request, plain)

    def _scripted(self, index: int, prompt: Prompt, request: Request, plain: list[int]) -> None:
        """Drafters that know the answer, or nothing, and forged stops; what takes a round a token takes turns."""
        engine, pinned = self.engine, self.plan.pinned
        scripts, block, vocabulary = [[*prompt.token_ids, *plain]], engine.block_size, engine.vocab_size
        budget = min(pinned[index % len(pinned)], 256)

        def know():
            return knowing(scripts, vocabulary, block, index)

        self._against(prompt, request, plain, budget, know, f"budget {budget}, knowing drafter")
        if index % 6 == 0:
            small = min(budget, 16)  # a token a round: what it drafts is all that costs
            name = f"budget {small}, wrong drafter"
            self._against(prompt, request, plain, small, lambda: ignorant(vocabulary, block, index), name)
        if index < ALWAYS_WHOLE or index % 6 == 0:
            self._forged_stop(prompt, request, plain, budget, know)
        if index < ALWAYS_WHOLE or index % 2:
            self._stop_string(prompt, request, plain, budget, know)

    def request(self, prompt: Prompt, temperature: float, budget: int = 0) -> Request:
        return Request(
            prompt.token_ids,
            max_tokens=self._room(prompt),
            sampling=SamplingParams(temperature=temperature),
            seed=self.plan.seed,
            tree_budget=budget,
            eos_token_ids=frozenset(self.tokenizer.eos_token_ids),
        )

    def _room(self, prompt: Prompt) -> int:
        return min(self.plan.max_tokens, self.engine.config.max_context - len(prompt.token_ids))

    def generate(self, request: Request, drafter=None, prompt_id: str = "") -> list[int] | None:
        """The answer's ids; None, and a fault, where the engine failed."""
        self.result.runs += 1
        try:
            with drafting_with(self.engine, drafter):
                emission = self.engine.generate(request)
        except RuntimeError as error:
            self.result.add(Fault(TARGET, f"the engine failed: {error}", prompt_id, request.tree_budget))
            return None
        if drafter is None and request.tree_budget:
            self.lengths.setdefault(request.tree_budget, Counter()).update(emission.stats.acceptance_histogram)
        miscounted = count_fault(emission.stats, len(emission.token_ids))
        if miscounted:
            self.result.add(Fault(COUNTS, miscounted, prompt_id, request.tree_budget))
        return list(emission.token_ids)

    def _measure(self, prompt: Prompt, plain: list[int]) -> None:
        self.noise = measure_noise(self.engine.target.model, [*prompt.token_ids, *plain])
        self.result.noise, self.result.near_tie_limit = self.noise.measured, self.noise.limit
        if self.noise.excessive:
            self.result.notes.append(
                f"steps, tree rows and a prefill of the same tokens differ by up to {self.noise.measured:.2g} in a logit, "
                f"more than rounding explains ({self.noise.bound:.2g})"
            )

    def _against(self, prompt: Prompt, request: Request, plain: list[int], budget: int, drafter, name: str) -> None:
        """One speculative run against plain decoding; `drafter` makes the one to use in place of the engine's own."""
        speculative = replace(request, tree_budget=budget)
        tokens = self.generate(speculative, drafter() if drafter else None, prompt.id)
        if tokens is not None:
            self._compare(prompt, speculative, plain, tokens, name, drafter)

    def _forged_stop(self, prompt: Prompt, request: Request, plain: list[int], budget: int, drafter) -> None:
        """Stop in the middle of the answer, inside an accepted run more often than not: by id, and as a stop string does."""
        for place, by_text in ((len(plain) // 3, False), (len(plain) // 2, False), (2 * len(plain) // 3, True)):
            stop = plain[place]
            if stop in request.eos_token_ids:
                continue
            ids = frozenset() if by_text else frozenset({stop})
            watcher = StopWatcher(stop) if by_text else None
            forged = replace(request, tree_budget=budget, stop_token_ids=ids, watcher=watcher)
            tokens = self.generate(forged, drafter(), prompt.id)
            if tokens is not None:
                expected = plain[: plain.index(stop) + 1]
                kind = "watched stop" if by_text else "stop"
                self._compare(prompt, forged, expected, tokens, f"budget {budget}, {kind} at token {stop}", drafter)

    def _stop_string(self, prompt: Prompt, request: Request, plain: list[int], budget: int, drafter) -> None:
        """The same by text, through the watcher that servers use."""

        def run(watcher):
            return self.generate(replace(request, tree_budget=budget, watcher=watcher), drafter(), prompt.id)

        found = stop_string_fault(self.tokenizer, plain, request.eos_token_ids, run)
        if found:
            self.result.add(Fault(STOP, found, prompt.id, budget))

    def _against_reference(self, prompt: Prompt, request: Request, plain: list[int]) -> None:
        tokens = self.reference.along(prompt.token_ids, plain, request.max_tokens)
        position = first_difference(plain, tokens)
        if position is not None:
            self._book(prompt, request, plain, tokens, position, TRANSFORMERS, None)

    def _compare(self, prompt, request, plain, tokens, name, drafter) -> None:
        position = first_difference(plain, tokens)
        if position is not None:
            self._book(prompt, request, plain, tokens, position, name, drafter)

    def _book(self, prompt, request, plain, tokens, position, name, drafter, beside=None) -> None:
        """Judge a difference, and localise it if it is a mismatch."""
        margin, verdict = None, MISMATCH
        if position < min(len(plain), len(tokens)):
            prefix = [*request.prompt_token_ids, *plain[:position]]
            _, margin = rescored(self.engine.target.model, request, prefix)
            # The batch-invariant mode promises the same bits, but not those of transformers.
            exact = self.engine.config.batch_invariant and name != TRANSFORMERS
            verdict = NEAR_TIE if margin <= self.noise.limit and not exact else MISMATCH
        found = Divergence(
            prompt.id, prompt.form, prompt.thinking, name, request.tree_budget, request.sampling.temperature, position,
            self._token(plain, position), self._token(tokens, position), margin, verdict,
        )  # fmt: skip
        if verdict == MISMATCH:
            found.where = self._where(prompt, beside or [request], name, drafter, plain[:position])
        self.result.divergences.append(found)

    def _where(self, prompt, requests, name, drafter, tokens) -> str:
        """`requests`: what ran side by side when it happened, `prompt`'s own among them."""
        if name == TRANSFORMERS:
            from ddtree.audit.reference import where_it_differs

            found = where_it_differs(self.engine.target.model, self.reference, [*prompt.token_ids, *tokens])
            if found is not None:
                return found
            requests = [replace(request, tree_budget=0) for request in requests]
        if self.num_localised >= MOST_LOCALISED:
            return "not localised: as many mismatches have been already"
        self.num_localised += 1
        # Its second run need not choose alike, and reads the drafter's context when it catches up, not at each round.
        requests = [replace(each, tree_budget=INSPECTED_BUDGET) if each.tree_budget == AUTO else each for each in requests]
        found = self.inside.inspect(prompt, requests, drafter() if drafter else None, LOCALISE_ROUNDS)
        if found.faults:
            return found.faults[0].where
        if self.engine.device_rounds is not None:  # what was looked into has caches of its own
            fault = self.inside.look_into_pools(prompt, requests, drafter() if drafter else None, LOCALISE_ROUNDS)
            if fault is not None:
                return fault.where
        return "not localised: every step of a second run is what it should be"

    def _side_by_side(self, prompts: Sequence[Prompt], temperature: float) -> None:
        """The same prompts packed together, each with a budget of its own: what they write must be what each writes alone."""
        if any(fault.kind != PROMPT for fault in self.result.faults) or self.result.verdict == MISMATCH:
            self.result.notes.append("nothing was decoded side by side: what is wrong alone comes first")
            return
        known = [prompt for prompt in prompts if (prompt, temperature) in self.answers]
        for first in range(0, GROUP * max(1, len(known) // MOST_PER_GROUP), GROUP):
            group = known[first : first + GROUP]
            if len(group) < 2:
                group = known[-2:]
            if len(group) < 2:
                return
            self.say(f"side by side: {', '.join(prompt.label for prompt in group)}")
            self._together(group, temperature)

    def _together(self, group: Sequence[Prompt], temperature: float) -> None:
        answers = [self.answers[prompt, temperature] for prompt in group]
        budgets = [*(min(budget, 256) for budget in self.plan.pinned), 0]
        requests = [self.request(prompt, temperature, budgets[i % len(budgets)]) for i, prompt in enumerate(group)]
        scripts = [[*prompt.token_ids, *plain] for prompt, plain in zip(group, answers, strict=True)]
        self.result.runs += 1
        self.result.packed += 1

        def drafter():
            return self.inside.long_paths(scripts, 0)

        try:
            with drafting_with(self.engine, drafter()):
                found = generate_together(self.engine, requests)
        except RuntimeError as error:
            self.result.add(Fault(TARGET, f"side by side: the engine failed: {error}", group[0].id))
            return
        for prompt, request, plain, tokens in zip(group, requests, answers, found, strict=True):
            position = first_difference(plain, tokens)
            if position is not None:
                name = f"budget {request.tree_budget}, side by side with {len(group) - 1} others"
                self._book(prompt, request, plain, tokens, position, name, drafter, requests)

    def _check_drafter_config(self) -> None:
        audit = DrafterAudit.of(self.inside.engine.drafter, self.inside.engine.target)
        for fault in audit.config_faults() if audit is not None else ():
            self.result.add(fault)

    def _check_stop(self, prompt: Prompt, request: Request, plain: list[int]) -> None:
        """Plain decoding's own end."""
        passed = [place for place, token_id in enumerate(plain[:-1]) if token_id in request.eos_token_ids]
        if passed:
            self.result.add(
                Fault(STOP, f"stop: plain decoding passed over {self._token(plain, passed[0])} at answer token {passed[0]}", prompt.id)
            )

    def _token(self, tokens: Sequence[int], position: int) -> str:
        if position >= len(tokens):
            return "(ended)"
        return repr(self.tokenizer.decode([tokens[position]], skip_special_tokens=False))

"""Looking inside rounds: of a run that went wrong, and of a few that did not, since some faults change no token.

The sample: the drafter's own guesses, long paths, a chunked prefill, two requests side by side, a long context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddtree.audit.borrowed import limited
from ddtree.audit.drafters import knowing
from ddtree.audit.drafting import DrafterAudit
from ddtree.audit.findings import FAULTY
from ddtree.audit.guided import guided
from ddtree.audit.localise import Inspector
from ddtree.audit.plan import INSPECTED_BUDGET
from ddtree.audit.pooled import pool_fault
from ddtree.audit.prompts import RAW, Prompt
from ddtree.engine.pooled import without_pools
from ddtree.engine.request import Request

INSPECTED_PROMPTS = 2
INSPECTED_ROUNDS = 3
FEWER_ROUNDS = 1  # of the looks after the first two
LONG_CONTEXT = 280  # tokens before the rounds that are looked at last
LONG_ANSWER = 16


class Inside:
    """The part of an `Audit` that watches rounds; faults go into its result."""

    def __init__(self, audit) -> None:
        self.audit = audit
        # Pools hold all sequences at once; what one layer remembers of one is looked at in caches of its own.
        self.engine = without_pools(audit.engine)
        self.inspections = []  # (prompt id, Inspection), for the report

    def inspect(self, prompt: Prompt, requests: Sequence[Request], drafter, most_rounds: int):
        """Watch `requests` side by side; the faults are booked under `prompt`."""
        audit, result = self.audit, self.audit.result
        found = Inspector(self.engine, audit.noise.limit if audit.noise else 0.0).run(requests, drafter, most_rounds)
        result.rounds_inspected += found.num_rounds
        if result.drafter_rounds is not None:
            drafted = [record.drafted for record in found.records if record.drafted is not None]
            result.drafter_rounds += sum(each.hidden is not None for each in drafted)
        for fault in found.faults:
            result.add(replace(fault, prompt_id=prompt.id))
        self.inspections.append((prompt.id, found))
        return found

    def look_into_pools(self, prompt: Prompt, requests: Sequence[Request], drafter, most_rounds: int):
        """The first fault in what the engine's pools hold, booked under `prompt`; None where they are right."""
        audit = self.audit
        fault = pool_fault(audit.engine, requests, drafter, audit.noise.limit if audit.noise else 0.0, most_rounds)
        if fault is not None:
            audit.result.add(replace(fault, prompt_id=prompt.id, budget=requests[0].tree_budget))
        return fault

    def look_at_sample(self, prompts: Sequence[Prompt]) -> None:
        """One request at a time: its own guesses, long paths, a prefill in chunks, a long context."""
        if not self._budget or not prompts:
            return
        first, last = self._chosen(prompts)[0], self._chosen(prompts)[-1]
        if self.engine.drafter is not None:
            self._look([first], long_paths=False)
        self._look([first])
        # In chunks, so that a chunk's boundary is looked at without a prompt of that length.
        self._look([last], FEWER_ROUNDS, chunk=len(last[0].token_ids) // 2 + 1)
        self._look([self._long_prompt()], FEWER_ROUNDS)
        if self.audit.engine.device_rounds is not None and not self.audit.result.target_is_faulty:
            self.look_into_pools(first[0], [first[1]], None, INSPECTED_ROUNDS)

    def look_side_by_side(self, prompts: Sequence[Prompt]) -> None:
        """Two requests in the same rounds."""
        chosen = self._chosen(prompts)
        if self._budget and len(chosen) > 1:
            self._look(chosen, FEWER_ROUNDS)

    @property
    def _budget(self) -> int:
        return min(max(self.audit.plan.pinned, default=0), INSPECTED_BUDGET)

    def _chosen(self, prompts: Sequence[Prompt]) -> list[tuple[Prompt, Request]]:
        temperatures = self.audit.plan.temperatures
        return [
            (prompt, self.audit.request(prompt, temperatures[i % len(temperatures)], self._budget))
            for i, prompt in enumerate(prompts[:INSPECTED_PROMPTS])
        ]

    def _look(self, chosen, rounds: int = INSPECTED_ROUNDS, chunk: int | None = None, long_paths: bool = True) -> None:
        """A few rounds of requests side by side, unless the target is known to be wrong already."""
        audit = self.audit
        if audit.result.target_is_faulty:
            return
        prompts, requests = zip(*chosen, strict=True)
        audit.say(f"inspecting rounds of {' beside '.join(prompt.label for prompt in prompts)}")
        drafter = None
        if long_paths:
            plain = [
                audit.answers.get((prompt, request.sampling.temperature)) or audit.generate(replace(request, tree_budget=0))
                for prompt, request in chosen
            ]
            if None in plain:
                return
            scripts = [[*request.prompt_token_ids, *answer] for request, answer in zip(requests, plain, strict=True)]
            drafter = self.long_paths(scripts, len(requests))
        with limited(self.engine, prefill_chunk=chunk or self.engine.config.prefill_chunk):
            self.inspect(prompts[0], requests, drafter, min(rounds, audit.plan.rounds))

    def _long_prompt(self) -> tuple[Prompt, Request]:
        """All that was read and written so far, over and over, as the beginning of one more answer."""
        audit = self.audit
        tokens = [token for (prompt, _), plain in audit.answers.items() for token in (*prompt.token_ids, *plain)]
        length = min(LONG_CONTEXT, audit.engine.config.max_context - LONG_ANSWER)
        ids = tuple((tokens * (length // max(len(tokens), 1) + 1))[:length])
        prompt = Prompt(f"{len(ids)} tokens", RAW, "", ids)
        request = replace(audit.request(prompt, audit.plan.temperatures[0], self._budget), max_tokens=LONG_ANSWER)
        return prompt, replace(request, eos_token_ids=frozenset())

    def long_paths(self, scripts: list[list[int]], seed: int):
        """A drafter whose paths are long. A real one's model goes along: its features after such paths are looked at too,
        which by its own guesses it may never reach. One that is known to be faulty would only hide what comes after it."""
        engine = self.engine
        faulty = self.audit.result.drafter == FAULTY
        if not faulty and DrafterAudit.of(engine.drafter, engine.target) is not None:
            return guided(engine.drafter, scripts, engine.vocab_size)
        return knowing(scripts, engine.vocab_size, engine.block_size, seed)

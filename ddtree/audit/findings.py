"""What an audit finds: divergences of the output, and faults with their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

IDENTICAL, NEAR_TIE, MISMATCH = "identical", "near_tie", "mismatch"
SOUND, FAULTY, UNINSPECTED, NONE = "sound", "faulty", "not_inspected", "none"  # of the drafter
EXIT_MISMATCH, EXIT_DRAFTER = 1, 3  # 2 is a command line that cannot be run

# Which kind of part is to blame.
TARGET, COMMIT, DRAFTER, STOP, PROMPT, TREE, CHOICE, COUNTS = (
    "target", "commit", "drafter", "stop", "prompt", "tree", "choice", "counts",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, with its place in words ("layer 5 recurrent state: sibling 9 leaks into node 11")."""

    kind: str
    where: str
    prompt_id: str = ""
    budget: int = 0
    round: int | None = None
    measured: float | None = None  # relative error, where the finding rests on one


@dataclass
class Divergence:
    """The first place where two outputs differ."""

    prompt_id: str
    form: str
    thinking: bool | None  # as the template was told; None where it was not, or knows none
    against: str  # what was compared with plain decoding: "budget 16", "budget 16, knowing drafter", "transformers"
    budget: int
    temperature: float
    position: int  # in the answer
    plain_token: str
    other_token: str
    margin: float | None  # of the target at that position, in logits; None where an output merely ended
    verdict: str
    where: str = ""


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Position of the first difference; the shorter length where one is the other's beginning; None if equal."""
    if list(left) == list(right):
        return None
    for position, pair in enumerate(zip(left, right, strict=False)):
        if pair[0] != pair[1]:
            return position
    return min(len(left), len(right))


@dataclass
class Result:
    """All of an audit."""

    prompts: int = 0
    tokens: int = 0  # of plain decoding
    runs: int = 0
    packed: int = 0  # runs of several requests side by side
    budgets: list[int] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    noise: float | None = None  # measured, in logits
    near_tie_limit: float | None = None
    rounds_inspected: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    acceptance_length: dict[str, float] = field(default_factory=dict)  # budget -> pooled, of the real drafter
    reference: str | None = None  # what plain decoding was compared with
    url: str | None = None  # of the server, where one was audited
    unchecked: list[str] = field(default_factory=list)  # what could not be looked at from outside
    drafter_rounds: int | None = None  # inspected with the real drafter's own parts; None without a drafter

    @property
    def drafter(self) -> str:
        """Of the drafter alone: is it what its config and tensors say, and given what it was trained on?"""
        if self.drafter_rounds is None:
            return NONE
        if any(fault.kind == DRAFTER for fault in self.faults):
            return FAULTY
        return SOUND if self.drafter_rounds else UNINSPECTED

    @property
    def target_is_faulty(self) -> bool:
        """Something but the drafter and the prompts is known to be wrong."""
        return any(fault.kind not in (PROMPT, DRAFTER) for fault in self.faults)

    @property
    def exit_status(self) -> int:
        """0: identical or near ties, and nothing wrong inside; 1: mismatch; 3: right output, faulty drafter."""
        return EXIT_MISMATCH if self.verdict == MISMATCH else EXIT_DRAFTER if self.drafter == FAULTY else 0

    @property
    def verdict(self) -> str:
        """Of the output alone: a drafter's fault makes it slower, not different."""
        if any(each.verdict == MISMATCH for each in self.divergences):
            return MISMATCH
        # Faults inside that change results, even if no token of this run has shown it.
        if any(fault.kind != DRAFTER for fault in self.faults):
            return MISMATCH
        return NEAR_TIE if self.divergences else IDENTICAL

    @property
    def passed(self) -> bool:
        return self.exit_status == 0

    def add(self, fault: Fault) -> None:
        """Book a fault once, however often it is met."""
        if all((known.kind, known.where) != (fault.kind, fault.where) for known in self.faults):
            self.faults.append(fault)

    def as_json(self) -> dict:
        found = asdict(self)
        found["divergences"] = [{k: _rounded(v) for k, v in each.items()} for each in found["divergences"]]
        return {"verdict": self.verdict, "drafter": self.drafter, "passed": self.passed, **found}


def _rounded(value):
    return float(f"{value:.4g}") if isinstance(value, float) and value == value and abs(value) != float("inf") else (
        None if isinstance(value, float) else value
    )

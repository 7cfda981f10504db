"""What an audit runs: budgets, lengths, temperatures."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree.engine.request import AUTO, TreeBudget

DEFAULT_BUDGETS = (0, 16, 32, 64, 128, 256, 512, 1024)
INSPECTED_BUDGET = 48  # of rounds that are looked into: larger trees show nothing that this one does not, and take longer
GROUP = 4  # requests decoded side by side


@dataclass(frozen=True)
class Plan:
    """What to run. Lengths in tokens."""

    budgets: tuple[TreeBudget, ...] = DEFAULT_BUDGETS
    max_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    inspect: bool = True
    rounds: int = 3  # looked into at most, in each kind of situation

    @property
    def drafting(self) -> tuple[TreeBudget, ...]:
        return tuple(budget for budget in self.budgets if budget)

    @property
    def pinned(self) -> tuple[int, ...]:
        """Budgets for scripted drafters and for looking into rounds, where "auto" would measure the script."""
        return tuple(budget for budget in self.drafting if budget != AUTO) or (INSPECTED_BUDGET,) * bool(self.drafting)

"""Near ties: is a first difference between two outputs within the noise of the arithmetic? Re-scored from scratch.

The target is run afresh over everything before the position, once in one piece and twice with its last rows apart, as
decoding has them. The three should agree; by how much they do not is the noise, measured where it matters.
"""

from __future__ import annotations

from dataclasses import replace

from ddtree.engine.request import Request
from ddtree.engine.sequence import Sequence
from ddtree.engine.target import Target
from ddtree.sampling.choose import margins

LAST_ROWS = (1, 17)  # as a plain round and a small tree have them
FLOOR = 1e-4  # the one excuse that contract.md allows in fp32


class _Recorder:
    """A model that remembers the logits it gave last."""

    def __init__(self, model):
        self.model, self.last = model, None

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def __call__(self, *args):
        return self.model(*args)

    def logits(self, hidden):
        self.last = self.model.logits(hidden)
        return self.last


def near_tie(model, request: Request, before: tuple[int, ...], tokens: tuple[int, int]) -> dict | None:
    """`{"margin", "noise"}` if the target itself hardly prefers one of `tokens` after `before`; None if it does.

    `before` is the prompt and the answer up to the difference. In logits, or scaled logits above temperature 0.
    """
    rows = [_scores(model, request, before, apart) for apart in (0, *LAST_ROWS) if apart < len(before)]
    scores, margin = rows[0]
    noise = max((float((row - scores).abs().max()) for row, _ in rows[1:]), default=0.0)
    bound = max(FLOOR, 2 * noise)
    if request.sampling.greedy:
        # Both tokens must be within reach, not just any two.
        margin = float(scores.max() - min(scores[token] for token in tokens))
    return {"margin": round(margin, 6), "noise": round(noise, 6)} if margin <= bound else None


def _scores(model, request: Request, before: tuple[int, ...], apart: int):
    """The logits `[V]` float32 after `before` and their margin; the last `apart` rows in a forward of their own."""
    recorder = _Recorder(model)
    target = Target(recorder)
    sequence = Sequence(0, replace(request, watcher=None))
    target.open(sequence)
    cut = len(before) - apart
    if apart:
        target.prefill(sequence, list(before[:cut]), last=False)
    target.prefill(sequence, list(before[cut:]) if apart else list(before), last=True)
    noise = sequence.noise(len(before), 1) if sequence.noise else None
    margin = float(margins(recorder.last, request.sampling, noise)[0])
    return recorder.last[0].float(), margin

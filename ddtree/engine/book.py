"""What a decode round adds to a request's stats and trace."""

from __future__ import annotations

from ddtree.engine.decode_round import Round
from ddtree.engine.request import RoundTrace
from ddtree.engine.sequence import Sequence
from ddtree.engine.stats import StageClock


def record(sequence: Sequence, each: Round, clock: StageClock, elapsed: float) -> None:
    """Book one round in the request's stats. Stage times are those of the whole round, shared or not."""
    stats = sequence.stats
    stats.decode_rounds += 1
    stats.plain_rounds += each.tree.num_drafted == 0
    stats.conditioned_rounds += each.scoring == "conditioned"
    stats.nodes_verified += each.tree.num_drafted
    if sequence.auto is not None and each.tree.num_drafted:
        stats.mode = "chain" if stats.mode != "ddtree" and each.tree.is_chain else "ddtree"
    stats.acceptance_histogram[each.acceptance.acceptance_length] += 1
    stats.trimmed_tokens += each.acceptance.acceptance_length - each.kept.acceptance_length
    stats.output_tokens += each.kept.acceptance_length
    stats.decode_s += elapsed
    for stage, seconds in clock.seconds.items():
        name = f"{stage}_s"
        setattr(stats, name, getattr(stats, name) + seconds)
    wanted = sequence.drafts and sequence.tree_budget > 0
    if wanted and each.tree.num_drafted == 0 and each.finish is None and stats.reason is None:
        stats.reason = "past the drafter's own context limit: plain decoding took over"


def traced(sequence: Sequence, each: Round, clock: StageClock, elapsed: float) -> RoundTrace:
    """The round as a trace, once it is booked and committed."""
    context_length = sequence.context_length - each.kept.acceptance_length
    return RoundTrace(
        sequence.stats.decode_rounds, context_length, each.scoring, each.tree, each.acceptance, dict(clock.seconds), elapsed
    )

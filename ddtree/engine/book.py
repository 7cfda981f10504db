"""What a decode round adds to a request's stats and trace."""

from __future__ import annotations

from ddtree.engine.decode_round import Round
from ddtree.engine.request import RoundTrace
from ddtree.engine.sequence import Sequence
from ddtree.engine.stats import StageClock


def record(sequence: Sequence, each: Round, clock: StageClock, elapsed: float) -> None:
    """Book one round in the request's stats. Stage times are those of the whole round, shared or not."""
    stats, seconds, num_drafted = sequence.stats, clock.seconds, each.num_drafted
    stats.decode_rounds += 1
    stats.plain_rounds += num_drafted == 0
    stats.conditioned_rounds += each.scoring == "conditioned"
    stats.nodes_verified += num_drafted
    if num_drafted and stats.mode != "ddtree" and sequence.auto is not None:
        stats.mode = "chain" if each.tree.is_chain else "ddtree"
    stats.acceptance_histogram[each.acceptance_length] += 1
    kept = len(each.token_ids)
    stats.trimmed_tokens += each.acceptance_length - kept
    stats.output_tokens += kept
    stats.decode_s += elapsed
    stats.draft_s += seconds["draft"]
    stats.build_s += seconds["build"]
    stats.verify_s += seconds["verify"]
    stats.accept_s += seconds["accept"]
    stats.commit_s += seconds["commit"]
    if each.budget and not num_drafted and each.finish is None and stats.reason is None:
        stats.reason = "past the drafter's own context limit: plain decoding took over"


def traced(sequence: Sequence, each: Round, clock: StageClock, elapsed: float) -> RoundTrace:
    """The round as a trace, once it is booked and committed."""
    context_length = sequence.context_length - len(each.token_ids)
    return RoundTrace(
        sequence.stats.decode_rounds, context_length, each.scoring, each.tree, each.acceptance, dict(clock.seconds), elapsed
    )

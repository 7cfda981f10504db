"""A request as the engine sees it: token ids in, token ids out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from ddtree.sampling.logprobs import TokenLogprob
from ddtree.sampling.params import SamplingParams
from ddtree.tree.accept import Acceptance
from ddtree.tree.draft_tree import DraftTree


class TokenWatcher(Protocol):
    """Reads the emitted tokens in order, outside the engine: text, stop strings."""

    def feed(self, token_id: int) -> str | None:
        """Take one emitted token; return the stop string that its text completes, or None."""
        ...


class TokenGrammar(Protocol):
    """Which tokens may follow, for one generation. Trees come as `token_ids`, `parents [N]`, node 0 the root.

    A mask over the vocabulary is the dear part (0.1 to 1 ms), so it is asked for node by node, where a token is chosen.

    It does not raise, so that no other request suffers: after an error of its own it allows an end token alone.
    """

    error: str | None  # why it has given up

    def follow(self, emitted: Sequence[int]) -> None:
        """Advance by the tokens emitted since the last call; `emitted` is all of them, and only grows."""
        ...

    def fits(self, token_ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """`[N]` bool: the nodes whose whole path the grammar lets be."""
        ...

    def allowed_after(self, path: Sequence[int]) -> np.ndarray | None:
        """What may follow the emitted tokens and then `path`: `[ceil(V / 8)]` uint8, bit v, least significant first, is set
        for token v. None where all may, and after a path that cannot be."""
        ...


AUTO: Literal["auto"] = "auto"  # the tree budget that is chosen each round by cost
TreeBudget = int | Literal["auto"]
Scoring = Literal["factorised", "conditioned"]  # how a draft's nodes are ranked: each depth alone, or knowing its path


@dataclass(frozen=True)
class Request:
    """What to generate. `seed` is always concrete: whoever builds the request draws one if the user gave none."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    choice_index: int = 0
    tree_budget: TreeBudget = 0
    scoring: Scoring | None = None  # None: conditioned where there is an adapter
    chain: bool = False  # draft trees without branching, to compare trees with
    eos_token_ids: frozenset[int] = frozenset()  # empty under ignore_eos
    stop_token_ids: frozenset[int] = frozenset()
    watcher: TokenWatcher | None = None
    grammar: TokenGrammar | None = None
    num_logprobs: int | None = None  # most probable tokens to report beside each emitted one; None reports nothing
    trace: bool = False  # whether each decode round is reported, tree and all
    cache_salt: str | None = ""  # prefixes are shared by requests of the same salt; None: neither looked up nor remembered
    boundaries: tuple[int, ...] = ()  # prompt lengths that others may share: ends of the system prompt, of turns


def scoring_of(num_conditioned: int, num_drafted: int) -> Scoring | None:
    """What to call so many rounds that drafted, of which so many were ranked by the adapter."""
    if not num_drafted:
        return None
    return "conditioned" if 2 * num_conditioned >= num_drafted else "factorised"


@dataclass
class RequestStats:
    """What one request cost and gained, in the units of the wire's `ddtree` object.

    output_tokens == 1 + sum(length * count over acceptance_histogram) - trimmed_tokens; the 1 is the token that
    prefill emits.
    """

    tree_budget: TreeBudget = 0  # the budget that was in force
    block_size: int | None = None  # None without a drafter
    mode: str = "target_only"  # ddtree | chain | target_only
    reason: str | None = None  # why the mode is not what was asked for
    decode_rounds: int = 0
    plain_rounds: int = 0  # those that verified the root alone
    conditioned_rounds: int = 0  # those whose tree the drafter's adapter ranked
    nodes_verified: int = 0  # drafted nodes verified, roots excluded
    trimmed_tokens: int = 0  # accepted or bonus tokens cut by a stop or by max_tokens
    acceptance_histogram: Counter[int] = field(default_factory=Counter)  # acceptance length -> rounds, bonus included
    output_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, taken from an earlier one
    preemptions: int = 0  # times that it gave its memory up and was computed again
    prefill_s: float = 0.0
    draft_s: float = 0.0
    build_s: float = 0.0
    verify_s: float = 0.0
    accept_s: float = 0.0
    commit_s: float = 0.0
    decode_s: float = 0.0  # wall time of the decode rounds
    ttft_s: float | None = None  # submit to first token, queueing included
    # What the auto budget decided by, summed over rounds; all 0 with a pinned one.
    probe_rounds: int = 0  # drafted to see whether speculation would pay again
    predicted_tokens: float = 0.0
    predicted_s: float = 0.0  # of the rounds, by the cost model
    predicted_plain_s: float = 0.0  # of plain decoding for as many tokens
    trust_offset: float = 0.0  # learnt from this request: what its text adds to a draft's log-odds

    @property
    def scoring(self) -> Scoring | None:
        """How most of the trees were ranked; None where there was none."""
        return scoring_of(self.conditioned_rounds, self.decode_rounds - self.plain_rounds)

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens that were accepted: acceptance length - 1 per round."""
        return sum((length - 1) * count for length, count in self.acceptance_histogram.items())

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens emitted per round, bonus included; None before the first round."""
        if not self.decode_rounds:
            return None
        return sum(length * count for length, count in self.acceptance_histogram.items()) / self.decode_rounds

    @property
    def predicted_speedup(self) -> float | None:
        """Over plain decoding, by the cost model and the calibrated probabilities; None where nothing was predicted."""
        return self.predicted_plain_s / self.predicted_s if self.predicted_s > 0 else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed alone: tokens after the first over the time of the rounds."""
        if self.output_tokens < 2 or self.decode_s <= 0:
            return None
        return (self.output_tokens - 1) / self.decode_s


@dataclass(frozen=True, eq=False)
class RoundTrace:
    """One decode round of one request. Stage times are those of the whole round, shared or not."""

    number: int  # of the request's decode rounds, from 1
    context_length: int  # before the round; a node's position is this + its depth
    scoring: Scoring | None  # how the tree was ranked; None where nothing was drafted
    tree: DraftTree
    acceptance: Acceptance  # as verified; a stop may have cut what was emitted
    stage_s: dict[str, float]
    round_s: float


@dataclass(frozen=True)
class RoundCount:
    """What one decode round of one request verified and accepted, for counters that move while it runs."""

    num_drafted: int  # nodes verified, the root excluded; 0 is plain decoding
    acceptance_length: int  # as verified; a stop may have cut what was emitted


@dataclass(frozen=True)
class Emission:
    """What one engine step brought for one request."""

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: str | None = None  # stop | length | abort | error, on the last emission
    stop_reason: int | str | None = None  # the stop token id or the stop string that ended it
    error: str | None = None
    error_code: str | None = None  # timeout | queue_timeout; None is a fault
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, if the request wants them
    stats: RequestStats | None = None  # on the last emission
    trace: RoundTrace | None = None  # of the decode round, if the request wants it
    round: RoundCount | None = None  # of the decode round; None for the token of prefill

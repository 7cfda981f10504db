"""SGLang's requests as our engine's sequences: sampling, seed and history; drafting and choosing are then the engine's own."""

from __future__ import annotations

import hashlib
from weakref import WeakKeyDictionary

import torch

from ddtree.engine.request import Request
from ddtree.engine.sequence import Sequence
from ddtree.sampling.params import SamplingParams
from ddtree.sglang.grammar import SglangGrammar

NO_LIMIT = 2**31


class Sequences:
    """Our `Sequence` of each SGLang request; one that SGLang forgets is forgotten here."""

    def __init__(self, most_drafted: int, vocab_size: int, device: torch.device) -> None:
        self.most_drafted, self.vocab_size, self.device = most_drafted, vocab_size, device
        self._known: WeakKeyDictionary = WeakKeyDictionary()

    def __call__(self, req) -> Sequence:
        """The request's sequence, with every token that it has by now."""
        sequence = self._known.get(req)
        if sequence is None:
            sequence = self._known[req] = self._open(req)
        prompt = sequence.request.prompt_token_ids
        sequence.token_ids.extend(req.output_ids[len(sequence.token_ids) - len(prompt) :])
        return sequence

    def _open(self, req) -> Sequence:
        params, budget = req.sampling_params, (req.sampling_params.custom_params or {}).get("tree_budget")
        budget = self.most_drafted if budget is None else min(budget, self.most_drafted)
        stops = frozenset(params.stop_token_ids or ())
        request = Request(
            prompt_token_ids=tuple(req.origin_input_ids),
            max_tokens=NO_LIMIT if params.max_new_tokens is None else max(params.max_new_tokens, 1),
            sampling=sampling_of(params, self.vocab_size),
            seed=seed_of(req),
            tree_budget=budget,
            eos_token_ids=frozenset() if params.ignore_eos else eos_token_ids_of(req),
            stop_token_ids=stops,
            grammar=None if req.grammar is None else SglangGrammar(req, self.vocab_size),
        )
        # Ranked with the adapter's scores where the drafter has one, as our engine does.
        sequence = Sequence(0, request, tree_budget=budget, conditioned=True)
        sequence.open_choice(self.vocab_size, self.device)
        return sequence


def eos_token_ids_of(req) -> frozenset[int]:
    """What ends a generation in SGLang: the model configuration's ids and the tokenizer's own."""
    own = getattr(req.tokenizer, "eos_token_id", None)
    return frozenset(req.eos_token_ids or ()) | ({own} if own is not None else set())


def sampling_of(params, vocab_size: int) -> SamplingParams:
    """SGLang's sampling parameters, normalised by it, as ours. It says greedy as top_k 1, and no top_k as a large one."""
    greedy = params.top_k == 1 or params.temperature == 0
    return SamplingParams(
        temperature=0.0 if greedy else params.temperature,
        top_p=params.top_p,
        top_k=params.top_k if 0 < params.top_k < vocab_size else 0,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=tuple((int(token_id), float(bias)) for token_id, bias in (params.logit_bias or {}).items()),
        min_tokens=params.min_new_tokens,
    )


def seed_of(req) -> int:
    """The request's seed, or one from its id, which is random and the same on every rank."""
    if req.sampling_params.sampling_seed is not None:
        return req.sampling_params.sampling_seed
    return int.from_bytes(hashlib.blake2b(req.rid.encode(), digest_size=8).digest(), "little")

"""From a checked body to the engine's requests: prompts to token ids, room, seeds, budgets, watchers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddtree.engine.request import Request
from ddtree.sampling.params import SamplingParams
from ddtree.server.batch import Facts
from ddtree.server.errors import InvalidRequest, shown
from ddtree.server.text import Prompt, Text

if TYPE_CHECKING:  # as types alone: the audit prepares prompts where there is no pydantic
    from ddtree.server.completions import CompletionRequest
    from ddtree.server.generation import Generation

# OpenAI's, for requests that leave it out.
DEFAULT_TEMPERATURE = 1.0
DEFAULT_TOP_P = 1.0
# Above the server's maximum a budget is clamped, and the clamp is echoed; beyond this it is a mistake.
ABSURD_TREE_BUDGET = 2**16


@dataclass(frozen=True)
class Prepared:
    """What one HTTP request asks of the engine: `num_choices` requests per prompt, in order."""

    requests: tuple[Request, ...]
    prompts: tuple[Prompt, ...]
    seed: int
    tree_budget_requested: int | str | None

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counted once, however many choices it has."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


def completion_prompts(body: CompletionRequest, text: Text, vocab_size: int) -> list[Prompt]:
    """One prompt per string or id list, in order; ids are used verbatim."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [_encoded(prompt, text, "prompt")]
    if not prompt:
        raise InvalidRequest("prompt is empty: send text or at least one token id", "prompt")
    if isinstance(prompt[0], int):
        return [_verbatim(prompt, vocab_size, "prompt")]
    return [
        _encoded(each, text, f"prompt[{i}]") if isinstance(each, str) else _verbatim(each, vocab_size, f"prompt[{i}]")
        for i, each in enumerate(prompt)
    ]


def prepare(body: Generation, prompts: Sequence[Prompt], text: Text, facts: Facts, max_sequences: int) -> Prepared:
    """Build the engine's requests; raises InvalidRequest naming what cannot be."""
    num_choices = body.n or 1
    if len(prompts) * num_choices > max_sequences:
        raise InvalidRequest(
            f"{len(prompts)} prompts times n = {num_choices} is more than {max_sequences} choices: send fewer at once",
            "n",
        )
    for token_id in body.stop_token_ids or ():
        _check_id(token_id, facts.vocab_size, "stop_token_ids")
    for token_id in body.logit_bias or ():
        _check_id(int(token_id), facts.vocab_size, "logit_bias")
    if body.scoring == "conditioned" and facts.scoring != "conditioned":
        raise InvalidRequest("scoring conditioned needs an adapter, and this server has none: leave scoring out", "scoring")
    seed = secrets.randbits(63) if body.seed is None else body.seed
    budget = _budget(body, facts)
    sampling = _sampling(body)
    eos_token_ids = frozenset() if body.ignore_eos else text.eos_token_ids
    stop_token_ids = frozenset(body.stop_token_ids or ())
    grammars = [text.grammar(body, prompt, facts.vocab_size) for prompt in prompts]
    requests = [
        Request(
            prompt_token_ids=prompt.token_ids,
            max_tokens=_room(body, len(prompt.token_ids), facts.max_context),
            sampling=sampling,
            seed=seed,
            choice_index=choice,
            tree_budget=budget,
            scoring=body.scoring,
            eos_token_ids=eos_token_ids,
            stop_token_ids=stop_token_ids,
            watcher=text.watcher(prompt, body.stops, eos_token_ids | stop_token_ids, body.min_tokens or 0),
            num_logprobs=body.num_logprobs,
            trace=bool(body.ddtree_trace),
            cache_salt=body.prefix_salt,
            boundaries=prompt.boundaries,
            grammar=grammar.copy() if grammar else None,
        )
        for prompt, grammar in zip(prompts, grammars, strict=True)
        for choice in range(num_choices)
    ]
    return Prepared(tuple(requests), tuple(prompts), seed, body.tree_budget)


def _budget(body: Generation, facts: Facts) -> int | str:
    if body.tree_budget is None:
        return facts.default_tree_budget
    if body.tree_budget == "auto":
        return "auto"
    if body.tree_budget > ABSURD_TREE_BUDGET:
        raise InvalidRequest(
            f"tree_budget must lie in 0 ... {ABSURD_TREE_BUDGET} (above this server's maximum of {facts.max_tree_budget} it is "
            f"clamped), got {body.tree_budget}",
            "tree_budget",
        )
    return body.tree_budget


def _sampling(body: Generation) -> SamplingParams:
    try:
        return SamplingParams(
            temperature=DEFAULT_TEMPERATURE if body.temperature is None else float(body.temperature),
            top_p=DEFAULT_TOP_P if body.top_p is None else float(body.top_p),
            top_k=max(body.top_k or 0, 0),  # vLLM's clients write -1 for "all of them"
            min_p=float(body.min_p or 0.0),
            presence_penalty=float(body.presence_penalty or 0.0),
            frequency_penalty=float(body.frequency_penalty or 0.0),
            repetition_penalty=1.0 if body.repetition_penalty is None else float(body.repetition_penalty),
            logit_bias=tuple((int(token_id), float(bias)) for token_id, bias in (body.logit_bias or {}).items()),
            min_tokens=body.min_tokens or 0,
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _room(body: Generation, num_prompt: int, max_context: int) -> int:
    room = max_context - num_prompt
    wanted = body.token_limit
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {num_prompt} tokens, and this server's context is {max_context} tokens, "
            "output included: shorten the prompt",
            "prompt" if hasattr(body, "prompt") else "messages",
            "context_length_exceeded",
        )
    if wanted is not None and wanted > room:
        raise InvalidRequest(
            f"the prompt has {num_prompt} tokens and max_tokens is {wanted}, together {num_prompt + wanted}, and this "
            f"server's context is {max_context} tokens: lower max_tokens to {room} or leave it out",
            "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
            "context_length_exceeded",
        )
    return room if wanted is None else wanted


def _encoded(prompt: str, text: Text, param: str) -> Prompt:
    token_ids = text.encode(prompt, param)
    if not token_ids:
        raise InvalidRequest(f"{param} has no tokens, got {shown(prompt)}: send some text", param)
    return Prompt(tuple(token_ids))


def _verbatim(token_ids: list[int], vocab_size: int, param: str) -> Prompt:
    if not token_ids:
        raise InvalidRequest(f"{param} is empty: send text or at least one token id", param)
    for token_id in token_ids:
        _check_id(token_id, vocab_size, param)
    return Prompt(tuple(token_ids))


def _check_id(token_id: int, vocab_size: int, param: str) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(f"{param}: token ids lie in 0 ... {vocab_size - 1}, got {token_id}", param)

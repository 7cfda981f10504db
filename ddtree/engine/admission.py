"""Which requests an engine takes, and which tree budget is in force for them."""

from __future__ import annotations

from typing import get_args

from ddtree.engine.config import EngineConfig
from ddtree.engine.request import AUTO, Request, Scoring, TreeBudget

SCORINGS = (None, *get_args(Scoring))


def check(request: Request, config: EngineConfig, vocab_size: int, has_auto: bool, has_adapter: bool = False) -> None:
    """ValueError, naming field, value and remedy, for what cannot run. `has_auto`: whether budget "auto" can be served."""
    prompt, limit = request.prompt_token_ids, config.max_context
    if not prompt:
        raise ValueError("prompt_token_ids must not be empty: give at least one token")
    wrong = next((t for t in prompt if not 0 <= t < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"prompt_token_ids must lie in 0 ... {vocab_size - 1}, got {wrong}")
    if request.max_tokens < 1:
        raise ValueError(f"max_tokens must be >= 1, got {request.max_tokens}")
    biased = next((t for t, _ in request.sampling.logit_bias if not 0 <= t < vocab_size), None)
    if biased is not None:
        raise ValueError(f"logit_bias: token ids lie in 0 ... {vocab_size - 1}, got {biased}")
    if request.tree_budget == AUTO:
        if not has_auto:
            raise ValueError('tree_budget "auto" needs measured costs: start_auto(engine, ...) first, or give an integer')
    elif isinstance(request.tree_budget, str):
        raise ValueError(f'tree_budget must be an integer or "auto", got {request.tree_budget!r}')
    elif request.tree_budget < 0:
        raise ValueError(f"tree_budget must be >= 0, got {request.tree_budget}")
    if request.chain and request.tree_budget == AUTO:
        raise ValueError('chain needs a tree_budget that is a number of nodes, got "auto": give block_size - 1, its longest')
    if request.scoring not in SCORINGS:
        raise ValueError(f"scoring must be factorised or conditioned, got {request.scoring!r}")
    if request.scoring == "conditioned" and not has_adapter:
        raise ValueError("scoring conditioned needs an adapter beside the drafter, and none is loaded: leave scoring out")
    if len(prompt) + request.max_tokens > limit:
        raise ValueError(
            f"prompt of {len(prompt)} tokens and max_tokens {request.max_tokens} exceed the context of {limit} "
            "tokens: shorten the prompt or lower max_tokens"
        )


def effective_budget(request: Request, config: EngineConfig, block_size: int | None) -> tuple[TreeBudget, str | None]:
    """The budget in force, and why it is not what was asked for. `block_size` is None without a drafter."""
    limit = config.max_tree_budget
    if not request.tree_budget:
        return 0, None
    if block_size is None:
        return 0, "no drafter is loaded"
    if block_size == 1:
        return 0, "the drafter's block size is 1: it drafts nothing"
    if request.tree_budget == AUTO:
        return AUTO, None
    if request.tree_budget > limit:
        return limit, f"tree_budget {request.tree_budget} was clamped to this server's maximum, {limit}"
    if request.chain and request.tree_budget >= block_size:
        return block_size - 1, f"tree_budget {request.tree_budget} was clamped to {block_size - 1}, the depths of a block: so long is a chain"
    return request.tree_budget, None

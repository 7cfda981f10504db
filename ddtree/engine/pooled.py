"""An engine whose caches are pools and whose rounds are CUDA graphs."""

from __future__ import annotations

from ddtree.engine.config import EngineConfig
from ddtree.engine.device_rounds import BUDGETS, DeviceRounds
from ddtree.engine.engine import Engine
from ddtree.engine.graph_actors import GraphDrafter, GraphTarget
from ddtree.engine.pooled_state import PooledState

LEAST_ROWS = 128  # that a round may stage even where trees are small, so that several sequences fit into one


def pooled_engine(
    model,
    drafter_model,
    config: EngineConfig,
    *,
    num_tokens: int | None = None,
    max_rows: int = LEAST_ROWS,
    graphs: bool = True,
) -> Engine:
    """The engine of a target and a drafter (or None) over pools for `num_tokens` tokens of all sequences together.

    `num_tokens` defaults to what `max_running` sequences of `max_context` hold. A round verifies up to `max_rows` rows of all
    sequences, or the largest tree if that has more. ValueError for a target that has no pooled form.
    """
    most_nodes = 1 + (config.max_tree_budget if drafter_model is not None else 0)
    max_rows = max(most_nodes, max_rows)
    tokens = config.max_running * config.max_context if num_tokens is None else num_tokens
    state = PooledState(model, drafter_model, config.max_running, tokens, config.max_context, max_rows)
    buckets = tuple(sorted({1 + budget for budget in BUDGETS if budget < most_nodes} | {most_nodes}))
    drafter = GraphDrafter(state, graphs=graphs) if drafter_model is not None else None
    engine = Engine(GraphTarget(state, buckets, graphs=graphs), drafter, config, model.config.vocab_size)
    engine.device_rounds = DeviceRounds(state, graphs=graphs)
    return engine

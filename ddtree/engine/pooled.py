"""An engine whose caches are pools and whose rounds are CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

from ddtree.caches.pools import PAGE_SIZE
from ddtree.engine.config import EngineConfig
from ddtree.engine.device_rounds import BUDGETS, DeviceRounds
from ddtree.engine.drafter import Drafter
from ddtree.engine.engine import Engine
from ddtree.engine.free_memory import free_memory
from ddtree.engine.graph_actors import GraphDrafter, GraphTarget
from ddtree.engine.paged_prefix import PagedPrefixCache
from ddtree.engine.pooled_memory import PooledMemory
from ddtree.engine.pooled_state import PooledState
from ddtree.engine.target import Target
from ddtree.kernels.tree_attention.invariant import NUM_SPLITS
from ddtree.models.conditioning import Conditioning

LEAST_SLOTS = 2  # so that an audit may look at two requests side by side
LEAST_ROWS = 128  # that a round may stage even where trees are small, so that several sequences fit into one


def pooled_engine(
    model,
    drafter_model,
    config: EngineConfig,
    *,
    num_tokens: int | None = None,
    max_rows: int = LEAST_ROWS,
    graphs: bool = True,
    conditioning: Conditioning | None = None,
) -> Engine:
    """The engine of a target and a drafter (or None) over pools for `num_tokens` tokens of all sequences together.

    `num_tokens` defaults to what `max_running` sequences of `max_context` hold; with fewer they are preempted where pages run
    out. Prefixes are remembered in up to `config.prefix_bytes` of the same pages. A round verifies up to `max_rows` rows of all
    sequences, or the largest tree if that has more. ValueError for a target that has no pooled form, for trees larger than any
    that is captured, or where one sequence of `max_context` does not fit.
    """
    if drafter_model is not None and config.max_tree_budget > BUDGETS[-1]:
        raise ValueError(
            f"max_tree_budget must be <= {BUDGETS[-1]} over pools, the most that a round is captured for, got {config.max_tree_budget}: lower it"
        )
    most_nodes = 1 + (config.max_tree_budget if drafter_model is not None else 0)
    max_rows = max(most_nodes, max_rows)
    tokens = config.max_running * config.max_context if num_tokens is None else num_tokens
    slots = max(config.max_running, LEAST_SLOTS)
    keeps_states = config.prefix_bytes > 0
    state = PooledState(
        model, drafter_model, slots, tokens, config.max_context, max_rows,
        keeps_states=keeps_states, conditioning=conditioning, batch_invariant=config.batch_invariant,
    )  # fmt: skip
    memory = PooledMemory(state)
    if memory.most_tokens < config.max_context:
        raise ValueError(
            f"the pools hold {memory.most_tokens} tokens, max_context is {config.max_context}: raise the one or lower the other"
        )
    # No more for states than for the rows between them.
    every = max(config.snapshot_every, PAGE_SIZE * state.store.pages_of(state.state_bytes))
    config = replace(config, max_rows=min(config.max_rows or max_rows, max_rows), snapshot_every=every)
    prefix = PagedPrefixCache(config.prefix_bytes, memory) if config.prefix_bytes else None
    buckets = tuple(sorted({1 + budget for budget in BUDGETS if budget < max_rows} | {max_rows}))
    drafter = GraphDrafter(state, graphs=graphs) if drafter_model is not None else None
    target = GraphTarget(state, buckets, graphs=graphs)
    engine = Engine(target, drafter, config, model.config.vocab_size, memory=memory, prefix=prefix)
    engine.device_rounds = DeviceRounds(state, graphs=graphs)
    return engine


def without_pools(engine: Engine) -> Engine:
    """The same models over per-sequence caches, whose layers can be looked into; the engine itself if it has no pools."""
    if engine.device_rounds is None:
        return engine
    model, layers = engine.target.model, engine.target.feature_layers
    drafter = Drafter(engine.drafter.model, model, engine.drafter.conditioning) if engine.drafter is not None else None
    config = replace(engine.config, cache_bytes=0, prefix_bytes=0, batch_invariant=False)
    return Engine(Target(model, layers), drafter, config, engine.vocab_size)


def tokens_that_fit(
    model, drafter_model, max_running: int, max_rows: int, memory_share: float = 0.9, *, batch_invariant: bool = False
) -> int:
    """Tokens of all sequences together whose keys and values fit into the device's free memory, the weights being there.

    Graphs, logits and what `max_rows` rows stage are put aside first; of the rest, `memory_share` is used.
    """
    free = free_memory(model.device)
    config, size = model.config, model.dtype.itemsize
    rows = max(LEAST_ROWS, max_rows)
    aside = 2 * rows * (config.vocab_size + 8 * config.intermediate_size) * size + (1 << 30)
    if batch_invariant:  # attention leaves every split's sums in memory
        aside += 2 * rows * NUM_SPLITS * config.num_heads * (config.head_dim + 1) * 4
    num_linear = 0
    if config.linear_attention is not None:
        linear = config.linear_attention
        num_linear = sum(kind == "linear_attention" for kind in config.layer_types)
        state = 4 * linear.num_value_heads * linear.key_dim * linear.value_dim
        staged = size * (linear.conv_channels + linear.values_size) + 4 * (linear.keys_size + linear.values_size) + 8 * linear.num_value_heads
        aside += num_linear * (rows * staged + (max_running + 1) * state)
    row = 2 * (config.num_layers - num_linear) * config.num_kv_heads * config.head_dim * size
    if drafter_model is not None:
        drafter = drafter_model.config
        row += 2 * drafter.num_layers * drafter.num_kv_heads * drafter.head_dim * size
    return max(int(memory_share * (free - aside)) // row - 2 * rows, 0)  # those that one sequence stages lie beyond

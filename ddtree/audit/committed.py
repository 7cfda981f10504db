"""What a round made permanent, against a fresh prefill of the same tokens; and how its tokens were chosen and cut.

Letters: N nodes, T committed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ddtree.audit.compare import closest_row, row_errors, tolerance
from ddtree.audit.findings import CHOICE, COMMIT, STOP, TREE, Fault
from ddtree.audit.observe import KEYS, VALUES, Forward, memory
from ddtree.audit.watch import Record
from ddtree.sampling.choose import choose, margins
from ddtree.sampling.noise import gumbel_noise, noise_key


def choice_faults(model, record: Record, limit: float) -> Iterator[Fault]:
    """The target's token after each node, chosen again from the hidden states with the noise of its position."""
    request, tree = record.request, record.tree
    logits = model.logits(record.forward.hidden)
    noise = None
    if not request.sampling.greedy:
        key = noise_key(request.seed, request.choice_index, request.prompt_token_ids)
        positions = [len(record.tokens_before) + int(depth) for depth in tree.depths]
        noise = gumbel_noise(key, positions, logits.shape[-1], logits.device)
    chosen = choose(logits, request.sampling, noise).tolist()
    for node, (actual, expected) in enumerate(zip(record.target_tokens.tolist(), chosen, strict=True)):
        if actual != expected and float(margins(logits, request.sampling, noise)[node]) > limit:
            yield Fault(CHOICE, f"verify: node {node} got token {actual}, its logits choose token {expected}")
            return


def walk(record: Record) -> tuple[list[int], list[int]]:
    """The longest path that the target's tokens follow, and what it emits, before any stop."""
    tree, path = record.tree, [0]
    emitted = [int(record.target_tokens[0])]
    while True:
        following = [
            node
            for node in range(1, tree.num_nodes)
            if tree.parents[node] == path[-1] and int(tree.token_ids[node]) == emitted[-1]
        ]
        if not following:
            return path, emitted
        path.append(following[0])
        emitted.append(int(record.target_tokens[path[-1]]))


def stop_ids(request) -> frozenset[int]:
    """Every token that ends this request, a watched one included."""
    watched = getattr(request.watcher, "stop_id", None)
    return request.eos_token_ids | request.stop_token_ids | (frozenset() if watched is None else {watched})


def stop_at(record: Record, emitted: list[int]) -> tuple[int, str] | None:
    """How many of the emitted tokens belong to the answer, and what ends it; None if it goes on."""
    request = record.request
    before = len(record.tokens_before) - len(request.prompt_token_ids)
    for count, token_id in enumerate(emitted, start=1):
        if token_id in stop_ids(request):
            return count, f"stop token {token_id}"
        if before + count >= request.max_tokens:
            return count, "max_tokens"
    return None


def accept_faults(record: Record) -> Iterator[Fault]:
    """The path that was kept and the tokens that were emitted, walked and cut again."""
    num_prompt = len(record.request.prompt_token_ids)
    stops = stop_ids(record.request)
    for place, token_id in enumerate(record.tokens_before[num_prompt:]):
        if token_id in stops:
            yield Fault(STOP, f"stop: token {token_id} at answer token {place} ends the answer, and a round followed it")
            return
    path, emitted = walk(record)
    end = stop_at(record, emitted)
    kept = len(emitted) if end is None else end[0]
    actual, first = record.emitted, len(record.tokens_before) - num_prompt
    if actual == emitted[:kept]:
        if record.path.tolist() != path[:kept]:
            yield Fault(COMMIT, f"commit: path {record.path.tolist()} was committed, the target's tokens follow {path[:kept]}")
        return
    if end is not None and actual[:kept] == emitted[:kept]:
        yield Fault(
            STOP,
            f"stop: {end[1]} at answer token {first + kept - 1} is number {kept} of {len(emitted)} emitted in its round "
            f"and was passed over; the target alone would have stopped there",
        )
    elif actual == emitted[: len(actual)]:
        yield Fault(
            STOP if end is not None or len(actual) < len(emitted) else TREE,
            f"stop: the round ended at answer token {first + len(actual) - 1}, {len(actual)} of {len(emitted)} tokens, "
            f"where nothing stops it; the target alone would have gone on",
        )
    else:
        yield Fault(TREE, f"accept: emitted {actual}, the target's tokens along the tree are {emitted[:kept]}")


def first_token_faults(record: Record, hidden: torch.Tensor, model, limit: float) -> Iterator[Fault]:
    """The token that prefill emitted, chosen again from a fresh forward's last row."""
    request = record.request
    logits, noise = model.logits(hidden[-1:]), None
    if not request.sampling.greedy:
        key = noise_key(request.seed, request.choice_index, request.prompt_token_ids)
        noise = gumbel_noise(key, [len(record.tokens_before)], logits.shape[-1], logits.device)
    expected = int(choose(logits, request.sampling, noise)[0])
    actual = record.tokens_after[len(record.tokens_before)]
    if actual != expected and float(margins(logits, request.sampling, noise)[0]) > limit:
        yield Fault(CHOICE, f"prefill: its token is {actual}, a fresh prefill in one piece chooses {expected}")


def cache_fault(record: Record, fresh: Forward, fresh_cache) -> Fault | None:
    """The first layer whose memory is not that of a fresh prefill of the committed tokens."""
    cache, num_tokens = record.target_cache, len(record.tokens_after) - 1
    step = "prefill" if record.tree is None else f"commit of path {record.path.tolist()}"
    if cache.context_length != num_tokens:
        return Fault(
            COMMIT, f"{step}: the cache says context length {cache.context_length}, {num_tokens} tokens are committed"
        )
    for layer, layer_cache in enumerate(cache.layers):
        for part, held in memory(layer_cache).items():
            if part in (KEYS, VALUES):
                where = _kv_fault(record, layer, part, held, fresh.parts[layer, part])
            else:
                expected = memory(fresh_cache.layers[layer])[part]
                error = float(row_errors(held.flatten()[None], expected.flatten()[None])[0])
                wrong = error > tolerance(fresh.hidden.dtype)
                where = f"layer {layer} {part} after {step}: not that of a fresh prefill ({error:.2g})" if wrong else None
            if where is not None:
                return Fault(COMMIT, where)
    return None


def _kv_fault(record: Record, layer: int, part: str, held: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Which row is wrong, and which node's it is instead."""
    limit = tolerance(expected.dtype)
    step = "prefill" if record.tree is None else f"commit of path {record.path.tolist()}"
    shared = min(len(held), len(expected))
    errors = row_errors(held[:shared], expected[:shared])
    wrong = torch.nonzero(errors > limit).flatten().tolist()
    if not wrong:
        if len(held) == len(expected):
            return None
        return (
            f"layer {layer} KV cache after {step}: {len(held)} rows are committed for {len(expected)} tokens; "
            "rejected siblings are left in it" if len(held) > len(expected) else
            f"layer {layer} KV cache after {step}: {len(held)} rows are committed for {len(expected)} tokens"
        )  # fmt: skip
    row = wrong[0]
    before = len(record.tokens_before) - 1
    where = f"layer {layer} KV cache after {step}: row {row} ({part}) "
    if record.tree is None:
        return f"{where}is not that of a fresh prefill ({float(errors[row]):.2g})"
    if row < before:
        return f"{where}of an earlier round has changed ({float(errors[row]):.2g})"
    due = record.path.tolist()[row - before] if row - before < len(record.path) else None
    node = closest_row(held[row], record.forward.parts[layer, part], limit)
    if node is None:
        return f"{where}is no node's; node {due}'s belongs there ({float(errors[row]):.2g})"
    kind = "on the path" if node in record.path else "a rejected sibling left in the cache"
    return f"{where}holds node {node} ({kind}), node {due} belongs there"

"""What the pools of a GPU's engine hold for a sequence after each of its steps, against a fresh prefill of the same tokens.

Rounds over pools run other code than those over caches of a sequence's own (kernels, captured graphs, pages), and no hook
sees into them. But whatever goes wrong in a layer shows in what the next one remembers: so the first layer whose memory is
wrong says where to look.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ddtree.audit.borrowed import drafting_with, limited
from ddtree.audit.compare import row_errors, tolerance
from ddtree.audit.drafter_twin import DrafterTwin
from ddtree.audit.findings import CHOICE, COMMIT, DRAFTER, TARGET, Fault
from ddtree.audit.observe import KEYS, VALUES, memory, run_alone
from ddtree.engine.request import Request

MOST_ROUNDS = 6


@torch.inference_mode()
def pool_fault(engine, requests: Sequence[Request], drafter=None, near_tie: float = 0.0, most_rounds: int = MOST_ROUNDS) -> Fault | None:
    """Run `requests` side by side on an engine over pools, a round at a time; the first thing in them that is wrong."""
    rounds, left, found, failed = engine.device_rounds, most_rounds, None, None
    rounds.runs_ahead = False  # what is launched ahead would have moved on before it is looked at
    try:
        with drafting_with(engine, drafter), limited(engine, max_running=len(requests)):
            going = {engine.add(replace(request, trace=True)) for request in requests}
            while going and left:
                emissions = [each for each in engine.step() if each.request_id in going]
                left -= any(each.trace is not None for each in emissions)
                going -= {each.request_id for each in emissions if each.finish_reason}
                found = next((fault for each in emissions if each.request_id in going for fault in _step_faults(engine, each, near_tie)), None)
                failed = next((each.error for each in emissions if each.error), None)
                if found is not None or failed:
                    break
            for request_id in going:
                engine.abort(request_id)
            return Fault(TARGET, f"pools: the round failed: {failed}") if failed else found
    finally:
        rounds.runs_ahead = True


def _step_faults(engine, emission, near_tie: float) -> Iterator[Fault]:
    """One sequence's memory and the tokens it was just given."""
    sequence, state, model = engine.running(emission.request_id), engine.target.state, engine.target.model
    slot, committed = sequence.target_state.slot, sequence.token_ids[:-1]
    step = "prefill" if emission.trace is None else f"commit of path {emission.trace.acceptance.path.tolist()}"
    length = int(state.table.context_lengths[slot])
    if length != len(committed):
        yield Fault(COMMIT, f"pools after {step}: the slot says context length {length}, {len(committed)} tokens are committed")
        return
    fresh, cache = run_alone(model, committed, commit=True)
    limit, before = tolerance(fresh.hidden.dtype), len(committed) - len(emission.token_ids)
    for layer, layer_cache in enumerate(cache.layers):
        for part, due in memory(layer_cache).items():
            held = _held(state, layer, part, slot, len(committed))
            if part not in (KEYS, VALUES):
                due, held = due.flatten()[None], held.flatten()[None]
            errors = row_errors(held, due)
            if float(errors.max()) > limit:
                row = int((errors > limit).nonzero()[0])
                what = f" of token {row}{'' if row >= before else ', of an earlier step,'}" if len(errors) > 1 else ""
                where = f"pools: layer {layer} {part}{what} after {step}: not that of a fresh prefill ({float(errors.max()):.2g})"
                yield Fault(COMMIT, where + _hint(layer, part))
                return
    yield from _choice_faults(model, sequence, emission, fresh, near_tie)
    if sequence.drafts and hasattr(engine.drafter, "state"):
        yield from _drafter_faults(engine, fresh, slot, step)


def _choice_faults(model, sequence, emission, fresh, near_tie: float) -> Iterator[Fault]:
    """Greedy tokens against those of the fresh forward."""
    if emission.trace is None or not sequence.request.sampling.greedy or sequence.request.sampling.adjusted:
        return
    logits = model.logits(fresh.hidden[-len(emission.token_ids) :]).float()
    for node, row, token_id in zip(emission.trace.acceptance.path, logits, emission.token_ids, strict=True):
        if float(row.max() - row[token_id]) > near_tie:
            yield Fault(CHOICE, f"pools: token {token_id} was chosen after node {node}, a forward of its path alone chooses {int(row.argmax())}")
            return


def _held(state, layer: int, part: str, slot: int, count: int) -> torch.Tensor:
    """[count, Hkv, D] keys or values, or a state, as the pools have them."""
    pool = state.target.pool
    place = pool.places[layer]
    if part in (KEYS, VALUES):
        return _rows(pool.attention, part, place, state.table.pages[slot], count)
    return pool.recurrent.states[place, slot] if part == "recurrent state" else pool.recurrent.conv_states[place, slot]


def _rows(pool, part: str, place: int, pages: torch.Tensor, count: int) -> torch.Tensor:
    return (pool.key_pages if part == KEYS else pool.value_pages)[place][pages.long()].flatten(0, 1)[:count]


def _hint(layer: int, part: str) -> str:
    """What is computed before it."""
    return f"; what layer {layer - 1} makes of these rows comes before" if part in (KEYS, VALUES) and layer else ""


def _drafter_faults(engine, fresh, slot: int, step: str) -> Iterator[Fault]:
    """The drafter's keys and values of its context."""
    state, twin = engine.target.state, DrafterTwin(engine.drafter.model)
    num_layers, limit = len(engine.target.model.layers), tolerance(fresh.hidden.dtype)
    due = twin.context(torch.cat([fresh.layer_output(layer, num_layers) for layer in twin.layer_ids], dim=-1))
    for layer in range(twin.config.num_layers):
        for part, rows in zip((KEYS, VALUES), due, strict=True):
            errors = row_errors(_rows(state.drafter.pool, part, layer, state.table.pages[slot], len(rows[layer])), rows[layer])
            if float(errors.max()) > limit:
                row = int((errors > limit).nonzero()[0])
                yield Fault(DRAFTER, f"pools: drafter layer {layer} {part} of token {row} after {step} are not its features'")
                return

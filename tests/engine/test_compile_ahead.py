"""The rounds of a start are rehearsed before one is captured: all of them, and without a trace."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ddtree.doctor.hybrid import VOCAB
from ddtree.engine.device_auto import DeviceAuto
from ddtree.engine.device_round import RoundShape
from ddtree.engine.request import Request
from ddtree.kernels.compiling import compile_ahead
from tests.engine.pools import FAMILIES, Pair

CARD = {"0.0": {"4": 2.5, "64": 3.5}}


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("max_running", [1, 8])
def test_every_shape_of_a_start_is_compiled_before_the_first_is_timed(conditioned, max_running):
    ahead, timed = [], []
    state = SimpleNamespace(conditioning=object() if conditioned else None, max_rows=1025)
    auto = DeviceAuto(SimpleNamespace(state=state, compile_ahead=lambda shapes, prefill_chunk=0: ahead.append(shapes)), CARD, 16, 1024)

    def time_of(shape: RoundShape) -> float:
        assert len(ahead) == 1
        timed.append(shape)
        return 1.0 + shape.max_budget

    auto._time = time_of
    auto.prepare(max_running, 512)
    assert set(ahead[0]) == set(timed)
    while auto.prepare_one():
        pass
    filtered = [shape for shapes in ahead[1:] for shape in shapes]
    assert len(filtered) == len(ahead) - 1 == len(auto.ladder), "once nobody waits what filters need, one shape at a time"
    assert all(shape.filtered and shape.sampled and shape.num_sequences == 1 for shape in filtered)
    assert any(shape.num_sequences == max_running and shape.max_budget == 63 for shape in timed)
    assert all(np.isfinite(costs).all() for costs in auto.costs.values())


def rehearsed(rounds, kinds) -> int:
    """How many rehearsals of rounds and prefills, by tree budget and whether sampled, come to their end."""
    ended = []

    def rehearse() -> None:
        for budget, sampled in kinds:
            rounds._rehearse(RoundShape(2, budget, sampled))
            rounds._rehearse_prefill(1 + budget)
            ended.append(budget)

    compile_ahead([rehearse], torch.device("cpu"))
    return len(ended)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_may_take_more_tokens_than_one_sequence_has_room_for(family):
    """Such prefills are rehearsed too, and read nothing beyond a table's end: on a GPU that would end the process."""
    rounds = Pair(family).engine(max_context=100, prefill_chunk=2048, max_running=2).device_rounds
    with torch.inference_mode():
        for num_tokens in (1, 100, 257, 1000, 2048):
            rounds._rehearse_prefill(num_tokens)
    assert not rounds.state.table.context_lengths[: rounds.state.dummy].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rehearsal_disturbs_no_sequence_that_runs(family, monkeypatch):
    engine = Pair(family).engine(max_running=2)
    prompt = torch.randint(0, VOCAB, (37,), generator=torch.Generator().manual_seed(3))
    request = Request(tuple(prompt.tolist()), 24, tree_budget=8)
    expected = engine.generate(request).token_ids
    request_id, emitted = engine.add(request), []
    for step in range(24):
        if not engine.has_work:
            break
        if step == 3:
            with monkeypatch.context() as patch:
                # As on a GPU, whose kernels are not launched here: everything else is run.
                patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
                assert rehearsed(engine.device_rounds, [(0, False), (8, True), (32, False)]) == 3
        for emission in engine.step():
            assert emission.request_id == request_id and emission.error is None, emission.error
            emitted += emission.token_ids
    assert tuple(emitted) == expected

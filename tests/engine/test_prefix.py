"""Prefixes remembered: the same tokens as cold, the right number of cached ones, a drafter that has missed nothing."""

from collections import Counter

import pytest
import torch

from ddtree.caches.model_cache import ModelCache
from ddtree.engine.config import EngineConfig
from ddtree.engine.drafter import Drafter
from ddtree.engine.engine import Engine
from ddtree.engine.prefix import PrefixCache
from ddtree.engine.request import Request
from ddtree.engine.target import Target
from ddtree.sampling.params import SamplingParams
from tests.engine.schedules import check_courses, run_schedule, seeded
from tests.engine.test_budget_sequences import FAMILIES, keys_of
from tests.models.qwens import drafter_for, reference
from tests.models.tiny import feed, random_ids, saved_and_loaded

PLENTY = 64 * 2**20
SYSTEM = 100


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """A random target, dense and hybrid, and a random drafter for it."""
    torch.manual_seed(3)
    config_class, changes = FAMILIES[request.param]
    target = saved_and_loaded(reference(request.param, config_class, **changes), tmp_path_factory.mktemp(request.param))
    torch.manual_seed(4)
    return target, drafter_for(target.config)


class CountingTarget(Target):
    num_prefilled = 0

    def prefill(self, sequence, token_ids, last):
        self.num_prefilled += len(token_ids)
        return super().prefill(sequence, token_ids, last)


def engine_of(pair, **config) -> Engine:
    model, drafter = pair
    config = {"max_context": 512, "prefill_chunk": 64, "max_running": 4, "prefix_bytes": PLENTY, "snapshot_every": 64, **config}
    target = CountingTarget(model, drafter.config.target_layer_ids)
    return Engine(target, Drafter(drafter, model), EngineConfig(**config), model.config.vocab_size)


def tokens(seed: int, count: int) -> tuple[int, ...]:
    torch.manual_seed(seed)
    return tuple(random_ids(count).tolist())


def ask(prompt, budget=8, max_tokens=12, **options) -> Request:
    return Request(tuple(prompt), max_tokens, tree_budget=budget, **options)


@pytest.fixture(scope="module")
def cold(pair):
    """request -> what an engine without memory of others answers."""
    answers = {}

    def answer(request):
        key = (request.prompt_token_ids, request.max_tokens, request.sampling, request.seed)
        if key not in answers:
            answers[key] = list(engine_of(pair, prefix_bytes=0).generate(request).token_ids)
        return answers[key]

    return answer


def is_hybrid(pair) -> bool:
    return pair[0].config.is_hybrid


def check(engine, request, cold) -> int:
    """The answer equals the cold one; returns its cached tokens, which were not computed again."""
    before = engine.target.num_prefilled
    emission = engine.generate(request)
    assert list(emission.token_ids) == cold(request)
    cached = emission.stats.cached_tokens
    assert engine.target.num_prefilled - before == len(request.prompt_token_ids) - cached
    return cached


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_shared_system_prompt(pair, cold, temperature):
    """S + A, S + B, S + A again, S + C: a hybrid knows the end of S once two prompts have parted there."""
    engine, system = engine_of(pair), tokens(1, SYSTEM)
    users = {name: (index, *tokens(2 + index, 30)) for index, name in enumerate("ABC")}
    sampling = SamplingParams(temperature=temperature)
    cached = {
        turn: check(engine, ask(system + users[name], sampling=sampling, seed=3), cold)
        for turn, name in (("A", "A"), ("B", "B"), ("A again", "A"), ("C", "C"))
    }
    assert cached == {"A": 0, "B": 64 if is_hybrid(pair) else SYSTEM, "A again": SYSTEM + 30, "C": SYSTEM}


def test_a_chat_of_three_turns_and_a_turn_taken_again(pair, cold):
    engine, history, known = engine_of(pair), tokens(5, 40), 0
    for turn in range(3):
        assert check(engine, ask(history), cold) == known
        again = ask(history, budget=[8, 0, 16][turn])
        assert check(engine, again, cold) == len(history) - 1, "the turn taken again, at another budget"
        history = (*history, *cold(again))
        known = len(history) - 1  # all but the last token of the answer is committed
        history = (*history, *tokens(50 + turn, 20))


def test_a_hybrid_stops_where_the_request_says_that_turns_part(pair, cold):
    engine, shared = engine_of(pair), tokens(6, 50)
    assert check(engine, ask((*shared, 1, *tokens(30, 8)), boundaries=(50,)), cold) == 0
    assert check(engine, ask((*shared, 2, *tokens(31, 8))), cold) == 50


def test_what_was_decoded_plainly_serves_plain_requests_alone(pair, cold):
    """The drafter's context is part of what is remembered: without it a prefix is worth nothing to who drafts."""
    engine, prompt = engine_of(pair), tokens(7, 90)
    assert check(engine, ask(prompt, budget=0), cold) == 0
    assert check(engine, ask(prompt), cold) == 0
    assert check(engine, ask(prompt), cold) == 89
    assert check(engine, ask(prompt, budget=0), cold) == 89


def test_the_drafters_context_is_the_one_that_a_cold_start_has(pair):
    """Lossless and invisible but for this: a context from the wrong rows only lowers acceptance."""
    model, drafter = pair
    prompt = tokens(8, 90)
    contexts = []
    for engine in (engine_of(pair, prefix_bytes=0), engine_of(pair)):
        if engine.prefix is not None:
            engine.generate(ask(prompt))
        request_id = engine.add(ask(prompt, max_tokens=30))
        while not (engine.running_or_none(request_id) and engine.running(request_id).num_emitted > 8):
            engine.step()
        sequence = engine.running(request_id)
        assert sequence.stats.cached_tokens == (89 if engine.prefix else 0)
        contexts.append(([keys_of(layer) for layer in sequence.drafter_state.layers], sequence.stats.acceptance_histogram))
    (first, cold_lengths), (second, warm_lengths) = contexts
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one[:, :90], other[:, :90], rtol=1e-4, atol=1e-4)
    assert cold_lengths == warm_lengths


def test_a_copy_that_fails_costs_the_memory_alone(pair, cold, monkeypatch):
    engine, prompt = engine_of(pair), tokens(9, 60)
    with monkeypatch.context() as patch:
        patch.setattr(ModelCache, "copy_rows", lambda *_: 1 / 0)
        assert check(engine, ask(prompt, budget=0), cold) == 0
    assert check(engine, ask(prompt, budget=0), cold) == 0, "nothing of it was kept"
    assert check(engine, ask(prompt, budget=0), cold) == 59


def test_salts_keep_prefixes_apart(pair, cold):
    engine, prompt = engine_of(pair), tokens(9, 60)
    assert check(engine, ask(prompt, cache_salt="mine"), cold) == 0
    assert check(engine, ask(prompt, cache_salt="yours"), cold) == 0
    assert check(engine, ask(prompt, cache_salt="mine"), cold) == 59
    held = engine.prefix.num_bytes
    assert check(engine, ask(prompt, cache_salt=None), cold) == 0 and engine.prefix.num_bytes == held


def test_evictions_keep_the_limit_and_the_tokens(pair, cold):
    size = sum((cache.size for cache in (pair[0].new_cache(), pair[1].new_cache())), start=type(pair[0].new_cache().size)(0, 0))
    limit = 250 * size.row_bytes + 4 * size.state_bytes
    engine, rng, hits = engine_of(pair, prefix_bytes=limit), seeded(0), Counter()
    prompts = [tokens(60 + i // 2, 40) + tokens(80 + i, 20) for i in range(8)]
    for _ in range(24):
        prompt = prompts[int(rng.integers(8))]
        hits[check(engine, ask(prompt, max_tokens=4), cold) > 0] += 1
        held = sum(node.num_bytes for node in engine.prefix._nodes())
        assert engine.prefix.num_bytes == held <= limit
    assert hits[True] > 3 and hits[False] > 3
    engine.prefix.clear()
    assert engine.prefix.num_bytes == 0 and not list(engine.prefix._nodes())


def test_what_runs_comes_before_what_is_remembered(pair, cold):
    """Prefixes live in the memory that running sequences leave free, to the page."""
    size = pair[0].new_cache().size + pair[1].new_cache().size
    engine = engine_of(pair, cache_bytes=900 * size.row_bytes + 6 * size.state_bytes)
    memory = engine.memory
    requests = [ask(tokens(100 + i % 2, 60) + tokens(110 + i, 30), max_tokens=24) for i in range(8)]
    courses = run_schedule(engine, requests, seeded(1))
    check_courses(courses, cold)
    assert all(course.finish_reason == "length" for course in courses)
    assert sum(course.stats.cached_tokens for course in courses) > 0
    held = memory.pages.num_pages - memory.pages.num_free
    assert held == engine.prefix.num_pages == -(-engine.prefix.num_bytes // memory.page_bytes)
    engine.prefix.clear()
    assert memory.pages.num_free == memory.pages.num_pages


def test_choices_of_one_prompt_share_it(pair, cold):
    engine, prompt = engine_of(pair), tokens(11, 80)
    requests = [
        Request(prompt, 10, SamplingParams(temperature=0.9), seed=1, choice_index=i, tree_budget=8) for i in range(4)
    ]
    courses = run_schedule(engine, requests, seeded(0), join_share=1.0)
    for course in courses:
        assert course.token_ids == list(engine_of(pair, prefix_bytes=0).generate(course.request).token_ids)
    assert [course.stats.cached_tokens for course in courses] == [0, 79, 79, 79]


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_snapshot_off_by_one_token_is_caught(pair, cold, monkeypatch, shift):
    """The negative control: the equalities above would see a hybrid's state of one token too few, or too many."""
    if not is_hybrid(pair):
        pytest.skip("rows say it all: there is no state")
    model, add = pair[0], PrefixCache.add

    def add_shifted(self, sequence, token_ids):
        add(self, sequence, token_ids)
        wrong = model.new_cache()
        ids = [*token_ids, 5] if shift > 0 else token_ids[:-1]
        feed(model, wrong, torch.tensor(list(ids)))
        matched = self._match(sequence.request.cache_salt, torch.tensor(list(token_ids)).numpy())
        matched[-1][0].state = wrong.copy_state()
        return True

    monkeypatch.setattr(PrefixCache, "add", add_shifted)
    engine, differing = engine_of(pair), 0
    for seed in range(4):
        prompt = tokens(200 + seed, 70)
        engine.generate(ask(prompt))
        emission = engine.generate(ask(prompt))
        assert emission.stats.cached_tokens == 69
        differing += list(emission.token_ids) != cold(ask(prompt))
    assert differing >= 3


def test_remembering_never_wants_more_pages_than_are_free(pair, caplog):
    """Plain and drafting requests behind the same prefixes: what one left is not all that the other needs."""
    size = pair[0].new_cache().size + pair[1].new_cache().size
    room = 260 * size.row_bytes + 4 * size.state_bytes
    limits = {"cache_bytes": room, "prefix_bytes": room, "max_context": 120, "max_running": 3, "prefill_chunk": 32, "snapshot_every": 16}
    for seed in (0, 2, 3):
        rng, engine = seeded(seed), engine_of(pair, **limits)
        requests = [
            ask(
                tokens(int(rng.integers(2)), int(rng.integers(20, 70))) + tokens(50 + i, int(rng.integers(1, 20))),
                int(rng.choice([0, 8])),
                int(rng.integers(2, 10)),
            )
            for i in range(24)
        ]
        courses = run_schedule(engine, requests, rng)
        assert not any(course.finish_reason == "error" for course in courses)
        assert "could not be remembered" not in caplog.text
        assert sum(course.stats.cached_tokens for course in courses) > 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20))])
def test_random_schedules_of_real_models(pair, cold, seed, caplog):
    """Joins, cancels, shared prefixes, memory for about four sequences: every answer as cold and alone."""
    size, rng = pair[0].new_cache().size + pair[1].new_cache().size, seeded(seed)
    engine = engine_of(pair, cache_bytes=700 * size.row_bytes + 6 * size.state_bytes, max_running=8, prefill_chunk=32)
    requests = [
        Request(
            tokens(300 + int(rng.integers(4)), int(rng.integers(20, 80))) + tokens(int(rng.integers(1000)), int(rng.integers(1, 40))),
            int(rng.integers(1, 50 if seed else 20)),
            SamplingParams(temperature=float(rng.choice([0.0, 0.8]))),
            seed=int(rng.integers(100)),
            tree_budget=int(rng.choice([0, 3, 16])),
        )
        for _ in range(64 if seed else 12)
    ]
    courses = run_schedule(engine, requests, rng, cancel_share=0.05)
    check_courses(courses, cold)
    assert not any(course.finish_reason == "error" for course in courses)
    assert "could not be remembered" not in caplog.text

"""Prefixes over pools: the same tokens as cold, the right number of cached ones, pages that nobody writes in again."""

from collections import Counter

import pytest
import torch

from ddtree.caches.pools import PAGE_SIZE
from ddtree.engine.paged_prefix import PagedPrefixCache
from ddtree.engine.request import Request
from ddtree.sampling.params import SamplingParams
from tests.engine.pools import FAMILIES, Pair, ask, check, check_pages, run_schedule, seeded, tokens
from tests.engine.schedules import check_courses
from tests.models.tiny import feed

SYSTEM = 100


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    return Pair(request.param)


class StopAfter:
    """A stop string, as the engine sees it: it ends after so many tokens."""

    def __init__(self, count: int):
        self.left = count

    def feed(self, token_id: int) -> str | None:
        self.left -= 1
        return "stop" if self.left == 0 else None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_shared_system_prompt(pair, temperature):
    """S + A, S + B, both again, S + C: a hybrid knows the end of S once two prompts have parted there. They part inside a page,
    of which A and B have one each."""
    engine, system = pair.engine(), tokens(1, SYSTEM)
    users = {name: (index, *tokens(2 + index, 30)) for index, name in enumerate("ABC")}
    sampling = SamplingParams(temperature=temperature)
    cached = {
        turn: check(pair, engine, ask(system + users[name], sampling=sampling, seed=3))
        for turn, name in (("A", "A"), ("B", "B"), ("A again", "A"), ("B again", "B"), ("C", "C"))
    }
    again = {"A again": SYSTEM + 30, "B again": SYSTEM + 30}
    assert cached == {"A": 0, "B": 64 if pair.is_hybrid else SYSTEM, **again, "C": SYSTEM}
    check_pages(engine)


@pytest.mark.parametrize("ends", ["length", "stop"])
def test_a_chat_of_three_turns_and_a_turn_taken_again(pair, ends):
    """Also where an answer ends at a stop inside an accepted path, and the next round is in flight already."""
    engine, history, known = pair.engine(), tokens(5, 60), 0
    for turn in range(3):
        options = {}
        if ends == "stop":
            longer = pair.cold(ask(history, max_tokens=30))
            options = {"max_tokens": 60, "stop_token_ids": frozenset(longer[20:21])}
        assert check(pair, engine, ask(history, **options)) == known
        again = ask(history, budget=[8, 0, 16][turn], **options)
        assert check(pair, engine, again) == len(history) - 1, "the turn taken again, at another budget"
        history = (*history, *pair.cold(again))
        known = len(history) - 1  # all but the last token of the answer is committed
        history = (*history, *tokens(50 + turn, 20))
    check_pages(engine)


def test_a_state_that_went_on_beyond_the_answer_is_not_remembered(pair):
    """An end that only the host sees, such as a stop string, may come with a round in vain."""
    engine = pair.engine()
    for count in (3, 17):
        history = tokens(60 + count, 70)
        request = ask(history, max_tokens=50, watcher=StopAfter(count))
        answer = list(engine.generate(request).token_ids)
        assert answer == pair.cold(ask(history, max_tokens=50))[:count]
        following = (*history, *answer, *tokens(61 + count, 10))
        cached = check(pair, engine, ask(following))
        known = len(history) + len(answer) - 1
        assert cached == known or (pair.is_hybrid and cached == len(history) - 1)


def test_a_hybrid_stops_where_the_request_says_that_turns_part(pair):
    engine, shared = pair.engine(), tokens(6, 50)
    assert check(pair, engine, ask((*shared, 1, *tokens(30, 8)), boundaries=(50,))) == 0
    assert check(pair, engine, ask((*shared, 2, *tokens(31, 8)))) == 50


def test_what_was_decoded_plainly_serves_plain_requests_alone(pair):
    """The drafter's context is part of what is remembered: without it a prefix is worth nothing to who drafts."""
    engine, prompt = pair.engine(), tokens(7, 90)
    assert check(pair, engine, ask(prompt, budget=0)) == 0
    assert check(pair, engine, ask(prompt)) == 0
    assert check(pair, engine, ask(prompt)) == 89
    assert check(pair, engine, ask(prompt, budget=0)) == 89
    check_pages(engine)


def test_the_drafters_context_is_the_one_that_a_cold_start_has(pair):
    """Lossless and invisible but for this: a context from the wrong rows only lowers acceptance."""
    prompt, contexts = tokens(8, 150), []
    for engine in (pair.engine(prefix_bytes=0), pair.engine()):
        if engine.prefix is not None:
            engine.generate(ask((*prompt[:140], 7)))  # parts inside a page
        request_id = engine.add(ask(prompt, max_tokens=30))
        while not (engine.running_or_none(request_id) and engine.running(request_id).num_emitted > 8):
            engine.step()
        sequence = engine.running(request_id)
        assert (sequence.stats.cached_tokens > 100) == (engine.prefix is not None)
        pool = engine.device_rounds.state.drafter.pool
        keys = pool.key_pages[:, sequence.pages].flatten(1, 2)[:, :150]
        contexts.append((keys, sequence.stats.acceptance_histogram))
    (cold, cold_lengths), (warm, warm_lengths) = contexts
    torch.testing.assert_close(cold, warm, rtol=1e-4, atol=1e-4)
    assert cold_lengths == warm_lengths


def test_salts_keep_prefixes_apart(pair):
    engine, prompt = pair.engine(), tokens(9, 80)
    assert check(pair, engine, ask(prompt, cache_salt="mine")) == 0
    assert check(pair, engine, ask(prompt, cache_salt="yours")) == 0
    assert check(pair, engine, ask(prompt, cache_salt="mine")) == 79
    held = engine.prefix.num_bytes
    assert check(pair, engine, ask(prompt, cache_salt=None)) == 0 and engine.prefix.num_bytes == held


def test_evictions_keep_the_limit_and_the_tokens(pair):
    probe = pair.engine()
    engine, rng, hits = pair.engine(prefix_bytes=10 * probe.memory.page_bytes), seeded(0), Counter()
    prompts = [tokens(60 + i // 2, 80) + tokens(80 + i, 20) for i in range(8)]
    for _ in range(24):
        hits[check(pair, engine, ask(prompts[int(rng.integers(8))], max_tokens=4)) > 0] += 1
        assert engine.prefix.holder.num_pages <= 10
    assert hits[True] > 3 and hits[False] > 3
    check_pages(engine)


def test_choices_of_one_prompt_share_its_pages(pair):
    engine, prompt = pair.engine(), tokens(11, 200)
    requests = [ask(prompt, max_tokens=10, sampling=SamplingParams(temperature=0.9), seed=1, choice_index=i) for i in range(4)]
    ids = [engine.add(request) for request in requests]
    answers, cached, most = {i: [] for i in ids}, {}, 0
    while engine.has_work:
        for emission in engine.step():
            answers[emission.request_id] += emission.token_ids
            cached[emission.request_id] = emission.stats.cached_tokens if emission.stats else None
        running = [s for s in engine.scheduler.running if not s.prefilling]
        if len(running) == 4:
            most = max(most, engine.memory.num_pages_of(running))
            assert len({tuple(s.pages[: 199 // PAGE_SIZE]) for s in running}) == 1
    assert [answers[i] for i in ids] == [pair.cold(request) for request in requests]
    # The last few tokens are computed again where that goes along with what the first still lacks.
    assert cached[ids[0]] == 0 and all(cached[i] in (192, 199) for i in ids[1:])
    assert most < 4 * 4, "each has its own page behind the shared ones, and no more"
    check_pages(engine)


def test_a_prefix_makes_room_for_a_request_that_would_not_fit_without(pair):
    """Shared pages are there already: two requests of six pages each, beside each other in eleven."""
    engine, system = pair.engine(num_tokens=570, max_context=400, max_running=2, snapshot_every=512), tokens(12, 256)
    assert engine.memory.pages.num_pages == 11
    check(pair, engine, ask(system + tokens(13, 8), max_tokens=2, boundaries=(256,)))
    requests = [ask(system + tokens(14 + i, 20), max_tokens=30, seed=i) for i in range(2)]
    ids = [engine.add(request) for request in requests]
    side_by_side, answers = 0, {i: [] for i in ids}
    while engine.has_work:
        for emission in engine.step():
            answers[emission.request_id] += emission.token_ids
        side_by_side = max(side_by_side, engine.num_running)
    assert side_by_side == 2
    assert [answers[i] for i in ids] == [pair.cold(request) for request in requests]


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_snapshot_off_by_one_token_is_caught(pair, monkeypatch, shift):
    """The negative control: the equalities above would see a hybrid's state of one token too few, or too many."""
    if not pair.is_hybrid:
        pytest.skip("rows say it all: there is no state")
    keep = PagedPrefixCache._keep_state

    def keep_shifted(self, sequence):
        ids = list(sequence.prefill_ids[: sequence.num_prefilled] if sequence.prefilling else sequence.token_ids[:-1])
        wrong = pair.target.new_cache()
        feed(pair.target, wrong, torch.tensor([*ids, 5] if shift > 0 else ids[:-1]))
        recurrent, slot = self.state.target.pool.recurrent, sequence.target_state.slot
        right, layers = recurrent.read(slot), [layer.copy_state() for layer in wrong.layers if layer.state_bytes]
        for place, states in enumerate(layers):
            for state in states:
                pool = recurrent.states if state.shape == recurrent.states[place, slot].shape else recurrent.conv_states
                pool[place, slot] = state.view(pool[place, slot].shape) if pool is recurrent.states else conv_rows(state, pool[place, slot])
        try:
            return keep(self, sequence)
        finally:
            recurrent.write(slot, right)

    monkeypatch.setattr(PagedPrefixCache, "_keep_state", keep_shifted)
    engine, differing = pair.engine(), 0
    for seed in range(4):
        prompt = tokens(200 + seed, 70)
        engine.generate(ask(prompt))
        emission = engine.generate(ask(prompt))
        assert emission.stats.cached_tokens == 69
        differing += list(emission.token_ids) != pair.cold(ask(prompt))
    assert differing >= 3


def conv_rows(state: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A layer's conv state as the pools lay it out, [W - 1, C]."""
    return state if state.shape == like.shape else state.transpose(-1, -2).reshape(like.shape)


def test_what_is_remembered_stays_as_it_was(pair):
    """Rows and states in shared pages, bit for bit, while others write behind them, split them and forget their neighbours."""
    probe = pair.engine()
    engine, rng = pair.engine(prefix_bytes=24 * probe.memory.page_bytes), seeded(3)
    state, seen = engine.device_rounds.state, {}
    pools = [state.target.pool.attention, state.drafter.pool]

    def contents(node):
        parts = []
        for rows, chosen in ((node.rows, pools[:1]), (node.drafter_rows, pools)):
            if rows is not None:
                places = slice(rows.first % PAGE_SIZE, rows.first % PAGE_SIZE + rows.num_rows)
                parts += [pages[:, list(rows.pages)].flatten(1, 2)[:, places] for p in chosen for pages in (p.key_pages, p.value_pages)]
        return parts, None if node.state is None else node.state.load()

    for number in range(8):
        prompt = tokens(int(rng.integers(3)), 40 + int(rng.integers(60))) + tokens(int(rng.integers(100)), 1 + int(rng.integers(60)))
        check(pair, engine, ask(prompt, int(rng.choice([0, 8])), max_tokens=int(rng.integers(1, 20))))
        nodes = list(engine.prefix._nodes())
        for node in nodes:
            key = (id(node), node.token_ids.tobytes(), node.drafter_rows is None, node.state is None)
            now = contents(node)
            before = seen.setdefault(key, (node, now))[1]
            assert all(map(torch.equal, before[0], now[0])), f"rows changed by request {number}"
            assert before[1] is None or torch.equal(before[1], now[1])


def drawn(rng, number: int) -> SamplingParams:
    """Greedy or not, now and then filtered, or penalised, which takes the host into its rounds."""
    temperature, top_p = float(rng.choice([0.0, 0.8])), float(rng.choice([1.0, 1.0, 0.9]))
    if number % 2:
        return SamplingParams(temperature=temperature, top_p=top_p)
    return SamplingParams(temperature=temperature, frequency_penalty=0.3 if top_p < 1 else 0.0)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 21))])
def test_random_schedules(pair, seed):
    """Joins, cancels, shared prefixes, in odd seeds so little memory that some are preempted: every answer as cold and alone, and no page is lost."""
    rng, pressed = seeded(seed), seed % 2
    engine = pair.engine(num_tokens=160 if pressed else 256, max_context=300, max_running=6, prefill_chunk=32)
    longest_prompt, most_tokens = (100, 160) if pressed else (150, 100 if seed else 40)
    requests = [
        Request(
            tokens(300 + int(rng.integers(3)), int(rng.integers(20, longest_prompt))) + tokens(int(rng.integers(1000)), int(rng.integers(1, 40))),
            int(rng.integers(1, most_tokens)),
            drawn(rng, number),
            seed=int(rng.integers(100)),
            tree_budget=int(rng.choice([0, 3, 16])),
        )
        for number in range(64 if seed else 12)
    ]
    courses = run_schedule(engine, requests, rng, cancel_share=0.03)
    check_courses(courses, pair.cold)
    assert not any(course.finish_reason == "error" for course in courses)
    if pressed:
        assert sum(course.stats.preemptions for course in courses if course.stats) > 0
    elif seed:
        assert sum(course.stats.cached_tokens for course in courses if course.stats) > 0
    engine.step()
    check_pages(engine)

"""The embedded pairs over pools, on the CPU: chats and little memory change no token of theirs."""

from dataclasses import replace

import pytest
import torch

from ddtree.engine.config import EngineConfig
from ddtree.engine.engine import Engine
from ddtree.engine.pooled import pooled_engine
from ddtree.engine.request import Request
from ddtree.engine.target import Target
from ddtree.models.dflash import load_drafter
from ddtree.models.registry import load_target
from ddtree.sources import resolve
from ddtree.text import Tokenizer
from tests.engine.pools import check_pages
from tests.engine.schedules import check_courses, run_schedule, seeded

QUESTIONS = ("Name three rivers.", "And which of them is the longest? Say why.", "Thank you. Now three mountains, please.")


@pytest.fixture(scope="module", params=["hybrid-tiny", pytest.param("smollm2", marks=pytest.mark.long)])
def models(request, smollm2_path):
    source = resolve(request.param)
    target = load_target(source.target, torch.device("cpu"), torch.float32)
    return target, load_drafter(source.drafter, target.config, torch.device("cpu"), torch.float32), Tokenizer.load(source.target)


def cold(models, request: Request) -> list[int]:
    engine = Engine(Target(models[0]), None, EngineConfig(max_context=1024), models[0].config.vocab_size)
    return list(engine.generate(replace(request, tree_budget=0, cache_salt=None)).token_ids)


def engine_of(models, num_tokens: int, **config) -> Engine:
    config = EngineConfig(max_tree_budget=16, prefill_chunk=128, prefix_bytes=2**34, **config)
    return pooled_engine(*models[:2], config, num_tokens=num_tokens)


def test_a_chat_of_three_turns_finds_all_of_its_past(models):
    engine, history, known = engine_of(models, 2048, max_context=512, snapshot_every=64), (), 0
    for question in QUESTIONS:
        history = (*history, *models[2].encode(f"\nQ: {question}\nA:", add_special_tokens=False))
        request = Request(history, 24, tree_budget=8)
        emission = engine.generate(request)
        assert list(emission.token_ids) == cold(models, request)
        assert emission.stats.cached_tokens == known
        history = (*history, *emission.token_ids)
        known = len(history) - 1
    check_pages(engine)


@pytest.mark.long
def test_little_memory_changes_no_token(models):
    engine = engine_of(models, 160, max_context=300, max_running=3)
    texts = [f"{question} " * 20 for question in QUESTIONS]
    requests = [
        Request(tuple(models[2].encode(text, add_special_tokens=False)[:90]), 60, tree_budget=[8, 8, 16][place])
        for place, text in enumerate(texts)
    ]
    courses = run_schedule(engine, requests, seeded(0), join_share=1.0)
    check_courses(courses, lambda request: cold(models, request))
    assert all(course.finish_reason == "length" for course in courses)
    assert sum(course.stats.preemptions for course in courses) > 0
    engine.step()
    check_pages(engine)

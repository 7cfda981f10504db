"""The sampler's state machine on a tiny random target."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ddtree.training import sample as sampling
from ddtree.training.sample import FORCED, GENERATED, USER_TOKEN, attend_matmul, attend_sdpa
from tests.training.conftest import OPENERS
from tests.training.packed_forward import packed_forward


def replay(tokens, prefix_length, phase, cap, is_stub):
    """The rule of the conversation in plain Python: the classes and, where a token is forced, its value."""
    classes, forced, queue, turn = [], [], [], 0
    for position, token in enumerate(tokens):
        if position < prefix_length:
            classes.append(FORCED), forced.append(None)
            continue
        if queue:
            classes.append(FORCED), forced.append(queue.pop(0))
            continue
        capped = phase == "user" and turn >= cap
        classes.append(FORCED if capped else USER_TOKEN if phase == "user" else GENERATED)
        forced.append(OPENERS["end_id"] if capped else None)
        turn = cap if phase == "user" and is_stub and token in OPENERS["docstring_ids"] else turn + 1
        if token == OPENERS["end_id"] and phase != "raw":
            queue, turn = list(OPENERS["after_user" if phase == "user" else "after_assistant"]), 0
            phase = "assistant" if phase == "user" else "user"
    return classes, forced


@pytest.fixture
def written(target, sampling_config):
    torch.manual_seed(1)
    begin = sampling.begin(OPENERS, 32, 80, sampling_config, seed=3, device=target.device)
    prefixes = begin.tokens.clone()
    conversation = sampling.Conversation(begin, OPENERS, sampling_config)
    tokens, classes = sampling.Writer(target, 32, 80).write(conversation)
    return begin, prefixes, tokens, classes


def test_forced_tokens_and_classes_follow_the_template(written):
    begin, prefixes, tokens, classes = written
    ended_turns = 0
    for row in range(32):
        length, phase = int(begin.prefix_lengths[row]), "raw" if begin.phases[row] == sampling.RAW else "user"
        assert tokens[row, :length].tolist() == prefixes[row, :length].tolist()
        expected, forced = replay(tokens[row].tolist(), length, phase, int(begin.user_caps[row]), bool(begin.is_stub[row]))
        assert classes[row].tolist() == expected
        for position, token in enumerate(forced):
            assert token is None or tokens[row, position] == token
        ended_turns += int((tokens[row, length:] == 2).sum())
    assert ended_turns > 40 and begin.is_stub.any() and not begin.is_stub.all()
    assert set(np.unique(classes)) == {FORCED, GENERATED, USER_TOKEN}


def test_greedy_rows_are_greedy_decoding_of_the_served_target(written, model):
    begin, _, tokens, classes = written
    checked = 0
    for row in np.flatnonzero(begin.temperatures.numpy() == 0):
        _, hidden = packed_forward(model, torch.from_numpy(tokens[row].astype(np.int64)), ())
        best = model.logits(hidden).argmax(dim=-1).numpy()
        positions = np.flatnonzero(classes[row] == GENERATED)
        wanted = best[positions - 1]
        if begin.phases[row] != sampling.RAW:
            wanted = np.where(np.isin(wanted, OPENERS["stop_ids"]), OPENERS["end_id"], wanted)
        assert tokens[row, positions].tolist() == wanted.tolist()
        checked += len(positions)
    assert checked > 200


def test_warm_rows_follow_the_temperature(target, sampling_config):
    config = replace(sampling_config, temperatures=(0.7,), temperature_shares=(1.0,))
    begin = sampling.begin({**OPENERS, "shares": {"raw": 1.0}}, 4000, 8, config, seed=0, device=target.device)
    conversation = sampling.Conversation(begin, OPENERS, config)
    logits = torch.randn(1, 61) * 2
    drawn = conversation.draw(logits.expand(4000, -1))
    share = torch.bincount(drawn, minlength=61) / 4000
    assert (share - (logits[0] / 0.7).softmax(-1)).abs().max() < 0.03


def test_user_turns_never_take_unlikely_tokens(target, sampling_config):
    config = replace(sampling_config, user_min_p=0.2)
    begin = sampling.begin({**OPENERS, "shares": {"chat": 1.0}}, 2000, 8, config, seed=0, device=target.device)
    logits = torch.randn(1, 61) * 2
    drawn = sampling.Conversation(begin, OPENERS, config).draw(logits.expand(2000, -1))
    probs = logits[0].softmax(-1)
    assert (probs[drawn] >= 0.199 * probs.max()).all() and len(drawn.unique()) > 1


def test_the_attention_variants_agree():
    query, keys, values = torch.randn(3, 2, 3, 8), torch.randn(3, 2, 11, 8), torch.randn(3, 2, 11, 8)
    torch.testing.assert_close(attend_sdpa(query, keys, values), attend_matmul(query, keys, values))


def test_a_second_run_goes_on_where_the_first_stopped(target, sampling_config, tmp_path):
    first = replace(sampling_config, tokens=32 * 80)
    assert sampling.sample(target, OPENERS, tmp_path, first) == 32 * 80
    written_at = (tmp_path / "tokens_0000.npy").stat().st_mtime_ns
    assert sampling.sample(target, OPENERS, tmp_path, sampling_config) == 64 * 80
    assert (tmp_path / "tokens_0000.npy").stat().st_mtime_ns == written_at
    tokens = np.load(tmp_path / "tokens_0001.npy")
    assert tokens.dtype == np.uint16 and tokens.shape == (32, 80)
    assert np.load(tmp_path / "classes_0001.npy").dtype == np.uint8

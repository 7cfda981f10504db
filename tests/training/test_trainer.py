"""The loop on a tiny target: it learns, it goes on after a break, it ends in a drafter that loads."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from ddtree.models.dflash import load_drafter
from ddtree.training import sample as sampling
from ddtree.training.command import build_parser
from ddtree.training.data import Data
from ddtree.training.evaluate import acceptance_length, evaluate, held_out_batches
from ddtree.training.optim import learning_rate
from ddtree.training.packed import PackedDrafter, new_drafter
from ddtree.training.trainer import CHECKPOINT, Trainer, fit
from ddtree.tree.draft_tree import DraftTree
from tests.training.conftest import OPENERS


@pytest.fixture
def data(target, sampling_config, tmp_path) -> Data:
    sampling.sample(target, OPENERS, tmp_path / "data", sampling_config)
    return Data(tmp_path / "data", target.device)


def trainer_of(target, data, config) -> Trainer:
    return Trainer(PackedDrafter(new_drafter(target, config), target), data, config)


@pytest.mark.parametrize(("optimizer", "rate"), [("muon", 2e-2), ("adamw", 1e-2)])
def test_one_batch_is_learnt_by_heart(target, data, training_config, optimizer, rate):
    config = replace(training_config, optimizer=optimizer, learning_rate=rate, full_block_share=1.0)
    trainer = trainer_of(target, data, config)
    shard = data.train[0]
    batch = data.batch_of(shard, np.arange(2))
    losses = []
    for _ in range(60):
        loss = trainer.loss(batch, np.random.default_rng(0))
        loss.backward()
        trainer.optimizer.step(rate)
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_every_parameter_learns_under_muon(target, data, training_config):
    trainer = trainer_of(target, data, training_config)
    before = {name: parameter.detach().clone() for name, parameter in trainer.drafter.named_parameters()}
    trainer.step(0.0)
    for name, parameter in trainer.drafter.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_a_resumed_run_equals_an_unbroken_one(target, data, training_config, tmp_path):
    whole = trainer_of(target, data, training_config)
    for _ in range(6):
        whole.step(0.2)
    broken = trainer_of(target, data, training_config)
    for _ in range(3):
        broken.step(0.2)
    broken.save(tmp_path)
    resumed = trainer_of(target, data, training_config)
    resumed.load(tmp_path)
    assert resumed.step_index == 3
    for _ in range(3):
        resumed.step(0.2)
    for (name, one), other in zip(whole.drafter.named_parameters(), resumed.drafter.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    for one, other in zip(whole.average.parameters(), resumed.average.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_fit_races_trains_resumes_and_exports(target, model, data, training_config, tmp_path):
    folder = tmp_path / "drafter"
    config = replace(
        training_config, race="muon:5e-3,adamw:1e-9", race_seconds=1.0, total_minutes=0.1, minutes_this_run=0.08
    )
    fit(target, data, folder, config)
    first = torch.load(folder / CHECKPOINT, weights_only=True)
    assert first["choice"] == ("muon", 5e-3)
    average = fit(target, data, folder, replace(config, minutes_this_run=1.0))
    second = torch.load(folder / CHECKPOINT, weights_only=True)
    assert second["step_index"] > first["step_index"] and second["trained_seconds"] >= 6
    served = load_drafter(folder, model.config, "cpu", torch.float32)
    error = (served.fc.weight - average.fc.weight).norm() / average.fc.weight.norm()
    assert served.config.shrinkable_block and error < 0.01
    lines = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    assert any("evaluation" in line for line in lines) and any("won" in line for line in lines)


def test_evaluation_counts_the_bonus_and_stays_within_the_block(target, data, training_config):
    result = evaluate(PackedDrafter(new_drafter(target, training_config), target), data, training_config, 64)
    assert result.num_anchors > 0
    assert 1 <= result.chain <= result.budgets[16] <= result.budgets[64] <= training_config.block_size
    assert len(result.top1_by_depth) == training_config.block_size - 1


def test_held_out_anchors_precede_whole_blocks_of_generated_text(data):
    for batch, anchors in held_out_batches(data, 64, 6):
        for row, chosen in enumerate(anchors):
            for anchor in chosen.tolist():
                assert (batch.classes[row, anchor + 1 : anchor + 6] == sampling.GENERATED).all()


def test_acceptance_length_of_a_known_tree():
    tree = DraftTree(
        np.array([9, 5, 6, 0, 7]), np.array([-1, 0, 0, 1, 3], np.int32), np.array([0, 1, 1, 2, 3], np.int32),
        np.zeros(5, np.float32),
    )  # fmt: skip
    assert acceptance_length(tree, np.array([5, 0, 7])) == 4
    assert acceptance_length(tree, np.array([5, 0, 8])) == 3
    assert acceptance_length(tree, np.array([6, 0, 7])) == 2
    assert acceptance_length(tree, np.array([4, 0, 7])) == 1


def test_the_rate_warms_up_by_steps_and_ends_at_zero_by_the_clock():
    assert learning_rate(1.0, 0, 0.0, 100) == pytest.approx(0.01)
    assert learning_rate(1.0, 500, 0.5, 100) == pytest.approx(0.5)
    assert learning_rate(1.0, 500, 1.0, 100) == pytest.approx(0.0)


def test_commands_take_every_field_as_a_flag():
    args = build_parser().parse_args(
        ["sample", "--target", "t", "--out", "o", "--tokens", "28e6", "--minutes", "2.7", "--lengths", "512,1024"]
    )
    assert (args.tokens, args.minutes, args.lengths) == (28_000_000, 2.7, (512, 1024))
    fitting = ["fit", "--target", "t", "--data", "d", "--out", "o", "--race", "muon:2e-3,adamw:1e-3", "--compile", "off"]
    args = build_parser().parse_args(fitting)
    assert (args.race, args.compile, args.minutes_this_run) == ("muon:2e-3,adamw:1e-3", "off", 13.0)

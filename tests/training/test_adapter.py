"""Training an adapter: the loss falls on text that has an order, resumes, exports, and what is exported loads."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from ddtree.models.adapter import SUMMARIES
from ddtree.models.adapter_files import FOLDER, load_adapter, save_adapter
from ddtree.models.dflash import load_drafter
from ddtree.training.adapter import CHECKPOINT, AdapterTrainer, fit_adapter
from ddtree.training.config import AdapterTrainingConfig
from ddtree.training.data import Data
from ddtree.training.export import save_drafter
from ddtree.training.packed import PackedDrafter, drafter_config, new_drafter
from ddtree.training.sample import sample
from tests.training.conftest import OPENERS


@pytest.fixture
def data(target, sampling_config, tmp_path) -> Data:
    sample(target, OPENERS, tmp_path / "data", sampling_config)
    return Data(tmp_path / "data", torch.device("cpu"))


@pytest.fixture
def drafter_folder(target, training_config, tmp_path):
    folder = tmp_path / "drafter"
    save_drafter(new_drafter(target, training_config), folder, drafter_config(target, training_config))
    return folder


def config(**changes) -> AdapterTrainingConfig:
    return AdapterTrainingConfig(
        **{
            "width": 16, "rank": 8, "num_candidates": 20, "tokens_per_step": 4 * 80, "anchors_per_512": 32, "warmup_steps": 5,
            "learning_rate": 1e-2, "total_minutes": 0.05, "minutes_this_run": 0.3, "eval_anchors": 32, "log_steps": 10,
        } | changes
    )  # fmt: skip


@pytest.mark.parametrize("summary", SUMMARIES)
def test_the_loss_falls(target, data, drafter_folder, summary):
    drafter = load_drafter(drafter_folder, target.config, "cpu", torch.float32)
    before = {name: tensor.clone() for name, tensor in drafter.named_parameters()}
    trainer = AdapterTrainer(PackedDrafter(drafter, target), data, config(summary=summary))
    losses = [trainer.step(0.0).item() for _ in range(40)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert all(torch.equal(before[name], tensor) for name, tensor in drafter.named_parameters())  # frozen


def test_training_resumes_and_exports(model, target, data, drafter_folder, tmp_path):
    folder = tmp_path / "out"
    fit_adapter(target, drafter_folder, data, folder, config(minutes_this_run=0.05, total_minutes=0.5))
    first = torch.load(folder / CHECKPOINT, weights_only=True)["step_index"]
    fit_adapter(target, drafter_folder, data, folder, config(minutes_this_run=0.1, total_minutes=0.5))
    assert torch.load(folder / CHECKPOINT, weights_only=True)["step_index"] > first > 0
    served = load_adapter(folder / FOLDER, drafter_folder, load_drafter(drafter_folder, model.config).config, "cpu", torch.float32)
    assert served.config.num_candidates == 20
    lines = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    assert {line["scoring"] for line in lines if "scoring" in line} == {"factorised", "conditioned"}


def test_grandparents_are_learnt_from_where_an_adapter_without_them_ended(target, data, drafter_folder, tmp_path):
    drafter = load_drafter(drafter_folder, target.config, "cpu", torch.float32)
    first = AdapterTrainer(PackedDrafter(drafter, target), data, config())
    for _ in range(5):
        first.step(0.0)
    folder = save_adapter(first.adapter, tmp_path / "first", drafter_folder).parent
    batch = data.batch(np.random.default_rng(0), 4 * 80)
    again = AdapterTrainer(first.packed, data, config(summary="grandparent", start=str(folder)))
    same = AdapterTrainer(first.packed, data, config(start=str(folder)))
    assert again.loss(batch, 1).item() == pytest.approx(same.loss(batch, 1).item(), abs=1e-6)
    again.step(0.0)
    assert again.adapter.grandparent_out.weight.any()
    with pytest.raises(ValueError, match=r"start: .* another shape \(.*grandparent_depth.*; train with"):
        AdapterTrainer(first.packed, data, config(start=str(save_adapter(again.adapter, folder, drafter_folder).parent)))
    with pytest.raises(ValueError, match="candidate_token"):
        AdapterTrainer(first.packed, data, config(rank=4, summary="grandparent", start=str(folder)))


def test_jointly_the_drafter_learns_and_is_exported(target, data, drafter_folder, tmp_path):
    folder = tmp_path / "out"
    fit_adapter(target, drafter_folder, data, folder, config(jointly=True, total_minutes=0.03))
    old, new = (load_drafter(path, target.config, "cpu", torch.float32) for path in (drafter_folder, folder))
    assert not torch.allclose(old.fc.weight, new.fc.weight, atol=1e-3)
    load_adapter(folder / FOLDER, folder, new.config, "cpu", torch.float32)
    with pytest.raises(ValueError, match="another drafter"):
        load_adapter(folder / FOLDER, drafter_folder, old.config, "cpu", torch.float32)

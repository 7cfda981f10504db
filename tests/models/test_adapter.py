"""The adapter: what is trained along a path is what is served level by level; its files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ddtree.engine.scoring import condition
from ddtree.models.adapter import SUMMARIES, Adapter, AdapterConfig
from ddtree.models.adapter_files import FOLDER, WEIGHTS_FILE, find_adapter, load_adapter, save_adapter
from ddtree.models.conditioning import Conditioning, conditioned
from ddtree.sampling.choose import rank_scores
from ddtree.sampling.noise import gumbel_noise
from ddtree.sampling.params import SamplingParams
from ddtree.tree.build import build_ddtree
from tests.closeness import assert_close
from tests.training.conftest import VOCAB, tiny_target

BLOCK, WIDTH = 6, 32


def random_adapter(summary: str = "none", seed: int = 0) -> Adapter:
    torch.manual_seed(seed)
    adapter = Adapter(AdapterConfig(WIDTH, BLOCK, width=16, rank=8, summary=summary, num_candidates=9))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(0.0, 0.4)
    return adapter.requires_grad_(False)


def drafted(seed: int = 1):
    """States [K, C] and logits [D, V] of a block."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BLOCK, WIDTH, generator=generator), torch.randn(BLOCK - 1, VOCAB, generator=generator) * 2


@pytest.mark.parametrize("summary", SUMMARIES)
@pytest.mark.parametrize("tables", [False, True])
def test_served_level_by_level_as_trained_along_a_path(summary, tables):
    adapter, model = random_adapter(summary), tiny_target()
    states, logits = drafted()
    candidates = condition(Conditioning(adapter, model, tables=tables), states, 0, logits, SamplingParams(), None)
    ranks = np.random.default_rng(2).integers(9, size=BLOCK - 1)
    ids = torch.from_numpy(candidates.token_ids)
    tokens = torch.cat([torch.zeros(1, dtype=torch.int64), ids[torch.arange(BLOCK - 1), torch.from_numpy(ranks)]])
    own = logits.log_softmax(-1).gather(1, ids)
    trained = adapter(states[None], tokens[None], model.embed_tokens, model.lm_head.weight, ids[None], own[None])[0]
    expected = conditioned(own, trained)[:, :-1]
    assert_close("along", candidates.scorer.along(ranks[:-1]), expected, 1e-5)
    # Two paths side by side, the second one's nodes first.
    other = (ranks + 1) % 9
    for depth in range(1, BLOCK):
        before = np.array([-1]) if depth == 1 else np.array([other[depth - 2], ranks[depth - 2]])
        parents = np.array([-1]) if depth == 1 else np.array([0, 0] if depth == 2 else [0, 1])
        rows = candidates.scorer.children(depth, before, parents)
        assert_close(f"depth {depth}", rows[-1], expected[depth - 1], 1e-5)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.7)])
def test_a_fresh_adapter_says_what_the_drafter_says(sampling):
    adapter = Adapter(AdapterConfig(WIDTH, BLOCK, width=16, rank=8)).requires_grad_(False)
    states, logits = drafted()
    noise = None if sampling.greedy else gumbel_noise(3, list(range(BLOCK - 1)), VOCAB, torch.device("cpu"))
    found = condition(Conditioning(adapter, tiny_target(), tables=False), states, 5, logits, sampling, noise)
    expected = rank_scores(logits, sampling, noise).topk(found.token_ids.shape[1])
    assert (found.token_ids == expected.indices.numpy()).all()
    for ranks in ([], [3], [3, 0, 2, 1]):
        assert_close("scores", found.scorer.along(np.array(ranks, np.int64))[-1], expected.values[len(ranks)], 1e-4)


def test_scores_are_log_probabilities_whatever_is_forbidden():
    states, logits = drafted()
    logits[:, 4:] = -torch.inf  # fewer tokens than candidates
    found = condition(Conditioning(random_adapter(), tiny_target(), tables=True), states, 1, logits, SamplingParams(), None)
    rows = found.scorer.children(2, np.arange(4), np.zeros(4, np.int64))
    assert not np.isnan(rows).any() and (rows <= 0).all()
    assert np.isfinite(rows).sum(axis=1).tolist() == [4] * 4
    assert (np.exp(rows).sum(axis=1) <= 1 + 1e-5).all()
    tree = build_ddtree(1, found, 300)
    assert set(tree.token_ids[1:].tolist()) <= set(range(4))


def saved(tmp_path, summary: str = "recurrence"):
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "drafter.gguf").write_bytes(b"weights")
    adapter = random_adapter(summary)
    save_adapter(adapter, drafter / FOLDER, drafter)
    return drafter, adapter


class Shape:
    hidden_size, block_size = WIDTH, BLOCK


def test_files_hold_what_was_saved(tmp_path):
    drafter, adapter = saved(tmp_path)
    assert find_adapter(drafter) == find_adapter(drafter / "drafter.gguf") == drafter / FOLDER
    found = load_adapter(drafter / FOLDER, drafter, Shape, "cpu", torch.float32)
    assert found.config == adapter.config
    for name, tensor in adapter.state_dict().items():
        assert_close(name, found.state_dict()[name], tensor, 5e-3)  # bfloat16
    assert find_adapter(tmp_path) is None


def test_a_file_of_the_former_names_is_the_same(tmp_path):
    drafter, adapter = saved(tmp_path, "grandparent")
    path = drafter / FOLDER / WEIGHTS_FILE
    former = {name.replace("grandparent_", "older_"): tensor for name, tensor in load_file(path).items()}
    assert sum(name.startswith("older_") for name in former) == 7
    save_file(former, path)
    resumed = torch.nn.ModuleDict({"adapter": random_adapter("grandparent", seed=1)})  # as a training checkpoint has it
    resumed.load_state_dict({f"adapter.{name}": tensor for name, tensor in former.items()})
    for found in (load_adapter(drafter / FOLDER, drafter, Shape, "cpu", torch.float32), resumed["adapter"]):
        for name, tensor in adapter.state_dict().items():
            assert_close(name, found.state_dict()[name], tensor, 5e-3)


def test_an_adapter_of_another_drafter_is_refused(tmp_path):
    drafter, _ = saved(tmp_path)
    with pytest.raises(ValueError, match="block_size is 6, the drafter's is 16"):
        load_adapter(drafter / FOLDER, drafter, type("Other", (), {"hidden_size": WIDTH, "block_size": 16}), "cpu", torch.float32)
    (drafter / "drafter.gguf").write_bytes(b"other weights")
    with pytest.raises(ValueError, match="another drafter .* --adapter none"):
        load_adapter(drafter / FOLDER, drafter, Shape, "cpu", torch.float32)


def test_a_broken_adapter_is_refused(tmp_path):
    drafter, adapter = saved(tmp_path)
    save_adapter(random_adapter("none"), drafter / FOLDER, drafter)
    about = json.loads((drafter / FOLDER / "adapter.json").read_text())
    (drafter / FOLDER / "adapter.json").write_text(json.dumps(about | {"config": adapter.config.as_json()}))
    with pytest.raises(ValueError, match=f"{WEIGHTS_FILE}: from_summary.weight should be .* is None"):
        load_adapter(drafter / FOLDER, drafter, Shape, "cpu", torch.float32)
    (drafter / FOLDER / "adapter.json").write_text("{}")
    with pytest.raises(ValueError, match='adapter.json: expected "config"'):
        load_adapter(drafter / FOLDER, drafter, Shape, "cpu", torch.float32)
    with pytest.raises(ValueError, match="no adapter.json"):
        load_adapter(tmp_path, drafter, Shape, "cpu", torch.float32)


@pytest.mark.parametrize("change, message", [({"summary": "all"}, "summary"), ({"width": 0}, "width"), ({"block_size": 1}, "block_size")])
def test_a_config_out_of_range_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        AdapterConfig(**({"hidden_size": 8, "block_size": 4} | change))

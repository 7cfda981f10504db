"""Qwen3.5 with experts: against transformers and itself; experts stored one by one and fused."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddtree.models.registry import load_target
from ddtree.models.weights import SafetensorsSource
from tests.models.qwens import EXPERTS, LINEAR, reference, save_inside_multimodal
from tests.models.target_checks import TargetChecks
from tests.models.tiny import feed, random_ids

CHANGES = {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 24}


class TestQwen3_5Moe(TargetChecks):
    FAMILY, CONFIG_CLASS, CHANGES = "Qwen3_5Moe", "Qwen3_5MoeTextConfig", CHANGES


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with experts one by one, in one file."""
    reference("Qwen3_5Moe", "Qwen3_5MoeTextConfig", **CHANGES).save_pretrained(tmp_path)
    return tmp_path


def fuse_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Replace experts.{i}.*_proj.weight by the 3-D experts.gate_up_proj and experts.down_proj."""
    marker = ".experts.0.gate_proj.weight"
    for prefix in [name.removesuffix(marker) for name in tensors if name.endswith(marker)]:
        parts = {
            kind: [tensors.pop(f"{prefix}.experts.{i}.{kind}.weight") for i in range(CHANGES["num_experts"])]
            for kind in ("gate_proj", "up_proj", "down_proj")
        }
        pairs = zip(parts["gate_proj"], parts["up_proj"], strict=True)
        tensors[f"{prefix}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{prefix}.experts.down_proj"] = torch.stack(parts["down_proj"])


def test_fused_experts_inside_a_multimodal_file_are_the_same_model(folder, tmp_path_factory):
    """As published: 3-D experts under model.language_model., the text config inside the multimodal one."""
    published = save_inside_multimodal(
        folder, tmp_path_factory.mktemp("published"), "Qwen3_5MoeForConditionalGeneration", fuse_experts
    )
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in SafetensorsSource(published).shapes
    apart, fused = (load_target(path, "cpu", torch.float32) for path in (folder, published))
    prompt = random_ids(20)
    assert torch.equal(feed(fused, fused.new_cache(), prompt)[0], feed(apart, apart.new_cache(), prompt)[0])


@pytest.mark.parametrize("missing", ["experts.3.up_proj.weight", "shared_expert_gate.weight", "gate.weight"])
def test_a_missing_tensor_is_named(folder, missing):
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.2.mlp.{missing}"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"model\.layers\.2\.mlp\.{missing}: missing from"):
        load_target(folder, "cpu", torch.float32)


def test_an_expert_too_many_is_named(folder):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.6.up_proj.weight"
    tensors[name] = torch.zeros(20, 32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name}: in .*, but the model has no such tensor"):
        load_target(folder, "cpu", torch.float32)

"""ddtree doctor: a line for each thing that may be wrong, what to do about it, the JSON line, the exit status."""

from __future__ import annotations

import json

import pytest
import torch

from ddtree.caches.recurrent import RecurrentCache
from ddtree.cli.main import main
from ddtree.doctor import FAILED, OK, WARNING, fitting, machine
from ddtree.doctor.compatibility import drafter_checks, read_drafter, read_target, target_checks
from ddtree.doctor.hybrid import DRAFTER, TARGET, random_hybrid
from ddtree.doctor.selftest import hybrid_check
from ddtree.models import stack
from ddtree.models.config import ModelConfig
from ddtree.models.drafter_config import DrafterConfig
from ddtree.text import Tokenizer
from tests.text.conftest import KINDS


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(KINDS["split_digits"]())


def run(capsys, *argv):
    code = main(["doctor", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, json.loads(captured.out.splitlines()[-1])


def statuses(checks) -> dict[str, str]:
    return {check.name: check.status for check in checks}


def test_a_folder_without_a_model_is_red_and_says_what_to_do(tmp_path, capsys):
    code, out, found = run(capsys, tmp_path, "--no-self-test")
    assert code == 1 and not found["passed"] and found["counts"]["failed"] == 1
    red = [check for check in found["checks"] if check["status"] == FAILED]
    assert red[0]["area"] == "files" and "config.json" in red[0]["found"] and red[0]["remedy"]


def test_a_model_that_was_not_fetched_is_skipped_with_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path))
    code, out, found = run(capsys, "smollm2", "--no-self-test")
    assert code == 0 and found["counts"]["skipped"] == 1 and "ddtree fetch smollm2" in out


def test_every_side_of_a_pair_that_does_not_fit_is_named(tokenizer, tmp_path):
    target = ModelConfig.from_hf(TARGET)
    sound = DrafterConfig.from_hf(DRAFTER)
    assert set(statuses(drafter_checks(sound, target, tokenizer, tmp_path)).values()) == {OK}
    other = DrafterConfig.from_hf(
        DRAFTER | {"hidden_size": 64, "dflash_config": {"mask_token_id": 999, "target_layer_ids": [0, 9]}, "vocab_size": 5000}
    )
    found = statuses(drafter_checks(other, target, tokenizer, tmp_path))
    for name in ("hidden size", "target_layer_ids", "mask token", "drafter and target"):
        assert found[name] == FAILED, found
    line = next(check for check in drafter_checks(other, target, tokenizer, tmp_path) if check.name == "hidden size")
    assert line.found == "drafter 64, target 32" and "--drafter" in line.remedy


def test_a_drafter_with_another_tokenizer_is_found(tokenizer, tmp_path):
    KINDS["split_digits"]().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    checks = drafter_checks(DrafterConfig.from_hf(DRAFTER), ModelConfig.from_hf(TARGET), tokenizer, tmp_path)
    assert statuses(checks)["tokenizer of the drafter"] == OK
    file = tmp_path / "tokenizer.json"
    read = json.loads(file.read_text())
    vocabulary = read["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(read))
    checks = drafter_checks(DrafterConfig.from_hf(DRAFTER), ModelConfig.from_hf(TARGET), tokenizer, tmp_path)
    line = next(check for check in checks if check.name == "tokenizer of the drafter")
    assert line.status == FAILED and "2 tokens have other ids" in line.found


def test_a_hybrid_target_and_a_tokenizer_too_large_for_it(tokenizer):
    found = statuses(target_checks(ModelConfig.from_hf(TARGET), tokenizer))
    assert found["hybrid"] == OK and found["tokenizer"] == FAILED  # its words are more than 96


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    refusal, config, shapes = read_target(tmp_path)
    assert refusal.status == FAILED and "GPT2LMHeadModel" in refusal.found and config is None
    refusal, config, _ = read_drafter(tmp_path)
    assert refusal.status == FAILED and config is None


def test_what_fits_into_memory(monkeypatch):
    target, drafter = ModelConfig.from_hf(TARGET), DrafterConfig.from_hf(DRAFTER)
    shapes = {"weights": (1000, 1000)}

    def checks(free: int):
        monkeypatch.setattr(fitting, "free_memory", lambda device: (free, "a machine"))
        return list(fitting.memory_checks(torch.device("cpu"), torch.float32, target, shapes, drafter, {}, None))

    assert [check.status for check in checks(1 << 20)] == [FAILED]
    assert "bfloat16" in checks(1 << 20)[0].remedy
    weights, context = checks(5_000_000)
    assert weights.status == OK and context.status == OK
    # One layer of four has keys: 2 heads of 16; the drafter's two have one head each.
    assert fitting.kv_bytes(target, torch.float32) == 2 * 2 * 16 * 4 and fitting.drafter_kv_bytes(drafter, torch.float32) == 2 * 2 * 16 * 4
    tight = checks(4_530_000)[1]
    assert tight.status == WARNING and "--max-context" in tight.remedy


def test_a_gpu_that_torch_cannot_see_is_red(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "driver_version", lambda: "550.1")
    found = {check.name: check for check in machine.gpu_checks()}
    assert found["GPU"].status == FAILED and "550.1" in found["GPU"].found and found["GPU"].remedy


def test_a_library_of_another_version_is_red(monkeypatch):
    monkeypatch.setattr(machine, "requires", lambda name: ["numpy>=999", 'absent-library>=1; extra == "test"'])
    (line,) = [check for check in machine.library_checks() if check.name == "libraries"]
    assert line.status == FAILED and "numpy" in line.found and "999" in line.found and "make setup" in line.remedy


def test_the_random_hybrid_pair_is_sound_and_a_flattened_one_is_red(monkeypatch):
    device = torch.device("cpu")
    first, second = (random_hybrid(device, torch.float32).target.model.embed_tokens for _ in range(2))
    assert torch.equal(first, second)
    sound = hybrid_check(device, torch.float32, lambda line: None)
    assert sound.status == OK and "identical, drafter sound" in sound.found

    class Flattened(RecurrentCache):
        def stage(self, query, key, value, g, beta, ancestor_mask):
            return super().stage(query, key, value, g, beta, None)

    monkeypatch.setattr(stack, "RecurrentCache", Flattened)
    faulty = hybrid_check(device, torch.float32, lambda line: None)
    assert faulty.status == FAILED and "layer 0 recurrent state" in faulty.found and faulty.remedy

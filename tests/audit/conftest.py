"""One tiny Llama of transformers for the whole folder, loaded as ours anew for each test."""

from __future__ import annotations

import pytest
import torch

from ddtree.models.registry import load_target
from tests.models.qwens import LINEAR
from tests.models.qwens import reference as qwen_reference
from tests.models.tiny import reference


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("llama")
    reference("Llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def hybrid_folder(tmp_path_factory):
    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("hybrid")
    qwen_reference("Qwen3_5", "Qwen3_5TextConfig", **LINEAR, intermediate_size=40).save_pretrained(folder)
    return folder


@pytest.fixture
def llama(llama_folder):
    return load_target(llama_folder, "cpu", torch.float32)


@pytest.fixture
def hybrid(hybrid_folder):
    return load_target(hybrid_folder, "cpu", torch.float32)

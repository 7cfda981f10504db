"""What fits is said before it is loaded, and a share of a GPU is kept to."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from ddtree.cli import replicas
from ddtree.cli.fits import check_memory
from ddtree.cli.settings import settle
from ddtree.doctor import fitting
from ddtree.engine.free_memory import free_memory
from ddtree.sources import resolve

GIB = 2**30


def said(**flags) -> list[str]:
    lines = []
    args = Namespace(**{"device": "cpu", "dtype": "float32", "max_context": None, "gpu_memory_fraction": None} | flags)
    check_memory(args, resolve("hybrid-tiny"), lines.append)
    return lines


def test_weights_and_context_are_said():
    weights, context = said()
    assert "target 0.02 GiB, drafter" in weights and "free on this machine" in weights
    assert "KiB a token" in context and "tokens fit" in context


def test_a_context_that_does_not_fit_comes_with_one_that_does(monkeypatch):
    monkeypatch.setattr(fitting, "bytes_free", lambda device: 60 * 2**20)
    assert "serve with --max-context" in said()[1]


def test_weights_that_do_not_fit_end_it_with_the_sizes(monkeypatch):
    monkeypatch.setattr(fitting, "bytes_free", lambda device: 2**20)
    with pytest.raises(ValueError, match="does not fit into memory: target 0.02 GiB.*try --dtype bfloat16"):
        said()


def test_a_cpu_has_no_share():
    with pytest.raises(ValueError, match="--gpu-memory-fraction 0.5 is for a GPU"):
        said(gpu_memory_fraction=0.5)


@pytest.mark.parametrize(("fraction", "free"), [(1.0, 62), (0.5, 37), (0.1, 0)])
def test_what_is_free_on_a_gpu_ends_at_its_share(monkeypatch, fraction, free):
    """100 GiB, 60 of them free; this process holds 15, of which 13 are in use."""
    for name, value in {
        "mem_get_info": (60 * GIB, 100 * GIB),
        "memory_reserved": 15 * GIB,
        "memory_allocated": 13 * GIB,
        "get_per_process_memory_fraction": fraction,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_memory(SimpleNamespace(type="cuda")) == free * GIB


def flags_of(monkeypatch, tmp_path, *flags: str) -> list[dict[str, str]]:
    """Each replica's flags, on a box of two GPUs."""
    monkeypatch.setattr(replicas, "num_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    args = settle(flags, {}).args
    launches = replicas.launches_of(args, replicas.places_of(args), tmp_path)
    found = [dict(each.partition("=")[::2] for each in launch.command if each.startswith("--")) for launch in launches]
    return [each | {"gpu": launch.environment.get("CUDA_VISIBLE_DEVICES")} for each, launch in zip(found, launches, strict=True)]


def test_each_replica_has_its_gpu_and_its_part(monkeypatch, tmp_path):
    one, two = flags_of(monkeypatch, tmp_path, "--replicas", "2", "--api-key", "k")
    assert (one["gpu"], two["gpu"]) == ("0", "1") and "--gpu-memory-fraction" not in one and "--api-key" not in one
    assert one["--uds"] != two["--uds"] and one["--device"] == "cuda"
    shared = flags_of(monkeypatch, tmp_path, "--gpus", "1,1")
    assert [(each["gpu"], each["--gpu-memory-fraction"]) for each in shared] == [("1", "0.475")] * 2
    free = iter([8 * GIB, 6 * GIB])  # other programs go on meanwhile
    monkeypatch.setattr(replicas, "free_memory", lambda device: next(free))
    first, second = flags_of(monkeypatch, tmp_path, "--replicas", "2", "--device", "cpu")
    assert first["--cache-memory"] == second["--cache-memory"] == "2.0"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--replicas", "3"), "2 GPUs: to share them say --gpus 0,1,0"),
        (("--replicas", "2", "--device", "cuda:1"), "name one for each of 2 replicas with --gpus"),
        (("--replicas", "3", "--gpus", "0,1"), "name one GPU for each replica"),
        (("--gpus", "0", "--device", "cpu"), "leave one of them out"),
        (("--replicas", "2", "--uds", "/x"), "--uds is for a single server"),
    ],
)
def test_replicas_that_cannot_be_placed_are_refused(monkeypatch, tmp_path, flags, says):
    with pytest.raises(ValueError, match=says):
        flags_of(monkeypatch, tmp_path, *flags)


def test_gpus_count_within_those_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-abc")
    assert replicas.places_of(settle(["--gpus", "1,0"], {}).args) == ["GPU-abc", "4"]
    with pytest.raises(ValueError, match="shows 2 GPUs"):
        replicas.places_of(settle(["--gpus", "2"], {}).args)

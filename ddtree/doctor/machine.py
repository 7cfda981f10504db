"""The machine: Python, libraries, torch, driver and GPU, threads, the cache of models."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

import torch

from ddtree.doctor.checks import FAILED, OK, WARNING, Check, passed_or_failed
from ddtree.engine.loading import pick_device, pick_dtype
from ddtree.sources import cache_dir

AREA = "machine"
OPTIONAL = {"httpx": "bench --url and audit --url", "matplotlib": "bench --plot"}
DRIVER = Path("/proc/driver/nvidia/version")
NEEDED_DISK_BYTES = 300 << 20  # an embedded model and its wheel
SETUP = "run `make setup`, or install ddtree again with pip"


def machine_checks(device: str, dtype: str) -> Iterator[Check]:
    """Everything that does not depend on a model."""
    yield Check(AREA, "Python", OK, f"{platform.python_version()} on {platform.platform(terse=True)}")
    yield from library_checks()
    yield from gpu_checks()
    yield device_check(device, dtype)
    threads = os.environ.get("OMP_NUM_THREADS")
    set_by = f", OMP_NUM_THREADS={threads}" if threads else ""
    yield Check(AREA, "CPU", OK, f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads{set_by}")
    yield cache_check()


def library_checks() -> Iterator[Check]:
    """Is everything installed that this version asks for, in a version that it was made for?"""
    from packaging.requirements import Requirement

    wrong, found = [], []
    for line in requires("ddtree") or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        found.append(f"{requirement.name} {installed}")
        if not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{requirement.name} is {installed}, needed is {requirement.specifier}")
    yield passed_or_failed(AREA, "libraries", not wrong, "; ".join(wrong or found), SETUP)
    for name, purpose in OPTIONAL.items():
        if find_spec(name) is None:
            yield Check(AREA, name, WARNING, f"not installed; {purpose} needs it", f"pip install {name}")


def gpu_checks() -> Iterator[Check]:
    """torch's build, the driver, every GPU."""
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    yield Check(AREA, "torch", OK, f"{torch.__version__}, {build}")
    driver = driver_version()
    if not torch.cuda.is_available():
        if driver is None:
            yield Check(AREA, "GPU", OK, "none: models run on the CPU")
        else:
            remedy = "install a torch build with CUDA" if torch.version.cuda is None else "update the driver, or free the GPU"
            yield Check(AREA, "GPU", FAILED, f"the NVIDIA driver {driver} is there, but torch sees no GPU", remedy)
        return
    yield Check(AREA, "driver", OK, f"NVIDIA {driver or 'of unknown version'}")
    for index in range(torch.cuda.device_count()):
        yield gpu_check(index)
    if find_spec("triton") is None:
        yield Check(AREA, "triton", WARNING, "not installed: kernels fall back to plain torch", SETUP)


def gpu_check(index: int) -> Check:
    """One card: name, capability, free memory."""
    name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    free, total = torch.cuda.mem_get_info(index)
    found = f"{name}, compute capability {major}.{minor}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if major < 8:
        return Check(AREA, f"GPU {index}", WARNING, found, "below 8.0 bfloat16 is emulated: use --dtype float32")
    if free < total / 2:
        return Check(AREA, f"GPU {index}", WARNING, found, "another process holds more than half of it: see nvidia-smi")
    return Check(AREA, f"GPU {index}", OK, found)


def driver_version() -> str | None:
    """The NVIDIA kernel module's version; None without one."""
    if not DRIVER.is_file():
        return None
    words = DRIVER.read_text(encoding="utf-8").split()
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), "unknown")


def device_check(device: str, dtype: str) -> Check:
    """The device and dtype that would be used."""
    try:
        place = pick_device(device)
        kind = pick_dtype(dtype, place)
    except ValueError as error:
        return Check(AREA, "device", FAILED, str(error), "choose another --device or --dtype")
    found = f"{place}, {str(kind).removeprefix('torch.')}"
    if place.type == "cpu" and kind == torch.bfloat16:
        return Check(AREA, "device", WARNING, found, "bfloat16 is emulated on most CPUs: leave --dtype out")
    return Check(AREA, "device", OK, found)


def cache_check() -> Check:
    """Can a model be fetched into the cache?"""
    folder = cache_dir()
    there = folder
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        remedy = "set DDTREE_CACHE to a folder that can be written to"
        return Check(AREA, "cache", WARNING, f"{folder}: {error.strerror}; fetched models still work", remedy)
    found = f"{folder}, {free / 2**30:.1f} GiB free"
    if free < NEEDED_DISK_BYTES:
        return Check(AREA, "cache", WARNING, found, "too little to fetch a model: free some, or set DDTREE_CACHE")
    return Check(AREA, "cache", OK, found)


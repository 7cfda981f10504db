"""ddtree serve with several replicas: which GPU each gets, and the supervisor over them."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ddtree.cli.keys import keys_of, warn_if_open
from ddtree.cli.serve_flags import as_flags
from ddtree.cli.settings import without_settings
from ddtree.engine.free_memory import free_memory
from ddtree.replicas.launch import Launch
from ddtree.replicas.proxy import find_caddy
from ddtree.replicas.supervisor import Supervisor
from ddtree.server.run import listen_on, url_of
from ddtree.sources import resolve

SHARED_GPU = 0.95  # of a GPU that several replicas share; the rest is for their contexts
PROGRAM = (sys.executable, "-m", "ddtree")


def serve_replicas(args: argparse.Namespace) -> None:
    """Serve until a signal."""
    find_caddy()
    places = places_of(args)
    sock = listen_on(args.host, args.port)
    try:
        warn_if_open(sock, keys_of(args))
        resolve(args.model, args.drafter)  # downloads once, not in each replica
        with tempfile.TemporaryDirectory(prefix="ddtree-") as folder:
            launches = launches_of(args, places, Path(folder))
            asyncio.run(Supervisor(launches, sock, url_of(sock), Path(folder), args.drain).run())
    finally:
        sock.close()


def places_of(args: argparse.Namespace) -> list[str]:
    """Where each replica runs: "cpu", or a GPU as CUDA_VISIBLE_DEVICES names it. ValueError where they cannot be had."""
    if args.uds is not None:
        raise ValueError("--uds is for a single server: leave it out, or serve with --replicas 1")
    if args.gpus is not None:
        if not args.device.startswith(("auto", "cuda")):
            raise ValueError(f"--gpus {','.join(args.gpus)} and --device {args.device}: leave one of them out")
        if args.replicas not in (None, len(args.gpus)):
            raise ValueError(f"--replicas {args.replicas} and {len(args.gpus)} --gpus: name one GPU for each replica")
        return [_visible(each) for each in args.gpus]
    if args.device == "cpu" or not (count := num_gpus()):
        return ["cpu"] * args.replicas
    if ":" in args.device:
        raise ValueError(f"--device {args.device} is one GPU: name one for each of {args.replicas} replicas with --gpus")
    if args.replicas > count:
        shared = ",".join(str(i % count) for i in range(args.replicas))
        raise ValueError(f"--replicas {args.replicas}, but {count} GPUs: to share them say --gpus {shared}")
    return [_visible(str(i)) for i in range(args.replicas)]


def launches_of(args: argparse.Namespace, places: list[str], folder: Path) -> list[Launch]:
    """One launch for each place; the sockets lie in `folder`."""
    launches, shares = [], {place: _memory(args, places, place) for place in dict.fromkeys(places)}  # what is free is asked once
    for index, place in enumerate(places):
        socket = folder / f"replica-{index}.sock"
        flags = as_flags(
            args,
            uds=str(socket),
            replica_index=index,
            replicas=1,
            gpus=None,
            device="cpu" if place == "cpu" else "cuda",
            config=None,
            **shares[place],
            drain=0,  # the supervisor has waited already
            api_key=None,  # not on the process list
        )
        environment = without_settings(os.environ)
        environment.pop("NOTIFY_SOCKET", None)  # the supervisor speaks to systemd
        if args.api_key is not None:
            environment["DDTREE_API_KEY"] = args.api_key
        if place == "cpu":
            # Replicas that take all cores each would wait for one another.
            environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // len(places), 1)))
        else:
            environment["CUDA_VISIBLE_DEVICES"] = place
        launches.append(Launch((*PROGRAM, "serve", *flags), environment, socket, place if place == "cpu" else f"GPU {place}"))
    return launches


def _memory(args: argparse.Namespace, places: list[str], place: str) -> dict[str, float]:
    """A replica's part of the memory that it shares with others, where the user has not said."""
    num_sharing = places.count(place)
    if num_sharing == 1:
        return {}
    if place != "cpu":
        return {} if args.gpu_memory_fraction else {"gpu_memory_fraction": round(SHARED_GPU / num_sharing, 3)}
    free = free_memory("cpu")
    return {} if args.cache_memory or free is None else {"cache_memory": round(free / 2**31 / num_sharing, 3)}


def num_gpus() -> int:
    """GPUs that PyTorch sees, asked in a process of its own, so that this one holds none; not asked where Linux has none."""
    if sys.platform == "linux" and not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return 0
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return int(done.stdout) if done.returncode == 0 else 0


def _visible(gpu: str) -> str:
    """A number counts within CUDA_VISIBLE_DEVICES, where that is set, as PyTorch counts."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not gpu.isdigit() or visible is None:
        return gpu
    names = [each.strip() for each in visible.split(",") if each.strip()]
    if int(gpu) >= len(names):
        raise ValueError(f"GPU {gpu}: CUDA_VISIBLE_DEVICES={visible} shows {len(names)} GPUs")
    return names[int(gpu)]

"""Who may call: keys from a file, and a warning where nobody needs one."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import socket
from pathlib import Path

logger = logging.getLogger("ddtree")


def keys_of(args: argparse.Namespace) -> tuple[str, ...]:
    """All keys that open, of --api-key and --api-key-file. ValueError for a file without one, or that others may read."""
    if args.api_key == "":
        raise ValueError('--api-key must not be empty, got "": leave it out to serve without a key')
    keys = [] if args.api_key is None else [args.api_key]
    if args.api_key_file is not None:
        keys += _read(Path(args.api_key_file))
    return tuple(dict.fromkeys(keys))


def _read(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(f"--api-key-file {path}: no such file")
    if path.stat().st_mode & 0o007:
        raise ValueError(f"--api-key-file {path}: every user of this machine may read it: chmod o-rwx {path}")
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"--api-key-file {path}: holds no key: write one a line")
    return keys


def warn_if_open(sock: socket.socket, keys: tuple[str, ...]) -> None:
    """Say so where other machines can reach the server and need no key."""
    if sock.family == socket.AF_UNIX or keys:
        return
    address = sock.getsockname()[0]
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        logger.warning("listening on %s without a key: whoever reaches it may use it; set --api-key-file or --host 127.0.0.1", address)

"""ddtree systemd: print or install the unit that serves."""

from __future__ import annotations

import argparse
import getpass
import sys

from ddtree.cli.settings import settle
from ddtree.service.unit import Service


def add_systemd(parser: argparse.ArgumentParser) -> None:
    """What to do, for which service, and the flags of the server."""
    parser.add_argument("action", choices=("install", "print"), help="write the files, or show what would be written")
    parser.add_argument("--name", default="ddtree", help="of the service, for several on one machine (default: ddtree)")
    parser.add_argument("--user", help="the account that the service runs as (default: yours)")
    parser.add_argument("--user-service", action="store_true", help="a service of your own, without root")
    parser.usage = "ddtree systemd [-h] [--name NAME] [--user USER] [--user-service] {install,print} [-- FLAGS OF ddtree serve]"


def systemd(args: argparse.Namespace) -> int:
    """Print or install; ValueError for flags that ddtree serve would refuse."""
    settle(args.rest, {})  # what is wrong with them is said now, not in the journal
    command = (sys.executable, "-m", "ddtree", "serve", *args.rest)
    service = Service(args.name, command, None if args.user_service else args.user or getpass.getuser())
    if args.action == "install":
        print("\n".join(service.install()))
        return 0
    for path, text in ((service.unit_path, service.unit()), (service.environment_path, service.environment())):
        print(f"# {path}\n{text}")
    return 0

"""The systemd unit and its environment file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

UNIT = """\
[Unit]
Description=ddtree: language models over the OpenAI API
After=network-online.target
Wants=network-online.target

[Service]
Type=notify
NotifyAccess=main
# Without a leading "-": no environment file, no start.
EnvironmentFile={environment_file}
ExecStart={command}
User={user}
{cache}

# Downloads and loading may take long; when it is ready it says so.
TimeoutStartSec=1h
# Alive means that requests are answered and the engine runs.
WatchdogSec=60
Restart=on-failure
RestartSec=5
# What the user has to change does not get better by itself.
RestartPreventExitStatus=2

# SIGTERM to the main process alone: it lets what runs finish (DDTREE_DRAIN), then ends the rest.
KillMode=mixed
TimeoutStopSec={stop_s}

NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict
ProtectHome=read-only
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictSUIDSGID=yes
LockPersonality=yes
UMask=0077
LimitNOFILE=65536

[Install]
WantedBy={wanted_by}
"""

ENVIRONMENT = """\
# Settings of the ddtree service: any flag of `ddtree serve` as DDTREE_ and its name in capitals.
# Lists are separated by commas, switches are 1 or 0. Flags in the unit's ExecStart win over these.
DDTREE_DRAIN={drain_s}
#DDTREE_MODEL=smollm2
#DDTREE_HOST=127.0.0.1
#DDTREE_PORT=8000
#DDTREE_GPUS=0,1
#DDTREE_API_KEY_FILE=/etc/ddtree/keys
#DDTREE_LOG_JSON=1
"""

DRAIN_S = 120
MARGIN_S = 30  # what comes after the drain: clients are told, replicas end


@dataclass(frozen=True)
class Service:
    """One service: of the system, or of the user who installs it."""

    name: str
    command: Sequence[str]
    user: str | None  # None: a service of the user who installs it
    drain_s: int = DRAIN_S

    @property
    def unit_path(self) -> Path:
        folder = Path("/etc/systemd/system") if self.user is not None else _config_home() / "systemd" / "user"
        return folder / f"{self.name}.service"

    @property
    def environment_path(self) -> Path:
        folder = Path("/etc/ddtree") if self.user is not None else _config_home() / "ddtree"
        return folder / f"{self.name}.env"

    def unit(self) -> str:
        """The unit file's text."""
        text = UNIT.format(
            environment_file=self.environment_path,
            command=" ".join(_quoted(each) for each in self.command),
            user=self.user,
            # The one place that it may write to: models that were fetched, and what rounds cost here.
            cache="CacheDirectory=ddtree\nEnvironment=DDTREE_CACHE=%C/ddtree",
            stop_s=self.drain_s + MARGIN_S,
            wanted_by="multi-user.target" if self.user is not None else "default.target",
        )
        if self.user is None:
            # systemd runs a user's services as that user, and cannot shield them as it does its own.
            own = ("User=", "Protect", "PrivateTmp=", "After=network", "Wants=network")
            text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(own))
        return text

    def environment(self) -> str:
        """The environment file's text."""
        return ENVIRONMENT.format(drain_s=self.drain_s)

    def install(self) -> list[str]:
        """Write both files, an environment file that is there already excepted; returns what was done and what to do next.

        ValueError where the place cannot be written to.
        """
        done = []
        for path, text, mode in ((self.unit_path, self.unit(), 0o644), (self.environment_path, self.environment(), 0o600)):
            if path == self.environment_path and path.exists():
                done.append(f"kept {path}")
                continue
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
                path.chmod(mode)
            except OSError as error:
                raise ValueError(f"cannot write {path}: {error.strerror}: run as root, or use --user-service") from None
            done.append(f"wrote {path}")
        control = "systemctl" if self.user is not None else "systemctl --user"
        return [*done, f"next: {control} daemon-reload && {control} enable --now {self.name}"]


def _config_home() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _quoted(argument: str) -> str:
    """As systemd reads a command line: % and $ mean something there, quotes much as in a shell."""
    escaped = argument.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
    return escaped if shlex.quote(argument) == argument else '"' + escaped.replace('"', '\\"') + '"'

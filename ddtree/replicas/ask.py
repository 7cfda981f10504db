"""GET over a Unix socket: what the supervisor asks its replicas."""

from __future__ import annotations

import http.client
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Reply:
    """A status and a body."""

    status: int
    body: bytes


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float):
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask(path: Path, target: str, timeout_s: float = 5.0) -> Reply | None:
    """The reply to `GET target`; None where nobody answers in time."""
    connection = _UnixConnection(path, timeout_s)
    try:
        connection.request("GET", target)
        response = connection.getresponse()
        return Reply(response.status, response.read())
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()

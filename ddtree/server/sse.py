"""Server-sent events as bytes."""

from __future__ import annotations

import json

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def event(data: dict, name: str | None = None) -> bytes:
    """One event, with its name on a line of its own where the API has names."""
    head = b"" if name is None else f"event: {name}\n".encode()
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return head + b"data: " + text.encode() + b"\n\n"

"""Log lines: for people, for journald, or as JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

# As journald reads them at the start of a line (sd-daemon(3)).
PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, the replica if there are several, and what the record brings as `fields`."""

    def __init__(self, replica: int | None):
        super().__init__()
        self._replica = {} if replica is None else {"replica": replica}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._replica,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class JournalLines(logging.Formatter):
    """The level as journald reads it; the time is journald's own."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{PRIORITIES.get(record.levelno, 6)}>"
        # Each line of a traceback is an entry of its own, and shall have the level of the first.
        return "\n".join(prefix + line for line in super().format(record).splitlines())


def set_up_logging(verbose: bool, as_json: bool, replica: int | None) -> None:
    """Log to standard error. One line per request comes with JSON and with `verbose`."""
    who = "" if replica is None else f"replica {replica}: "
    handler = logging.StreamHandler(sys.stderr)
    if as_json:
        handler.setFormatter(JsonLines(replica))
    elif "JOURNAL_STREAM" in os.environ:
        handler.setFormatter(JournalLines(f"{who}%(message)s"))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {who}%(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("ddtree").setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.getLogger("ddtree.requests").setLevel(logging.INFO if as_json or verbose else logging.WARNING)

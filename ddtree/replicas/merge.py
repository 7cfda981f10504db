"""Several replicas' `/metrics` as one, each sample with a label that says whose it is."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (.+)$")


def merge(texts: Mapping[int, str]) -> str:
    """Prometheus text of all replicas, a family's samples together, with `replica="i"` on each."""
    heads: dict[str, list[str]] = {}  # family -> HELP and TYPE, as they came first
    samples: dict[str, list[str]] = {}
    for index, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                lines = heads.setdefault(family, [])
                samples.setdefault(family, [])
                if line not in lines and len(lines) < 2:
                    lines.append(line)
            elif match := _SAMPLE.match(line):
                name, labels, value = match.groups()
                labelled = f'{name}{{replica="{index}"{"," + labels if labels else ""}}} {value}'
                samples.setdefault(family, []).append(labelled)
    lines = [line for family, each in samples.items() for line in (*heads.get(family, ()), *each)]
    return "\n".join(lines) + "\n" if lines else ""

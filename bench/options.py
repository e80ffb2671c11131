"""What the command line decides for every benchmark."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Options", "tell"]


@dataclass(frozen=True, slots=True)
class Options:
    """How to measure.

    Attributes:
        is_quick: Short runs, each once: shows that it works, not how fast.
        results: Where result files go.
        date: Their names begin with it.
    """

    is_quick: bool
    results: Path
    date: str

    @property
    def repeats(self) -> int:
        """How often each run is repeated; the median counts."""
        return 1 if self.is_quick else 3


def tell(text: str) -> None:
    """Say how far the bench is, to whoever waits."""
    print(text, file=sys.stderr, flush=True)

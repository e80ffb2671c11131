"""A load on a broker group that has followers: whoever leads is asked what is left to do."""

import time
from pathlib import Path
from typing import Any

from tests.robustness.checkers import check_drained
from tests.robustness.load import Load
from tests.robustness.replicated_group import ReplicatedGroup

__all__ = ["ReplicatedLoad"]


class ReplicatedLoad(Load):
    """Producers that want their messages on all disks, and consumers, of one subject."""

    def __init__(self, group: ReplicatedGroup, folder: Path) -> None:
        super().__init__(group.cluster.url, folder)
        self._brokers = group

    def drain(self, within: float = 120) -> dict[str, Any]:
        """Wait until consumers have nothing left to do; return what the leader then reports."""
        deadline = time.monotonic() + within
        while problems := check_drained(status := self._brokers.status_of_leader()):
            assert time.monotonic() < deadline, problems[:10]
            time.sleep(0.05)
        return status

"""What the steps of requests cost the event loop of a server that runs in the test itself."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from pulque.errors import PulqueError
from pulque.net.server import AcceptedConnection
from pulque.testing.raw import RawConnection
from pulque.wire.requests import Request
from pulque.wire.responses import Response

__all__ = ["LONGEST_STEP_MS", "Steps", "counted"]

LONGEST_STEP_MS = 50.0
"""Of processor time, which a busy machine does not stretch as it does the time that passes."""


@dataclass
class Steps:
    """The steps of connections, since they were last asked about."""

    count: int = 0
    longest_ms: float = 0.0

    async def of(
        self, raw: RawConnection, request: Request
    ) -> tuple[Response | PulqueError, int, float]:
        """Ask something; return the answer, the steps that it took, and the longest of them."""
        asked = await raw.put(request)
        self.count, self.longest_ms = 0, 0.0
        answer = await raw.answer_to(asked)
        return answer, self.count, self.longest_ms


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    """Count and time the steps of all connections, without those of the garbage collector."""
    steps = Steps()
    take = AcceptedConnection._handle_next  # noqa: SLF001  # it is what a turn consists of

    def timed(connection: AcceptedConnection) -> bool:
        began = time.thread_time()
        try:
            return take(connection)
        finally:
            steps.count += 1
            steps.longest_ms = max(steps.longest_ms, (time.thread_time() - began) * 1000)

    monkeypatch.setattr(AcceptedConnection, "_handle_next", timed)
    gc.collect()
    gc.disable()
    try:
        yield steps
    finally:
        gc.enable()

"""Time small pieces of code by their CPU, so that neighbours on the machine disturb less."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["Row", "cpu_us", "show"]

_RUN_S = 0.05
_RUNS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        what: The step.
        us: Microseconds of CPU for one call.
        messages: How many messages one call handles; 0 where that makes no sense.
        size: Bytes that one call handles; 0 where that makes no sense.
    """

    what: str
    us: float
    messages: int = 0
    size: int = 0

    def cells(self) -> list[str]:
        """As text: the step, per call, per message, and the rate."""
        return [
            self.what,
            f"{self.us:,.2f}",
            f"{1000 * self.us / self.messages:,.0f}" if self.messages else "",
            f"{self.size / self.us / 1000:,.2f}" if self.size else "",
        ]


def cpu_us(call: Callable[[], object]) -> float:
    """Microseconds of this thread's CPU for one call: the least of some runs."""
    times = 1
    while (taken := _run_s(call, times)) < _RUN_S:
        times = max(2 * times, int(times * _RUN_S / max(taken, 1e-6)))
    return 1e6 * min(taken, *(_run_s(call, times) for _ in range(_RUNS - 1))) / times


def _run_s(call: Callable[[], object], times: int) -> float:
    began = time.thread_time()
    for _ in range(times):
        call()
    return time.thread_time() - began


def show(title: str, rows: Iterable[Row]) -> str:
    """A table of figures."""
    lines = [f"{title:58} {'µs/call':>12} {'ns/message':>12} {'GB/s':>8}"]
    for row in rows:
        what, per_call, per_message, rate = row.cells()
        lines.append(f"  {what:56} {per_call:>12} {per_message:>12} {rate:>8}")
    return "\n".join(lines)

"""Show figures of peers as a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable

from bench.peers.peer import Unavailable
from bench.peers.suite import Figures

__all__ = ["as_markdown"]

_HEAD = (
    "|  | end to end /s | produce /s | consume /s | one at a time p50 / p99 µs "
    "| CPU per message, server + clients µs | server MiB | other load, cores | versions |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---|"
)


def as_markdown(results: Iterable[Figures | Unavailable]) -> str:
    """One line per peer; one that cannot be had shows the reason."""
    return "\n".join([_HEAD, *map(_line, results)])


def _line(result: Figures | Unavailable) -> str:
    if isinstance(result, Unavailable):
        return f"| {result.name} | not measured: {result.reason} |" + " |" * 7
    cells = [
        result.name,
        f"{result.e2e_rate:,.0f}",
        f"{result.produce_rate:,.0f}",
        f"{result.consume_rate:,.0f}",
        f"{result.sync_p50_us:,.0f} / {result.sync_p99_us:,.0f}",
        f"{result.server_us:.1f} + {result.client_us:.1f}",
        f"{result.server_rss_mib:,.0f}",
        f"{result.foreign_cores:.1f}",
        result.version,
    ]
    return f"| {' | '.join(cells)} |"

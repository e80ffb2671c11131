"""Print what single steps cost; takes about a minute."""

from __future__ import annotations

from pathlib import Path

from bench.machine import describe
from bench.micro import broker, codecs, routes
from bench.micro.timing import show

_TABLES = {
    "packing": codecs.packing,
    "unpacking": codecs.unpacking,
    "size columns": codecs.columns,
    "frames": codecs.frames,
    "checksums": codecs.checksums,
    "the broker's own work, without sockets": broker.requests,
    "where a message goes, from 10,000 known routes": routes.look_ups,
}


def main() -> None:
    """Print a table for each kind of step."""
    print(f"{describe(Path.cwd())}\n")
    for title, rows in _TABLES.items():
        print(f"{show(title, rows())}\n")


if __name__ == "__main__":
    main()

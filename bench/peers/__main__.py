"""Measure the peers and print a table: ``python -m bench.peers [--quick] [--json FILE]``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from bench.machine import describe
from bench.peers import Plan, all_peers, as_markdown, measure_peers


def main() -> None:
    """Parse the options, measure, print."""
    peers = all_peers()
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="peer", help=f"of {', '.join(peers)}")
    parser.add_argument("--quick", action="store_true", help="short runs, each once")
    parser.add_argument("--size", type=int, default=100, help="bytes of a body")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    unknown = set(options.names) - set(peers)
    if unknown:
        parser.error(f"unknown peer {', '.join(sorted(unknown))}; there are {', '.join(peers)}")
    plan = Plan.quick(options.size) if options.quick else Plan(size=options.size)
    machine = describe(Path.cwd())

    results = []
    for result in measure_peers([peers[name] for name in options.names or peers], plan):
        print(f"{result.name}: done", file=sys.stderr)
        results.append(result)
    print(f"{machine}; bodies of {plan.size} bytes, median of {plan.repeats}\n")
    print(as_markdown(results))
    if options.json is not None:
        figures = {"machine": machine.as_dict(), "peers": [asdict(one) for one in results]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()

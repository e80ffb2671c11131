"""Run everything random again and again, each time with a new seed, until the time is over.

    make explore MINUTES=30

Random is what takes the `seed` fixture or is driven by hypothesis: properties, state machines,
power cuts, simulations. Tests that start servers or Spark are left out. Each file of tests runs
in a process of its own, in random order; its seed is printed. The output of a failed run is kept
in .reports/explore/, with the example that hypothesis found; the seed finds it again. The exit
code is 1 if anything failed.
"""

import argparse
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / ".reports" / "explore"
RANDOM = "random and not server and not spark and not long"
LONGEST_S = 1200
"""No file of tests takes longer; one that does has failed."""
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", RANDOM)


def random_files(where: Sequence[str]) -> list[str]:
    """Return the files that have random tests.

    Raises:
        SystemExit: There are none, or pytest cannot collect them.
    """
    command = [*_PYTEST, "--collect-only", *where]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    files = sorted({line.split("::")[0] for line in found.stdout.splitlines() if "::" in line})
    if found.returncode or not files:
        sys.exit(f"no random tests could be collected:\n{found.stdout}{found.stderr}")
    return files


def explore(files: Sequence[str], minutes: float, workers: int) -> list[str]:
    """Run files until the minutes are over, each at least once; return what failed."""
    end = time.monotonic() + 60 * minutes
    order = _in_random_order(files)
    lock = Lock()
    failed: list[str] = []
    started = 0

    def work() -> None:
        nonlocal started
        while True:
            with lock:
                if started >= len(files) and time.monotonic() >= end:
                    return
                started += 1
                file = next(order)
            problem = run(file, secrets.randbelow(2**32))
            if problem:
                with lock:
                    failed.append(problem)

    with ThreadPoolExecutor(workers) as pool:
        for each in [pool.submit(work) for _ in range(workers)]:
            each.result()
    print(f"{started} runs of {len(files)} files, {len(failed)} failed", flush=True)
    return failed


def run(file: str, seed: int) -> str:
    """Run one file with a seed, and keep its output if it fails; return how to repeat that."""
    environment = {"PULQUE_HYPOTHESIS_PROFILE": "ci", **os.environ, "PULQUE_TEST_SEED": str(seed)}
    again = f"PULQUE_TEST_SEED={seed} pytest {file}"
    began = time.monotonic()
    try:
        ended = subprocess.run(
            [*_PYTEST, file],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LONGEST_S,
            check=False,
        )
        output, is_good = ended.stdout, ended.returncode == 0
    except subprocess.TimeoutExpired as error:
        output, is_good = (error.stdout or b"") + b"\nit took too long\n", False
    verdict = "passed" if is_good else "FAILED"
    print(f"{verdict} in {time.monotonic() - began:.0f} s: {again}", flush=True)
    if is_good:
        return ""
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"{file.replace('/', '.')}-{seed}.txt"
    path.write_bytes(output)
    return f"{again}    # {path.relative_to(ROOT)}"


def _in_random_order(files: Sequence[str]) -> Iterator[str]:
    while True:
        yield from secrets.SystemRandom().sample(files, len(files))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("where", nargs="*", help="files or folders of tests; all if not given")
    options = parser.parse_args()
    failed = explore(random_files(options.where), options.minutes, options.workers)
    for each in failed:
        print(f"FAILED: {each}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

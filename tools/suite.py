"""Run the tests as `make test` does: all of them side by side, then what failed once more, alone.

The tests start brokers, clusters and Spark on whatever machine they are given. When it stands
still for some seconds a test can fail that says nothing about the code; a fault of the code fails
twice, for seeds are kept and hypothesis tries the example it found first of all. A test that
passes only the second time is named at the end: it is a bug to mend, in the test or in the code.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / ".acceptance.json"

_SOME_FAILED = 1  # pytest's exit code; every other one but 0 says that it could not do its work


def run_suite(arguments: Sequence[str] = (), report: Path = REPORT, workers: str = "2") -> int:
    """Run what is not `long`, and write the acceptance report; return pytest's exit code."""
    report.unlink(missing_ok=True)
    (ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed").unlink(missing_ok=True)
    os.environ.setdefault("PULQUE_TEST_SEED", str(secrets.randbelow(2**32)))  # one for both tries
    os.environ.setdefault("PULQUE_HYPOTHESIS_PROFILE", "ci")
    side_by_side = ("-n", workers, "--dist", "loadgroup", "--junit-xml=.reports/junit.xml")
    first = _run_pytest(report, *side_by_side, *arguments)
    if first != _SOME_FAILED:
        return first
    print("\nSome tests failed. Each has one more try, with the machine to itself.", flush=True)
    alone = ("--last-failed", "--last-failed-no-failures=none", "--junit-xml=.reports/again.xml")
    second = _run_pytest(report, *alone, "-rA", "--show-capture=no", *arguments)
    if second == 0:
        print("\nThese needed their second try: that is a bug, see CONTRIBUTING.md.", flush=True)
    return second


def _run_pytest(report: Path, *arguments: str) -> int:
    command = [sys.executable, "-m", "pytest", "-m", "not long", f"--acceptance-report={report}"]
    return subprocess.run([*command, *arguments], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(run_suite(sys.argv[1:], workers=os.environ.get("WORKERS", "2")))

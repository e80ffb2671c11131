"""Run the tests as `make test` does: all of them side by side, each of them once.

A test that fails is a fault, of the code or of the test, and fails the run.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / ".acceptance.json"


def run_suite(arguments: Sequence[str] = (), report: Path = REPORT, workers: str = "2") -> int:
    """Run what is not `long`, and write the acceptance report; return pytest's exit code."""
    report.unlink(missing_ok=True)
    os.environ.setdefault("PULQUE_HYPOTHESIS_PROFILE", "ci")
    command = [
        *(sys.executable, "-m", "pytest", "-m", "not long", f"--acceptance-report={report}"),
        *("-n", workers, "--dist", "loadgroup", "--junit-xml=.reports/junit.xml", *arguments),
    ]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(run_suite(sys.argv[1:], workers=os.environ.get("WORKERS", "2")))

"""Check that programs which are no Python packages are there; install them where that is possible.

    python -m tools.programs java strace ip

On Debian root gets a missing program with apt-get. Everybody else gets one line that says what to
install, and exit code 1.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["main"]

_OLDEST_JAVA = 17
_PACKAGES = {"ip": "iproute2", "java": "openjdk-17-jre-headless", "strace": "strace"}
"""The Debian package of each program."""


def main(programs: Sequence[str]) -> int:
    """Return 0 if each program is there in the end, 1 after a line about what is missing."""
    for program in programs:
        check = _CHECKS.get(program, _missing)
        problem = check(program)
        if problem == f"{program} is not installed" and _install(_PACKAGES[program]):
            problem = check(program)
        if problem:
            print(f"{problem}: install it (Debian: apt install {_PACKAGES[program]})")
            return 1
    return 0


def _missing(program: str) -> str:
    return "" if shutil.which(program) else f"{program} is not installed"


def _wrong_java(program: str) -> str:
    """Return what is wrong with the Java that Spark would take: nothing, or a few words."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(str(Path(home, "bin", program)) if home else program)
    if found is None:
        return f"JAVA_HOME is {home}, which has no bin/java" if home else _missing(program)
    told = subprocess.run([found, "-version"], capture_output=True, text=True, check=False)
    version = re.search(r'version "(\d+)', told.stderr)
    if told.returncode or version is None:
        return f"{found} does not run"
    if int(version[1]) < _OLDEST_JAVA:
        return f"{found} is Java {version[1]}, and Spark needs {_OLDEST_JAVA} or newer"
    return ""


_CHECKS: dict[str, Callable[[str], str]] = {"java": _wrong_java}


def _install(package: str) -> bool:
    """Install a package of Debian as root; return whether that worked."""
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        return False
    print(f"installing {package} …", flush=True)
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = [apt, "install", "--yes", "--no-install-recommends", package]
    subprocess.run([apt, "update"], env=environ, capture_output=True, check=False)
    ended = subprocess.run(install, env=environ, capture_output=True, check=False)
    return ended.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

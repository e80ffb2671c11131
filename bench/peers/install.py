"""Get what the peers need: Debian packages, Python clients, and jars by their coordinates.

Installing needs root for Debian's packages. Whatever cannot be had raises ``MissingError`` with
the reason, which ends up in the table.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["MissingError", "debian_package", "maven_jars", "python_clients", "python_packages"]

_REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_POLICY = Path("/usr/sbin/policy-rc.d")
_INSTALL_LIMIT_S = 300

_POM = """\
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>bench</groupId>
  <artifactId>jars</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>{group}</groupId>
      <artifactId>{artifact}</artifactId>
      <version>{version}</version>
    </dependency>
  </dependencies>
</project>
"""


class MissingError(Exception):
    """Something could not be installed; the text is the reason."""


def python_clients(*modules: str) -> None:
    """See that these modules can be imported, installing the peers' requirements if not."""
    if not _missing(modules):
        return
    python_packages(_REQUIREMENTS)
    if missing := _missing(modules):
        raise MissingError(f"no Python module {', '.join(missing)} after installing")


def python_packages(requirements: Path) -> None:
    """Install what a file of requirements lists into this environment."""
    command = [sys.executable, "-m", "pip", "install", "-q", "-r", str(requirements)]
    if importlib.util.find_spec("pip") is None:
        command = ["uv", "pip", "install", "-q", "--python", sys.executable]
        command += ["-r", str(requirements)]
    _run(command)
    importlib.invalidate_caches()


def debian_package(package: str, program: str) -> None:
    """See that ``program`` exists, installing ``package`` if not, without starting its service."""
    if Path(program).exists():
        return
    if os.geteuid() != 0:
        raise MissingError(f"{package} is not installed, and installing it needs root")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with _services_stay_down():
        _run(["apt-get", "update", "-q"], environment)
        _run(["apt-get", "install", "-q", "-y", "--no-install-recommends", package], environment)


def maven_jars(coordinates: tuple[str, str, str], directory: Path) -> list[Path]:
    """The jars of (group, artifact, version) and all they need at run time.

    They are kept in ``directory``, so that a second run needs no Maven.
    """
    if shutil.which("java") is None:
        raise MissingError("no Java on this machine")
    if not (directory / "complete").exists():
        if shutil.which("mvn") is None:
            raise MissingError("no Maven on this machine")
        directory.mkdir(parents=True, exist_ok=True)
        group, artifact, version = coordinates
        pom = directory / "pom.xml"
        pom.write_text(_POM.format(group=group, artifact=artifact, version=version))
        _run(
            [
                *("mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies"),
                *("-DincludeScope=runtime", f"-DoutputDirectory={directory}"),
            ]
        )
        (directory / "complete").touch()
    return sorted(directory.glob("*.jar"))


def _missing(modules: Sequence[str]) -> list[str]:
    return [module for module in modules if importlib.util.find_spec(module) is None]


@contextmanager
def _services_stay_down() -> Iterator[None]:
    """Tell Debian not to start services of packages installed meanwhile."""
    if _POLICY.exists():
        # Somebody decided already, and a container's file says the same as ours.
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()


def _run(command: Sequence[str], environment: dict[str, str] | None = None) -> None:
    try:
        subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
            timeout=_INSTALL_LIMIT_S,
        )
    except FileNotFoundError:
        raise MissingError(f"no {command[0]} on this machine") from None
    except subprocess.TimeoutExpired:
        raise MissingError(f"{command[0]} took over {_INSTALL_LIMIT_S} s") from None
    except subprocess.CalledProcessError as error:
        last = (error.stdout or "no output").strip().splitlines()[-1]
        raise MissingError(f"{command[0]} failed: {last}") from error

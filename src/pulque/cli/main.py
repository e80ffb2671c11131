"""Where the command ``pulque`` begins.

Everything else is imported inside: an application that installed only the client has the
command too, and is told what it lacks.
"""

import signal
import sys

from pulque.cli.common.interrupts import INTERRUPTED, importing

__all__ = ["main"]

_EXTRA = {
    "aiosqlite",
    "alembic",
    "asyncpg",
    "fastapi",
    "numpy",
    "pydantic",
    "rich",
    "sqlalchemy",
    "structlog",
    "typer",
    "uvicorn",
}


def main() -> None:
    """Run the command line of this process and exit with its code."""
    try:
        code = _run(sys.argv[1:])
    except KeyboardInterrupt:
        code = INTERRUPTED
    # What is left to do takes no time, and a traceback would only confuse.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    try:
        with importing():
            from pulque.cli.app import run_process

        return run_process(arguments)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        print(
            f"error: ConfigError: the command needs {error.name}: pip install 'pulque[server]'",
            file=sys.stderr,
        )
        return 2

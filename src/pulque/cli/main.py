"""Where the command ``pulque`` begins.

Everything else is imported inside: an application that installed only the client has the
command too, and is told what it lacks.
"""

import sys

__all__ = ["main"]

_EXTRA = {"pydantic", "rich", "structlog", "typer"}


def main() -> None:
    """Run the command line of this process and exit with its code."""
    try:
        from pulque.cli.app import run_process
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        print(
            f"error: ConfigError: the command needs {error.name}: pip install 'pulque[server]'",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.exit(run_process(sys.argv[1:]))

"""Exit codes that scripts can use, and which error leads to which.

They are part of the interface: a code never changes its meaning.
"""

from enum import IntEnum

from pulque.errors import ConfigError, OverloadedError, PulqueError, UnavailableError, UsageError

__all__ = ["ExitCode", "exit_code_of"]


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    """It did what was asked, or whoever read its output had seen enough."""
    FAILED = 1
    """It could not, or the broker refused."""
    USAGE = 2
    """The command line or the settings are wrong; nothing was begun."""
    UNREACHABLE = 3
    """No broker answered in time."""
    NOTHING = 4
    """There was nothing: no message came within the time given."""
    INTERRUPTED = 130
    """Ctrl-C."""


def exit_code_of(error: PulqueError) -> ExitCode:
    """Return the code for an error."""
    match error:
        case ConfigError() | UsageError():
            return ExitCode.USAGE
        case OverloadedError():
            return ExitCode.FAILED
        case UnavailableError():
            return ExitCode.UNREACHABLE
        case _:
            return ExitCode.FAILED

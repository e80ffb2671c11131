"""Exit codes that scripts can use, and which error leads to which.

They are part of the interface: a code never changes its meaning.
"""

from enum import IntEnum

from pulque.errors import (
    ConfigError,
    InvalidNameError,
    OverloadedError,
    PulqueError,
    UnavailableError,
    UsageError,
)

__all__ = ["ExitCode", "exit_code_of"]


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    NOTHING = 4
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        """What a script may conclude."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.OK: "It did what was asked, or whoever read its output had seen enough.",
    ExitCode.FAILED: "It could not, or the broker refused; for `log verify`: there is damage; "
    "for `pipeline audit`: something does not add up.",
    ExitCode.USAGE: "The command line or the settings are wrong; nothing was begun.",
    ExitCode.UNREACHABLE: "No broker or meta server answered in time.",
    ExitCode.NOTHING: "There was nothing: no message came within the time given, or what "
    "was asked for is not there.",
    ExitCode.INTERRUPTED: "Ctrl-C. A broker that is told to stop exits with 0.",
}


def exit_code_of(error: PulqueError) -> ExitCode:
    """Return the code for an error."""
    match error:
        case ConfigError() | UsageError() | InvalidNameError():
            return ExitCode.USAGE
        case OverloadedError():
            return ExitCode.FAILED
        case UnavailableError():
            return ExitCode.UNREACHABLE
        case _:
            return ExitCode.FAILED

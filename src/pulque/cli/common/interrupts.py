"""Ctrl-C while a command is still being imported."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

__all__ = ["INTERRUPTED", "importing"]

INTERRUPTED = 130
"""The exit code of a command that was interrupted, as shells have it."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Let an interrupt end the process at once: in the middle of an import it may get lost.

    Where interrupts are ignored, as in the background of a shell, they stay so.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

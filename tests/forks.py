"""Children of fork for tests."""

import os
import pickle
import select
import signal
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["PATIENCE", "in_child"]

PATIENCE = 20.0
"""How long a child may take, in seconds."""


def in_child(act: Callable[[], Any]) -> Any:
    """Run something in a child of fork, and return what it returned or raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            try:
                found = act()
            except BaseException as error:  # noqa: BLE001  # the parent judges it
                found = error
            os.write(writer, pickle.dumps(found))
        finally:
            os._exit(0)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], PATIENCE)
        if not ready:
            os.kill(child, signal.SIGKILL)
            pytest.fail(f"the child hangs for {PATIENCE} s")
        with open(reader, "rb", closefd=False) as stream:
            return pickle.loads(stream.read())  # noqa: S301  # of our own child
    finally:
        os.close(reader)
        os.waitpid(child, 0)

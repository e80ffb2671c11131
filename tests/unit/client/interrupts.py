"""Raises what a signal handler raises wherever the interpreter itself may raise it.

CPython looks for signals after each call, after each jump backwards and when a function starts;
never between ``with lock:`` and the block, for example. ``Interrupter`` stops the calling thread
at one such point after the other, in the frames of some modules.
"""

import dis
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

CHECKS = frozenset({"RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD"})


class Interrupter:
    """Interrupts the thread that calls ``run``, at one point.

    Args:
        point: At which one, from 0.
        is_watched: Says of a file whether its code is interrupted.
        error: What the handler raises.
    """

    def __init__(
        self,
        point: int,
        is_watched: Callable[[str], bool],
        error: type[BaseException] = KeyboardInterrupt,
    ) -> None:
        self.where = ""
        """Where it was interrupted; empty if there are not so many points."""
        self._left = point
        self._is_watched = is_watched
        self._error = error
        self._last: dict[FrameType, int] = {}

    def run(self, act: Callable[[], Any]) -> Any:
        """Return what ``act`` returns, or None if it was interrupted."""
        sys.settrace(self._begin)
        try:
            return act()
        except self._error:
            assert self.where
            return None
        finally:
            sys.settrace(None)
            self._last.clear()

    def _begin(self, frame: FrameType, event: str, arg: object) -> Any:
        if self.where or not self._is_watched(frame.f_code.co_filename):
            return None
        self._last[frame] = frame.f_lasti  # at its RESUME
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._look

    def _look(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "return":
            self._last.pop(frame, None)
            return None
        if event != "opcode" or self.where:
            return self._look
        before, self._last[frame] = self._last.get(frame, -1), frame.f_lasti
        if is_check(frame.f_code, before, frame.f_lasti):
            if not self._left:
                code = frame.f_code
                self.where = f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
                raise self._error
            self._left -= 1
        return self._look


_known: dict[CodeType, tuple[dict[int, str], list[Any]]] = {}


def is_check(code: CodeType, before: int, now: int) -> bool:
    """Return whether a signal may be handled after the instruction at ``before``.

    It is raised at the next one, which has to have the same handler.
    """
    if code not in _known:
        names = {each.offset: each.opname for each in dis.get_instructions(code)}
        _known[code] = names, dis._parse_exception_table(code)  # type: ignore[attr-defined]  # noqa: SLF001
    names, table = _known[code]

    def handler(offset: int) -> int:
        return next((each.target for each in table if each.start <= offset < each.end), -1)

    return names.get(before) in CHECKS and handler(before) == handler(now)

"""Copies of the leader's checkpoints, from which a follower starts when it is elected."""

from typing import NamedTuple

from pulque.errors import CorruptionError
from pulque.storage.checkpoint import Mark, checkpoint_path, decode_checkpoint, read_checkpoint
from pulque.storage.directory.layout import CHECKPOINTS, base_of
from pulque.storage.events import Listener
from pulque.storage.files import FileSystem, replace
from pulque.storage.logs.partitions import Partitions

__all__ = ["CopiedCheckpoints", "RecoveryStart", "read_mark"]

_KEPT = 2


class RecoveryStart(NamedTuple):
    """The point from which a follower examines its logs."""

    mark: Mark
    partitions: Partitions
    """The partitions that exist by then."""


class CopiedCheckpoints:
    """The checkpoints in a directory."""

    def __init__(self, files: FileSystem, listener: Listener) -> None:
        self._files = files
        self._listener = listener
        self._marks: dict[int, Mark] = {}
        """The marks that were read."""
        self._numbers: list[int] = []
        self._hidden: list[int] = []
        for name in files.list(CHECKPOINTS):
            number = base_of(name, "checkpoint")
            if number is not None:
                self._numbers.append(number)
            elif name.endswith(".tmp"):
                files.remove(f"{CHECKPOINTS}/{name}")

    @property
    def newest(self) -> int:
        """The number of the newest one, 0 if there is none."""
        return self._numbers[-1] if self._numbers else 0

    def start(self) -> RecoveryStart | None:
        """Return the start of the newest intact checkpoint; remove damaged ones."""
        while self._numbers:
            path = checkpoint_path(self.newest)
            found = read_checkpoint(self._files, path)
            try:
                if isinstance(found, dict):
                    partitions = Partitions()
                    partitions.load(found)
                    mark = self._marks[self.newest] = Mark.decode(found)
                    return RecoveryStart(mark, partitions)
            except ValueError as problem:
                found = str(problem)
            self._refuse(path, found)
        return None

    def put(self, number: int, data: bytes, mark: Mark) -> None:
        """Write a verified checkpoint durably; keep the last two.

        Raises:
            StorageError: The write failed; an old checkpoint of that number may remain.
        """
        replace(self._files, checkpoint_path(number), [data])
        self._files.sync_directory(CHECKPOINTS)
        self._marks[number] = mark
        self._numbers = sorted({*self._numbers, number})
        # Another leader counts its own: a higher number is not newer if it reaches less far.
        passed = [each for each in self._numbers if each > number and self._is_before(each, mark)]
        self._drop(passed)
        self._drop(self._numbers[:-_KEPT])
        self._listener.checkpoint_written(checkpoint_path(number), len(data))

    def hide_beyond(self, messages: int, actions: int) -> None:
        """Ignore checkpoints that reach beyond the logs."""
        reach = {number: self._mark_of(number) for number in self._numbers}
        beyond = [
            number
            for number, mark in reach.items()
            if mark is None or mark.message_offset > messages or mark.action_offset > actions
        ]
        self._hide(beyond)

    def hide_all(self) -> None:
        """Ignore all checkpoints."""
        self._hide(list(self._numbers))

    def carry_out(self) -> None:
        """Remove hidden checkpoints durably."""
        if self._hidden:
            for number in self._hidden:
                self._files.remove(checkpoint_path(number))
            self._hidden = []
            self._files.sync_directory(CHECKPOINTS)

    def unneeded_actions(self) -> int:
        """Return up to where neither of the two checkpoints needs the action log."""
        marks = [self._mark_of(number) for number in self._numbers]
        found = [mark.action_offset for mark in marks if mark is not None]
        return min(found) if len(found) == _KEPT else 0

    def _is_before(self, number: int, mark: Mark) -> bool:
        found = self._mark_of(number)
        return found is None or found.message_offset <= mark.message_offset

    def _mark_of(self, number: int) -> Mark | None:
        """Return the mark of a checkpoint; None if it is damaged."""
        if number not in self._marks:
            found = read_checkpoint(self._files, checkpoint_path(number))
            try:
                if isinstance(found, dict):
                    self._marks[number] = Mark.decode(found)
            except ValueError:
                return None
        return self._marks.get(number)

    def _refuse(self, path: str, reason: str) -> None:
        self._listener.checkpoint_refused(path, reason)
        self._drop([self.newest])

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            self._files.remove(checkpoint_path(number))
            self._forget(number)

    def _hide(self, numbers: list[int]) -> None:
        for number in numbers:
            self._hidden.append(number)
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._marks.pop(number, None)
        self._numbers.remove(number)


def read_mark(number: int, data: bytes) -> Mark:
    """Verify a checkpoint, and return its mark.

    Raises:
        CorruptionError: The checkpoint is damaged.
    """
    found = decode_checkpoint(data)
    try:
        if isinstance(found, dict):
            return Mark.decode(found)
    except ValueError as problem:
        found = str(problem)
    raise CorruptionError(checkpoint_path(number), 0, found)

"""What a power cut leaves of a file system, after any of the operations done to it.

A disk is two things: names in directories, and contents of files. Programs see every operation
at once; what is durable trails behind. ``History`` keeps the operations and can tell, for any
moment of the past, what a power cut would have left::

    what is seen     ────────────────────────────────► KEPT: a killed process loses nothing
    what is synced   ──────────────────┐
                                       └─ LOST, TORN, ZEROED, GARBAGE: what becomes of the rest

Between the two, nothing is promised: unsynced writes to a file survive in any combination,
whole or in part, and unsynced changes of names in a directory survive up to some point. A file
and its name are apart: contents that were synced under a name that was not are gone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from random import Random
from typing import NamedTuple, assert_never

__all__ = [
    "ROOT",
    "Cut",
    "DirectorySynced",
    "Disk",
    "History",
    "Linked",
    "Node",
    "Operation",
    "SyncFailed",
    "Synced",
    "Truncated",
    "Wrote",
]


class Cut(Enum):
    """What becomes of whatever was not synced."""

    LOST = auto()
    """All of it is gone."""
    KEPT = auto()
    """All of it is there: the process was killed, the machine lives on."""
    TORN = auto()
    """Any part of it is there, and holes are zeros; names changed up to some point."""
    ZEROED = auto()
    """Names and sizes are there, but what files grew by is zeros."""
    GARBAGE = auto()
    """Names and sizes are there, but what files grew by is noise."""


class Node(NamedTuple):
    """A file or a directory, whatever its name is."""

    number: int
    is_directory: bool


ROOT = Node(0, is_directory=True)


@dataclass(frozen=True, slots=True)
class Wrote:
    """Bytes were written to a file."""

    node: Node
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncated:
    """A file was cut, or filled up with zeros."""

    node: Node
    size: int


@dataclass(frozen=True, slots=True)
class Synced:
    """All writes to a file became durable."""

    node: Node


@dataclass(frozen=True, slots=True)
class SyncFailed:
    """A sync failed: the system forgot which pages to write, and no later sync brings them."""

    node: Node


@dataclass(frozen=True, slots=True)
class Linked:
    """Names were changed in one step: of a file made, renamed or removed.

    Each link is a directory, a name in it, and the node that it stands for from now on.
    """

    links: tuple[tuple[Node, str, Node | None], ...]


@dataclass(frozen=True, slots=True)
class DirectorySynced:
    """All changes of names in a directory became durable."""

    node: Node


Operation = Wrote | Truncated | Synced | SyncFailed | Linked | DirectorySynced


class Disk:
    """Names and contents at one moment."""

    __slots__ = ("contents", "names")

    def __init__(self) -> None:
        self.names: dict[Node, dict[str, Node]] = {ROOT: {}}
        self.contents: dict[Node, bytearray] = {}

    def copy(self) -> "Disk":
        other = Disk()
        other.names = {node: dict(names) for node, names in self.names.items()}
        other.contents = {node: bytearray(content) for node, content in self.contents.items()}
        return other

    def change(self, operation: Wrote | Truncated | Linked) -> None:
        """Do what the operation did."""
        match operation:
            case Wrote(node, offset, data):
                _place(self.content(node), offset, data)
            case Truncated(node, size):
                _resize(self.content(node), size)
            case Linked(links):
                for link in links:
                    self._link(*link)
            case _:
                assert_never(operation)

    def content(self, node: Node) -> bytearray:
        """Return the content of a file, to be changed in place."""
        content = self.contents.get(node)
        if content is None:
            content = self.contents[node] = bytearray()
        return content

    def walk(self, directory: Node = ROOT, prefix: str = "") -> Iterator[tuple[str, Node]]:
        """Yield the path and the node of everything that has a name."""
        for name, node in self.names.get(directory, {}).items():
            yield prefix + name, node
            if node.is_directory:
                yield from self.walk(node, f"{prefix}{name}/")

    def _link(self, directory: Node, name: str, node: Node | None) -> None:
        names = self.names.setdefault(directory, {})
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node
            if node.is_directory:
                self.names.setdefault(node, {})
            else:
                self.content(node)


class History:
    """All operations since a first disk, and what a power cut after any of them would leave.

    Asking for moments in ascending order is fast: the replay goes on from the last one.
    """

    def __init__(self, first: Disk) -> None:
        self._first = first.copy()
        self._operations: list[Operation] = []
        self._replay: _Replay | None = None

    def __len__(self) -> int:
        return len(self._operations)

    def __getitem__(self, index: int) -> Operation:
        return self._operations[index]

    def append(self, operation: Operation) -> None:
        self._operations.append(operation)

    def after_power_cut(self, at: int, cut: Cut, random: Random) -> Disk:
        """Return what is left if the power fails after the first ``at`` operations."""
        if not 0 <= at <= len(self._operations):
            raise ValueError(f"a cut at {at} of {len(self._operations)} operations")
        replay = self._replay
        if replay is None or at < replay.at:
            replay = self._replay = _Replay(self._first)
        for operation in self._operations[replay.at : at]:
            replay.take(operation)
        return replay.left_by(cut, random)


class _Replay:
    """What programs see, what is durable, and what is between, after some operations."""

    def __init__(self, first: Disk) -> None:
        self.at = 0
        self._seen = first.copy()
        self._durable = first.copy()
        self._changes: dict[Node, list[Wrote | Truncated]] = {}
        self._links: list[Linked] = []

    def take(self, operation: Operation) -> None:
        self.at += 1
        match operation:
            case Wrote(node) | Truncated(node):
                self._seen.change(operation)
                self._changes.setdefault(node, []).append(operation)
            case Synced(node):
                for change in self._changes.pop(node, ()):
                    self._durable.change(change)
            case SyncFailed(node):
                self._changes.pop(node, None)
            case Linked():
                self._seen.change(operation)
                self._links.append(operation)
            case DirectorySynced(node):
                self._sync_names(node)
            case _:
                assert_never(operation)

    def left_by(self, cut: Cut, random: Random) -> Disk:
        left = Disk()
        left.names = self._names_left_by(cut, random)
        for _, node in left.walk():
            if not node.is_directory:
                left.contents[node] = self._content_left_by(cut, node, random)
        reachable = {node for _, node in left.walk() if node.is_directory}
        left.names = {n: names for n, names in left.names.items() if n in reachable or n == ROOT}
        return left

    def _sync_names(self, directory: Node) -> None:
        """Make the changes in one directory durable, and all that those follow from.

        A rename from one directory into another is one step in both.
        """
        directories = {directory}
        kept: list[Linked] = []
        durable: list[Linked] = []
        for linked in reversed(self._links):
            touched = {each for each, _, _ in linked.links}
            if touched & directories:
                directories |= touched
                durable.append(linked)
            else:
                kept.append(linked)
        for linked in reversed(durable):
            self._durable.change(linked)
        self._links = kept[::-1]

    def _names_left_by(self, cut: Cut, random: Random) -> dict[Node, dict[str, Node]]:
        if cut is Cut.LOST:
            return _copied(self._durable.names)
        if cut is not Cut.TORN:
            return _copied(self._seen.names)
        survivor = Disk()
        survivor.names = _copied(self._durable.names)
        for linked in _surviving_links(self._links, random):
            survivor.change(linked)
        return survivor.names

    def _content_left_by(self, cut: Cut, node: Node, random: Random) -> bytearray:
        seen = self._seen.contents.get(node, b"")
        if cut is Cut.KEPT:
            return bytearray(seen)
        content = bytearray(self._durable.contents.get(node, b""))
        changes = self._changes.get(node)
        if cut is Cut.LOST or not changes:
            return content
        if cut is Cut.TORN:
            _tear(content, changes, random)
        else:
            grown = len(seen) - len(content)
            _resize(content, len(seen))
            if cut is Cut.GARBAGE and grown > 0:
                content[-grown:] = random.randbytes(grown)
        return content


def _copied(names: dict[Node, dict[str, Node]]) -> dict[Node, dict[str, Node]]:
    return {node: dict(entries) for node, entries in names.items()}


def _place(content: bytearray, offset: int, data: bytes) -> None:
    if offset > len(content):
        _resize(content, offset)
    content[offset : offset + len(data)] = data


def _resize(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def _surviving_links(links: list[Linked], random: Random) -> Iterator[Linked]:
    """Yield the changes of names that survive: in each directory all up to some point."""
    counts: dict[Node, int] = {}
    for linked in links:
        for directory in {each for each, _, _ in linked.links}:
            counts[directory] = counts.get(directory, 0) + 1
    left = {directory: _some_of(count, random) for directory, count in counts.items()}
    for linked in links:
        directories = {each for each, _, _ in linked.links}
        if all(left[directory] > 0 for directory in directories):
            for directory in directories:
                left[directory] -= 1
            yield linked
        else:
            left.update(dict.fromkeys(directories, 0))


def _tear(content: bytearray, changes: list[Wrote | Truncated], random: Random) -> None:
    """Let some of the changes survive, and some of them in part.

    Up to some point all survive, so that the damage is as often deep in a run of writes as at
    its start.
    """
    largest = len(content)
    whole = _some_of(len(changes), random)
    for i, change in enumerate(changes):
        if isinstance(change, Truncated):
            if i < whole or random.random() < 0.5:
                _resize(content, change.size)
            largest = max(largest, change.size)
            continue
        start, end = (0, len(change.data)) if i < whole else _part_of(len(change.data), random)
        if start < end:
            _place(content, change.offset + start, change.data[start:end])
        largest = max(largest, change.offset + len(change.data))
    if largest > len(content) and random.random() < 0.5:
        _resize(content, random.randint(len(content), largest))


def _part_of(size: int, random: Random) -> tuple[int, int]:
    """Say which bytes of a write survive: none, all, the first or the last ones."""
    kind = random.randrange(4)
    if kind < 2:
        return 0, size * kind
    middle = random.randint(0, size)
    return (0, middle) if kind == 2 else (middle, size)


def _some_of(count: int, random: Random) -> int:
    """Draw a number of ``0..count``, the ends more often than the rest."""
    return random.choice((0, count, random.randint(0, count), random.randint(0, count)))

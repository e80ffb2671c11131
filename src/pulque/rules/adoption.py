"""Deduplicate messages that a broker adopted from another one that was away.

A consumer without an answer retries the request, and must not double the message by that. An
adoption is identified by the delivery's position, the group, and the failed attempt. The record
in the log names it as its origin, so a replay knows it too.
"""

from collections.abc import Mapping
from struct import Struct
from typing import NamedTuple

from pulque.model.names import Group, PartitionName
from pulque.model.positions import ConsumeSequence, PartitionId

__all__ = [
    "IDLE_MS",
    "MOST_ADOPTIONS",
    "Adoption",
    "Adoptions",
    "adoption_name",
    "is_adoption",
]

MOST_ADOPTIONS = 100_000
"""The most adoptions to remember; beyond that, the oldest are dropped."""
IDLE_MS = 24 * 3_600_000
"""How long to remember an adoption: no consumer retries after so long."""

_PREFIX = b"o"
_ELSEWHERE = "@"
"""The prefix of an origin at another broker: no partition name begins with it."""
_STATE = Struct("<IQq")


class Adoption(NamedTuple):
    """Where an adopted message was stored first."""

    partition: PartitionId
    sequence: ConsumeSequence
    at_ms: int
    """When it was stored there."""


def adoption_name(
    broker_group: str, partition: PartitionName, sequence: ConsumeSequence, attempt: int
) -> str:
    """Return the identifier of a failed attempt of another broker's message."""
    return f"{_ELSEWHERE}{broker_group}/{partition}/{sequence}/{attempt}"


def is_adoption(origin: str) -> bool:
    """Return whether the origin of a record is a delivery of another broker."""
    return origin.startswith(_ELSEWHERE)


class Adoptions:
    """Remembers what was adopted. Fed with every stored record, live and in replay."""

    def __init__(self) -> None:
        self._known: dict[tuple[Group, str], Adoption] = {}
        """In the order in which they came."""
        self._changed: set[tuple[Group, str]] = set()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, group: Group, name: str) -> Adoption | None:
        """Return where an adopted message is stored, or None if it was not adopted."""
        return self._known.get((group, name))

    def stored(self, group: Group, name: str, adoption: Adoption) -> None:
        """Record an adopted message that is in the log; its first place counts."""
        if (group, name) in self._known:
            return
        self._known[group, name] = adoption
        self._changed.add((group, name))

    def forget_old(self, now_ms: int) -> None:
        """Drop adoptions that are older than ``IDLE_MS``."""
        surplus = len(self._known) - MOST_ADOPTIONS
        for key, adoption in list(self._known.items()):
            if surplus <= 0 and now_ms - adoption.at_ms <= IDLE_MS:
                break
            surplus -= 1
            self._forget(key)

    def clip(self, ends: Mapping[PartitionId, ConsumeSequence]) -> bool:
        """Drop state beyond the recovered end of its partition, or of a deleted partition.

        Returns:
            Whether anything was dropped.
        """
        gone = [
            key
            for key, adoption in self._known.items()
            if adoption.sequence >= ends.get(adoption.partition, ConsumeSequence(0))
        ]
        for key in gone:
            self._forget(key)
        return bool(gone)

    def _forget(self, key: tuple[Group, str]) -> None:
        del self._known[key]
        self._changed.add(key)

    def encode_changes(self) -> dict[bytes, bytes | None]:
        """Return the changes since the last call, for a checkpoint."""
        changes: dict[bytes, bytes | None] = {}
        for key in self._changed:
            adoption = self._known.get(key)
            changes[_PREFIX + "\0".join(key).encode()] = (
                None if adoption is None else _STATE.pack(*adoption)
            )
        self._changed = set()
        return changes

    def load(self, state: Mapping[bytes, bytes]) -> None:
        """Load the state of a checkpoint."""
        found = []
        for key, value in state.items():
            if key[:1] == _PREFIX and len(value) == _STATE.size:
                group, _, name = key[1:].decode().partition("\0")
                partition, sequence, at_ms = _STATE.unpack(value)
                place = Adoption(PartitionId(partition), ConsumeSequence(sequence), at_ms)
                found.append((place.at_ms, (Group(group), name), place))
        self._known.update((key, place) for _, key, place in sorted(found))

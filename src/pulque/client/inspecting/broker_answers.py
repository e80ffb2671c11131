"""What all brokers of a subject say together."""

from collections.abc import Iterable
from typing import TypeVar

from pulque.errors import PulqueError, UnknownGroupError, UnknownSubjectError, UsageError
from pulque.model.message import Message

__all__ = ["Said", "of_all", "of_one", "with_broker"]

T = TypeVar("T")
Said = tuple[str, T | PulqueError]
"""A broker group, and what it answered."""


def of_all(said: Iterable[Said[T]]) -> list[tuple[str, T]]:
    """Return what brokers said, but for those that never heard of the group or the subject.

    Raises:
        PulqueError: None of them did, or one of them failed; a note says who had said yes.
    """
    found: list[tuple[str, T]] = []
    unknown: PulqueError | None = None
    for broker, answer in said:
        if isinstance(answer, UnknownGroupError | UnknownSubjectError):
            unknown = answer
        elif isinstance(answer, PulqueError):
            if found:
                names = ", ".join(name for name, _ in found)
                answer.add_note(f"broker group {broker} failed, after {names} had answered")
            raise answer
        else:
            found.append((broker, answer))
    if not found and unknown is not None:
        raise unknown
    return found


def of_one(brokers: Iterable[str], broker: str | None, what: str) -> str:
    """Return the only broker that can be meant.

    Raises:
        UsageError: There are several, or not this one.
    """
    names = sorted(brokers)
    if broker is None and len(names) == 1:
        return names[0]
    if broker is None or broker not in names:
        raise UsageError(
            f"{what}: which broker? each counts for itself; {', '.join(names)} are there, and "
            f"broker={broker!r} was said"
        )
    return broker


def with_broker(messages: list[Message], broker: str) -> list[Message]:
    """Write down whose messages these are."""
    for message in messages:
        message.source()[0].broker_group = broker
    return messages

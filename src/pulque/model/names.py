"""Parse and build names of subjects, groups, consumers and partitions.

User-given names contain neither ``%`` nor ``#``; both are reserved. ``%`` marks the partitions
of a group (``%retry%subject%group``), ``#`` the further partitions of one subject, and the
group of one broadcast consumer (``#consumer``).

Each priority has a partition of its own: the default one the plain ``subject``, the others
``subject#p<level>``, and partitions of a group likewise (``%retry%subject#p7%group``).
A *pattern* names many subjects: ``order.*`` all that begin with ``order.``, ``*`` all subjects.
"""

import re
from typing import NewType

from pulque.errors import InvalidNameError

__all__ = [
    "DEFAULT_LEVEL",
    "MAX_LEVEL",
    "MAX_NAME_LENGTH",
    "ConsumerId",
    "Group",
    "PartitionName",
    "Pattern",
    "Subject",
    "broadcast_group",
    "dead_partition",
    "effective_group",
    "is_broadcast",
    "is_dead",
    "is_pattern",
    "is_retry",
    "is_wait",
    "level_of",
    "level_partition",
    "overlap",
    "owner_of",
    "parse_consumer_id",
    "parse_group",
    "parse_owner",
    "parse_partition",
    "parse_pattern",
    "parse_subject",
    "patterns_of",
    "retry_partition",
    "subject_of",
    "wait_partition",
]

Subject = NewType("Subject", str)
Group = NewType("Group", str)
ConsumerId = NewType("ConsumerId", str)
PartitionName = NewType("PartitionName", str)
Pattern = NewType("Pattern", str)
"""One subject, or ``order.*``, or ``*``: what a subscription covers."""

MAX_NAME_LENGTH = 255
MAX_LEVEL = 9
"""The highest priority; the lowest is 0."""
DEFAULT_LEVEL = 4
"""The default priority."""
EVERYTHING = "*"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,253}[A-Za-z0-9_])?", re.ASCII)
_CONSUMER_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._@:/-]{0,253}[A-Za-z0-9_])?", re.ASCII)
_OWNED = re.compile(
    r"%(?:retry|dead|wait)%(?P<subject>[^%#]+)(?:#p(?P<level>[0-35-9]))?%(?P<group>[^%]+)",
    re.ASCII,
)
_NUMBERED = re.compile(r"(?P<subject>[^%#]+)#(?P<number>[A-Za-z0-9_-]{1,64})", re.ASCII)
_LEVEL = re.compile(r"p(?P<level>[0-35-9])", re.ASCII)
_NO_LEVEL = re.compile(r"p[0-9]+", re.ASCII)
_RULE = (
    f"1 to {MAX_NAME_LENGTH} characters of A-Z a-z 0-9 . _ -, beginning with a letter or digit, "
    "not ending in . or -, without '..'"
)


def parse_subject(text: str) -> Subject:
    """Return ``text`` as a subject, or raise ``InvalidNameError``."""
    _check_type(text, "subject")
    if is_pattern(text):
        raise InvalidNameError(
            f"subject {_shown(text)} is not allowed: {_RULE}; a pattern can be subscribed to, "
            "but a message goes to one subject"
        )
    return Subject(_parse(text, "subject"))


def parse_pattern(text: str) -> Pattern:
    """Parse a subject or a pattern.

    Raises:
        InvalidNameError: The text is neither.
    """
    if not isinstance(text, str):
        raise InvalidNameError(
            f"subject is {_shown(text)}; one subject or pattern as a str is allowed: order.* "
            "covers all subjects that begin with 'order.'"
        )
    if text == EVERYTHING:
        return Pattern(text)
    prefix = text.removesuffix(".*")
    if "*" in prefix:
        raise InvalidNameError(
            f"subject pattern {_shown(text)} is not allowed: a * stands for the rest of a name, "
            "as in order.* (all subjects that begin with 'order.'), or alone for all subjects"
        )
    _parse(prefix, "subject" if prefix == text else "subject pattern")
    if len(text) > MAX_NAME_LENGTH:
        raise InvalidNameError(
            f"subject pattern {_shown(text)} is not allowed: at most {MAX_NAME_LENGTH} characters"
        )
    return Pattern(text)


def is_pattern(text: str) -> bool:
    """Return whether ``text`` is a pattern."""
    return text == EVERYTHING or text.endswith(".*")


def patterns_of(subject: Subject) -> list[Pattern]:
    """Return the subject and all patterns that cover it; the subject comes first."""
    found = [Pattern(subject)]
    at = subject.rfind(".")
    while at > 0:
        found.append(Pattern(f"{subject[:at]}.*"))
        at = subject.rfind(".", 0, at)
    found.append(Pattern(EVERYTHING))
    return found


def overlap(one: Pattern, other: Pattern) -> bool:
    """Return whether two patterns can cover a common subject."""
    if not is_pattern(one):
        return other in patterns_of(Subject(one))
    if not is_pattern(other):
        return one in patterns_of(Subject(other))
    # Without their stars they are what names begin with.
    return one.startswith(other[:-1]) or other.startswith(one[:-1])


def parse_group(text: str) -> Group:
    """Return ``text`` as a group, or raise ``InvalidNameError``."""
    return Group(_parse(text, "group"))


def parse_owner(text: str) -> Group:
    """Return ``text`` as a group, or as the group of a broadcast consumer: ``#consumer``."""
    _check_type(text, "group")
    if text.startswith("#"):
        return Group(f"#{parse_consumer_id(text[1:])}")
    return parse_group(text)


def parse_consumer_id(text: str) -> ConsumerId:
    """Return ``text`` as a consumer id, or raise ``InvalidNameError``."""
    _check_type(text, "consumer id")
    if _CONSUMER_ID.fullmatch(text) is None or ".." in text:
        raise InvalidNameError(f"consumer id {_shown(text)} is not allowed: {_RULE}, and @ : /")
    return ConsumerId(text)


def parse_partition(text: str) -> PartitionName:
    """Return ``text`` as the name of any partition, ours included.

    A partition is named like its subject, ``subject#name`` if the subject has several, or
    ``%retry%subject%group`` (also ``%dead%``, ``%wait%``) if it belongs to a group.
    """
    if owned := _OWNED.fullmatch(text):
        _parse(owned["subject"], "subject")
        parse_owner(owned["group"])
    elif numbered := _NUMBERED.fullmatch(text):
        _parse(numbered["subject"], "subject")
        _check_level(text, numbered["number"])
    else:
        _parse(text, "partition")
    return PartitionName(text)


def level_partition(subject: Subject, level: int) -> PartitionName:
    """Name the partition of a subject's messages of one priority."""
    return PartitionName(_with_level(subject, level))


def retry_partition(subject: Subject, group: Group, level: int = DEFAULT_LEVEL) -> PartitionName:
    """Name the partition from which redeliveries of ``subject`` to ``group`` are pulled."""
    return PartitionName(f"%retry%{_with_level(subject, level)}%{group}")


def wait_partition(subject: Subject, group: Group, level: int = DEFAULT_LEVEL) -> PartitionName:
    """Name the partition where redeliveries to a group wait until they are due."""
    return PartitionName(f"%wait%{_with_level(subject, level)}%{group}")


def dead_partition(subject: Subject, group: Group, level: int = DEFAULT_LEVEL) -> PartitionName:
    """Name the partition of ``group``'s dead letters of ``subject``."""
    return PartitionName(f"%dead%{_with_level(subject, level)}%{group}")


def is_retry(partition: PartitionName) -> bool:
    """Return whether a partition holds due retries, which consumers pull."""
    return partition.startswith("%retry%")


def is_wait(partition: PartitionName) -> bool:
    """Return whether a partition holds retries that wait until they are due."""
    return partition.startswith("%wait%")


def is_dead(partition: PartitionName) -> bool:
    """Return whether a partition holds dead letters."""
    return partition.startswith("%dead%")


def subject_of(partition: PartitionName) -> Subject:
    """Return the subject that a partition's messages were sent to."""
    if owned := _OWNED.fullmatch(partition):
        return Subject(owned["subject"])
    return Subject(partition.partition("#")[0])


def level_of(partition: PartitionName) -> int:
    """Return the priority of a partition's messages."""
    if "#p" not in partition:
        return DEFAULT_LEVEL
    found = _OWNED.fullmatch(partition) or _LEVEL.fullmatch(partition.partition("#")[2])
    return DEFAULT_LEVEL if found is None or found["level"] is None else int(found["level"])


def owner_of(partition: PartitionName) -> Group | None:
    """Return the group that a partition belongs to, or None for a subject's own partition."""
    owned = _OWNED.fullmatch(partition)
    return None if owned is None else Group(owned["group"])


def broadcast_group(consumer: ConsumerId) -> Group:
    """Return the group of a broadcast consumer.

    Raises:
        InvalidNameError: The consumer's id is too long for it.
    """
    if len(consumer) >= MAX_NAME_LENGTH:
        raise InvalidNameError(
            f"consumer id {_shown(consumer)} is too long to be broadcast to: at most "
            f"{MAX_NAME_LENGTH - 1} characters are allowed"
        )
    return Group(f"#{consumer}")


def is_broadcast(group: Group) -> bool:
    """Return whether a group is that of a broadcast consumer."""
    return group.startswith("#")


def effective_group(text: str, consumer: ConsumerId) -> Group:
    """Return the group that a request acts for; a broadcast consumer acts for itself only.

    Raises:
        InvalidNameError: The name is invalid, or is the group of another consumer.
    """
    if text == f"#{consumer}":
        return broadcast_group(consumer)
    return parse_group(text)


def _with_level(subject: Subject, level: int) -> str:
    if not 0 <= level <= MAX_LEVEL:
        raise InvalidNameError(f"priority {level} is not allowed: 0 to {MAX_LEVEL}, higher first")
    return subject if level == DEFAULT_LEVEL else f"{subject}#p{level}"


def _check_level(partition: str, number: str) -> None:
    if _NO_LEVEL.fullmatch(number) and not _LEVEL.fullmatch(number):
        raise InvalidNameError(
            f"partition {_shown(partition)} is not allowed: #p and a digit from 0 to {MAX_LEVEL} "
            f"is a priority, and priority {DEFAULT_LEVEL} goes without"
        )


def _parse(text: str, kind: str) -> str:
    _check_type(text, kind)
    if _NAME.fullmatch(text) is None or ".." in text:
        raise InvalidNameError(f"{kind} {_shown(text)} is not allowed: {_RULE}")
    return text


def _check_type(text: object, kind: str) -> None:
    if not isinstance(text, str):
        raise InvalidNameError(f"{kind} is {_shown(text)}; a str is allowed")


def _shown(text: object) -> str:
    """Return an untrusted name quoted, escaped and cut, safe to print."""
    shown = ascii(text)
    if len(shown) <= 60:
        return shown
    length = len(text) if isinstance(text, str) else len(shown)
    return f"{shown[:57]}... ({length} characters)"

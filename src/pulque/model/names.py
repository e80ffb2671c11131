"""Names of subjects, groups, consumers and partitions, and what is allowed in them.

User-given names hold neither ``%`` nor ``#``; both are ours. ``%`` marks the partitions that
belong to a group (``%retry%subject%group``), ``#`` the numbered partitions of one subject.
"""

import re
from typing import NewType

from pulque.errors import InvalidNameError

__all__ = [
    "MAX_NAME_LENGTH",
    "ConsumerId",
    "Group",
    "PartitionName",
    "Subject",
    "owner_of",
    "parse_consumer_id",
    "parse_group",
    "parse_partition",
    "parse_subject",
    "retry_partition",
    "subject_of",
]

Subject = NewType("Subject", str)
Group = NewType("Group", str)
ConsumerId = NewType("ConsumerId", str)
PartitionName = NewType("PartitionName", str)

MAX_NAME_LENGTH = 255
MAX_PARTITION_LENGTH = 600
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,253}[A-Za-z0-9_])?", re.ASCII)
_CONSUMER_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._@:/-]{0,253}[A-Za-z0-9_])?", re.ASCII)
_OWNED = re.compile(r"%(?:retry|dead|wait)%(?P<subject>[^%]+)%(?P<group>[^%]+)", re.ASCII)
_NUMBERED = re.compile(r"(?P<subject>[^%#]+)#(?P<number>[A-Za-z0-9_-]{1,64})", re.ASCII)
_RULE = (
    f"1 to {MAX_NAME_LENGTH} characters of A-Z a-z 0-9 . _ -, beginning with a letter or digit, "
    "not ending in . or -, without '..'"
)


def parse_subject(text: str) -> Subject:
    """Return ``text`` as a subject, or raise ``InvalidNameError``."""
    return Subject(_parse(text, "subject"))


def parse_group(text: str) -> Group:
    """Return ``text`` as a group, or raise ``InvalidNameError``."""
    return Group(_parse(text, "group"))


def parse_consumer_id(text: str) -> ConsumerId:
    """Return ``text`` as a consumer id, or raise ``InvalidNameError``."""
    if _CONSUMER_ID.fullmatch(text) is None or ".." in text:
        raise InvalidNameError(f"consumer id {_shown(text)} is not allowed: {_RULE}, and @ : /")
    return ConsumerId(text)


def parse_partition(text: str) -> PartitionName:
    """Return ``text`` as the name of any partition, ours included.

    A partition is named like its subject, ``subject#name`` where a subject has several, or
    ``%retry%subject%group`` (also ``%dead%``, ``%wait%``) where it belongs to a group.
    """
    if owned := _OWNED.fullmatch(text):
        _parse(owned["subject"], "subject")
        _parse(owned["group"], "group")
    elif numbered := _NUMBERED.fullmatch(text):
        _parse(numbered["subject"], "subject")
    else:
        _parse(text, "partition")
    return PartitionName(text)


def retry_partition(subject: Subject, group: Group) -> PartitionName:
    """Name the partition where redeliveries of ``subject`` to ``group`` wait."""
    return PartitionName(f"%retry%{subject}%{group}")


def subject_of(partition: PartitionName) -> Subject:
    """Return the subject that a partition's messages were sent to."""
    if owned := _OWNED.fullmatch(partition):
        return Subject(owned["subject"])
    return Subject(partition.partition("#")[0])


def owner_of(partition: PartitionName) -> Group | None:
    """Return the group that a partition belongs to, or None for one that all may read."""
    owned = _OWNED.fullmatch(partition)
    return None if owned is None else Group(owned["group"])


def _parse(text: str, kind: str) -> str:
    if _NAME.fullmatch(text) is None or ".." in text:
        raise InvalidNameError(f"{kind} {_shown(text)} is not allowed: {_RULE}")
    return text


def _shown(text: str) -> str:
    """Make a foreign name safe to print: quoted, escaped, cut."""
    shown = ascii(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}... ({len(text)} characters)"

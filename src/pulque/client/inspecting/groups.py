"""Where groups are, and how they are set to another place: requests, and what answers mean."""

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from pulque.client.arguments.checks import check_flag, check_text
from pulque.client.options.group_options import StartAt, start_of
from pulque.errors import RemoteProtocolError, UsageError
from pulque.model.names import ConsumerId, Group, PartitionName
from pulque.model.positions import ConsumeSequence
from pulque.wire.requests import Groups, Reset
from pulque.wire.resets import GroupPosition
from pulque.wire.responses import GroupsReport, ResetDone, Response

__all__ = [
    "ConsumerState",
    "GroupState",
    "GroupTotals",
    "PartitionReset",
    "groups_of",
    "groups_request",
    "reset_request",
    "resets_of",
    "state_of",
    "totals_of",
]


class PartitionReset(NamedTuple):
    """What a reset did, or would do, in one partition."""

    partition: PartitionName
    position: ConsumeSequence
    """The next message of the group, before the reset."""
    target: ConsumeSequence
    """The next message of the group, after it."""
    held: int
    """How many deliveries were taken from consumers that had not settled them."""
    reread: int
    """How many stored messages come again."""
    skipped: int
    """How many stored messages do not come any more."""
    broker_group: str = ""
    """Whose partition it is; empty for a lone broker's."""


class ConsumerState(NamedTuple):
    """What one consumer holds of one partition."""

    consumer: ConsumerId
    held: int
    """How many deliveries it has not settled."""
    silent: float | None
    """For how many seconds nothing was heard of it; None if it is gone."""


class GroupState(NamedTuple):
    """Where a group is in one partition."""

    partition: PartitionName
    group: Group
    """Of a broadcast consumer, ``#`` and its id."""
    mode: str
    """``shared``, ``broadcast`` or ``once``."""
    next_sequence: ConsumeSequence
    """The next message that nobody of the group was handed."""
    end: ConsumeSequence
    """The next message to come."""
    lag: int
    """How many messages are stored and not settled."""
    held: int
    """How many deliveries its consumers have not settled."""
    consumers: tuple[ConsumerState, ...]
    broker_group: str = ""
    """Whose partition it is; empty for a lone broker's."""


class GroupTotals(NamedTuple):
    """A group, all its partitions added up."""

    group: Group
    mode: str
    partitions: int
    lag: int
    held: int
    consumers: int
    """How many were heard of lately."""


def reset_request(
    subject: str, group: str, to: StartAt, partition: str | None, *, dry_run: bool
) -> Reset:
    """Return the request for a reset.

    Raises:
        UsageError: There is no such place, or an argument is of a wrong type.
    """
    check_text("subject", subject)
    check_text("group", group)
    check_text("partition", partition, may_be_none=True)
    check_flag("dry_run", dry_run)
    try:
        target = start_of(to)
    except UsageError as error:
        raise UsageError(str(error).replace("start is", "to is", 1)) from None
    if isinstance(to, datetime) and target.value < 0:
        raise UsageError(f"to is {to!r}, which is before 1970")
    return Reset(group, subject, partition or "", target, dry_run)


def resets_of(response: Response) -> list[PartitionReset]:
    """Return what a reset did."""
    if not isinstance(response, ResetDone):
        raise RemoteProtocolError(f"a reset got {response!r}")
    return [
        PartitionReset(
            row.partition,
            row.position,
            row.target,
            row.held,
            max(max(row.position, row.start) - row.target, 0),
            max(row.target - max(row.position, row.start), 0),
        )
        for row in response.rows
    ]


def groups_request(subject: str | None, group: str | None) -> Groups:
    """Return the request for where groups are: of one subject or pattern, of one group, or all.

    Raises:
        UsageError: An argument is of a wrong type.
    """
    check_text("subject", subject, may_be_none=True)
    check_text("group", group, may_be_none=True)
    return Groups(subject or "", group or "")


def groups_of(response: Response) -> list[GroupState]:
    """Return where groups are.

    Raises:
        UsageError: There are too many for one answer.
    """
    if not isinstance(response, GroupsReport):
        raise RemoteProtocolError(f"a request for groups got {response!r}")
    if response.is_cut:
        raise UsageError(
            f"there are more than {len(response.positions)} groups and partitions: "
            "name a subject or a group"
        )
    return [state_of(position) for position in response.positions]


def totals_of(states: Iterable[GroupState]) -> list[GroupTotals]:
    """Add up the partitions of each group; return groups by name."""
    groups: dict[Group, list[GroupState]] = {}
    for each in states:
        groups.setdefault(each.group, []).append(each)
    return [
        GroupTotals(
            group,
            found[0].mode,
            len(found),
            sum(each.lag for each in found),
            sum(each.held for each in found),
            len({c.consumer for each in found for c in each.consumers if c.silent is not None}),
        )
        for group, found in sorted(groups.items())
    ]


def state_of(position: GroupPosition) -> GroupState:
    """Return where a group is, as the client shows it."""
    return GroupState(
        position.partition,
        position.group,
        position.mode.name.lower(),
        position.next_sequence,
        position.end,
        position.lag,
        position.held,
        tuple(
            ConsumerState(
                each.consumer, each.held, None if each.silent_ms < 0 else each.silent_ms / 1000
            )
            for each in position.consumers
        ),
    )

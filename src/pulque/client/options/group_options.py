"""What an application may wish of its group: mode, filter, start, retries."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from pulque.client.arguments.checks import check_choice, check_text, check_words
from pulque.client.arguments.due_times import ms_of
from pulque.client.ordered.partition_core import OrderedOptions
from pulque.client.ordered.window import DELAYS
from pulque.errors import RemoteProtocolError, UsageError
from pulque.model.groups import (
    BROKERS_CHOICE,
    FROM_EARLIEST,
    MAX_DELAY_MS,
    MAX_DELAYS,
    GroupSettings,
    Mode,
    RetrySettings,
    Start,
    StartKind,
    tag_filter,
)
from pulque.model.names import is_pattern
from pulque.wire.requests import ChangeGroup
from pulque.wire.responses import GroupChanged, Response

__all__ = [
    "WINDOW_LENGTH",
    "ModeName",
    "RetryPolicy",
    "StartAt",
    "StartName",
    "change_request",
    "changed_of",
    "look_request",
    "mode_of",
    "ordered_options",
    "retry_of",
    "start_of",
]

ModeName = Literal["shared", "broadcast", "once", "ordered"]
StartName = Literal["earliest", "latest"]
StartAt = StartName | int | datetime
_STARTS = {"earliest": FROM_EARLIEST, "latest": Start(StartKind.LATEST)}
_MODES = {mode.name.lower(): mode for mode in Mode}
WINDOW_LENGTH = 10_000
"""How many messages of a partition an ordered consumer holds at most, if it is told nothing."""
_MOST_ATTEMPTS = 0xFFFF
_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How a group wants failed messages to come again; what is left out is the broker's choice.

    The group keeps it, and the last consumer that says something counts.
    """

    delays: Sequence[float] = ()
    """Seconds before each further attempt; the last one counts for all that follow."""
    jitter: float | None = None
    """By which part of itself a delay varies at random, 0 to 1."""
    max_attempts: int | None = None
    """How often a message is delivered before it is a dead letter."""

    def __post_init__(self) -> None:
        delays: object = self.delays
        if isinstance(delays, str | bytes) or not isinstance(delays, Iterable):
            raise UsageError(f"delays is {delays!r}; a list of seconds is allowed, as [1, 10, 60]")
        # They may be given as what can be read once only.
        object.__setattr__(self, "delays", tuple(delays))
        for delay in self.delays:
            _check_number("delays has", delay, "seconds as a number each are allowed")
        if self.jitter is not None:
            _check_number("jitter is", self.jitter, "0 to 1 are allowed")
        attempts: object = self.max_attempts
        if attempts is not None and type(attempts) is not int:
            raise UsageError(f"max_attempts is {attempts!r}; a whole number is allowed")
        retry_of(self)


def _check_number(what: str, value: object, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        hint = f": {value.total_seconds():g} s" if isinstance(value, timedelta) else ""
        raise UsageError(f"{what} {value!r}{hint}; {allowed}")


def mode_of(
    mode: str | None, group: str | None, *, broadcast: bool | None, ordered: bool = False
) -> Mode:
    """Return the mode that is meant; without a group, each consumer gets everything.

    Raises:
        UsageError: The wishes contradict each other, or there is no such mode.
    """
    if mode is not None:
        check_choice("mode", mode, _MODES)
    wanted = None if mode is None else _MODES[mode]
    if ordered:
        if broadcast or wanted not in {None, Mode.ORDERED}:
            raise UsageError("an ordered consumer is neither shared nor a broadcast one")
        wanted = Mode.ORDERED
    if broadcast is not None and wanted is not None and broadcast != (wanted is Mode.BROADCAST):
        raise UsageError(f"mode is {mode!r} and broadcast is {broadcast}: which one?")
    is_unsaid = wanted is None and broadcast is None
    if broadcast or wanted is Mode.BROADCAST or (is_unsaid and not group):
        return Mode.BROADCAST
    if not group:
        raise UsageError(
            "a consumer that is not a broadcast one needs a group: those of one group share its "
            "messages"
        )
    return wanted or Mode.SHARED


def ordered_options(
    subject: str, mode: Mode, blocks: str, retry: RetryPolicy | None
) -> OrderedOptions | None:
    """Return what an ordered consumer is told beside what all are; None for another one.

    Raises:
        UsageError: It is told nonsense, or wants a pattern.
    """
    check_choice("blocks", blocks, ("key", "partition"))
    if mode is not Mode.ORDERED:
        return None
    if is_pattern(subject):
        raise UsageError(
            f"{subject} is a pattern: an ordered consumer has one subject, as its partitions are "
            "shared out one by one"
        )
    retry_of(retry)
    delays = tuple(retry.delays) if retry is not None and retry.delays else DELAYS
    return OrderedOptions("partition" if blocks == "partition" else "key", delays)


def start_of(start: StartAt) -> Start:
    """Return where a new group starts.

    Raises:
        UsageError: It is none of what is allowed, or an instant without a time zone.
    """
    if isinstance(start, datetime):
        return Start(StartKind.TIME, ms_of(start))
    if isinstance(start, int) and not isinstance(start, bool) and 0 <= start <= _LARGEST:
        return Start(StartKind.SEQUENCE, start)
    if isinstance(start, str) and start in _STARTS:
        return _STARTS[start]
    raise UsageError(
        f'start is {start!r}; "earliest", "latest", a datetime with a time zone or a sequence '
        "are allowed"
    )


def retry_of(retry: RetryPolicy | None) -> RetrySettings:
    """Return what a group says about its retries.

    Raises:
        UsageError: A delay, the jitter or the number of attempts cannot be.
    """
    if retry is None:
        return BROKERS_CHOICE
    if not isinstance(retry, RetryPolicy):
        raise UsageError(f"retry is {retry!r}; a pulque.RetryPolicy is allowed")
    jitter = retry.jitter
    if jitter is not None and not 0 <= jitter <= 1:
        raise UsageError(f"jitter is {jitter!r}; 0 to 1 are allowed")
    attempts = retry.max_attempts
    if attempts is not None and not 1 <= attempts <= _MOST_ATTEMPTS:
        raise UsageError(f"max_attempts is {attempts!r}; 1 to {_MOST_ATTEMPTS} are allowed")
    return RetrySettings(
        tuple(_delays_ms(retry.delays)),
        BROKERS_CHOICE.jitter_percent if jitter is None else round(jitter * 100),
        attempts or 0,
    )


def change_request(  # the arguments of Client.change_group
    subject: str,
    group: str,
    *,
    mode: str | None,
    tags: Iterable[str] | None,
    all_tags: Iterable[str] | None,
    retry: RetryPolicy | None,
) -> ChangeGroup:
    """Return the request that changes what a group said.

    Raises:
        UsageError: There is no such mode, no such filter, or an argument is of a wrong type.
    """
    check_text("subject", subject)
    check_text("group", group)
    check_words("tags", () if tags is None else tags)
    check_words("all_tags", () if all_tags is None else all_tags)
    found = mode_of(mode, group, broadcast=None)
    return ChangeGroup(
        group,
        subject,
        mode is not None,
        found,
        tags is not None or all_tags is not None,
        tag_filter(tags or (), all_tags or ()),
        retry_of(retry),
    )


def look_request(subject: str, group: str) -> ChangeGroup:
    """Return the request for what a group said, which changes nothing."""
    return ChangeGroup(group, subject)


def changed_of(response: Response) -> GroupSettings:
    """Return what is in force, after a change."""
    if not isinstance(response, GroupChanged):
        raise RemoteProtocolError(f"a change of a group got {response!r}")
    return GroupSettings(response.mode, response.filter, response.retry)


def _delays_ms(delays: Iterable[float]) -> list[int]:
    found = list(delays)
    if len(found) > MAX_DELAYS:
        raise UsageError(f"{len(found)} delays; at most {MAX_DELAYS} are allowed")
    for delay in found:
        if not 0 <= delay <= MAX_DELAY_MS / 1000:
            raise UsageError(
                f"a delay of {delay!r} s; 0 to {MAX_DELAY_MS // 1000} seconds are allowed"
            )
    return [round(delay * 1000) for delay in found]

# Generated from aio/reader.py by `make blocking`: edit that file, not this one.
"""Looking at what is stored, without a group."""

import functools
import time
from collections.abc import Iterator
from datetime import datetime

from pulque.client.arguments.checks import check_wait, check_whole
from pulque.client.blocking.brokers import ClientConnections
from pulque.client.blocking.connection_pool import Calls
from pulque.client.blocking.messages import Messages
from pulque.client.inspecting.stored_messages import (
    PartitionPositions,
    first_sequence,
    positions_of,
    positions_request,
    read_of,
)
from pulque.client.options.group_options import StartAt, start_of
from pulque.errors import UnknownSubjectError
from pulque.model.message import Message
from pulque.model.names import PartitionName
from pulque.wire.requests import Read

__all__ = ["Reading"]

_MAX_BYTES = 1024 * 1024
_MOST_READ = 1_000_000
_LONG_POLL = 10.0
_TAILED = 1000


class Reading:
    """How a client looks at what brokers have, without a group and without effect."""

    _brokers: ClientConnections
    _timeout: float

    @property
    def messages(self) -> Messages:
        """What is stored, to be found by key, id, time or position."""
        return Messages(self._brokers, self._timeout, self)

    def read(
        self,
        subject: str,
        sequence: int = 0,
        *,
        partition: str | None = None,
        broker: str | None = None,
        max_messages: int = 1000,
        timeout: float = 0.0,
    ) -> list[Message]:
        """Return stored messages from a sequence on, without a group and without effect.

        Where several brokers have some, those of all are put in the order in which they were
        stored. Each broker counts for itself: to go on from a message, name its ``broker_group``.

        Args:
            subject: Whose messages.
            sequence: Where to start; if that is no longer stored, at the oldest that is.
            partition: Which partition, if the subject has several.
            broker: Only this broker group's.
            max_messages: At most so many; those that nobody can decode are left out.
            timeout: How long to wait for a first message, in seconds.
        """
        check_whole("sequence", sequence, 0, 2**63 - 1)
        check_whole("max_messages", max_messages, 1, _MOST_READ)
        deadline = time.monotonic() + check_wait(timeout)
        found: list[Message] = []
        for calls, group, name in self._brokers.plain_partitions(
            subject, self._timeout, broker, partition
        ):
            until = 0.0 if found else deadline
            some, _ = self._read_from(calls, group, name, sequence, max_messages, until)
            found += some
        found.sort(key=lambda message: message.stored_at_ms)
        return found[:max_messages]

    def _read_from(
        self,
        calls: Calls,
        broker_group: str,
        partition: PartitionName,
        sequence: int,
        max_messages: int,
        deadline: float,
    ) -> tuple[list[Message], int]:
        """Wait for messages of one partition; return them, and the sequence to go on from.

        That is behind messages that cannot be decoded, too, so that nobody reads them again.
        """
        convert = functools.partial(read_of, partition, broker_group=broker_group)
        messages: list[Message] = []
        while not messages:
            wait = max(0.0, deadline - time.monotonic())
            request = Read(partition, sequence, max_messages, _MAX_BYTES, int(wait * 1000))
            messages, after = calls.ask(request, wait + self._timeout, convert)
            if after <= sequence:
                break
            sequence = after
        return messages, sequence

    def tail(self, subject: str, *, start: StartAt = "latest") -> Iterator[Message]:
        """Yield messages as they are stored, without a group, until the caller stops."""
        instant = start if isinstance(start, datetime) else None
        nexts: dict[tuple[str, PartitionName], int] = {
            (found.broker_group, found.partition): first_sequence(start_of(start), found)
            for found in self.positions(subject, at=instant)
        }
        while not self._brokers.home.is_closed:
            is_quiet = True
            wait = _LONG_POLL / len(nexts) ** 2
            for (broker, name), sequence in nexts.items():
                ((calls, group, _),) = self._brokers.plain_partitions(
                    subject, self._timeout, broker, name
                )
                messages, nexts[broker, name] = self._read_from(
                    calls, group, name, sequence, _TAILED, time.monotonic() + wait
                )
                is_quiet = is_quiet and not messages
                yield from messages
            if is_quiet:
                # Another priority, or another broker, may have come into use meanwhile.
                for store in self._brokers.stores(subject, self._timeout):
                    for target in store.targets:
                        nexts.setdefault((store.broker_group, target.partition), 0)

    def positions(self, subject: str, *, at: datetime | None = None) -> list[PartitionPositions]:
        """Return where each partition of a subject begins and ends, at every broker.

        Args:
            subject: Whose partitions.
            at: Look for the first message stored at or after this instant, too.
        """
        found: list[PartitionPositions] = []
        unknown: UnknownSubjectError | None = None
        for store in self._brokers.stores(subject, self._timeout):
            for target in store.targets:
                name = target.partition
                request = positions_request(name, at)
                convert = functools.partial(positions_of, name, at, store.broker_group)
                try:
                    found.append(store.calls.ask(request, self._timeout, convert))
                except UnknownSubjectError as error:
                    unknown = error  # it may have messages elsewhere, or of other priorities
        if not found and unknown is not None:
            raise unknown
        return found

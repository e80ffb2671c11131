"""Looking at what is stored, without a group: the requests, and what their answers mean."""

import base64
import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from pulque.client.arguments.due_times import ms_of
from pulque.client.receiving.log_records import check_count, split_records
from pulque.errors import InvalidBatchError, RemoteProtocolError
from pulque.model.groups import Start, StartKind
from pulque.model.message import Message, StoredBatch, unreadable_in
from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence
from pulque.wire.requests import NO_TIME, Positions
from pulque.wire.responses import Located, ReadBack, Response

__all__ = [
    "DamagedRange",
    "PartitionPositions",
    "damaged_of",
    "first_sequence",
    "messages_of",
    "positions_of",
    "positions_request",
    "read_of",
    "text_or_base64",
]

log = logging.getLogger("pulque.client")


class PartitionPositions(NamedTuple):
    """Where one partition begins and ends."""

    partition: PartitionName
    start: ConsumeSequence
    """The oldest message that is stored."""
    end: ConsumeSequence
    """The next message to come."""
    at: ConsumeSequence | None
    """The first message stored at or after the instant asked for; ``end`` if there is none."""
    broker_group: str = ""
    """Who has it."""


class DamagedRange(NamedTuple):
    """Messages of a partition that its broker cannot read, and that groups pass over."""

    partition: PartitionName
    first_sequence: ConsumeSequence
    end: ConsumeSequence


def first_sequence(start: Start, found: PartitionPositions) -> ConsumeSequence:
    """Return where to read from; ``found`` knows of the instant, if it is one."""
    match start.kind:
        case StartKind.EARLIEST:
            return found.start
        case StartKind.SEQUENCE:
            return ConsumeSequence(start.value)
        case StartKind.TIME if found.at is not None:
            return found.at
    return found.end


def positions_request(partition: PartitionName, at: datetime | None) -> Positions:
    """Return the request for a partition's positions."""
    return Positions(partition, NO_TIME if at is None else ms_of(at))


def positions_of(
    partition: PartitionName, at: datetime | None, broker_group: str, response: Response
) -> PartitionPositions:
    """Return what the answer says."""
    if not isinstance(response, Located):
        raise RemoteProtocolError(f"a request for positions got {response!r}")
    found = None if at is None else response.at
    return PartitionPositions(partition, response.start, response.end, found, broker_group)


def messages_of(
    partition: PartitionName, response: Response, *, broker_group: str = ""
) -> list[Message]:
    """Return the messages of an answer to a read; those that nobody can decode are left out."""
    return read_of(partition, response, broker_group=broker_group)[0]


def read_of(
    partition: PartitionName, response: Response, *, broker_group: str = ""
) -> tuple[list[Message], int]:
    """Return the messages of an answer to a read, and the sequence after the last that came.

    Messages that nobody can decode are left out; the sequence is 0 if nothing came at all.
    """
    if not isinstance(response, ReadBack) or isinstance(response.records, tuple):
        raise RemoteProtocolError(f"a read got {response!r}")
    messages: list[Message] = []
    for served in split_records(
        response.records,
        partition=partition,
        first_sequence=response.first_sequence,
        count=response.count,
    ):
        first, indices = served.envelope.first_sequence, range(served.start, served.end)
        try:
            batch = StoredBatch(
                served.data,
                partition=partition,
                first_sequence=first,
                stored_at_ms=served.envelope.stored_at_ms,
            )
            check_count(len(batch), served.envelope.count)
            batch.broker_group = broker_group
            unreadable = unreadable_in(batch, served.start, served.end)
            messages += [Message(batch, index) for index in indices if index not in unreadable]
        except InvalidBatchError as error:
            unreadable = dict.fromkeys(indices, str(error))
        for index, problem in unreadable.items():
            log.warning("not readable: %s/%d %s", partition, first + index, problem)
    return messages, response.first_sequence + response.count if response.count else 0


def damaged_of(report: Mapping[str, Any]) -> list[DamagedRange]:
    """Return what a broker cannot read, as its status tells."""
    return [
        DamagedRange(row["partition"], row["first_sequence"], row["end"])
        for row in report.get("damaged", ())
    ]


def text_or_base64(body: bytes) -> tuple[str | None, str | None]:
    """Return a body as text, or as base64 if it is no text; the other is None."""
    try:
        return body.decode(), None
    except UnicodeDecodeError:
        return None, base64.b64encode(body).decode()

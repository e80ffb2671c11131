"""Messages of an archive, sent again: to their own subjects, or to another one.

They are new messages, with ids of their own; the header ``origin_id`` names the one they were made
from, so that a consumer can tell, and a second replay can be noticed. What a group had to retry,
and dead letters, are copies of messages that are in the archive anyway: they are left out.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

import pulque
from pulque.client.sending.outgoing_message import Outgoing, as_body
from pulque.errors import UsageError
from pulque.model.names import PartitionName, owner_of, parse_subject
from pulque.pipeline.lake.table import MESSAGES, Table
from pulque.pipeline.query import Question, candidates, scan

__all__ = ["ORIGIN_HEADER", "ReplayResult", "check_rate", "count_messages", "replay"]

ORIGIN_HEADER = "origin_id"
_AT_ONCE = 1000


@dataclass(slots=True)
class ReplayResult:
    """What a replay did, or would do."""

    messages: Counter[str] = field(default_factory=Counter)
    """By the subject that they were archived from."""
    body_bytes: int = 0

    @property
    def total(self) -> int:
        """How many messages in all."""
        return self.messages.total()


class ReplayPace:
    """Holds back whoever is faster than so many messages per second."""

    def __init__(self, rate: float | None) -> None:
        check_rate(rate)
        self._rate = rate
        self._began = time.monotonic()
        self._sent = 0

    @property
    def at_once(self) -> int:
        """How many may go together, so that the rate is even over a tenth of a second."""
        return _AT_ONCE if self._rate is None else max(1, min(_AT_ONCE, int(self._rate / 10)))

    def sent(self, count: int) -> None:
        """Wait until more may follow."""
        self._sent += count
        if self._rate is not None:
            due = self._began + self._sent / self._rate
            time.sleep(max(0.0, due - time.monotonic()))


def check_rate(rate: float | None) -> None:
    """Check how many messages per second a replay may send; None for any number.

    Raises:
        UsageError: It is not a number above 0.
    """
    if rate is not None and not 0 < rate < math.inf:
        raise UsageError(
            f"a rate of {rate:g}; a number of messages per second above 0 is allowed, and without "
            "a rate they are sent as fast as the broker takes them"
        )


def count_messages(lake: str, question: Question) -> ReplayResult:
    """Return what a replay would send."""
    found = ReplayResult()
    for rows in _originals(lake, question):
        found.messages.update(rows.column("subject").to_pylist())
        found.body_bytes += sum(map(len, rows.column("body").to_pylist()))
    return found


def replay(
    lake: str,
    question: Question,
    client: pulque.Client,
    *,
    target: str | None = None,
    rate: float | None = None,
    on_sent: Callable[[int], None] = lambda _: None,
) -> ReplayResult:
    """Send the messages of a question again; return once all are confirmed.

    Args:
        lake: Where the archive is.
        question: Which messages; its limit does not count.
        client: Where to.
        target: The subject they go to; else each goes to its own.
        rate: At most so many per second.
        on_sent: Called with how many were confirmed since the last time.

    Raises:
        UsageError: There is no archive, or the target or the rate is not allowed.
        PulqueError: The broker could not take one; those before it are sent.
    """
    subject = None if target is None else parse_subject(target)
    pace = ReplayPace(rate)
    done = ReplayResult()
    with client.producer() as producer:
        for rows in _originals(lake, question):
            messages = [(subject or row["subject"], _message(row)) for row in rows.to_pylist()]
            origins = rows.column("subject").to_pylist()
            for at in range(0, len(messages), pace.at_once):
                some = messages[at : at + pace.at_once]
                promises = [producer.send_many(s, group) for s, group in _by_subject(some)]
                for promise in promises:
                    promise.result()
                done.messages.update(origins[at : at + pace.at_once])
                done.body_bytes += sum(len(as_body(message.body)) for _, message in some)
                on_sent(len(some))
                pace.sent(len(some))
    return done


def _originals(lake: str, question: Question) -> Iterator[pa.Table]:
    """Yield what was sent, without what groups made of it."""
    table = Table(lake, MESSAGES)
    files = candidates(table.open(), question)
    if not files:
        return
    for rows in scan(table, files, question):
        names = set(rows.column("partition").to_pylist())
        owned = [name for name in names if owner_of(PartitionName(name)) is not None]
        if owned:
            is_owned = pa.compute.is_in(rows.column("partition"), pa.array(owned))
            rows = rows.filter(pa.compute.invert(is_owned))  # noqa: PLW2901
        if rows.num_rows:
            yield rows


def _by_subject(messages: list[tuple[str, Outgoing]]) -> list[tuple[str, list[Outgoing]]]:
    found: dict[str, list[Outgoing]] = {}
    for subject, message in messages:
        found.setdefault(subject, []).append(message)
    return list(found.items())


def _message(row: dict[str, Any]) -> Outgoing:
    headers = dict(row["headers"] or ())
    own = {name: value for name, value in headers.items() if not name.startswith("pulque.")}
    return Outgoing(
        row["body"],
        key=row["key"],
        order_key=row["order_key"],
        tags=row["tags"] or (),
        headers={**own, ORIGIN_HEADER: row["message_id"]},
        priority=row["priority"],
    )

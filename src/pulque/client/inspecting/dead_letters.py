"""Dead letters: what nobody could process, to be looked at, delivered again, or given up.

Each of them is a conversation with the broker, without I/O: it yields what to ask and is sent
the answers. Whoever carries it, a thread or a task, does nothing but that.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from pulque.client.arguments.checks import check_whole
from pulque.client.inspecting.stored_messages import read_of
from pulque.client.sending.outgoing_message import Outgoing, as_body
from pulque.errors import RemoteProtocolError, UsageError
from pulque.model.message import Message
from pulque.model.names import dead_partition, parse_owner, parse_partition, parse_subject
from pulque.model.positions import ConsumeSequence
from pulque.rules.retry import DEAD_HEADER, REASON_HEADER
from pulque.wire.dead import Dead, DeadListed, Resend, Resent
from pulque.wire.requests import Read, Request
from pulque.wire.responses import Response

__all__ = ["DeadLetterTalks", "Death", "ResentLetters", "Talk", "death_of"]

T = TypeVar("T")
Messages = list[Message]
Talk = Generator[Request, Response, T]
"""Yields requests, is sent their answers, and returns what came of it."""
_LAST = 2**64 - 1
_AT_ONCE = 1000
_MAX_BYTES = 1024 * 1024


class ResentLetters(NamedTuple):
    """What became of the letters that were to be resent, by their sequences."""

    resent: tuple[int, ...]
    """They come to the group again, and are on the broker's disk."""
    done: tuple[int, ...]
    """They had been resent or purged before."""
    missing: tuple[int, ...]
    """They are not stored any more, or never were."""


class Death(NamedTuple):
    """When a message became a dead letter, and why."""

    at_ms: int
    attempts: int
    why: str
    """Why it is not tried again."""
    reason: str
    """Why the last attempt failed."""


def death_of(letter: Message) -> Death:
    """Return when a message became a dead letter, and why."""
    headers = letter.headers
    return Death(
        letter.stored_at_ms,
        letter.attempt,
        headers.get(DEAD_HEADER, ""),
        headers.get(REASON_HEADER, ""),
    )


class DeadLetterTalks:
    """The dead letters of one group and subject, as conversations."""

    def __init__(self, subject: str, group: str) -> None:
        self.subject = parse_subject(subject)
        self.group = parse_owner(group)
        self.partition = parse_partition(dead_partition(self.subject, self.group))

    def count(self) -> Talk[int]:
        """Ask how many there are."""
        listed = yield from self._listed(0, _LAST, 0)
        return listed.count

    def some(self, first: int, limit: int) -> Talk[Messages]:
        """Ask for letters from a sequence on."""
        _check(first, "the first sequence")
        check_whole("limit", limit, 1, _AT_ONCE)
        listed = yield from self._listed(first, _LAST, limit)
        found: Messages = []
        for start, length in listed.ranges:
            found += yield from self._read(start, length)
        return found

    def one(self, sequence: int) -> Talk[Message | None]:
        """Ask for one letter."""
        _check(sequence, "a sequence")
        listed = yield from self._listed(sequence, sequence, 1)
        for start, length in listed.ranges:
            for message in (yield from self._read(start, length)):
                return message
        return None

    def resend(
        self,
        sequences: Sequence[int],
        body: object,
        headers: Mapping[str, str] | None,
    ) -> Talk[ResentLetters]:
        """Have letters delivered again."""
        for sequence in sequences:
            _check(sequence, "a sequence")
        if not sequences:
            raise UsageError("which dead letters to resend? at least one sequence is wanted")
        if (body is not None or headers is not None) and len(sequences) > 1:
            raise UsageError(
                f"a new body or new headers for {len(sequences)} dead letters; "
                "they can be edited one at a time"
            )
        edited = Outgoing(b"" if body is None else body, headers=headers)
        new_body = as_body(edited.body)
        new_headers = () if headers is None else tuple((edited.headers or {}).items())
        parts: list[Resent] = []
        for at in range(0, len(sequences), _AT_ONCE):
            some = tuple(sequences[at : at + _AT_ONCE])
            answer = yield Resend(
                self.subject,
                self.group,
                some,
                replaces_body=body is not None,
                body=new_body,
                replaces_headers=headers is not None,
                headers=new_headers,
            )
            parts.append(_resent_of(answer))
        return ResentLetters(
            tuple(s for part in parts for s in part.resent),
            tuple(s for part in parts for s in part.done),
            tuple(s for part in parts for s in part.missing),
        )

    def resend_all(self) -> Talk[int]:
        """Have all letters delivered again that there are by now."""
        listed = yield from self._listed(0, _LAST, _AT_ONCE)
        last = listed.end - 1
        count = 0
        while listed.ranges:
            sequences = [s for start, n in listed.ranges for s in range(start, start + n)]
            resent = yield from self.resend(sequences, None, None)
            count += len(resent.resent)
            # Some may not be readable any more: they are passed over.
            after = sequences[-1] + 1
            if after > last:
                break
            listed = yield from self._listed(after, last, _AT_ONCE)
        return count

    def purge(self, until: int | None) -> Talk[int]:
        """Have letters forgotten."""
        if until is not None:
            _check(until, "the last sequence")
        last = _LAST if until is None else until
        answer = yield Dead(self.subject, self.group, 0, last, 0, is_purge=True)
        return _listed_of(answer).count

    def _listed(self, first: int, last: int, most: int) -> Talk[DeadListed]:
        answer = yield Dead(self.subject, self.group, first, last, most)
        return _listed_of(answer)

    def _read(self, start: ConsumeSequence, length: int) -> Talk[Messages]:
        found: Messages = []
        at, end = int(start), start + length
        while at < end:
            answer = yield Read(self.partition, at, end - at, _MAX_BYTES, 0)
            messages, after = read_of(self.partition, answer)
            found += [each for each in messages if each.sequence < end]
            if after <= at:
                break  # gone meanwhile
            at = after  # also behind what nobody can decode
        return found


def _check(sequence: object, what: str) -> None:
    if not isinstance(sequence, int) or isinstance(sequence, bool) or not 0 <= sequence <= _LAST:
        raise UsageError(f"{what} is {sequence!r}; a whole number from 0 is wanted")


def _listed_of(response: Response) -> DeadListed:
    if not isinstance(response, DeadListed):
        raise RemoteProtocolError(f"a request for dead letters got {response!r}")
    return response


def _resent_of(response: Response) -> Resent:
    if not isinstance(response, Resent):
        raise RemoteProtocolError(f"a request to resend got {response!r}")
    return response

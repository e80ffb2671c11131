"""Sends of very many batches are taken in one batch at a time."""

import pytest

from pulque.errors import InvalidRequestError
from pulque.testing.clock import ManualClock
from pulque.testing.raw import RawConnection
from pulque.wire.delay import Cancel, Move, Reschedule, Ticket
from pulque.wire.requests import Acks, Request, Send
from pulque.wire.responses import Sent
from tests.robustness.steps import LONGEST_STEP_MS, counted
from tests.unit.delay.running import StartDelay, delayed_batch

HOUR_MS = 3_600_000
MOST = 1024
TOO_MANY = 65_535


async def test_a_send_of_very_many_batches_is_taken_in_one_at_a_time(
    start_delay: StartDelay, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_delay()
    due_ms = clock.now_ms() + HOUR_MS
    names = [f"subject.{number}" for number in range(MOST)]
    batches = tuple(
        (name, delayed_batch([(b"x", due_ms)], name, first_id=number)[0])
        for number, name in enumerate(names)
    )
    raw = await RawConnection.open(running.server.url)
    with counted(monkeypatch) as steps:
        answer, count, longest_ms = await steps.of(raw, Send(Acks.DISK, 0, batches))
    raw.close()

    assert isinstance(answer, Sent)
    assert [outcome.code for outcome in answer.outcomes] == [0] * MOST
    assert count > MOST
    assert longest_ms < LONGEST_STEP_MS


@pytest.mark.parametrize(
    "request_of",
    [
        Cancel(tuple(Ticket(bytes(16)) for _ in range(TOO_MANY))),
        Reschedule(tuple(Move(bytes(16), 0, 1) for _ in range(TOO_MANY))),
        Send(Acks.DISK, 0, (("subject", b""),) * TOO_MANY),
    ],
    ids=lambda request: type(request).__name__,
)
async def test_a_list_that_is_too_long_is_refused_before_it_is_built(
    start_delay: StartDelay, monkeypatch: pytest.MonkeyPatch, request_of: Request
) -> None:
    running = await start_delay()
    raw = await RawConnection.open(running.server.url)
    with counted(monkeypatch) as steps:
        answer, _, longest_ms = await steps.of(raw, request_of)
    raw.close()

    assert isinstance(answer, InvalidRequestError)
    assert longest_ms < LONGEST_STEP_MS

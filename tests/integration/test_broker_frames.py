"""The protocol against a real process, frame by frame: what a kill changes, and what not."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from pulque.errors import DisconnectedError, ErrorCode, StaleSettleError
from pulque.model.pack import ProducedBy
from pulque.testing.process import BrokerProcess
from pulque.testing.raw import RawConnection, expect, pack_batch
from pulque.wire.requests import Acks, Send
from pulque.wire.responses import Sent

pytestmark = pytest.mark.server


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [str(number).encode() for number in range(start, start + count)]


@pytest.mark.accepts("004-09", "003-30", "003-60")
async def test_deliveries_and_batches_are_known_again_after_a_kill(
    start_broker: Callable[..., BrokerProcess],
) -> None:
    broker = start_broker()
    by = ProducedBy(9, 1, 0)
    async with await RawConnection.open(broker.url) as raw:
        sent = await raw.send("orders", numbered(5), acks=Acks.DISK, produced_by=by)
        held = await raw.pull("orders")
        await raw.settle(held.runs[0], last=1)
    broker.kill()
    broker.restart()

    async with await RawConnection.open(broker.url) as raw:
        again = await raw.send("orders", numbered(5), acks=Acks.DISK, produced_by=by)
        got = await raw.pull("orders")
        late = await raw.settle(held.runs[0], first=2)

    assert (again.first_sequence, again.is_duplicate) == (sent.first_sequence, True)
    assert got.bodies == numbered(3, 2)
    assert got.runs[0].tenure == held.runs[0].tenure
    assert late.settled == 5


async def test_a_settle_of_before_the_kill_does_not_count_for_what_was_handed_out_after(
    start_broker: Callable[..., BrokerProcess],
) -> None:
    broker = start_broker()
    async with await RawConnection.open(broker.url) as raw:
        await raw.send("orders", numbered(2), acks=Acks.DISK)
        before = await raw.pull("orders")
        await raw.settle(before.runs[0])
    broker.kill()
    broker.restart()

    async with await RawConnection.open(broker.url) as raw:
        await raw.send("orders", numbered(2, 2), acks=Acks.DISK)
        after = await raw.pull("orders")
        assert (after.runs[0].first_pull, after.runs[0].tenure.start) == (2, 2)
        with pytest.raises(StaleSettleError):
            await raw.settle(after.runs[0], tenure=before.runs[0].tenure)
        assert (await raw.settle(after.runs[0])).settled == 4


async def test_sends_on_their_way_are_answered_when_the_broker_is_stopped(
    start_broker: Callable[..., BrokerProcess],
) -> None:
    broker = start_broker()
    async with await RawConnection.open(broker.url) as raw:
        for _ in range(200):
            batch = pack_batch("orders", [b"x" * 1000])
            await raw.put(Send(Acks.DISK, 10_000, (("orders", batch),)))
        _, first = await raw.get()
        stopped = asyncio.get_running_loop().run_in_executor(None, broker.stop)
        answers = [expect(first, Sent), *await all_answers(raw)]
        assert await stopped == 0
    broker.restart()

    async with await RawConnection.open(broker.url) as raw:
        answer, _ = await raw.read("orders")
    confirmed = [a.outcomes[0] for a in answers if a.outcomes[0].code is ErrorCode.NONE]
    assert len(confirmed) == len(answers)
    assert answer.end >= len(confirmed)


async def all_answers(raw: RawConnection) -> list[Sent]:
    """Return what is answered until the connection ends."""
    found = []
    with suppress(DisconnectedError, ConnectionResetError):
        while True:
            found.append(expect((await raw.get())[1], Sent))
    return found

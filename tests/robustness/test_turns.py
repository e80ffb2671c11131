"""What falls between two turns of the event loop: neither lost, nor doubled, nor unanswered."""

import asyncio
from contextlib import suppress

import pytest

from pulque.errors import ErrorCode, StorageFullError
from pulque.model.batch import Flag, read_header
from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.rules.dedup import Dedup
from pulque.testing.files import MemoryFileSystem
from pulque.wire.requests import Nacked, Settle
from tests.robustness.inside import Inside, open_inside
from tests.robustness.raw import make_batch, messages_in


async def turns() -> None:
    """Let everything that is scheduled run."""
    for _ in range(3):
        await asyncio.sleep(0)


async def until_redelivered(inside: Inside) -> None:
    async with asyncio.timeout(5):
        while not inside.parts.redeliverer.redelivered:  # noqa: ASYNC110  # a count, not an event
            await asyncio.sleep(0.001)


async def test_a_send_that_found_no_room_is_answered_though_its_place_was_taken() -> None:
    files = MemoryFileSystem()
    async with open_inside(files) as inside:
        inside.send("a", b"0")
        await turns()
        refused = inside.send("a", b"1")
        files.fail_after(1, StorageFullError("no room"))
        inside.send("new", b"makes a partition, so all that waits is written at once")
        stored = inside.send("a", b"2")
        await turns()

        assert [outcome.code for outcome in refused] == [ErrorCode.STORAGE_FULL]
        assert [(o.code, o.first_sequence) for o in stored] == [(ErrorCode.NONE, 1)]
        assert inside.committer.waiting_bytes == 0
        assert not inside.failures


async def test_what_a_checkpoint_could_not_write_is_in_the_next_one() -> None:
    files = MemoryFileSystem()
    async with open_inside(files) as inside:
        for body in (b"0", b"1"):
            inside.send("a", body)
        await turns()
        inside.pull("a", max_messages=2)
        inside.send("a", b"2")
        files.fail_after(1, StorageFullError("no room"))
        with suppress(StorageFullError):
            await inside.housekeeper.checkpoint()
        await inside.housekeeper.checkpoint()

    async with open_inside(files) as again:
        (subscription,) = again.state.consumption.subscriptions.values()

        assert subscription.held_count == 2
        assert not again.pull("a").deliveries[0].first_sequence


@pytest.mark.parametrize("where", ["queued", "written"])
async def test_a_message_is_redelivered_once_though_a_checkpoint_came_between(
    where: str,
) -> None:
    files = MemoryFileSystem()
    async with open_inside(files) as inside:
        inside.send("a", b"0")
        await turns()
        (delivered,) = inside.pull("a").deliveries
        checkpoints = []
        submit = inside.committer.submit

        def checkpoint_then_submit(*arguments: object) -> None:
            if where == "written":
                asyncio.get_running_loop().call_soon(begin)
            submit(*arguments)  # type: ignore[arg-type]
            if where == "queued":
                begin()

        def begin() -> None:
            checkpoints.append(asyncio.ensure_future(inside.housekeeper.checkpoint()))

        inside.committer.submit = checkpoint_then_submit  # type: ignore[assignment, method-assign]
        inside.parts.settler.settle(
            Settle("a", "g", "c", 1, delivered.tenure, 0, 0, (Nacked(0, -1, "no"),))
        )
        await until_redelivered(inside)
        await asyncio.gather(*checkpoints)

    async with open_inside(files) as again:
        await asyncio.sleep(0.05)
        await turns()
        (retried,) = again.pull("%retry%a%g").deliveries

        assert retried.count == 1
        assert not isinstance(retried.records, memoryview | bytes)
        assert len(messages_in("%retry%a%g", b"".join(retried.records))) == 1


def test_producers_that_were_silent_longest_are_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pulque.rules.dedup.MOST_PRODUCERS", 2)
    dedup = Dedup()
    headers = [
        read_header(make_batch("a", [b"x"], producer=number))._replace(flags=Flag.NAMED_PRODUCER)
        for number in (1, 2, 3)
    ]
    for at_ms, header in enumerate(headers):
        dedup.stored(PartitionId(1), header, ConsumeSequence(at_ms), at_ms)
    dedup.forget_idle(10)

    assert [dedup.find(PartitionId(1), header) for header in headers] == [None, 1, 2]

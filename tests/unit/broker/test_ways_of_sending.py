"""However batches come, alone or together, at once or in turn: the same answers, the same log."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from pulque.errors import ErrorCode
from pulque.model.pack import ProducedBy
from pulque.testing.raw import RawConnection, expect, pack_batch
from pulque.wire.requests import Acks, Send, encode_request
from pulque.wire.responses import Outcome, Sent
from tests.unit.broker.running import Running, Start

Batches = list[tuple[str, bytes]]
PARTITIONS = ("orders", "bills", "%retry%orders%kitchen", "../x", "orders#p9")
FIRST_ID = 1000


def some_batches(seed: int) -> Batches:
    """Return batches of all kinds: good ones, some again, some strayed, cut or not allowed."""
    chance = random.Random(seed)
    batches: Batches = []
    for number in range(60):
        partition = chance.choices(PARTITIONS, (20, 20, 1, 1, 1))[0]
        bodies = [b"%d" % number] * chance.choice((1, 1, 1, 5))
        by = ProducedBy(chance.choice((0, 7)), 0, number)
        batch = pack_batch(partition, bodies, produced_by=by)
        what = chance.random()
        if what < 0.1 and batches:
            partition, batch = chance.choice(batches)
        elif what < 0.15:
            batch = pack_batch("strayed", bodies)
        elif what < 0.2:
            batch = batch[: chance.randrange(len(batch))]
        batches.append((partition, batch))
    return batches


async def in_turn(raw: RawConnection, batches: Batches, acks: Acks) -> list[Outcome]:
    """Send each batch alone, and wait for its answer."""
    answers = [await raw.ask(Send(acks, 10_000, (each,)), Sent) for each in batches]
    return [outcome for answer in answers for outcome in answer.outcomes]


async def at_once(raw: RawConnection, batches: Batches, acks: Acks) -> list[Outcome]:
    """Send each batch alone, all in one piece of bytes."""
    frames = [
        b"".join(encode_request(Send(acks, 10_000, (each,)), FIRST_ID + index, 0))
        for index, each in enumerate(batches)
    ]
    await raw.put_bytes(b"".join(frames))
    answers = [await raw.answer_to(FIRST_ID + index) for index in range(len(batches))]
    return [outcome for answer in answers for outcome in expect(answer, Sent).outcomes]


async def together(raw: RawConnection, batches: Batches, acks: Acks) -> list[Outcome]:
    """Send all batches in one request."""
    return list((await raw.ask(Send(acks, 10_000, tuple(batches)), Sent)).outcomes)


async def stored(running: Running) -> dict[str, list[bytes]]:
    """Return all that is there."""
    raw = await running.connect()
    names = [found["name"] for found in (await raw.status())["partitions"]]
    return {name: [m.body for m in (await raw.read(name, 0))[1]] for name in sorted(names)}


def told(outcomes: Sequence[Outcome]) -> list[tuple[ErrorCode, int, str]]:
    """Return outcomes without what depends on the time.

    A batch that comes again before it is confirmed shares the first one's outcome, so whether
    it counts as a duplicate does, too.
    """
    return [(o.code, o.first_sequence, o.text) for o in outcomes]


@pytest.mark.parametrize("acks", [Acks.MEMORY, Acks.DISK])
@pytest.mark.parametrize("seed", range(3))
async def test_the_way_makes_no_difference(
    start: Start, tmp_path: Path, seed: int, acks: Acks
) -> None:
    batches = some_batches(seed)
    found = []
    for way in (in_turn, at_once, together):
        running = await start(tmp_path / way.__name__)
        outcomes = told(await way(await running.connect(), batches, acks))
        found.append((outcomes, await stored(running)))
        again = await running.restarted()
        assert await stored(again) == found[-1][1]
        await again.close()

    assert found[0] == found[1] == found[2]
    codes = {code for code, *_ in found[0][0]}
    assert {ErrorCode.NONE, ErrorCode.INVALID_BATCH} <= codes
    assert len(set(batches)) < len(batches)


async def test_senders_in_one_turn_share_a_write_and_all_are_answered(running: Running) -> None:
    raws = [await running.connect() for _ in range(8)]
    for turn in range(5):
        ids = [
            await raw.put(Send(Acks.DISK, 10_000, (("orders", pack_batch("orders", [b"x"])),)))
            for raw in raws
        ]
        answers = [
            expect(await raw.answer_to(request), Sent)
            for raw, request in zip(raws, ids, strict=True)
        ]
        firsts = sorted(answer.outcomes[0].first_sequence for answer in answers)
        assert firsts == list(range(8 * turn, 8 * turn + 8))

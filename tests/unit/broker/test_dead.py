"""The dead letter office: letters are shown, resent once, or given up, and it lasts."""

from collections.abc import Sequence

import pytest

from pulque.errors import (
    InvalidNameError,
    InvalidRequestError,
    MessageTooLargeError,
    PulqueError,
)
from pulque.model.batch import seed_of
from pulque.model.message import Message
from pulque.model.pack import BatchPacker
from pulque.testing.raw import RawConnection
from pulque.wire.dead import Dead, DeadListed, Resend, Resent
from pulque.wire.requests import Acks, Send
from pulque.wire.responses import Sent
from tests.unit.broker.running import Running, Start, eventually, numbered

RETRY, DEAD = "%retry%orders%g", "%dead%orders%g"
ONE_ATTEMPT = {"attempts": 1}
LAST = 2**64 - 1


async def bury(raw: RawConnection, bodies: Sequence[bytes], group: str = "g") -> None:
    """Let messages fail for good."""
    packer = BatchPacker()
    for body in bodies:
        packer.add(body, key="k", tags=("red",), headers={"who": "me"})
    batch = packer.encode(
        seed=seed_of("orders"), ids=bytes(range(16)) * len(bodies), created_at_ms=7
    )
    await raw.ask(Send(Acks.MEMORY, 1000, (("orders", batch),)), Sent)
    (run,) = (await raw.pull("orders", group=group)).runs
    nacked = {run.first_pull + i: f"reason {i}" for i in range(run.length)}
    before = len((await raw.read(f"%dead%orders%{group}"))[1])
    await raw.settle(run, group=group, nacked=nacked)

    async def is_dead() -> bool:
        return len((await raw.read(f"%dead%orders%{group}"))[1]) == before + run.length

    await eventually(is_dead)


async def listed(
    raw: RawConnection, first: int = 0, last: int = LAST, most: int = 1000, group: str = "g"
) -> DeadListed:
    return await raw.ask(Dead("orders", group, first, last, most), DeadListed)


async def purge(raw: RawConnection, last: int = LAST) -> int:
    return (await raw.ask(Dead("orders", "g", 0, last, 0, is_purge=True), DeadListed)).count


async def resend(
    raw: RawConnection,
    *sequences: int,
    body: bytes | None = None,
    headers: tuple[tuple[str, str], ...] | None = None,
) -> Resent:
    request = Resend(
        "orders", "g", sequences, body is not None, body or b"", headers is not None, headers or ()
    )
    return await raw.ask(request, Resent)


async def retried(raw: RawConnection) -> list[Message]:
    return (await raw.read(RETRY))[1]


async def test_letters_are_named_until_somebody_deals_with_them(start: Start) -> None:
    raw = await (await start(retry=ONE_ATTEMPT)).connect()
    assert await listed(raw) == DeadListed(0, 0, 0, ())  # type: ignore[arg-type]
    await bury(raw, numbered(6))

    assert (await listed(raw)).ranges == ((0, 6),)
    assert await resend(raw, 2) == Resent((2,), (), ())
    assert await purge(raw, last=0) == 1

    found = await listed(raw)
    assert (found.start, found.end, found.count, found.ranges) == (0, 6, 4, ((1, 1), (3, 3)))
    assert (await listed(raw, first=4)).ranges == ((4, 2),)
    assert (await listed(raw, first=1, last=3)).ranges == ((1, 1), (3, 1))
    page = await listed(raw, most=2)
    assert (page.count, page.ranges) == (4, ((1, 1), (3, 1)))
    assert (await listed(raw, group="other")).count == 0


async def test_a_resent_letter_comes_as_a_first_attempt_to_its_group_only(start: Start) -> None:
    raw = await (await start(retry={"attempts": 2, "delays": "0s"})).connect()
    await raw.send("orders", [b"x"])
    (first,) = (await raw.pull("orders")).runs
    await raw.settle(first, nacked={0: "once"})
    (second,) = (await raw.pull(RETRY, timeout_ms=5000)).runs
    await raw.settle(second, nacked={0: "twice"})

    async def is_dead() -> bool:
        return (await listed(raw)).count == 1

    await eventually(is_dead)
    await resend(raw, 0)

    (again,) = (await raw.pull(RETRY, timeout_ms=5000)).runs[0].messages
    assert (again.body, again.attempt, again.id) == (b"x", 1, first.messages[0].id)
    assert set(again.headers) == {"pulque.origin", "pulque.first"}
    assert again.headers["pulque.origin"] == f"{DEAD}/0"
    assert again.headers["pulque.first"] == "orders/0"
    other = await raw.pull("orders", "%retry%orders%h", group="h")
    assert other.bodies == [b"x"]


async def test_a_letter_keeps_what_is_not_edited(start: Start) -> None:
    raw = await (await start(retry=ONE_ATTEMPT)).connect()
    await bury(raw, numbered(3))

    await resend(raw, 0)
    await resend(raw, 1, body=b"new")
    await resend(raw, 2, headers=(("why", "fixed"),))

    as_it_was, new_body, new_headers = await retried(raw)
    ours = ("pulque.origin", "pulque.first")
    for message in (as_it_was, new_body, new_headers):
        assert (message.key, message.tags, message.created_at_ms) == ("k", ("red",), 7)
    shown = [{n: v for n, v in m.headers.items() if n not in ours} for m in await retried(raw)]
    assert shown == [{"who": "me"}, {"who": "me"}, {"why": "fixed"}]
    assert [m.body for m in await retried(raw)] == [b"0", b"new", b"2"]


async def test_a_letter_is_resent_once(start: Start) -> None:
    raw = await (await start(retry=ONE_ATTEMPT)).connect()
    await bury(raw, numbered(4))

    first = await raw.put(Resend("orders", "g", (0, 1)))
    second = await raw.put(Resend("orders", "g", (1, 2, 2, 99)))
    answers = [await raw.answer_to(first), await raw.answer_to(second)]
    await purge(raw, last=3)

    assert answers == [Resent((0, 1), (), ()), Resent((2,), (1,), (99,))]
    assert await resend(raw, 0, 3) == Resent((), (0, 3), ())
    assert [message.body for message in await retried(raw)] == numbered(3)


@pytest.mark.parametrize("is_clean", [True, False], ids=["stopped", "killed"])
async def test_what_was_dealt_with_stays_so(start: Start, *, is_clean: bool) -> None:
    running = await start(retry=ONE_ATTEMPT)
    raw = await running.connect()
    await bury(raw, numbered(5))
    await purge(raw, last=1)
    await resend(raw, 3)

    again: Running
    if is_clean:
        again = await running.restarted()
    else:
        again = await start(running.as_if_killed("killed"), retry=ONE_ATTEMPT)
    raw = await again.connect()

    assert (await listed(raw)).ranges == ((2, 1), (4, 1))
    assert await resend(raw, 3) == Resent((), (3,), ())
    assert [message.body for message in await retried(raw)] == [b"3"]
    third = await again.restarted()
    assert (await listed(await third.connect())).ranges == ((2, 1), (4, 1))
    await third.close()


async def test_a_resent_letter_that_fails_again_is_a_new_letter(start: Start) -> None:
    raw = await (await start(retry=ONE_ATTEMPT)).connect()
    await bury(raw, [b"x"])
    await resend(raw, 0)
    (run,) = (await raw.pull(RETRY, timeout_ms=5000)).runs
    await raw.settle(run, nacked={0: "no"})

    async def is_dead_again() -> bool:
        return (await listed(raw)).ranges == ((1, 1),)

    await eventually(is_dead_again)
    (_, letter) = (await raw.read(DEAD))[1]
    assert (letter.attempt, letter.headers["pulque.first"]) == (1, "orders/0")


@pytest.mark.parametrize(
    ("request_", "kind", "text"),
    [
        (Dead("orders", "g", 5, 4, 1), InvalidRequestError, "after the last"),
        (Dead("or%ders", "g", 0, 4, 1), InvalidNameError, "subject"),
        (Dead("orders", "g%h", 0, 4, 1), InvalidNameError, ""),
        (Dead("orders", "", 0, 4, 1), InvalidNameError, ""),
        (Resend("orders", "g", ()), InvalidRequestError, "1 to 1000"),
        (Resend("orders", "g", tuple(range(1001))), InvalidRequestError, "at most 1000"),
        (Resend("orders", "g", (1, 2), True, b"x"), InvalidRequestError, "one at a time"),
        (
            Resend("orders", "g", (1, 2), replaces_headers=True),
            InvalidRequestError,
            "one at a time",
        ),
        (Resend("orders", "g", (1,), headers=(("", "x"),)), InvalidRequestError, "headers"),
        (Resend("orders", "g", (1,), headers=(("a", "\0"),)), InvalidRequestError, "headers"),
        (
            Resend("orders", "g", (1,), headers=(("pulque.first", "x"),)),
            InvalidRequestError,
            "are ours",
        ),
        (Resend("orders", "g", (1,), True, bytes(5000)), MessageTooLargeError, "at most 4096"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    start: Start, request_: Dead | Resend, kind: type[PulqueError], text: str
) -> None:
    raw = await (await start(limits={"max_message": "4KiB"})).connect()

    answer = await raw.answer_to(await raw.put(request_))

    assert isinstance(answer, kind)
    assert text in str(answer)


async def test_letters_of_nobody_are_missing(raw: RawConnection) -> None:
    assert await resend(raw, 0) == Resent((), (), (0,))
    assert await purge(raw) == 0

"""What a pull hands out: first what the consumer holds, then new messages, never too much."""

import pytest

from pulque.errors import (
    ErrorCode,
    FencedError,
    InvalidNameError,
    InvalidRequestError,
    NotAllowedError,
    OverloadedError,
)
from pulque.model.batch import Codec
from pulque.testing.raw import Handed, RawConnection, pack_batch
from pulque.wire.requests import EARLIEST, LATEST, Acks, Pull, Send, Wanted
from pulque.wire.responses import Pulled, Sent
from tests.unit.broker.running import Running, Start, numbered


def pulls(got: Handed) -> list[tuple[int, int, int]]:
    """Return first pull sequence, first consume sequence and length of each run."""
    return [(run.first_pull, run.first_sequence, run.length) for run in got.runs]


# -- own ones first, then new ones --------------------------------------------------------------


@pytest.mark.accepts("003-30", "003-31", "003-32")
async def test_own_unsettled_messages_come_first_then_new_ones(raw: RawConnection) -> None:
    await raw.send("orders", numbered(3))
    await raw.pull("orders")
    await raw.send("orders", numbered(2, 3))

    got = await raw.pull("orders")

    assert pulls(got) == [(0, 0, 3), (3, 3, 2)]
    assert got.bodies == numbered(5)


@pytest.mark.accepts("003-30", "003-31")
async def test_what_another_consumer_holds_is_not_handed_out(raw: RawConnection) -> None:
    await raw.send("orders", numbered(5))
    await raw.pull("orders", consumer="c1", max_messages=3)

    got = await raw.pull("orders", consumer="c2")

    assert pulls(got) == [(0, 3, 2)]


@pytest.mark.accepts("000-26")
async def test_the_next_pull_goes_on_after_the_last_delivery(raw: RawConnection) -> None:
    await raw.send("orders", numbered(6))
    first = await raw.pull("orders", max_messages=2)
    assert first.states[0].next_pull == 2

    second = await raw.pull("orders", max_messages=2, expected=2)
    third = await raw.pull("orders", max_messages=2, expected=4)

    assert pulls(second) == [(2, 2, 2)]
    assert pulls(third) == [(4, 4, 2)]


async def test_an_answer_that_was_lost_is_given_again(raw: RawConnection) -> None:
    await raw.send("orders", numbered(4))
    await raw.pull("orders", max_messages=2, expected=0)
    lost = await raw.pull("orders", max_messages=2, expected=2)

    again = await raw.pull("orders", max_messages=2, expected=2)

    assert pulls(again) == pulls(lost) == [(2, 2, 2)]
    assert again.bodies == lost.bodies


@pytest.mark.accepts("003-60", "003-30")
async def test_a_restarted_consumer_gets_what_it_held_from_its_settled_position(
    raw: RawConnection,
) -> None:
    await raw.send("orders", numbered(5))
    before = await raw.pull("orders", incarnation=1)
    await raw.settle(before.runs[0], last=1)

    after = await raw.pull("orders", incarnation=2)

    assert after.states[0].settled == 2
    assert pulls(after) == [(2, 2, 3)]
    assert after.bodies == numbered(3, 2)


async def test_settled_messages_do_not_come_again(raw: RawConnection) -> None:
    await raw.send("orders", numbered(3))
    got = await raw.pull("orders")
    await raw.settle(got.runs[0])

    assert (await raw.pull("orders")).runs == ()
    assert (await raw.pull("orders", consumer="d")).runs == ()


async def test_what_the_consumer_has_and_has_not_settled_yet_is_not_sent_again(
    raw: RawConnection,
) -> None:
    await raw.send("orders", numbered(2))
    await raw.pull("orders")

    assert (await raw.pull("orders", expected=2)).runs == ()


@pytest.mark.accepts("000-23", "001-29")
async def test_a_pull_is_in_the_pull_log_with_the_positions_of_its_messages(
    raw: RawConnection,
) -> None:
    await raw.send("orders", numbered(6))
    for consumer, count in (("c1", 1), ("c2", 2), ("c1", 3)):
        expected = 1 if count == 3 else 0
        await raw.pull("orders", consumer=consumer, max_messages=count, expected=expected)

    again = await raw.pull("orders", consumer="c1")

    assert pulls(again) == [(0, 0, 1), (1, 3, 3)]


# -- never too much ---------------------------------------------------------------------------


@pytest.mark.accepts("000-05")
@pytest.mark.parametrize("most", [1, 2, 7, 1000])
async def test_never_more_messages_than_asked_for(raw: RawConnection, most: int) -> None:
    for number in range(5):
        await raw.send("orders", numbered(3, 3 * number))

    at = 0
    while (got := await raw.pull("orders", max_messages=most, expected=at)).runs:
        assert got.length <= most
        assert got.bodies == numbered(got.length, at)
        at += got.length

    assert at == 15


@pytest.mark.accepts("000-05")
async def test_the_number_counts_over_all_partitions(raw: RawConnection) -> None:
    for name in ("a", "b", "c"):
        await raw.send(name, numbered(3))
    await raw.pull("a", max_messages=2)

    got = await raw.pull("a", "b", "c", max_messages=5)

    assert [(run.partition, run.length) for run in got.runs] == [("a", 2), ("b", 3)]


async def test_the_broker_has_a_limit_of_its_own(start: Start) -> None:
    running = await start(limits={"max_pull_messages": 5})
    raw = await running.connect()
    await raw.send("orders", numbered(20))

    assert (await raw.pull("orders", max_messages=1000)).length == 5


async def test_a_consumer_never_holds_more_than_the_limit(start: Start) -> None:
    running = await start(limits={"max_held": 5})
    raw = await running.connect()
    await raw.send("orders", numbered(20))

    first = await raw.pull("orders", max_messages=3, expected=0)
    second = await raw.pull("orders", max_messages=1000, expected=3)
    third = await raw.pull("orders", max_messages=1000, expected=5)
    await raw.settle(first.runs[0])
    fourth = await raw.pull("orders", max_messages=1000, expected=5)

    assert [each.length for each in (first, second, third, fourth)] == [3, 2, 0, 3]


async def test_deliveries_have_no_gap_though_bytes_cut_what_is_held_short(
    raw: RawConnection,
) -> None:
    """The first messages of a batch are small and its last is large: an estimate is wrong."""
    uneven = [b"s"] * 9 + [b"L" * 9000]
    await raw.send("orders", uneven)
    await raw.send("other", [b"o"])
    await raw.pull("orders")
    await raw.send("orders", [b"new"])

    at = 0
    bodies: list[bytes] = []
    while (got := await raw.pull("orders", expected=at, max_bytes=2000)).runs:
        for run in got.runs:
            assert run.first_pull == at
            at += run.length
        bodies += got.bodies

    assert bodies == [*uneven, b"new"]


@pytest.mark.parametrize("codec", Codec)
async def test_part_of_a_batch_can_be_pulled_whatever_its_codec(
    raw: RawConnection, codec: Codec
) -> None:
    batch = pack_batch("orders", numbered(10), codec=codec)
    await raw.ask(Send(Acks.MEMORY, 1000, (("orders", batch),)), Sent)

    first = await raw.pull("orders", max_messages=4, expected=0)
    second = await raw.pull("orders", max_messages=4, expected=4)
    again = await raw.pull("orders", max_messages=3, expected=1)

    assert first.bodies == numbered(4)
    assert second.bodies == numbered(4, 4)
    assert again.bodies == numbered(3, 1)


# -- several partitions, groups, consumers ------------------------------------------------------


async def test_a_new_consumer_can_pull_several_partitions_at_once(raw: RawConnection) -> None:
    """Each of the subscriptions that one pull opens has its own number and its own pull log."""
    for name in ("a", "b", "c"):
        await raw.send(name, [f"{name}{number}".encode() for number in range(2)])

    got = await raw.pull("a", "b", "c")
    for run in got.runs:
        await raw.settle(run)

    assert [(run.partition, run.bodies) for run in got.runs] == [
        (name, [f"{name}0".encode(), f"{name}1".encode()]) for name in ("a", "b", "c")
    ]
    assert (await raw.pull("a", "b", "c")).runs == ()
    status = await raw.status()
    assert {(s["partition"], s["settled"]) for s in status["subscriptions"]} == {
        ("a", 2),
        ("b", 2),
        ("c", 2),
    }


async def test_groups_do_not_see_each_other(raw: RawConnection) -> None:
    await raw.send("orders", numbered(4))
    got = await raw.pull("orders", group="g")
    await raw.settle(got.runs[0], group="g")

    assert (await raw.pull("orders", group="h")).bodies == numbered(4)


@pytest.mark.parametrize(
    ("start_at", "expected"), [(EARLIEST, 0), (LATEST, 5), (2, 2), (5, 5), (-7, 0)]
)
async def test_a_new_group_starts_where_it_says(
    raw: RawConnection, start_at: int, expected: int
) -> None:
    await raw.send("orders", numbered(5))
    await raw.pull("orders", start_at=start_at, max_messages=1000)
    await raw.send("orders", numbered(1, 5))

    got = await raw.pull("orders", start_at=start_at)

    assert got.runs[0].first_sequence == expected
    assert got.bodies == numbered(6 - expected, expected)


async def test_a_group_that_starts_at_a_message_to_come_gets_none_before_it(
    raw: RawConnection,
) -> None:
    await raw.send("orders", numbered(5))
    assert (await raw.pull("orders", start_at=7)).runs == ()
    await raw.send("orders", numbered(5, 5))

    assert (await raw.pull("orders", start_at=7)).bodies == numbered(3, 7)


async def test_where_a_group_stands_does_not_change_with_what_its_next_pull_says(
    raw: RawConnection,
) -> None:
    await raw.send("orders", numbered(5))
    await raw.pull("orders", max_messages=1, start_at=EARLIEST)

    got = await raw.pull("orders", consumer="d", start_at=LATEST)

    assert got.bodies == numbered(4, 1)


# -- positions that cannot be -------------------------------------------------------------------


async def test_a_position_beyond_what_was_handed_out_is_lost(raw: RawConnection) -> None:
    await raw.send("orders", numbered(5))
    await raw.pull("orders", max_messages=2)

    got = await raw.pull("orders", expected=3)

    assert got.states[0].code is ErrorCode.POSITION_LOST
    assert (got.states[0].settled, got.states[0].next_pull) == (0, 2)
    assert got.runs == ()


async def test_a_lost_position_of_one_partition_does_not_hold_up_the_others(
    raw: RawConnection,
) -> None:
    await raw.send("a", numbered(1))

    got = await raw.pull("a", "unknown", expected=[0, 7], timeout_ms=30_000)

    assert [state.code for state in got.states] == [ErrorCode.NONE, ErrorCode.POSITION_LOST]
    assert [(run.partition, run.bodies) for run in got.runs] == [("a", numbered(1))]


@pytest.mark.parametrize("expected", [0, 3, -1])
async def test_a_position_below_the_settled_one_means_the_settled_one(
    raw: RawConnection, expected: int
) -> None:
    await raw.send("orders", numbered(5))
    got = await raw.pull("orders")
    await raw.settle(got.runs[0], last=2)

    again = await raw.pull("orders", expected=expected)

    assert pulls(again) == [(3, 3, 2)]


# -- requests that cannot be --------------------------------------------------------------------


def asked(**changes: object) -> Pull:
    fields: dict[str, object] = {
        "group": "g",
        "consumer": "c",
        "incarnation": 1,
        "max_messages": 1,
        "max_bytes": 1,
        "timeout_ms": 0,
        "start_at": EARLIEST,
        "wanted": (Wanted("orders", 0),),
    }
    return Pull(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.accepts("003-29")
@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"group": ""}, InvalidNameError),
        ({"group": "a%b"}, InvalidNameError),
        ({"group": "x" * 300}, InvalidNameError),
        ({"consumer": ""}, InvalidNameError),
        ({"consumer": "a\nb"}, InvalidNameError),
        ({"wanted": ()}, InvalidRequestError),
        ({"wanted": (Wanted("", 0),)}, InvalidNameError),
        ({"wanted": (Wanted("../x", 0),)}, InvalidNameError),
        ({"wanted": (Wanted("a\x00b", 0),)}, InvalidNameError),
        ({"wanted": (Wanted("a", 0), Wanted("a", 0))}, InvalidRequestError),
        ({"wanted": (Wanted("%retry%orders%other", 0),)}, NotAllowedError),
        ({"wanted": tuple(Wanted(f"s{i}", 0) for i in range(10_001))}, InvalidRequestError),
        ({"max_messages": 0}, InvalidRequestError),
        ({"max_bytes": 0}, InvalidRequestError),
    ],
)
async def test_a_pull_that_cannot_be_is_refused_and_the_connection_lives(
    raw: RawConnection, changes: dict[str, object], error: type[Exception]
) -> None:
    await raw.send("orders", numbered(1))

    with pytest.raises(error):
        await raw.ask(asked(**changes), Pulled)

    assert (await raw.pull("orders")).bodies == numbered(1)
    assert (await raw.status())["pulls_waiting"] == 0


async def test_a_group_may_pull_its_own_retry_partition(raw: RawConnection) -> None:
    assert (await raw.pull("orders", "%retry%orders%g")).runs == ()


async def test_one_connection_may_not_wait_for_too_many_partitions(
    running: Running, raw: RawConnection
) -> None:
    many = tuple(Wanted(f"s{i}", 0) for i in range(6000))
    await raw.put(asked(wanted=many, timeout_ms=30_000))

    with pytest.raises(OverloadedError):
        await raw.ask(asked(wanted=many, timeout_ms=30_000, consumer="d"), Pulled)

    other = await running.connect()
    assert (await other.status())["pulls_waiting"] == 1


# -- twins --------------------------------------------------------------------------------------


async def test_an_older_incarnation_is_fenced_off(running: Running, raw: RawConnection) -> None:
    await raw.send("orders", numbered(2))
    held = await raw.pull("orders", incarnation=5)
    await raw.pull("orders", incarnation=6)

    with pytest.raises(FencedError):
        await raw.pull("orders", incarnation=5)
    with pytest.raises(FencedError):
        await raw.settle(held.runs[0], incarnation=5)
    with pytest.raises(FencedError):
        await raw.heartbeat(incarnation=5)

    assert (await raw.settle(held.runs[0], incarnation=6)).settled == 2


async def test_a_newer_incarnation_that_only_waits_fences_the_older_off(
    running: Running, raw: RawConnection
) -> None:
    await raw.send("orders", numbered(1))
    got = await raw.pull("orders", incarnation=1)
    await raw.settle(got.runs[0], incarnation=1)

    await raw.pull("orders", incarnation=2, expected=1)

    with pytest.raises(FencedError):
        await raw.pull("orders", incarnation=1, expected=1)


async def test_a_retry_partition_that_came_later_has_a_pull_log_of_its_own(
    raw: RawConnection,
) -> None:
    await raw.send("orders", numbered(2))
    got = await raw.pull("orders", "%retry%orders%g")
    await raw.settle(got.runs[0], nacked={1: "no"})

    retried = await raw.pull("%retry%orders%g", "orders", expected=[0, 2], timeout_ms=5000)

    assert [(run.partition, run.first_pull) for run in retried.runs] == [("%retry%orders%g", 0)]
    assert retried.bodies == [b"1"]

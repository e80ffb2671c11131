"""Which partition a message goes to: by its order key, else in turn, round what is not fit."""

from collections import Counter
from itertools import pairwise

import google_crc32c
import hypothesis.strategies as st
import pytest
from hypothesis import given

from pulque.client.connection.url import Address
from pulque.client.routing.broker_health import Breaker
from pulque.client.routing.route_table import RouteKey, RouteTable
from pulque.client.routing.targets import HOME, Target, Targets
from pulque.errors import DisconnectedError
from pulque.model.names import PartitionName, Pattern
from pulque.model.routes import ALL_SLOTS, PartitionRoute, Route, RouteKind, Slots
from pulque.wire.routes import ChangedRoute

NOW = 1000.0


def route(cuts: list[int], *, version: int = 1, writable: set[int] | None = None) -> Route:
    """A subject on as many broker groups as there are ranges between the cuts."""
    bounds = [0, *sorted(cuts), 1024]
    return Route(
        Pattern("orders"),
        version,
        tuple(
            PartitionRoute(
                PartitionName("orders"),
                f"g{number}",
                "127.0.0.1",
                7000 + number,
                writable is None or number in writable,
                Slots(start, end),
            )
            for number, (start, end) in enumerate(pairwise(bounds))
        ),
    )


def many(route: Route) -> Targets:
    table = RouteTable()
    table.take_in(RouteKey("orders"), route)
    return table.targets["orders"]


def fail(target: Target) -> None:
    for _ in range(Breaker.MOST_FAILURES):
        target.health.failed(NOW)


_cuts = st.lists(st.integers(1, 1023), min_size=1, max_size=5, unique=True)


@pytest.mark.accepts("002-08", "002-15", "002-17", "002-18")
@given(_cuts, st.text(min_size=1, max_size=20))
def test_an_order_key_belongs_to_the_partition_of_its_slot(cuts: list[int], key: str) -> None:
    targets = many(route(cuts))
    slot = google_crc32c.value(key.encode()) % 1024
    found = targets.pick(key, now=NOW)
    assert found.slots.start <= slot < found.slots.end
    for target in targets:
        target.health.answered(NOW, 30.0)
    assert targets.pick(key, now=NOW) is found, "slow answers do not break the order"


@given(_cuts, st.text(min_size=1, max_size=20))
def test_an_order_key_goes_elsewhere_while_its_partition_cannot_be_sent_to(
    cuts: list[int], key: str
) -> None:
    targets = many(route(cuts))
    own = targets.pick(key, now=NOW)
    fail(own)
    others = {targets.pick(key, now=NOW) for _ in range(5)}
    assert len(others) == 1, "all messages of the key go the same way"
    assert own not in others
    assert targets.pick(key, now=NOW + 2) is own, "and come back"


@pytest.mark.accepts("004-73")
@given(_cuts, st.integers(1, 5))
def test_messages_without_an_order_key_take_turns(cuts: list[int], rounds: int) -> None:
    targets = many(route(cuts))
    count = len(cuts) + 1
    picked = [targets.pick(None, now=NOW).broker_group for _ in range(rounds * count)]
    assert set(Counter(picked).values()) == {rounds}
    assert picked == picked[:count] * rounds


@given(_cuts, st.data())
def test_what_is_not_fit_is_passed_over_and_something_is_always_found(
    cuts: list[int], data: st.DataObject
) -> None:
    count = len(cuts) + 1
    numbers = st.sets(st.integers(0, count - 1))
    writable, slow, down, tried = (data.draw(numbers) for _ in range(4))
    targets = many(route(cuts, writable=writable))
    for number in slow:
        targets.all[number].health.answered(NOW, 5.0)
    for number in down:
        fail(targets.all[number])
    avoid = [targets.all[number] for number in tried]
    fit = writable - slow - down - tried
    picked = Counter(
        targets.all.index(targets.pick(None, now=NOW, avoid=avoid)) for _ in range(3 * count)
    )
    if fit:
        assert set(picked) == fit
        assert max(picked.values()) - min(picked.values()) <= 1
    elif writable:
        assert set(picked) <= writable, "what takes no messages comes last"


def test_of_those_that_fail_the_one_that_comes_back_first_is_the_least_bad() -> None:
    targets = many(route([300, 600]))
    first, second, third = targets
    for target, at in ((first, NOW), (second, NOW - 0.5), (third, NOW - 0.2)):
        target.health.failed(at, Breaker.LONG)
    assert targets.pick(None, now=NOW) is second
    first.health.answered(NOW, 5.0)
    assert targets.pick(None, now=NOW) is first, "slow is better than away"


def test_a_partition_that_refused_is_left_alone_for_a_while() -> None:
    targets = many(route([512]))
    first, second = targets
    first.refused(NOW)
    assert {targets.pick(None, now=NOW) for _ in range(4)} == {second}
    assert {targets.pick(None, now=NOW + 3) for _ in range(4)} == {first, second}


def test_a_breaker_that_is_half_open_lets_one_message_through() -> None:
    targets = many(route([512]))
    first, _ = targets
    fail(first)
    picked = [targets.pick(None, now=NOW + 2) for _ in range(6)]
    assert picked.count(first) == 1


def test_levels_follow_their_plain_partition() -> None:
    targets = many(route([512], writable={1}))
    assert {targets.pick(None, 9, NOW).partition for _ in range(4)} == {"orders#p9"}
    assert {targets.pick(None, 9, NOW).broker_group for _ in range(4)} == {"g1"}


# ── the table ──────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.tuples(_cuts, st.integers(0, 2**64 - 1)), min_size=1, max_size=6))
def test_the_table_keeps_what_was_heard_last(history: list[tuple[list[int], int]]) -> None:
    table = RouteTable()
    key = RouteKey("orders")
    before: tuple[PartitionRoute, ...] | None = None
    for cuts, version in history:
        heard = route(cuts, version=version)
        assert table.take_in(key, heard) == (heard.partitions != before)
        before = heard.partitions
        assert [each.version for each in table.known()] == [version]
        groups = [each.broker_group for each in table.targets["orders"]]
        assert groups == [each.broker_group for each in heard.partitions]
    assert table.address_of("g0") == Address("127.0.0.1", 7000)
    with pytest.raises(DisconnectedError, match="g9"):
        table.address_of("g9")


def test_a_new_route_keeps_what_is_known_of_the_brokers_in_it() -> None:
    table = RouteTable()
    table.take_in(RouteKey("orders"), route([512]))
    fail(table.targets["orders"].all[0])
    table.take_in(RouteKey("orders"), route([300, 600], version=2))
    targets = table.targets["orders"]
    assert {targets.pick(None, now=NOW).broker_group for _ in range(6)} == {"g1", "g2"}


def test_a_watch_brings_only_what_was_asked_for() -> None:
    table = RouteTable()
    table.take_in(RouteKey("orders"), route([512]))
    consumers = RouteKey("orders", "kitchen")
    table.take_in(consumers, route([512]))
    newer = route([512], version=2, writable={0})
    changed = [
        ChangedRoute(RouteKind.REALTIME, "", newer),
        ChangedRoute(RouteKind.REALTIME, "strangers", newer),
    ]
    assert table.take_in_changed(changed) == [RouteKey("orders")]
    assert table.take_in_changed(changed) == []
    assert {each.version for each in table.known()} == {1, 2}
    table.forget(consumers)
    assert [each.group for each in table.known()] == [""]


def test_nobody_serves_a_subject_whose_route_is_empty() -> None:
    table = RouteTable()
    table.take_in(RouteKey("orders"), Route(Pattern("orders"), 1, ()))
    assert "orders" not in table.targets


def test_without_a_host_a_partition_is_at_home() -> None:
    table = RouteTable()
    here = PartitionRoute(PartitionName("orders"), "broker", "", 0, sends=1)
    table.take_in(RouteKey("orders"), Route(Pattern("orders"), 1, (here,)))
    (target,) = table.targets["orders"]
    assert (target.place, target.address, target.slots) == (HOME, None, ALL_SLOTS)


@given(st.integers(1, 5), st.floats(0, 1, exclude_max=True))
def test_clients_that_send_once_begin_anywhere(count: int, drawn: float) -> None:
    names = [f"b{n}" for n in range(count)]
    table = RouteTable(draw=lambda: drawn)
    partitions = [PartitionRoute(PartitionName("s"), name, "h", 1) for name in names]
    table.take_in(RouteKey("s"), Route(Pattern("s"), 1, tuple(partitions)))

    picked = [table.targets["s"].pick(None).broker_group for _ in names]

    assert picked[0] == names[int(drawn * count) % count]
    assert sorted(picked) == names

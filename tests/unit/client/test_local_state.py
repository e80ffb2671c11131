"""What a consumer keeps over a restart: acks and nacks that its broker was not told."""

import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import pulque
import pulque.aio
from pulque.client.persistence import nack_spool as spool
from pulque.client.persistence.consumer_state import LocalState
from pulque.client.receiving.consumer_core import IncomingCore
from pulque.client.receiving.pull_options import PullOptions
from pulque.client.receiving.saved_positions import (
    KeptPosition,
    KeptRange,
    decode_positions,
    encode_positions,
)
from pulque.errors import ErrorCode, PulqueError
from pulque.model.message import Message
from pulque.model.names import ConsumerId, Group, PartitionName
from pulque.model.positions import Epoch, PullSequence, StartCount, Tenure
from pulque.testing.broker import InProcessBroker
from pulque.wire.responses import Pulled, State
from tests.nothing import check_nothing_comes


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def connect(pulque_broker: InProcessBroker, state: Path) -> Callable[[], pulque.Client]:
    """Connect like the same application after a restart."""
    return lambda: pulque.connect(pulque_broker.url, timeout=1, name="shop", state_dir=state)


GROUPS: dict[str, dict[str, Any]] = {"shared": {}, "broadcast": {"broadcast": True}}


def consumer_group(client: pulque.Client) -> str:
    """Return the group that the one consumer is in, as the broker knows it."""
    (group,) = {row["group"] for row in client.status()["subscriptions"]}
    return str(group)


def bodies(messages: list[pulque.ReceivedMessage]) -> list[str]:
    return [message.body.decode() for message in messages]


def kept(state: Path) -> dict[str, dict[str, object]]:
    """Return what stands in the one file of positions, by partition."""
    (path,) = state.glob("consumers/*.settled")
    found = json.loads(path.read_bytes().splitlines()[1])
    return dict(found["partitions"])


def spooled(state: Path) -> list[tuple[str, str, bytes]]:
    """Return partition, reason and body of the nacks in the spool."""
    return [
        (nack.partition, nack.reason, Message(nack.read_message(), 0).body)
        for path in state.glob("consumers/*.nacks")
        for nack in spool.Spool(path).read()
    ]


def settled_at_broker(client: pulque.Client, partition: str = "orders") -> list[int]:
    rows = client.status()["subscriptions"]
    return [row["settled"] for row in rows if row["partition"] == partition]


class TestAcks:
    @pytest.mark.accepts("000-21", "000-35")
    def test_acks_without_a_broker_are_told_after_the_restart_of_the_consumer(
        self, pulque_broker: InProcessBroker, connect: Callable[[], pulque.Client], state: Path
    ) -> None:
        with connect() as client:
            client.send_many("orders", [b"1", b"2", b"3", b"4"])
            consumer = client.consumer("orders", group="kitchen")
            first, second, _, _ = consumer.pull(timeout=10)
            pulque_broker.kill()
            first.ack()
            second.ack()
        position = kept(state)["orders"]
        assert (position["settled"], position["position"]) == (0, 2)

        pulque_broker.restart()
        with connect() as client:
            consumer = client.consumer("orders", group="kitchen")

            assert bodies(consumer.pull(timeout=10)) == ["3", "4"]
            consumer.settle()
            assert settled_at_broker(client) == [2]

    @pytest.mark.accepts("000-21")
    def test_the_position_is_written_while_all_is_well(
        self, connect: Callable[[], pulque.Client], state: Path
    ) -> None:
        with connect() as client:
            client.send_many("orders", [b"1", b"2", b"3"])
            consumer = client.consumer("orders", group="kitchen")
            consumer.ack_all(consumer.pull(timeout=10)[:2])
            consumer.settle()
        position = kept(state)["orders"]

        assert (position["settled"], position["position"]) == (2, 2)

    def test_they_are_told_after_the_broker_comes_back_to_the_same_consumer(
        self, pulque_broker: InProcessBroker, connect: Callable[[], pulque.Client]
    ) -> None:
        with connect() as client:
            client.send("orders", b"1")
            consumer = client.consumer("orders", group="kitchen")
            (message,) = consumer.pull(timeout=10)
            pulque_broker.kill()
            message.ack()
            pulque_broker.restart()

            assert consumer.pull(timeout=0.2) == []
            consumer.settle()
            assert settled_at_broker(client) == [1]

    def test_what_was_finished_for_one_broker_is_handed_out_by_another(
        self, pulque_broker: InProcessBroker, connect: Callable[[], pulque.Client], state: Path
    ) -> None:
        """Tenure, pull sequences and consume sequences are the same there."""
        with connect() as client:
            client.send_many("orders", [b"1", b"2"])
            consumer = client.consumer("orders", group="kitchen")
            messages = consumer.pull(timeout=10)
            pulque_broker.kill()
            consumer.ack_all(messages)
        assert kept(state)["orders"]["position"] == 2

        with InProcessBroker() as other:
            other.advance_time(10)
            with pulque.connect(other.url, name="shop", state_dir=state) as client:
                client.send_many("orders", [b"3", b"4"])
                consumer = client.consumer("orders", group="kitchen")

                assert bodies(consumer.pull(timeout=10)) == ["3", "4"]

    def test_after_the_lease_nothing_is_settled_that_others_have(
        self, pulque_broker: InProcessBroker, connect: Callable[[], pulque.Client]
    ) -> None:
        with connect() as client:
            client.send("orders", b"1")
            consumer = client.consumer("orders", group="kitchen")
            (message,) = consumer.pull(timeout=10)
            pulque_broker.kill()
            message.ack()
        pulque_broker.restart()
        pulque_broker.advance_time(60)

        with connect() as client:
            (again,) = client.consumer("orders", group="kitchen").pull(timeout=10)
            assert again.attempt == 2

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: data[:-10],
            lambda data: b"",
            lambda data: bytes(len(data)),
            lambda data: data.replace(b"kitchen", b"chicken"),
            lambda data: b"00000000\nnull\n",
        ],
    )
    def test_a_damaged_file_is_ignored_with_a_warning(
        self,
        pulque_broker: InProcessBroker,
        connect: Callable[[], pulque.Client],
        state: Path,
        caplog: pytest.LogCaptureFixture,
        damage: Callable[[bytes], bytes],
    ) -> None:
        with connect() as client:
            client.send("orders", b"1")
            consumer = client.consumer("orders", group="kitchen")
            (message,) = consumer.pull(timeout=10)
            pulque_broker.kill()
            message.ack()
        (path,) = state.glob("consumers/*.settled")
        path.write_bytes(damage(path.read_bytes()))
        pulque_broker.restart()

        with caplog.at_level(logging.WARNING, "pulque.client"), connect() as client:
            consumer = client.consumer("orders", group="kitchen")
            assert bodies(consumer.pull(timeout=10)) == ["1"]
        assert "kept positions ignored" in caplog.text

    def test_a_folder_that_cannot_be_written_costs_nothing_but_the_net(
        self, pulque_broker: InProcessBroker, tmp_path: Path
    ) -> None:
        (tmp_path / "file").touch()
        with pulque.connect(pulque_broker.url, state_dir=tmp_path / "file") as client:
            client.send("orders", b"1")
            consumer = client.consumer("orders", group="kitchen", consumer_id="one")
            (message,) = consumer.pull(timeout=10)
            message.ack()
            consumer.settle()
            assert settled_at_broker(client) == [1]


class TestNacks:
    @pytest.mark.accepts("000-33", "000-34")
    def test_a_nack_without_a_broker_is_kept_with_its_message_and_told_later(
        self, pulque_broker: InProcessBroker, connect: Callable[[], pulque.Client], state: Path
    ) -> None:
        with connect() as client:
            client.send_many("orders", [b"1", b"2", b"3", b"4"])
            consumer = client.consumer("orders", group="kitchen")
            first, second, third, _ = consumer.pull(timeout=10)
            pulque_broker.kill()
            first.ack()
            second.nack("no milk")
            third.ack()
        assert spooled(state) == [("orders", "no milk", b"2")]
        assert kept(state)["orders"]["position"] == 3  # the ack after it may go on

        pulque_broker.restart()
        with connect() as client:
            consumer = client.consumer("orders", group="kitchen")
            assert bodies(consumer.pull(timeout=10)) == ["4"]
            consumer.settle()
            assert settled_at_broker(client) == [3]
            pulque_broker.advance_time(7200)
            (again,) = consumer.pull(timeout=10)
            assert (again.body, again.attempt) == (b"2", 2)
            assert "no milk" in str(again.headers)
            again.ack()
        assert spooled(state) == []

    @pytest.mark.accepts("000-34")
    def test_acks_do_not_go_beyond_a_nack_that_is_not_safe(
        self,
        pulque_broker: InProcessBroker,
        connect: Callable[[], pulque.Client],
        state: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def refuse(self: spool.Spool, nacks: object) -> int:
            return 0

        monkeypatch.setattr(spool.Spool, "put", refuse)
        with connect() as client:
            client.send_many("orders", [b"1", b"2", b"3"])
            consumer = client.consumer("orders", group="kitchen")
            first, second, third = consumer.pull(timeout=10)
            pulque_broker.kill()
            first.ack()
            second.nack("no milk")
            third.ack()
        assert kept(state)["orders"]["position"] == 1

        pulque_broker.restart()
        with connect() as client:
            consumer = client.consumer("orders", group="kitchen")
            assert bodies(consumer.pull(timeout=10)) == ["2", "3"]

    def test_a_nack_is_known_without_the_file_of_positions(
        self, pulque_broker: InProcessBroker, connect: Callable[[], pulque.Client], state: Path
    ) -> None:
        with connect() as client:
            client.send_many("orders", [b"1", b"2", b"3"])
            consumer = client.consumer("orders", group="kitchen")
            first, second, _ = consumer.pull(timeout=10)
            pulque_broker.kill()
            first.ack()
            second.nack("no milk")
        (path,) = state.glob("consumers/*.settled")
        path.unlink()
        pulque_broker.restart()

        with connect() as client:
            consumer = client.consumer("orders", group="kitchen")
            # One after the other, as the nacked one lies between them.
            found = consumer.pull(timeout=10)
            assert bodies(found) == ["1", "3"]
            consumer.ack_all(found)
            consumer.settle()
            assert settled_at_broker(client) == [3]
            assert client.status()["deliveries_nacked"] == 1

    def test_a_nack_that_lasts_is_kept_before_the_consumer_ends(
        self, pulque_broker: InProcessBroker, connect: Callable[[], pulque.Client], state: Path
    ) -> None:
        client = connect()
        client.send("orders", b"1")
        consumer = client.consumer("orders", group="kitchen")
        (message,) = consumer.pull(timeout=10)
        pulque_broker.kill()
        message.nack("no milk")

        for _ in range(100):
            if spooled(state):
                break
            with pytest.raises(PulqueError):
                consumer.settle(timeout=0.2)
        assert spooled(state) == [("orders", "no milk", b"1")]

        pulque_broker.restart()
        consumer.settle(timeout=10)
        assert client.status()["deliveries_nacked"] == 1
        client.close()
        assert spooled(state) == []

    def test_after_the_lease_a_kept_nack_is_the_brokers_matter(
        self, pulque_broker: InProcessBroker, connect: Callable[[], pulque.Client], state: Path
    ) -> None:
        with connect() as client:
            client.send("orders", b"1")
            consumer = client.consumer("orders", group="kitchen")
            (message,) = consumer.pull(timeout=10)
            pulque_broker.kill()
            message.nack("no milk")
        pulque_broker.restart()
        pulque_broker.advance_time(60)

        with connect() as client:
            consumer = client.consumer("orders", group="kitchen")
            (again,) = consumer.pull(timeout=10)
            assert again.attempt == 2
            again.ack()
            consumer.settle()
            check_nothing_comes(client, consumer)
            assert client.status()["deliveries_nacked"] == 0
        assert spooled(state) == []


class TestResetsAndFilters:
    @pytest.mark.parametrize("mode", ["shared", "broadcast"])
    def test_a_reset_wins_over_a_file_that_lags_behind(
        self, connect: Callable[[], pulque.Client], state: Path, mode: str
    ) -> None:
        with connect() as client:
            client.send_many("orders", [b"1", b"2", b"3"])
            consumer = client.consumer("orders", group="kitchen", **GROUPS[mode])
            messages = consumer.pull(timeout=10)
            consumer.ack_all(messages)
            consumer.settle()
            group, consumer_id = consumer_group(client), str(consumer.consumer_id)
        # As if it had been killed when the acks were on their way.
        tenure = Tenure(Epoch(0), StartCount(1))
        acked = KeptRange(tenure, 0, 3, 0, messages[0].stored_at_ms)
        position = KeptPosition(PartitionName("orders"), 0, 3, (acked,))
        (path,) = state.glob("consumers/*.settled")
        owner = {"group": group, "consumer": consumer_id}
        path.write_bytes(encode_positions(owner, [position]))

        with connect() as client:
            client.reset("orders", group, to="earliest")
            consumer = client.consumer("orders", group="kitchen", **GROUPS[mode])

            assert bodies(consumer.pull(timeout=10)) == ["1", "2", "3"]

    def test_kept_acks_and_messages_that_a_filter_leaves_out(
        self, pulque_broker: InProcessBroker, connect: Callable[[], pulque.Client]
    ) -> None:
        with connect() as client:
            drinks = ["tea", "milk", "tea", "milk", "milk", "tea", "tea"]
            client.send_many(
                "orders",
                [pulque.Outgoing(str(n).encode(), tags=[tag]) for n, tag in enumerate(drinks)],
            )
            consumer = client.consumer("orders", group="kitchen", tags=["tea"])
            messages = consumer.pull(timeout=10)
            assert bodies(messages) == ["0", "2", "5", "6"]
            pulque_broker.kill()
            messages[0].ack()
            messages[1].nack("no milk", delay=0)
            messages[2].ack()
        pulque_broker.restart()
        with connect() as client:
            consumer = client.consumer("orders", group="kitchen", tags=["tea"])
            found = consumer.pull(timeout=10)
            consumer.settle()
            pulque_broker.advance_time(1)
            if len(found) < 2:
                found += consumer.pull(timeout=10)

            assert sorted((m.body, m.attempt) for m in found) == [(b"2", 2), (b"6", 1)]


class TestTheTwin:
    @pytest.fixture
    async def client(
        self, pulque_broker: InProcessBroker, state: Path
    ) -> AsyncIterator[pulque.aio.Client]:
        async with pulque.aio.connect(
            pulque_broker.url, timeout=1, name="shop", state_dir=state
        ) as client:
            yield client

    @pytest.mark.accepts("000-33", "000-35")
    async def test_acks_and_nacks_are_kept_and_told(
        self, pulque_broker: InProcessBroker, client: pulque.aio.Client, state: Path
    ) -> None:
        await client.send_many("orders", [b"1", b"2", b"3"])
        consumer = client.consumer("orders", group="kitchen")
        first, second, _ = await consumer.pull(timeout=10)
        pulque_broker.kill()
        first.ack()
        second.nack("no milk")
        await consumer.close()
        assert kept(state)["orders"]["position"] == 2
        assert spooled(state) == [("orders", "no milk", b"2")]

        pulque_broker.restart()
        async with client.consumer("orders", group="kitchen") as again:
            assert bodies(await again.pull(timeout=10)) == ["3"]
            await again.settle()
            assert (await client.status())["deliveries_settled"] == 2
        assert spooled(state) == []


class TestASecondRestart:
    """What is not delivered again before the next restart is kept on."""

    def test_of_partitions_that_the_broker_said_nothing_of(self, tmp_path: Path) -> None:
        core, local = restarted(tmp_path, "orders")
        core.next_pull(10, 0.0)
        core.pulled(Pulled((State(ErrorCode.NONE, PullSequence(4), PullSequence(9)),), ()))

        local.save(core.progress(), 1.0)

        cakes, orders = loaded(tmp_path)
        assert cakes == POSITIONS[0]
        assert (orders.settled, orders.position) == (4, 6)

    def test_of_what_an_answer_had_no_room_for(self, tmp_path: Path) -> None:
        core, local = restarted(tmp_path)
        core.next_pull(10, 0.0)
        here = State(ErrorCode.NONE, PullSequence(3), PullSequence(9))
        core.pulled(Pulled((here, here), ()))

        local.save(core.progress(), 1.0)

        assert loaded(tmp_path) == POSITIONS

    def test_but_not_of_what_the_broker_knows(self, tmp_path: Path) -> None:
        core, local = restarted(tmp_path)
        core.next_pull(10, 0.0)
        settled = State(ErrorCode.NONE, PullSequence(6), PullSequence(9))
        core.pulled(Pulled((settled, settled), ()))

        local.save(core.progress(), 1.0)

        assert [(each.settled, each.position, each.ranges) for each in loaded(tmp_path)] == [
            (6, 6, ()),
            (6, 6, ()),
        ]


POSITIONS = [
    KeptPosition(
        PartitionName(name), 3, 6, (KeptRange(Tenure(Epoch(0), StartCount(1)), 3, 3, 3, 1234),)
    )
    for name in ("cakes", "orders")
]
OWNER = {"group": "kitchen", "consumer": "one"}


def restarted(folder: Path, *partitions: str) -> tuple[IncomingCore, LocalState]:
    """Return a consumer that finds the files of its last run, and knows these partitions."""
    (folder / "slot.settled").write_bytes(encode_positions(OWNER, POSITIONS))
    group, consumer = Group(OWNER["group"]), ConsumerId(OWNER["consumer"])
    local = LocalState(folder / "slot", group, consumer)
    core = IncomingCore(PullOptions("*", group, consumer, 2, 10, 1000, 100), local.load())
    core.subscribe(map(PartitionName, partitions or ("cakes", "orders")))
    return core, local


def loaded(folder: Path) -> list[KeptPosition]:
    found = decode_positions((folder / "slot.settled").read_bytes(), OWNER)
    return sorted(found, key=lambda each: each.partition)

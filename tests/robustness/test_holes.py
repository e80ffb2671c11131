"""Holes that were found in a broker by attacking it. README.md tells of each."""

import os
import time

import pytest

from pulque.errors import ErrorCode, InvalidRequestError, NotAllowedError, UnknownSubjectError
from pulque.model.batch import Codec
from pulque.testing.process import BrokerProcess
from pulque.wire.requests import (
    EARLIEST,
    FROM_SETTLED,
    LATEST,
    Acks,
    Heartbeat,
    Hello,
    Positions,
    Pull,
    Read,
    Send,
    Wanted,
)
from pulque.wire.responses import Beaten, Pulled, ReadBack, Sent
from tests.robustness.brokers import Footprint, StartBroker, wait_until
from tests.robustness.raw import RawClient, bodies_of, make_batch, messages_in

pytestmark = pytest.mark.server


def test_a_new_consumer_of_two_partitions_gets_each_ones_messages(broker: BrokerProcess) -> None:
    with RawClient(broker.url) as client:
        client.send("a", [b"a0", b"a1"])
        client.send("b", [b"b0", b"b1"])
        wanted = (Wanted("a", FROM_SETTLED), Wanted("b", FROM_SETTLED))
        pulled = client.expect(Pulled, Pull("g", "c", 1, 10, 10_000, 0, EARLIEST, wanted))

        assert [bodies_of("?", each) for each in pulled.deliveries] == [
            [b"a0", b"a1"],
            [b"b0", b"b1"],
        ]
        assert [each.first_pull for each in pulled.deliveries] == [0, 0]
        for name, delivered in zip(("a", "b"), pulled.deliveries, strict=True):
            assert client.settle(name, delivered).settled == 2


def test_a_partition_named_twice_in_one_pull_is_refused(broker: BrokerProcess) -> None:
    with RawClient(broker.url) as client:
        client.send("a", [b"a0"])
        wanted = (Wanted("a", FROM_SETTLED), Wanted("a", FROM_SETTLED))
        answer = client.ask(Pull("g", "c", 1, 10, 10_000, 0, EARLIEST, wanted))

        assert isinstance(answer, InvalidRequestError)


def test_a_group_that_starts_at_the_end_gets_what_comes_while_it_waits(
    broker: BrokerProcess,
) -> None:
    with RawClient(broker.url) as consumer, RawClient(broker.url) as producer:
        producer.send("a", [b"before"])
        consumer.put(Pull("g", "c", 1, 9, 999, 5000, LATEST, (Wanted("a", FROM_SETTLED),)))
        # Its answer comes after the broker has seen the pull: requests are handled in order.
        assert producer.status()["pulls_waiting"] == 1
        producer.send("a", [b"after"])
        pulled = consumer.get()

        assert isinstance(pulled, Pulled)
        assert [bodies_of("a", each) for each in pulled.deliveries] == [[b"after"]]


def test_a_message_is_not_given_to_a_waiting_consumer_that_was_lost(
    start_broker: StartBroker,
) -> None:
    broker = start_broker(consumption__lease="300ms", consumption__lease_check="50ms")
    with RawClient(broker.url) as stopped, RawClient(broker.url) as other:
        other.send("a", [b"a0"])
        stopped.settle(
            "a", stopped.pull("a", consumer="stopped").deliveries[0], consumer="stopped"
        )
        wanted = (Wanted("a", 1),)
        stopped.put(Pull("g", "stopped", 1, 10, 1000, 60_000, EARLIEST, wanted))

        answer = stopped.get()
        other.send("a", [b"a1"])
        pulled = other.pull("a", consumer="other", timeout_ms=5000)

        assert isinstance(answer, Pulled)
        assert not answer.deliveries
        assert [bodies_of("a", each) for each in pulled.deliveries] == [[b"a1"]]


def test_a_send_that_makes_a_partition_wakes_those_who_wait_for_another(
    broker: BrokerProcess,
) -> None:
    with RawClient(broker.url) as consumer, RawClient(broker.url) as producer:
        producer.send("a", [b"a0"])
        consumer.settle("a", consumer.pull("a").deliveries[0])
        consumer.put(Pull("g", "c", 1, 10, 1000, 5000, EARLIEST, (Wanted("a", 1),)))
        assert producer.status()["pulls_waiting"] == 1
        both = (("a", make_batch("a", [b"a1"])), ("new", make_batch("new", [b"n0"])))
        producer.expect(Sent, Send(Acks.MEMORY, 1000, both))
        consumer.socket.settimeout(2)
        pulled = consumer.get()

        assert isinstance(pulled, Pulled)
        assert [bodies_of("a", each) for each in pulled.deliveries] == [[b"a1"]]


@pytest.mark.parametrize("first", [Hello(1, 1, "again"), Hello(1, 1, "x" * 9000)])
def test_frames_behind_a_refused_one_are_not_handled(broker: BrokerProcess, first: Hello) -> None:
    with RawClient(broker.url) as hostile, RawClient(broker.url) as other:
        batch = make_batch("sneaked", [b"in"])
        behind = hostile.frame(Send(Acks.DISK, 1000, (("sneaked", batch),)))
        hostile.socket.sendall(hostile.frame(first) + behind)

        assert hostile.is_closed(within=2)
        assert isinstance(other.ask(Positions("sneaked")), UnknownSubjectError)


def test_what_is_sent_before_the_handshake_is_not_stored_by_a_later_one(
    broker: BrokerProcess,
) -> None:
    with RawClient(broker.url, hello=False) as hostile, RawClient(broker.url) as other:
        send = hostile.frame(Send(Acks.DISK, 1000, (("early", make_batch("early", [b"in"])),)))
        hostile.socket.sendall(send + hostile.frame(Hello(1, 1, "late")) + send)

        assert hostile.is_closed(within=2)
        assert isinstance(other.ask(Positions("early")), UnknownSubjectError)


def test_a_burst_of_large_reads_blocks_nobody_and_costs_little(start_broker: StartBroker) -> None:
    broker = start_broker(storage__tail_cache="0")
    with RawClient(broker.url) as other, RawClient(broker.url) as hostile:
        for _ in range(20):
            other.send("a", [os.urandom(1000)] * 1000, acks=Acks.MEMORY)
        footprint = Footprint(broker.pid)
        burst = [hostile.frame(Read("a", 0, 10_000, 2**23, 0)) for _ in range(1000)]
        hostile.socket.sendall(b"".join(burst))
        waits = []
        for _ in range(20):
            began = time.monotonic()
            other.status()
            waits.append(time.monotonic() - began)

        assert max(waits) < 1
        assert footprint.grown_mib < 48


def test_an_answer_larger_than_the_buffer_for_slow_clients_arrives(
    start_broker: StartBroker,
) -> None:
    broker = start_broker(limits__send_buffer="64KiB", limits__max_pull_bytes="1KiB")
    with RawClient(broker.url) as client:
        body = os.urandom(4_000_000)
        client.send("a", [body])
        found = client.expect(ReadBack, Read("a", 0, 1, 1, 0))

        assert found.count == 1
        assert client.stored("a")[0].body == body


def test_hostile_names_do_not_fill_the_memory(start_broker: StartBroker) -> None:
    broker = start_broker(limits__max_partitions=5, limits__max_subscriptions=7)
    with RawClient(broker.url) as client:
        codes = [client.send(f"s{i}", [b"x"]).code for i in range(7)]
        wanted = tuple(Wanted(f"t{i}", FROM_SETTLED) for i in range(3))
        latest = client.ask(Pull("g", "c", 1, 1, 1, 0, LATEST, wanted))
        for i in range(7):
            client.pull("s0", consumer=f"c{i}")
        one_more = client.ask(Pull("g", "c7", 1, 1, 1, 0, EARLIEST, (Wanted("s0", FROM_SETTLED),)))

        assert codes == [ErrorCode.NONE] * 5 + [ErrorCode.NOT_ALLOWED] * 2
        assert isinstance(latest, NotAllowedError)
        assert isinstance(one_more, NotAllowedError)
        assert "limits.max_subscriptions" in str(one_more)
        status = client.status()
        assert status["partition_count"] == 5
        assert len(status["subscriptions"]) == 7
        # Those who are known go on, and get their retries.
        delivered = client.pull("s0", consumer="c0").deliveries[0]
        client.settle("s0", delivered, consumer="c0", nacked=[0])
        retries = (Wanted("%retry%s0%g", FROM_SETTLED),)
        request = Pull("g", "c0", 1, 9, 999, 5000, EARLIEST, retries)
        assert client.expect(Pulled, request).deliveries


def test_single_messages_of_a_large_compressed_batch_are_taken_out_quickly(
    broker: BrokerProcess,
) -> None:
    with RawClient(broker.url) as client:
        client.send("a", [bytes(6000)] * 10_000, codec=Codec.ZSTD)
        delivered = client.pull("a", max_messages=1000).deliveries[0]
        client.settle("a", delivered, nacked=range(0, 1000, 2))
        began = time.monotonic()
        wanted = (Wanted("%retry%a%g", FROM_SETTLED),)
        seen: set[str] = set()
        while len(seen) < 500:
            pulled = client.expect(Pulled, Pull("g", "r", 1, 999, 2**23, 9000, EARLIEST, wanted))
            for each in pulled.deliveries:
                assert not isinstance(each.records, tuple)
                seen |= {m.headers["pulque.origin"] for m in messages_in("r", each.records)}
                client.settle("%retry%a%g", each, consumer="r")

        assert seen == {f"a/{sequence}" for sequence in range(0, 1000, 2)}
        assert time.monotonic() - began < 8


def test_thousands_of_consumers_that_vanish_stop_nobody_and_are_told_of_briefly(
    start_broker: StartBroker,
) -> None:
    broker = start_broker(consumption__lease="1s", consumption__lease_check="100ms")
    with RawClient(broker.url) as client, RawClient(broker.url) as other:
        for i in range(0, 5000, 100):
            frames = [client.frame(Heartbeat("g", f"c{i + j}", 1)) for j in range(100)]
            client.socket.sendall(b"".join(frames))
            for _ in frames:
                assert isinstance(client.get(), Beaten)
        other.send("a", [b"x"] * 50)
        for i in range(50):
            assert client.pull("a", consumer=f"holder{i}", max_messages=1).deliveries
        waits = []
        deadline = time.monotonic() + 10
        while "more_consumers_lost" not in broker.stderr and time.monotonic() < deadline:
            began = time.monotonic()
            other.status()
            waits.append(time.monotonic() - began)
        wait_until(lambda: other.status()["deliveries_lost"] == 50, within=5, what="all are lost")

        assert max(waits) < 0.5
        assert len(broker.stderr.splitlines()) < 60

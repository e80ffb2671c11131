"""Holes that were found in a broker by attacking it. README.md tells of each."""

import pytest

from pulque.errors import InvalidRequestError
from pulque.testing.process import BrokerProcess
from pulque.wire.requests import EARLIEST, FROM_SETTLED, LATEST, Acks, Pull, Send, Wanted
from pulque.wire.responses import Pulled, Sent
from tests.robustness.brokers import StartBroker
from tests.robustness.raw import RawClient, bodies_of, make_batch

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

"""Random histories of a consumer and its broker, both of which come and go.

What was acked or nacked, and stands behind nothing open, is finished when the consumer has settled
or ended: it must never be handed out again, whoever was away in between. And nothing goes missing.
"""

from collections import Counter
from pathlib import Path
from random import Random

import pytest

import pulque
from pulque.testing.broker import InProcessBroker

Delivery = tuple[str, int]
"""Partition and sequence."""

STEPS = 25


class History:
    """One consumer id and one broker, and what must hold of them."""

    def __init__(self, broker: InProcessBroker, state: Path, random: Random) -> None:
        self.broker = broker
        self.state = state
        self.random = random
        self.is_up = True
        self.sent = 0
        self.acked: Counter[bytes] = Counter()
        self.final: set[Delivery] = set()
        self.told: list[str] = []
        self.open_session()

    def open_session(self) -> None:
        self.client = pulque.connect(
            self.broker.url, timeout=0.5, name="shop", state_dir=self.state
        )
        self.consumer = self.client.consumer("orders", group="kitchen", max_messages=7)
        self.deliveries: dict[str, list[tuple[int, bool]]] = {}

    def finish(self) -> None:
        """Take note of what is finished: all before the first delivery that is still open."""
        for partition, deliveries in self.deliveries.items():
            for sequence, is_done in deliveries:
                if not is_done:
                    break
                self.final.add((partition, sequence))

    # ── steps ──────────────────────────────────────────────────────────────────────────────

    def send(self) -> None:
        if self.is_up:
            count = self.random.randint(1, 5)
            bodies = [str(self.sent + n).encode() for n in range(count)]
            self.client.send_many("orders", bodies)
            self.sent += count

    def pull(self) -> None:
        if self.is_up:
            for message in self.consumer.pull(self.random.randint(1, 6), timeout=0.1):
                self.handle(message, self.random.choice(("ack", "ack", "nack", "leave")))

    def handle(self, message: pulque.ReceivedMessage, word: str) -> None:
        where = (str(message.partition), int(message.sequence))
        assert where not in self.final, f"{where} was finished; {self.told}"
        self.told.append(f"{word} {where}")
        if word == "ack":
            message.ack()
            self.acked[message.body] += 1
        elif word == "nack":
            message.nack("no milk", delay=0)
        self.deliveries.setdefault(where[0], []).append((where[1], word != "leave"))

    def settle(self) -> None:
        if self.is_up:
            self.consumer.settle(timeout=10)
            self.finish()

    def toggle_broker(self) -> None:
        self.told.append("broker down" if self.is_up else "broker up")
        if self.is_up:
            self.random.choice((self.broker.kill, self.broker.stop))()
        else:
            self.broker.start()
        self.is_up = not self.is_up

    def restart_consumer(self) -> None:
        self.told.append("consumer restarts")
        self.client.close()
        self.finish()
        if not self.is_up:
            self.toggle_broker()
        self.open_session()

    def lose_both(self) -> None:
        """Handle messages whose settle finds no broker, and restart."""
        self.pull()
        if self.is_up:
            self.toggle_broker()
        self.restart_consumer()

    def drain(self) -> None:
        if not self.is_up:
            self.toggle_broker()
        self.restart_consumer()
        for _ in range(100):
            self.broker.advance_time(3600)
            found = self.consumer.pull(50, timeout=0.3)
            if not found and len(self.acked) == self.sent:
                break
            for message in found:
                self.handle(message, "ack")
            self.settle()


@pytest.mark.accepts("000-30", "000-34", "000-35")
@pytest.mark.parametrize("number", range(6))
def test_what_is_finished_stays_so_and_nothing_goes_missing(
    pulque_broker: InProcessBroker, tmp_path: Path, seed: int, number: int
) -> None:
    random = Random(seed + number)
    history = History(pulque_broker, tmp_path / "state", random)
    steps = (
        [history.send] * 2
        + [history.pull] * 3
        + [history.settle, history.toggle_broker, history.restart_consumer]
        + [history.lose_both] * 2
    )
    for _ in range(STEPS):
        random.choice(steps)()
    history.drain()

    assert sorted(map(int, history.acked)) == list(range(history.sent)), history.told
    history.client.close()

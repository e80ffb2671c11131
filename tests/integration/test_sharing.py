"""Consumers share the work by what they can do, however many there are; told by counts.

Nothing here is timed. Consumers that are fast or slow are played by how often each of them gets
its turn: what counts is that whoever asks gets something while messages remain.
"""

import random
from collections import Counter
from collections.abc import Iterator

import pytest

import pulque
from pulque.testing.broker import InProcessBroker

pytestmark = pytest.mark.server
TASKS = 10_000


@pytest.fixture
def backlog(pulque_client: pulque.Client) -> int:
    """Ten thousand tasks that wait."""
    with pulque_client.producer(max_batch=100) as producer:
        producer.send_many("tasks", [b"%d" % number for number in range(TASKS)]).result()
    return TASKS


class Team:
    """Consumers of one group."""

    def __init__(self, client: pulque.Client) -> None:
        self._client = client
        self.consumers: dict[str, pulque.Consumer] = {}
        self.handled: Counter[str] = Counter()
        self.seen: list[bytes] = []
        self.idle_asks = 0

    def join(self, name: str) -> None:
        self.consumers[name] = self._client.consumer(
            "tasks", "workers", consumer_id=name, max_messages=50, max_held=TASKS
        )

    def leave(self, name: str) -> None:
        self.consumers.pop(name).close()

    def work(self, name: str, most: int) -> int:
        """Have one of them ask once, and handle all that it gets."""
        messages = self.consumers[name].pull(most, timeout=10 if self.left else 0.05)
        assert len(messages) <= most
        self.consumers[name].ack_all(messages)
        self.handled[name] += len(messages)
        self.seen += [message.body for message in messages]
        if not messages and self.left:
            self.idle_asks += 1
        return len(messages)

    @property
    def left(self) -> int:
        return TASKS - len(self.seen)

    def close(self) -> None:
        for name in list(self.consumers):
            self.leave(name)


@pytest.fixture
def team(pulque_client: pulque.Client) -> Iterator[Team]:
    team = Team(pulque_client)
    yield team
    team.close()


def settled_lag(client: pulque.Client) -> int:
    return sum(state.lag for state in client.groups("tasks", group="workers"))


@pytest.mark.usefixtures("backlog")
@pytest.mark.accepts("000-08", "001-01", "001-02", "002-44")
def test_fast_consumers_take_more_and_nobody_is_idle_while_messages_remain(
    team: Team, pulque_client: pulque.Client, seed: int
) -> None:
    # One partition and ten consumers: consumer 9 gets ten turns where consumer 0 gets one.
    draw = random.Random(seed)
    speeds = {f"c{number}": number + 1 for number in range(10)}
    for name in speeds:
        team.join(name)
    turns: Counter[str] = Counter()
    while team.left:
        (name,) = draw.choices(list(speeds), weights=list(speeds.values()))
        turns[name] += 1
        assert team.work(name, min(20, team.left)) > 0
    for consumer in team.consumers.values():
        consumer.settle()

    assert sorted(team.seen, key=int) == [b"%d" % number for number in range(TASKS)]
    assert team.idle_asks == 0
    assert set(team.handled) == set(speeds)
    # By the number of turns alone, not by anybody's share of the storage.
    for name, count in team.handled.items():
        assert count <= 20 * turns[name]
        assert count >= 20 * turns[name] - 20 * len(speeds)
    assert settled_lag(pulque_client) == 0


@pytest.mark.usefixtures("backlog")
@pytest.mark.parametrize("number", [1, 3, 7, 11])
@pytest.mark.accepts("001-02")
def test_equal_consumers_get_equal_shares_whatever_their_number(team: Team, number: int) -> None:
    for each in range(number):
        team.join(f"c{each}")
    while team.left:
        for name in list(team.consumers):
            team.work(name, max(1, min(50, team.left)))

    assert len(team.seen) == TASKS
    assert max(team.handled.values()) - min(team.handled.values()) <= 100


@pytest.mark.usefixtures("backlog")
@pytest.mark.accepts("000-09", "001-03", "001-05", "001-06")
def test_consumers_that_come_late_get_what_is_piled_up_at_once(team: Team) -> None:
    team.join("first")
    for _ in range(10):
        assert team.work("first", 20) > 0
    held = team.consumers["first"].pull(50, timeout=10)

    for number in range(19):
        team.join(f"late{number}")
        # Its very first pull, while the other works on: nothing is dealt anew.
        assert team.work(f"late{number}", 20) > 0
        assert team.work("first", 20) > 0

    assert held
    assert not any(message.is_abandoned for message in held)
    team.consumers["first"].ack_all(held)
    assert team.consumers["first"].abandoned == 0


@pytest.mark.usefixtures("backlog")
@pytest.mark.accepts("001-04", "001-06")
def test_consumers_can_go_when_the_peak_is_over(team: Team, pulque_client: pulque.Client) -> None:
    for number in range(10):
        team.join(f"c{number}")
    for name in list(team.consumers):
        team.work(name, 100)
    before = pulque_client.status()["partition_count"]
    for number in range(9):
        team.leave(f"c{number}")
        # Those who stay go on in the same breath.
        assert team.work("c9", 100) > 0
    while team.left:
        assert team.work("c9", 500) > 0

    assert len(team.seen) == len(set(team.seen)) == TASKS
    assert pulque_client.status()["partition_count"] == before


@pytest.mark.usefixtures("backlog")
@pytest.mark.accepts("001-04")
def test_what_a_consumer_held_that_left_goes_to_those_who_stay(team: Team) -> None:
    team.join("goes")
    team.join("stays")
    team.consumers["goes"].pull(50, timeout=10)
    team.leave("goes")

    while team.left:
        assert team.work("stays", 500) > 0

    assert sorted(team.seen, key=int) == [b"%d" % number for number in range(TASKS)]


@pytest.mark.usefixtures("backlog")
@pytest.mark.accepts("000-01")
def test_a_group_with_a_backlog_keeps_no_other_from_its_messages(
    pulque_client: pulque.Client, pulque_broker: InProcessBroker
) -> None:
    with pulque_client.consumer(
        "tasks", "behind", retry=pulque.RetryPolicy(delays=[1.0], jitter=0)
    ) as behind:
        behind.pull(1, timeout=10)[0].nack("not now")
        behind.settle()
        with pulque_client.consumer("news", "prompt") as prompt:
            for number in range(20):
                pulque_client.send("news", b"%d" % number)
                (message,) = prompt.pull(1, timeout=10)
                message.ack()
                assert message.body == b"%d" % number
        # Its own retries come before the rest of its own backlog, too.
        pulque_broker.advance_time(2)
        got = behind.pull(100, timeout=10)
        assert [message.attempt for message in got if message.body == b"0"] == [2]
        behind.ack_all(got)

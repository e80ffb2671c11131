"""How messages are consumed and how they are stored have nothing to do with each other."""

import hashlib
from pathlib import Path

import pytest

import pulque
from pulque.testing.broker import InProcessBroker

COUNT = 400


def digest_of(data: Path) -> str:
    """Of all segments of the message log, as they lie on the disk."""
    digest = hashlib.sha256()
    for path in sorted((data / "messages").glob("*.log")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def consume(client: pulque.Client, group: str, consumers: int) -> list[int]:
    """Let so many consumers take turns; return what they got, together."""
    crew = [
        client.consumer("tasks", group, consumer_id=f"{group}-{number}", max_messages=7)
        for number in range(consumers)
    ]
    got: list[int] = []
    while len(got) < COUNT:
        for consumer in crew:
            messages = consumer.pull(7, timeout=0.2)
            got += [int(message.body) for message in messages]
            consumer.ack_all(messages)
    for consumer in crew:
        consumer.close()
    return got


@pytest.mark.accepts("001-07")
def test_any_number_of_consumers_and_groups_leaves_the_stored_messages_as_they_are(
    tmp_path: Path,
) -> None:
    with InProcessBroker(tmp_path) as broker, pulque.connect(broker.url) as client:
        client.send_many("tasks", [b"%d" % number for number in range(COUNT)])
        before = digest_of(tmp_path)
        # One partition, and as many consumers as one likes: nothing is re-dealt for them.
        for consumers in (1, 3, 16):
            got = consume(client, f"crew-{consumers}", consumers)
            assert sorted(got) == list(range(COUNT))
        with client.consumer("tasks", broadcast=True, consumer_id="all") as consumer:
            assert len(consumer.pull(COUNT, timeout=5)) == COUNT

        assert [found.partition for found in client.positions("tasks")] == ["tasks"]
        assert digest_of(tmp_path) == before

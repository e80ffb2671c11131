"""The worked example of the design: three logs, and how a number leads from one to the next.

::

    message log    offset of subject1     3        6        9        20
    consume log    sequence               1        2        3        4
    pull logs      consumer 1:  1 → 1     2 → 3      consumer 2:  1 → 2     2 → 4

Ours count from 0, and an entry stands for a batch; here every batch is one message. Messages of
other subjects lie in between, so that offsets have gaps and sequences have none.
"""

import pytest

from pulque.broker.recovery import recover
from pulque.model.actions import GroupOpened, Pulled
from pulque.model.batch import read_header
from pulque.model.names import ConsumerId, Group, PartitionName
from pulque.model.positions import ConsumeSequence, Epoch, PullSequence, StartCount, Tenure
from pulque.rules.consumption import Consumption
from pulque.rules.subscription import Subscription
from pulque.storage.engine import Engine
from pulque.storage.events import SilentListener
from pulque.storage.logs.partitions import Partition
from pulque.storage.options import StorageOptions
from pulque.testing.files import MemoryFileSystem
from pulque.testing.raw import pack_batch

NOW_MS = 1_700_000_000_000
G = Group("g")
NOW = Tenure(Epoch(0), StartCount(1))


def append(engine: Engine, name: str, body: bytes) -> int:
    """Append one message; return its offset in the message log."""
    partition = engine.create_partition(PartitionName(name), NOW_MS)
    batch = pack_batch(name, [body])
    appended = engine.append(partition, batch, read_header(batch), now_ms=NOW_MS, wants_disk=False)
    engine.write()
    return appended.entry.offset


def pull_in_turns(rules: Consumption, partition: Partition, *consumers: str) -> list[Subscription]:
    """Let consumers pull the first four messages, one at a time."""
    rules.handle(GroupOpened(partition.id, G, ConsumeSequence(0)))
    found = []
    for consumer in consumers:
        opened = rules.opened(partition.id, G, ConsumerId(consumer), 1)
        assert opened is not None
        rules.handle(opened)
        found.append(rules.subscriptions[opened.subscription])
    for sequence in range(4):
        each = found[sequence % len(found)]
        fact = Pulled(each.id, NOW, each.next_pull, ConsumeSequence(sequence), 1, NOW_MS)
        rules.handle(fact)
    return found


@pytest.mark.accepts("001-26", "001-27", "001-28", "001-29", "001-30", "000-17", "000-22")
def test_pull_sequences_lead_to_consume_sequences_and_those_to_offsets() -> None:
    files = MemoryFileSystem()
    engine, recovered = recover(files, StorageOptions(), SilentListener(), NOW_MS)
    offsets: list[int] = []
    for name in ("a", "subject1", "b", "subject1", "a", "subject1", *"abcdefg", "subject1"):
        offset = append(engine, name, f"{name}:{len(offsets)}".encode())
        if name == "subject1":
            offsets.append(offset)
    subject1 = engine.partition("subject1")
    assert subject1 is not None
    consumers = pull_in_turns(recovered.consumption, subject1, "consumer1", "consumer2")

    def entry_of(sequence: int) -> tuple[int, bytes]:
        """Return the offset of a message, by the consume log, and what is stored there."""
        span = engine.span(subject1, ConsumeSequence(sequence), max_messages=1, max_bytes=1)
        (piece,) = span.pieces
        return piece.entry.offset, b"".join(engine.read(subject1, span))

    # The consume log: sequences without gaps lead to offsets with gaps, in order.
    assert [entry_of(sequence)[0] for sequence in range(4)] == offsets
    assert offsets == sorted(offsets)
    assert offsets[3] - offsets[2] > offsets[1] - offsets[0]
    # The pull logs: each consumer counts from 0, and its entries hold consume sequences.
    pull_logs = [[(h.first_pull, h.first_sequence) for h in each.held] for each in consumers]
    assert pull_logs == [[(0, 0), (1, 2)], [(0, 1), (1, 3)]]
    # From a delivery to the message: pull log, consume log, message log.
    for each in consumers:
        for held in each.held:
            assert f"subject1:{held.first_sequence}".encode() in entry_of(held.first_sequence)[1]
    # Progress is one number of the pull log.
    consumers[0].settle(PullSequence(0))
    assert consumers[0].settled == 1

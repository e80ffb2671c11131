"""A micro-batch is published once, wherever the driver died the first time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import pulque
from pulque.errors import CorruptionError, UsageError
from pulque.model.batch import seed_of
from pulque.model.names import PartitionName, parse_partition
from pulque.model.pack import BatchPacker
from pulque.testing.broker import InProcessBroker

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
from pyspark.sql.types import BinaryType, StructField, StructType

from pulque.pipeline.options import WriteOptions
from pulque.pipeline.staging import PackedBatch, Staged, Staging, stage
from pulque.pipeline.writer import StreamWriter, _StagedBatches

PARTITIONS = tuple(map(parse_partition, ("orders", "refunds")))
QUERY = "4711"


class DiedError(Exception):
    """The driver is gone."""


def packed(partition: PartitionName, *bodies: str) -> tuple[PackedBatch, int]:
    packer = BatchPacker()
    packer.bodies.extend(body.encode() for body in bodies)
    ids = b"".join(b"%016d" % at for at in range(len(bodies)))
    batch = packer.encode(seed=seed_of(partition), ids=ids, created_at_ms=1)
    return PackedBatch(partition, batch), len(bodies)


def staged(folder: Path, number: int, task: int, batches: int = 3, query: str = QUERY) -> Staged:
    work = (
        packed(partition, *(f"{partition}-{number}-{task}-{at}-{i}" for i in range(2)))
        for at in range(batches)
        for partition in PARTITIONS
    )
    return stage(str(folder), work, query=query)


def writer_for(broker: InProcessBroker, folder: Path) -> StreamWriter:
    options = WriteOptions.parse({"url": broker.url, "subject": "x", "staging": str(folder)})
    return StreamWriter(options, StructType([StructField("body", BinaryType())]))


def bodies_of(broker: InProcessBroker, subject: str) -> list[str]:
    with pulque.connect(broker.url) as client:
        return [m.body.decode() for m in client.read(subject, max_messages=100_000)]


def commit(writer: StreamWriter, number: int, *tasks: Staged) -> None:
    writer.commit([_StagedBatches(each) for each in tasks], number)


def expected(subject: str, numbers: int, tasks: int, batches: int = 3) -> list[str]:
    return [
        f"{subject}-{number}-{task}-{at}-{i}"
        for number in range(numbers)
        for task in range(tasks)
        for at in range(batches)
        for i in range(2)
    ]


def test_micro_batches_come_in_order_and_once(
    pulque_broker: InProcessBroker, tmp_path: Path
) -> None:
    writer = writer_for(pulque_broker, tmp_path)
    for number in range(4):
        tasks = [staged(tmp_path, number, task) for task in range(2)]
        commit(writer, number, *tasks)
        commit(writer, number, *[staged(tmp_path, number, task) for task in range(2)])  # again

    for subject in PARTITIONS:
        assert bodies_of(pulque_broker, subject) == expected(subject, 4, 2)


@pytest.mark.parametrize("survived", range(12))
def test_a_driver_that_died_while_publishing_loses_and_doubles_nothing(
    pulque_broker: InProcessBroker,
    tmp_path: Path,
    survived: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = writer_for(pulque_broker, tmp_path)
    commit(writer, 0, staged(tmp_path, 0, 0), staged(tmp_path, 0, 1))
    with monkeypatch.context() as patched:
        patched.setattr("pulque.pipeline.writer._check_stored", dying(after=survived))
        with pytest.raises(DiedError):
            commit(writer, 1, staged(tmp_path, 1, 0), staged(tmp_path, 1, 1))
    pulque_broker.kill()
    pulque_broker.restart()
    # The new driver runs the tasks again: they stage new files, with other ids.
    again = writer_for(pulque_broker, tmp_path)
    commit(again, 1, staged(tmp_path, 1, 0), staged(tmp_path, 1, 1))
    commit(again, 2, staged(tmp_path, 2, 0), staged(tmp_path, 2, 1))

    for subject in PARTITIONS:
        assert bodies_of(pulque_broker, subject) == expected(subject, 3, 2)


def dying(*, after: int):  # type: ignore[no-untyped-def]  # stands for _check_stored
    left: Iterator[int] = iter(range(after))

    def check(answer: object) -> None:
        del answer
        if next(left, None) is None:
            raise DiedError

    return check


def test_more_batches_than_the_broker_remembers_are_published_once(
    pulque_broker: InProcessBroker, tmp_path: Path
) -> None:
    writer = writer_for(pulque_broker, tmp_path)
    tasks = [staged(tmp_path, 0, 0, batches=100)]
    commit(writer, 0, *tasks)
    commit(writer, 0, *tasks)

    assert bodies_of(pulque_broker, "orders") == expected("orders", 1, 1, batches=100)


def test_nothing_is_left_behind_but_the_last_micro_batch(
    pulque_broker: InProcessBroker, tmp_path: Path
) -> None:
    writer = writer_for(pulque_broker, tmp_path)
    for number in range(3):
        commit(writer, number, staged(tmp_path, number, 0))
    lost = staged(tmp_path, 3, 0)
    writer.abort([_StagedBatches(lost), None], 3)

    assert len(list(tmp_path.glob("*.batches"))) == 1
    assert len(list(tmp_path.glob("0*.json"))) == 1


def test_another_query_is_refused(pulque_broker: InProcessBroker, tmp_path: Path) -> None:
    writer = writer_for(pulque_broker, tmp_path)
    commit(writer, 0, staged(tmp_path, 0, 0))

    with pytest.raises(UsageError, match="belongs to the streaming query 4711, and this is 12"):
        commit(writer, 0, staged(tmp_path, 0, 0, query="12"))


def test_a_damaged_staged_file_is_told(pulque_broker: InProcessBroker, tmp_path: Path) -> None:
    work = staged(tmp_path, 0, 0)
    path = tmp_path / work.file
    path.write_bytes(path.read_bytes()[:-3])

    with pytest.raises(CorruptionError, match="crc"):
        Staging(str(tmp_path)).commit(0, [work], lambda _, __: None)

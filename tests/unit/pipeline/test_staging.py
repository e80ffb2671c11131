"""A micro-batch is published once, wherever the driver died the first time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import pulque
from pulque.client.options.client_options import acks_of
from pulque.errors import CorruptionError, MessageTooLargeError, UsageError
from pulque.model.batch import seed_of
from pulque.model.names import PartitionName, parse_partition
from pulque.model.pack import BatchPacker
from pulque.testing.broker import InProcessBroker
from pulque.wire.requests import Send
from tests.unit.client.fake_cluster import FakeCluster

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BinaryType, StructField, StructType

from pulque.pipeline.data_source.row_messages import check_schema, rows_of
from pulque.pipeline.data_source.staging import PackedBatch, Staged, Staging, stage
from pulque.pipeline.data_source.table_writer import StreamWriter, _StagedBatches
from pulque.pipeline.options import WriteOptions

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
        patched.setattr(
            "pulque.pipeline.data_source.table_writer._check_stored", dying(after=survived)
        )
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


@pytest.mark.parametrize("survived", range(12))
def test_a_micro_batch_that_was_aborted_after_its_manifest_is_finished(
    pulque_broker: InProcessBroker,
    tmp_path: Path,
    survived: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = writer_for(pulque_broker, tmp_path)
    commit(writer, 0, staged(tmp_path, 0, 0), staged(tmp_path, 0, 1))
    tasks = [staged(tmp_path, 1, 0), staged(tmp_path, 1, 1)]
    with monkeypatch.context() as patched:
        patched.setattr(
            "pulque.pipeline.data_source.table_writer._check_stored", dying(after=survived)
        )
        with pytest.raises(DiedError):
            commit(writer, 1, *tasks)
    writer.abort([_StagedBatches(each) for each in tasks], 1)  # as Spark does then
    again = writer_for(pulque_broker, tmp_path)
    repeated = [staged(tmp_path, 1, 0), staged(tmp_path, 1, 1)]
    again.abort([_StagedBatches(repeated[0]), None], 1)
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


def test_files_of_tasks_that_died_are_removed(
    pulque_broker: InProcessBroker, tmp_path: Path
) -> None:
    writer = writer_for(pulque_broker, tmp_path)
    lost = staged(tmp_path, 0, 0)
    tried_twice = staged(tmp_path, 0, 0, batches=0)
    kept = staged(tmp_path, 0, 1)
    commit(writer, 0, tried_twice, kept)

    assert not (tmp_path / lost.file).exists()
    assert [path.name for path in tmp_path.glob("*.batches")] == [kept.file]


SMALL = {"max_message": "64KiB", "max_batch": "128KiB"}


@pytest.mark.parametrize("key", [None, "of one partition"])
def test_batches_are_no_larger_than_the_broker_takes(tmp_path: Path, key: str | None) -> None:
    """One that the broker refuses when its manifest is written stops the query for good."""
    rows = [
        {
            "subject": "orders",
            "body": b"%d" % at + b"x" * 40_000,
            "order_key": key,
            "headers": None,
        }
        for at in range(5)
    ] + [
        {
            "subject": "orders",
            "body": b"%d" % at,
            "order_key": key,
            "headers": [("n", "y" * 60_000)],
        }
        for at in range(5, 10)
    ]
    with InProcessBroker(tmp_path / "data", limits=SMALL) as broker:
        writer = rows_writer_for(broker, tmp_path / "staging")
        writer.commit([writer.write(iter([pa.RecordBatch.from_pylist(rows, ROWS)]))], 0)

        found = bodies_of(broker, "orders")
    assert [body.rstrip("x") for body in found] == [str(at) for at in range(10)]


def test_a_message_that_is_too_large_with_its_headers_is_refused_before_the_manifest(
    tmp_path: Path,
) -> None:
    row = {"subject": "orders", "body": b"x" * 40_000, "headers": [("n", "y" * 40_000)]}
    with InProcessBroker(tmp_path / "data", limits=SMALL) as broker:
        writer = rows_writer_for(broker, tmp_path / "staging")
        with pytest.raises(MessageTooLargeError, match="80002 bytes; the broker takes at most"):
            writer.write(iter([pa.RecordBatch.from_pylist([row], ROWS)]))


ROWS = pa.schema(
    [
        ("subject", pa.string()),
        ("body", pa.binary()),
        ("order_key", pa.string()),
        ("headers", pa.map_(pa.string(), pa.string())),
    ]
)


def rows_writer_for(broker: InProcessBroker, folder: Path) -> StreamWriter:
    options = WriteOptions.parse({"url": broker.url, "staging": str(folder)})
    return StreamWriter(options, from_arrow_schema(ROWS))


def test_a_staged_file_that_is_gone_is_told(
    pulque_broker: InProcessBroker, tmp_path: Path
) -> None:
    writer = writer_for(pulque_broker, tmp_path)
    work = staged(tmp_path, 0, 0)
    (tmp_path / work.file).unlink()

    with pytest.raises(CorruptionError, match=f"{work.file}.*staged this file .* it is gone"):
        commit(writer, 0, work)
    # No manifest names it, so that the query can do the micro-batch again.
    commit(writer, 0, staged(tmp_path, 0, 0))
    assert bodies_of(pulque_broker, "orders") == expected("orders", 1, 1)


def test_a_file_that_is_gone_after_its_manifest_is_told(
    pulque_broker: InProcessBroker, tmp_path: Path
) -> None:
    writer = writer_for(pulque_broker, tmp_path)
    work = staged(tmp_path, 0, 0)
    commit(writer, 0, work)
    (tmp_path / work.file).unlink()

    with pytest.raises(CorruptionError, match=f"{work.file}.*names this file, and it is gone"):
        commit(writer, 0, work)


def test_another_query_is_refused(pulque_broker: InProcessBroker, tmp_path: Path) -> None:
    writer = writer_for(pulque_broker, tmp_path)
    commit(writer, 0, staged(tmp_path, 0, 0))

    with pytest.raises(UsageError, match="belongs to the streaming query 4711, and this is 12"):
        commit(writer, 0, staged(tmp_path, 0, 0, query="12"))


def test_a_query_that_was_not_known_at_first_has_the_directory_to_itself(
    pulque_broker: InProcessBroker, tmp_path: Path
) -> None:
    writer = writer_for(pulque_broker, tmp_path)
    commit(writer, 0, staged(tmp_path, 0, 0, query=""))
    commit(writer, 1, staged(tmp_path, 1, 0))

    with pytest.raises(UsageError, match="belongs to the streaming query 4711, and this is 12"):
        commit(writer, 1, staged(tmp_path, 1, 0, query="12"))


@pytest.mark.parametrize("number", [0, 9])
def test_a_micro_batch_without_tasks_leaves_what_others_have_in_the_directory(
    pulque_broker: InProcessBroker, tmp_path: Path, number: int
) -> None:
    writer = writer_for(pulque_broker, tmp_path)
    commit(writer, 0, staged(tmp_path, 0, 0))
    waiting = staged(tmp_path, 1, 0)
    writer_for(pulque_broker, tmp_path).commit([], number)
    commit(writer, 1, waiting)
    commit(writer, 2, staged(tmp_path, 2, 0))

    for subject in PARTITIONS:
        assert bodies_of(pulque_broker, subject) == expected(subject, 3, 1)


def test_a_checkpoint_that_is_older_than_the_directory_is_refused(
    pulque_broker: InProcessBroker, tmp_path: Path
) -> None:
    writer = writer_for(pulque_broker, tmp_path)
    for number in range(3):
        commit(writer, number, staged(tmp_path, number, 0))

    # Numbered anew, they would be taken for repeats, and confirmed without being stored.
    with pytest.raises(UsageError, match="has published micro-batch 2, and this is 1"):
        commit(writer, 1, staged(tmp_path, 1, 0))


def test_a_damaged_staged_file_is_told(pulque_broker: InProcessBroker, tmp_path: Path) -> None:
    work = staged(tmp_path, 0, 0)
    path = tmp_path / work.file
    path.write_bytes(path.read_bytes()[:-3])

    with pytest.raises(CorruptionError, match="crc"):
        Staging(str(tmp_path)).commit(0, [work], lambda _, __: None)


@pytest.mark.parametrize("staging", ["relative", "s3://bucket/x", "hdfs://h/x", "file:x", ""])
def test_a_staging_directory_that_is_not_a_local_absolute_path_is_refused(staging: str) -> None:
    with pytest.raises(UsageError, match="an absolute path of a local or mounted directory"):
        WriteOptions.parse({"subject": "x", "staging": staging})


def test_a_staging_directory_may_be_a_file_url(tmp_path: Path) -> None:
    assert WriteOptions.parse({"staging": f"file://{tmp_path}"}).staging == str(tmp_path)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ([("body", "binary"), ("body", "binary")], "there are 2 columns 'body'; one is allowed"),
        ([("body", "binary"), ("color", "int")], "column 'color' is not part of a message"),
        ([("key", "string")], "one column named body or value is needed; found neither"),
        ([("body", "binary"), ("tags", "string")], "'tags' is string; it must be array<string>"),
        ([("body", "binary"), ("priority", "bigint")], "'priority' is bigint; it must be int"),
    ],
)
def test_a_schema_that_is_no_message_s_is_refused(
    columns: list[tuple[str, str]], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        check_schema(columns, has_subject=True)


def test_a_tag_that_is_null_is_refused() -> None:
    batch = pa.RecordBatch.from_arrays(
        [pa.array([b"x"]), pa.array([["hot", None]], pa.list_(pa.string()))], ["body", "tags"]
    )

    with pytest.raises(UsageError, match="a tag of a row is null; text is allowed"):
        list(rows_of(batch, "orders"))


def test_a_header_without_a_value_is_refused() -> None:
    kind = pa.map_(pa.string(), pa.string())
    batch = pa.RecordBatch.from_arrays(
        [pa.array([b"x"]), pa.array([[("a", "b"), ("trace", None)]], kind)], ["body", "headers"]
    )

    with pytest.raises(UsageError, match="header 'trace' of a row is null; text is allowed"):
        list(rows_of(batch, "orders"))


@pytest.mark.parametrize("acks", ["disk", "replica"])
def test_a_micro_batch_that_must_be_on_several_disks_goes_where_followers_are(
    tmp_path: Path, acks: str
) -> None:
    with FakeCluster(3) as cluster:
        cluster.serve([0, 1, 2], alone=[0, 2])
        options = {"url": cluster.url, "subject": "orders", "staging": str(tmp_path)}
        writer = StreamWriter(
            WriteOptions.parse({**options, "acks": acks, "maxBatch": "1"}),
            StructType([StructField("body", BinaryType())]),
        )
        rows = pa.RecordBatch.from_arrays([pa.array([b"%d" % i for i in range(30)])], ["body"])

        writer.commit([writer.write(iter([rows]))], 0)

        found = {number for number in range(3) if cluster.bodies(number)}
        sends = [each for broker in cluster.brokers for each in broker.seen(Send)]

    assert found == ({1} if acks == "replica" else {0, 1, 2})
    assert {each.acks for each in sends if isinstance(each, Send)} == {acks_of(acks)}

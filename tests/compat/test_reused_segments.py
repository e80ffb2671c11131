"""Logs of a release that wrote segments over the files of removed ones are read by today's.

``v1-reused-segments.tar.gz`` has one data directory for each of its crash tests. Each segment had
four messages, numbered from 0; the open one begins with 20. Behind its end lie older ones.
"""

import tarfile
from random import Random
from typing import NamedTuple

import pytest

from pulque.cli.common.output import Output
from pulque.cli.log_files import print_file
from pulque.model.positions import ConsumeSequence, Epoch, MessageOffset, PartitionId
from pulque.model.record import ENVELOPE_SIZE, Envelope, RecordType, pack_envelope
from pulque.storage.inspection.data_files import UnreadableBytes, data_files, read_messages
from pulque.storage.inspection.verification import verify
from pulque.storage.options import StorageOptions
from pulque.testing.files import Cut, MemoryFileSystem
from tests.compat.delayed import data_file
from tests.crash.opening import Opened, open_engine
from tests.unit.storage.storing import bodies_of, packed, store

OPEN = "messages/00000000000000009044.log"
END = 9984
"""Where the open segment ends that has two messages."""


class Case(NamedTuple):
    """A directory, and what has to be made of it."""

    name: str
    bodies: list[int]
    damage: int | None = None
    """Where something is lost that was promised."""
    torn: int | None = None
    """Where something was cut off that was not."""


CASES = [
    Case("killed", [20, 21]),
    Case("stopped", [20, 21]),
    Case("torn", [20, 21], torn=END),
    Case("short", [20, 21], torn=END),
    Case("forged", [20, 21]),
    Case("forged-at-the-end", [20, 21]),
    Case("only-a-name", [22, 23, 24, 25], torn=11_780),
    Case("lost-name", [20, 21, 22, 23, 24, 25]),
    Case("damaged", [20, 21, 23], damage=END),
    Case("damaged-end", [20, 21], damage=END),
    Case("longer-again", [20, 21, 22, 23, 24, 25]),
    Case("longer-again-synced", [20, 21, 22, 23, 24, 25]),
    Case("damaged-seam", [20, 21, 23], damage=END),
    Case("older-table", list(range(4, 22))),
    Case("older-table-with-messages", list(range(4, 24))),
]


def body(number: int) -> bytes:
    return b"%05d " % number * 50


def files_of(name: str) -> MemoryFileSystem:
    files = MemoryFileSystem()
    with tarfile.open(data_file("v1-reused-segments")) as archive:
        for member in archive:
            case, _, path = member.name.partition("/")
            content = archive.extractfile(member)
            if case != name or content is None:
                continue
            if "/" in path:
                files.make_directory(path.rpartition("/")[0])
            file = files.open(path, create=True)
            file.write([content.read()], 0)
            file.close()
    return files


def start(files: MemoryFileSystem) -> Opened:
    return open_engine(files, StorageOptions(reserve_bytes=0), 1)


def killed(files: MemoryFileSystem) -> MemoryFileSystem:
    return files.after_power_cut(files.operations, Cut.KEPT, Random(1))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_was_promised_is_read_and_damage_is_told(case: Case) -> None:
    opened = start(files_of(case.name))

    assert bodies_of(opened.engine, "orders") == [body(number) for number in case.bodies]
    assert [found[1] for found in opened.heard.corruptions] == [
        offset for offset in (case.damage,) if offset is not None
    ]
    assert [found[1] for found in opened.heard.cuts] == [
        offset for offset in (case.torn,) if offset is not None
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_log_goes_on_and_is_read_after_the_next_kill(case: Case) -> None:
    files = files_of(case.name)
    engine = start(files).engine
    store(engine, "orders", b"next")
    engine.roll(1)
    store(engine, "orders", b"last")
    again = start(killed(files))

    expected = [*(body(number) for number in case.bodies), b"next", b"last"]
    assert bodies_of(again.engine, "orders") == expected
    assert not again.heard.cuts
    assert not [name for name in files.list("messages") if name.endswith(".spare")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verify_finds_only_what_is_damaged_or_torn(case: Case) -> None:
    files = files_of(case.name)
    found = verify(files, data_files(files))

    assert {each.offset for each in found.damages} == {case.damage} - {None}
    if case.damage is None:
        assert {each.offset for each in found.findings} <= {case.torn}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_indexes_that_are_lost_are_made_again(case: Case) -> None:
    files = files_of(case.name)
    engine = start(files).engine
    store(engine, "orders", b"next")
    job = engine.begin_checkpoint({})
    job.run()
    engine.finish_checkpoint(job)
    left = killed(files)
    for name in left.list("messages"):
        if name.endswith(".index"):
            left.remove(f"messages/{name}")

    expected = [*(body(number) for number in case.bodies), b"next"]
    assert bodies_of(start(left).engine, "orders") == expected


def test_nothing_is_taken_from_a_file_whose_table_was_never_written() -> None:
    files = files_of("only-a-name")
    path = max(name for name in files.list("messages") if name.endswith(".log"))
    base, at = int(path[:20]), 500
    before = bodies_of(start(files_of("only-a-name")).engine, "orders")
    # What somebody sent long ago, and looks like a record of just this place.
    batch = packed("orders", b"forged")
    envelope = Envelope(
        RecordType.BATCH,
        ENVELOPE_SIZE + len(batch),
        MessageOffset(base + at),
        MessageOffset(base + at),
        Epoch(0),
        PartitionId(1),
        ConsumeSequence(26),
        1,
        1,
    )
    file = files.open(f"messages/{path}")
    file.write([pack_envelope(envelope), batch], at)
    file.close()

    opened = start(files)

    assert bodies_of(opened.engine, "orders") == before
    assert not opened.heard.corruptions


def test_older_bytes_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    files = files_of("killed")
    records = list(read_messages(files, OPEN, 9044))
    for each in data_files(files):
        assert not each.path.endswith(".spare")
        print_file(files, each, Output.TABLE, with_messages=True)

    assert not [record for record in records if isinstance(record, UnreadableBytes)]
    assert "damage" not in capsys.readouterr().out

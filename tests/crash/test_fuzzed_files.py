"""Whatever lies in the files, opening ends soon, and in an engine or an error of ours.

Bytes at random, edited files, and records whose crc is right though they make no sense. As long
as nobody forges a crc, nothing is ever served that was not sent.
"""

from collections.abc import Callable
from functools import cache
from random import Random
from struct import Struct

import google_crc32c
import pytest

from pulque.errors import PulqueError
from pulque.model.batch import read_header
from pulque.model.ids import IdSource
from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence, Epoch, MessageOffset, PartitionId
from pulque.model.record import ENVELOPE_SIZE, Envelope, RecordType, pack_envelope, read_envelope
from pulque.storage.files import FileSystem
from pulque.storage.logs.action_log import walk_actions
from pulque.testing.files import MemoryFileSystem
from tests.crash.archive import NOW_MS, OPTIONS, Archive, readable
from tests.crash.opening import EFFORT, open_engine
from tests.crash.workload import make_batch, random_fact

ROUNDS = 25 * EFFORT
HARD_SIZE = (2 if EFFORT == 1 else 8) * 1024 * 1024
Made = Callable[[Random, bytes], bytes]


@cache
def archive(seed: int) -> Archive:
    return Archive.build(seed, checkpoints=True)


def noise(random: Random, before: bytes) -> bytes:
    return random.randbytes(random.randrange(2 * len(before) + 2))


def sparse(random: Random, before: bytes) -> bytes:
    """Small numbers and zeros, which look like sizes and types."""
    return bytes(random.choice((0, 0, 0, 1, 2, 3, 4, 5, 6, 80, 76, 255)) for _ in before)


def edited(random: Random, before: bytes) -> bytes:
    data = bytearray(before)
    for _ in range(random.randint(1, 6)):
        at = random.randrange(len(data) + 1)
        length = random.choice((1, 2, 8, 60, 300))
        match random.randrange(5):
            case 0:
                data[at : at + length] = random.randbytes(length)
            case 1:
                data[at:at] = random.randbytes(length)
            case 2:
                del data[at : at + length]
            case 3:
                data[at:at] = data[at : at + length]
            case _:
                other = random.randrange(len(data) + 1)
                data[at : at + length] = data[other : other + length]
    return bytes(data)


def put(files: FileSystem, path: str, data: bytes) -> None:
    file = files.open(path, create=True)
    file.truncate(0)
    file.write([data], 0)
    file.close()


def use(files: FileSystem, *, is_forged: bool = False) -> dict[tuple[str, int], bytes]:
    """Open, read, write, and open again; return what could be read."""
    opened = open_engine(files, OPTIONS, NOW_MS)
    engine = opened.engine
    found = readable(engine)
    for partition in list(engine.partitions.by_name.values()):
        engine.at_time(partition, NOW_MS + 10)
    partition = engine.create_partition(PartitionName("fuzz"), NOW_MS)
    batch = make_batch("fuzz", [b"new"], ids=IdSource(1))
    engine.append(partition, batch, read_header(batch), now_ms=NOW_MS, wants_disk=True)
    engine.write()
    engine.append_action(random_fact(Random(1)))
    Archive.sync(engine)
    checkpoint = engine.begin_checkpoint({})
    checkpoint.run()
    engine.finish_checkpoint(checkpoint)
    engine.roll(NOW_MS)
    while (job := engine.begin_index()) is not None:
        job.run()
        engine.finish_index(job)
    new = ("fuzz", partition.end - 1)
    # Who forges a checkpoint may have forgotten partitions, and their ids are used again.
    assert new in readable(engine) or is_forged
    engine.close()
    again = open_engine(files, OPTIONS, NOW_MS)
    assert new in readable(again.engine) or is_forged
    return found


@pytest.mark.parametrize("make", [noise, sparse, edited])
def test_anything_in_any_file_is_refused_or_recovered(seed: int, make: Made) -> None:
    source = archive(seed)
    everything = source.everything()
    contents = source.files.contents()
    paths = source.paths()
    for turn in range(ROUNDS):
        random = Random(f"{seed}/{turn}")
        files = source.copy()
        damaged = random.sample(paths, random.choice((1, 1, 1, 2, 5)))
        for path in damaged:
            put(files, path, make(random, contents[path]))
        try:
            found = use(files)
        except PulqueError:
            continue
        except BaseException as error:
            error.add_note(f"turn {turn} of seed {seed}: {damaged}")
            raise
        assert found.items() <= everything.items(), f"turn {turn}: {damaged}"


def forged_envelope(random: Random, old: Envelope) -> Envelope:
    numbers = (0, 1, 7, 2**31, 2**32 - 1)
    large = (*numbers, 2**63 - 1, 2**63, 2**64 - 1)
    return old._replace(
        type=random.choice((old.type, *RecordType)),
        size=random.choice((old.size, old.size, ENVELOPE_SIZE, ENVELOPE_SIZE + 10, 2**32 - 1)),
        offset=random.choice((old.offset, old.offset, MessageOffset(random.choice(large)))),
        synced=MessageOffset(random.choice((old.synced, *large))),
        epoch=Epoch(random.choice(numbers)),
        partition=random.choice(
            (old.partition, old.partition, PartitionId(random.choice(numbers)))
        ),
        first_sequence=ConsumeSequence(random.choice((old.first_sequence, *large))),
        stored_at_ms=random.choice((old.stored_at_ms, -(2**63), 2**63 - 1, 0)),
        count=random.choice((old.count, old.count, *numbers)),
    )


def forge_records(random: Random, data: bytes, base: int) -> bytes:
    """Give some records other envelopes, and tables other contents, with crcs that match."""
    forged = bytearray(data)
    at = 0
    while at < len(data):
        old = read_envelope(data, at)
        assert isinstance(old, Envelope)
        if random.random() < 0.2:
            forged[at : at + ENVELOPE_SIZE] = pack_envelope(forged_envelope(random, old))
        if old.type is RecordType.PARTITION_TABLE and random.random() < 0.3:
            table = forged[at + ENVELOPE_SIZE + 4 : at + old.size]
            for _ in range(random.randint(1, 4)):
                table[random.randrange(len(table))] = random.choice((0, 1, 200, 255))
            crc = google_crc32c.value(bytes(table)).to_bytes(4, "little")
            forged[at + ENVELOPE_SIZE : at + old.size] = crc + table
        at += old.size
    return bytes(forged)


def forge_facts(random: Random, data: bytes, base: int) -> bytes:
    """Give some facts other fields, with crcs that match."""
    forged = bytearray(data)
    for at, size, fact in walk_actions(data, base):
        if fact is not None and random.random() < 0.3:
            fields = bytearray(fact)
            for _ in range(random.randint(1, 3)):
                fields[random.randrange(len(fields))] = random.choice((0, 1, 6, 7, 200, 255))
            where = Struct("<QI").pack(base + at, len(fields)) + fields
            forged[at + 4 : at + 8] = google_crc32c.value(where).to_bytes(4, "little")
            forged[at + 8 : at + size] = fields
    return bytes(forged)


def forge_checkpoint(random: Random, data: bytes, base: int) -> bytes:
    forged = bytearray(data)
    for _ in range(random.randint(1, 4)):
        forged[random.randrange(16, len(forged))] = random.choice((0, 1, 200, 255))
    if random.random() < 0.3:
        del forged[random.randrange(16, len(forged)) :]
    forged[8:12] = google_crc32c.value(bytes(forged[16:])).to_bytes(4, "little")
    return bytes(forged)


def forge_index(random: Random, data: bytes, base: int) -> bytes:
    forged = bytearray(data)
    for _ in range(random.randint(1, 4)):
        forged[random.randrange(8, len(forged))] = random.choice((0, 1, 2, 200, 255))
    rows = int.from_bytes(data[32:36], "little")
    body = forged[48 : 48 + 32 * rows]
    entries = int.from_bytes(data[24:32], "little")
    start = len(data) - 44 * entries
    for at in range(start, len(data), 64 * 44):
        crc = google_crc32c.value(bytes(forged[at : min(at + 64 * 44, len(data))]))
        body += crc.to_bytes(4, "little")
    forged[48:start] = body
    forged[40:44] = google_crc32c.value(bytes(body)).to_bytes(4, "little")
    forged[44:48] = google_crc32c.value(bytes(forged[:44])).to_bytes(4, "little")
    return bytes(forged)


FORGERIES = [
    ("messages/", ".log", forge_records),
    ("actions/", ".log", forge_facts),
    ("checkpoints/", ".checkpoint", forge_checkpoint),
    ("messages/", ".index", forge_index),
]


@pytest.mark.parametrize(("prefix", "suffix", "forge"), FORGERIES)
def test_nonsense_with_a_matching_crc_is_refused_or_recovered(
    seed: int, prefix: str, suffix: str, forge: Callable[[Random, bytes, int], bytes]
) -> None:
    source = archive(seed)
    contents = source.files.contents()
    paths = [p for p in source.paths() if p.startswith(prefix) and p.endswith(suffix)]
    for turn in range(ROUNDS):
        random = Random(f"{seed}/{turn}")
        files = source.copy()
        for path in random.sample(paths, random.randint(1, len(paths))):
            base = int(path.rpartition("/")[2][:20])
            put(files, path, forge(random, contents[path], base))
        try:
            use(files, is_forged=True)
        except PulqueError:
            continue
        except BaseException as error:
            error.add_note(f"turn {turn} of seed {seed}")
            raise


@pytest.mark.parametrize(
    "name",
    [
        "x.log",
        ".log",
        "1.log",
        "00000000000000000000.log.log",
        "99999999999999999999.log",
        "0000000000000000000x.index",
        f"{chr(0x660) * 20}.log",
        "00000000000000099999.open",
        "notes.txt",
    ],
)
@pytest.mark.parametrize("directory", ["messages", "actions", "checkpoints"])
def test_files_of_strangers_are_left_alone(seed: int, directory: str, name: str) -> None:
    source = archive(seed)
    files = source.copy()
    put(files, f"{directory}/{name}", b"hello")

    assert use(files) == source.everything()


def aligned(pattern: bytes, size: int) -> bytes:
    return (pattern * (size // len(pattern) + 1))[:size]


def at_its_place(size: int, base: int) -> bytes:
    """Heads that say where they are, every 16 bytes; only the crc is missing."""
    return b"".join(
        b"PL\x01\x01\x40\0\0\0" + (base + at).to_bytes(8, "little") for at in range(0, size, 16)
    )


def whole_and_broken(size: int, base: int) -> bytes:
    """Records of 70 bytes, every other one with a broken envelope; none says it was synced."""
    parts = []
    for at in range(0, size, 140):
        head = Envelope(
            RecordType.BATCH,
            70,
            MessageOffset(base + at),
            MessageOffset(base + at),
            Epoch(0),
            PartitionId(1),
            ConsumeSequence(0),
            0,
            1,
        )
        parts += [pack_envelope(head), bytes(10), b"PL\x01\x01", bytes(66)]
    return b"".join(parts)


HARD_SEGMENTS: dict[str, Callable[[int, int], bytes]] = {
    "magic": lambda size, _: aligned(b"PL", size),
    "heads": lambda size, _: aligned(b"PL\x01\x01", size),
    "places": at_its_place,
    "zeros": lambda size, _: bytes(size),
    "mixed": whole_and_broken,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", HARD_SEGMENTS)
def test_a_hard_segment_is_searched_once(kind: str) -> None:
    files = MemoryFileSystem(random=Random(1))
    engine = open_engine(files, OPTIONS, NOW_MS).engine
    base = engine.end
    engine.close()
    path = "messages/00000000000000000000.log"
    file = files.open(path)
    file.write([HARD_SEGMENTS[kind](HARD_SIZE, base)], base)
    file.close()

    assert open_engine(files, OPTIONS, NOW_MS).engine.end >= base


HARD_FACTS: dict[str, Callable[[int], bytes]] = {
    "zeros": bytes,
    "ones": lambda size: aligned(b"\x01", size),
    "sizes": lambda size: aligned(b"\0\0\x01\0", size),
    "types": lambda size: aligned(b"\x04\0\0\0", size),
    "settled": lambda size: aligned(b"\0\x40\0\0\x04", size),
    "noise": lambda size: Random(1).randbytes(size),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", HARD_FACTS)
def test_hard_facts_are_searched_once(kind: str) -> None:
    files = MemoryFileSystem(random=Random(1))
    engine = open_engine(files, OPTIONS, NOW_MS).engine
    facts = [random_fact(Random(i)) for i in range(10)]
    for fact in facts[:5]:
        engine.append_action(fact)
    Archive.sync(engine)
    place = engine.actions.end
    for fact in facts[5:]:
        engine.append_action(fact)
    engine.close()
    path = "actions/00000000000000000000.log"
    file = files.open(path)
    damage = HARD_FACTS[kind](HARD_SIZE)
    file.write([damage], place)
    file.close()

    assert open_engine(files, OPTIONS, NOW_MS).facts[:5] == facts[:5]

"""The file of a key index, byte by byte, and what becomes of it with its segment."""

from struct import Struct

import google_crc32c
import pytest

from pulque.errors import StorageFullError
from pulque.model.batch import Codec, read_header, seed_of
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker
from pulque.storage.engine import Engine
from pulque.storage.events import SilentListener
from pulque.storage.indexes.key_index import KeyIndex, KeyQuery
from pulque.storage.indexes.key_rows import hash_of_id, hash_of_key
from pulque.storage.inspection.data_files import FileKind, data_files
from pulque.storage.inspection.verification import verify
from pulque.testing.files import MemoryFileSystem
from tests.unit.storage.storing import opened

# As docs/reference/files.md has it.
HEADER = Struct("<4sHHQQQIIIIqqQQI")
SLOT = Struct("<III")
ROW = Struct("<IIHI")
FIRST = "messages/00000000000000000000.keys"
NOW_MS = 1_700_000_000_000


def store(
    engine: Engine, partition: str, keys: list[str], now_ms: int, codec: Codec = Codec.NONE
) -> tuple[int, list[bytes]]:
    """Store a batch; return its offset, and the ids of its messages."""
    found = engine.create_partition(PartitionName(partition), now_ms)
    packer = BatchPacker()
    for key in keys:
        packer.add(b"body", key=key or None)
    ids = b"".join(b"%08d%08d" % (now_ms % 10**8, i) for i in range(len(keys)))
    batch = packer.encode(seed=seed_of(partition), ids=ids, created_at_ms=1, codec=codec)
    header = read_header(batch)
    appended = engine.append(found, batch, header, now_ms=now_ms, wants_disk=False)
    engine.write()
    return int(appended.entry.offset), [ids[at : at + 16] for at in range(0, len(ids), 16)]


def index_of(engine: Engine, files: MemoryFileSystem) -> KeyIndex:
    return KeyIndex(files, lambda: engine.segments, engine.partitions.name_of, SilentListener())


def extended(engine: Engine, files: MemoryFileSystem) -> KeyIndex:
    """Return an index that has everything."""
    index = index_of(engine, files)
    index.learn()
    while missing := index.missing():
        assert index.extend(missing[0][0])
    return index


def offsets(index: KeyIndex, subject: str, key: str) -> list[tuple[int, int]]:
    wanted = KeyQuery(hash_of_key(subject, key), is_id=False)
    return [
        (each.offset, each.index) for looked in index.look(wanted) for each in looked.candidates
    ]


@pytest.mark.accepts("004-88", "004-89", "004-90", "004-91", "004-92", "004-93", "004-95")
def test_the_file_is_as_the_page_says() -> None:  # noqa: PLR0915  # field by field
    files = MemoryFileSystem()
    engine = opened(files, segment_age_ms=2**62)
    keys = [f"key {i % 90}" if i % 3 else "" for i in range(300)]
    first, _ = store(engine, "orders", keys, NOW_MS)
    last, _ = store(engine, "invoices", keys, NOW_MS + 250, Codec.LZ4)
    index = extended(engine, files)
    middle = engine.end
    third, ids = store(engine, "orders", ["key 1"], NOW_MS + 900)
    assert index.extend(engine.segments[0])
    content = files.contents()[FIRST]

    # The header: used slots and rows, first and last store time and offset.
    *fields, crc = HEADER.unpack_from(content)
    magic, version, _, base, begin, end, rows, slots, used, messages, *times_and_offsets = fields
    assert (magic, version, base, begin, end) == (b"PLKX", 1, 0, 0, middle)
    assert crc == google_crc32c.value(content[: HEADER.size - 4])
    assert (messages, rows) == (600, 600 + 2 * 200)  # an id each, and a key if there is one
    assert times_and_offsets == [NOW_MS, NOW_MS + 250, first, last]

    # The slots: the newest row from 1 on, 0 for none; rows of a slot follow, newest first.
    rows_at = HEADER.size + slots * SLOT.size
    table = [SLOT.unpack_from(content, HEADER.size + i * SLOT.size) for i in range(slots)]
    assert used == sum(1 for newest, _, _ in table if newest)
    assert sum(count for _, count, _ in table) == rows
    found = []
    for slot, (newest, count, slot_crc) in enumerate(table):
        assert bool(newest) == bool(count)
        at = rows_at + max(newest - 1, 0) * ROW.size
        chain = content[at : at + count * ROW.size]
        seed = google_crc32c.value(Struct("<QIII").pack(begin, slot, newest, count))
        assert google_crc32c.extend(seed, chain) == slot_crc
        entries = list(ROW.iter_unpack(chain))
        assert all(hashed % slots == slot for hashed, _, _, _ in entries)
        for is_id in (True, False):
            places = [(p, i & 0x7FFF) for _, p, i, _ in entries if bool(i & 0x8000) is is_id]
            assert places == sorted(places, reverse=True)
        found += entries

    # The rows: hash, place of the batch, index, and the time since the header's.
    wanted = [
        (hash_of_key(subject, key), offset - begin, i, age)
        for subject, offset, age in (("orders", first, 0), ("invoices", last, 250))
        for i, key in enumerate(keys)
        if key
    ]
    assert sorted(row for row in found if not row[2] & 0x8000) == sorted(wanted)

    # The next part is appended behind header, slots and rows.
    following = HEADER.unpack_from(content, rows_at + rows * ROW.size)
    assert following[3:6] == (0, middle, engine.end)
    assert following[6] == 2
    assert offsets(index, "orders", "key 1")[0] == (third, 0)
    looked = index.look(KeyQuery(hash_of_id(ids[0]), is_id=True))
    assert [tuple(c) for each in looked for c in each.candidates] == [(third, 0)]


def test_it_goes_with_its_segment_and_stays_with_the_others() -> None:
    files = MemoryFileSystem()
    engine = opened(files, segment_age_ms=2**62)
    store(engine, "orders", ["a", "b"], NOW_MS)
    engine.roll(NOW_MS)
    kept, _ = store(engine, "orders", ["a"], NOW_MS + 1)
    index = extended(engine, files)
    assert len(offsets(index, "orders", "a")) == 2
    engine.remove_oldest().run()
    assert offsets(index, "orders", "a") == [(kept, 0)]
    assert [name for name in files.list("messages") if name.endswith(".keys")] == [
        f"{engine.segments[0].base:020d}.keys"
    ]


def test_a_start_removes_what_has_no_segment_and_believes_nothing_of_a_tail_that_was_cut() -> None:
    files = MemoryFileSystem()
    engine = opened(files, segment_age_ms=2**62)
    store(engine, "orders", ["a"], NOW_MS)
    end = engine.end
    store(engine, "orders", ["b"], NOW_MS)
    extended(engine, files)
    engine.close()
    log = files.open("messages/00000000000000000000.log")
    log.truncate(int(end) + 10)
    log.close()
    files.open("messages/00000000000000009999.keys", create=True).close()
    again = opened(files, segment_age_ms=2**62)
    assert not files.exists("messages/00000000000000009999.keys")
    other, _ = store(again, "orders", ["c"], NOW_MS + 5)
    index = extended(again, files)
    assert offsets(index, "orders", "b") == []
    assert offsets(index, "orders", "c") == [(other, 0)]


def test_without_room_for_it_messages_are_found_all_the_same() -> None:
    files = MemoryFileSystem()
    engine = opened(files, segment_age_ms=2**62)
    where, _ = store(engine, "orders", ["a"], NOW_MS)
    engine.roll(NOW_MS)
    files.room = sum(map(len, files.contents().values()))
    index = index_of(engine, files)
    with pytest.raises(StorageFullError):
        index.extend(engine.segments[0])
    assert offsets(index, "orders", "a") == [(where, 0)]
    files.room = None
    assert index.extend(engine.segments[0])
    assert offsets(index, "orders", "a") == [(where, 0)]


def test_what_is_damaged_in_the_log_hides_nothing_else() -> None:
    files = MemoryFileSystem()
    engine = opened(files, segment_age_ms=2**62)
    places = [store(engine, "orders", ["a"] * 3, NOW_MS + i)[0] for i in range(5)]
    log = files.open("messages/00000000000000000000.log")
    log.write([b"\xff" * 20], places[2])
    log.close()
    found = {offset for offset, _ in offsets(extended(engine, files), "orders", "a")}
    assert found == {*places} - {places[2]}


def test_damage_is_found_by_a_check_and_a_changed_row_too() -> None:
    files = MemoryFileSystem()
    engine = opened(files, segment_age_ms=2**62)
    store(engine, "orders", ["a", "b"], NOW_MS)
    engine.roll(NOW_MS)
    store(engine, "orders", ["c"], NOW_MS)
    extended(engine, files)
    assert FileKind.KEYS in {each.kind for each in data_files(files)}
    assert verify(files, data_files(files)).findings == []
    file = files.open(FIRST)
    whole = file.read(file.size(), 0)
    for at in range(len(whole)):
        file.write([bytes([whole[at] ^ 1])], at)
        assert [each.path for each in verify(files, data_files(files)).damages] == [FIRST], at
        file.write([whole[at : at + 1]], at)
    file.close()

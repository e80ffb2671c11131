"""The key index finds what a plain list of all that was sent has, whatever became of its files."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulque.model.batch import Codec, read_header, seed_of
from pulque.model.names import PartitionName, subject_of
from pulque.model.pack import BatchPacker
from pulque.storage.engine import Engine
from pulque.storage.events import SilentListener
from pulque.storage.indexes import key_index, key_rows
from pulque.storage.indexes.key_index import EVERYTHING, KeyIndex, KeyQuery
from pulque.storage.indexes.key_rows import hash_of_id, hash_of_key
from pulque.testing.files import MemoryFileSystem
from tests.unit.storage.storing import opened

# Two keys with the same CRC-32C: to the index they are one.
KEYS = ("", "a", "b", "schlüssel", "6352603e", "33f2a4a7")
PARTITIONS = ("orders", "orders#p7", "invoices", "%retry%orders%kitchen", "%dead%orders%kitchen")


class Sent(NamedTuple):
    """One message, as the oracle remembers it."""

    subject: str
    key: str
    id: bytes
    stored_at_ms: int
    offset: int
    place: int


class Batch(NamedTuple):
    """One batch to be stored."""

    partition: str
    keys: tuple[str, ...]
    codec: Codec
    later_ms: int
    body: bytes
    seals: bool


batches = st.builds(
    Batch,
    st.sampled_from(PARTITIONS),
    st.lists(st.sampled_from(KEYS), min_size=1, max_size=12).map(tuple),
    st.sampled_from([Codec.NONE, Codec.NONE, Codec.LZ4, Codec.ZSTD]),
    st.sampled_from([0, 1, 500]),
    st.sampled_from([b"", b"body", b"x" * 700]),
    st.sampled_from([False, False, False, True]),
)
histories = st.lists(batches, min_size=1, max_size=15)


@contextmanager
def small_parts(part: int = 3000, stretch: int = 1200) -> Iterator[None]:
    """Have few messages make a part, so that there are many."""
    with (
        patch.object(key_rows, "PART_BYTES", part),
        patch.object(key_index, "PART_BYTES", part),
        patch.object(key_rows, "_STRETCH_BYTES", stretch),
        patch.object(key_rows, "_PART_MESSAGES", 40),
    ):
        yield


def store(engine: Engine, history: list[Batch]) -> list[Sent]:
    """Store batches; return all messages, in order."""
    sent: list[Sent] = []
    now_ms = 1000
    for number, batch in enumerate(history):
        now_ms += batch.later_ms
        partition = engine.create_partition(PartitionName(batch.partition), now_ms)
        packer = BatchPacker()
        for key in batch.keys:
            packer.add(batch.body, key=key or None)
        ids = b"".join(b"%08d%08d" % (number, i) for i in range(len(batch.keys)))
        content = packer.encode(
            seed=seed_of(batch.partition), ids=ids, created_at_ms=1, codec=batch.codec
        )
        header = read_header(content)
        appended = engine.append(partition, content, header, now_ms=now_ms, wants_disk=False)
        engine.write()
        entry = appended.entry
        sent += [
            Sent(
                subject_of(PartitionName(batch.partition)),
                key,
                ids[16 * i : 16 * i + 16],
                entry.stored_at_ms,
                int(entry.offset),
                i,
            )
            for i, key in enumerate(batch.keys)
        ]
        if batch.seals:
            engine.roll(now_ms)
    return sent


def index_of(engine: Engine, files: MemoryFileSystem) -> KeyIndex:
    return KeyIndex(files, lambda: engine.segments, engine.partitions.name_of, SilentListener())


def found(index: KeyIndex, wanted: KeyQuery) -> list[tuple[int, int]]:
    return [
        (each.offset, each.index) for looked in index.look(wanted) for each in looked.candidates
    ]


def expected(sent: list[Sent], wanted: KeyQuery, *hashes: int) -> list[tuple[int, int]]:
    """Return what a walk over everything has, the newest first."""
    return [
        (each.offset, each.place)
        for each, found_hash in reversed(list(zip(sent, hashes, strict=True)))
        if found_hash == wanted.hash
        and wanted.since_ms <= each.stored_at_ms < wanted.until_ms
        and (each.offset, each.place) < wanted.before
    ]


def check_all(index: KeyIndex, sent: list[Sent], **limits: int | tuple[int, int]) -> None:
    """Look for every key and every id, and compare."""
    key_hashes = [hash_of_key(each.subject, each.key) if each.key else -1 for each in sent]
    id_hashes = [hash_of_id(each.id) for each in sent]
    for subject, key in product(("orders", "invoices"), ("a", "33f2a4a7", "never sent")):
        wanted = KeyQuery(hash_of_key(subject, key), is_id=False, **limits)  # type: ignore[arg-type]
        assert found(index, wanted) == expected(sent, wanted, *key_hashes)
    for each in (sent[0], sent[len(sent) // 2], sent[-1]):
        wanted = KeyQuery(hash_of_id(each.id), is_id=True, **limits)  # type: ignore[arg-type]
        assert found(index, wanted) == expected(sent, wanted, *id_hashes)


@pytest.mark.accepts("004-45", "004-93")
@settings(max_examples=40)
@given(history=histories, data=st.data())
def test_what_was_sent_is_found_newest_first(history: list[Batch], data: st.DataObject) -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    sent = store(engine, history)
    with small_parts():
        index = index_of(engine, files)
        for _ in range(data.draw(st.integers(0, 3))):
            for segment, _ in index.missing()[:1]:
                index.extend(segment)
        check_all(index, sent)
        times = st.integers(900, sent[-1].stored_at_ms + 2)
        since, until = sorted((data.draw(times), data.draw(times)))
        check_all(index, sent, since_ms=since, until_ms=until + 1)
        place = data.draw(st.sampled_from(sent))
        check_all(index, sent, before=(place.offset, place.place))
        check_all(index_of(engine, files), sent)  # by what is in the files


@settings(max_examples=40)
@given(history=histories, data=st.data())
def test_whatever_happens_to_its_files_it_finds_the_same(
    history: list[Batch], data: st.DataObject
) -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    sent = store(engine, history)
    with small_parts():
        index = index_of(engine, files)
        check_all(index, sent)
        names = [name for name in files.list("messages") if name.endswith(".keys")]
        for name in data.draw(st.lists(st.sampled_from(names), max_size=2)) if names else ():
            damage(files, f"messages/{name}", names, data)
        check_all(index, sent)  # the same, which knows what was in the files
        check_all(index_of(engine, files), sent)  # one that knows nothing


def damage(files: MemoryFileSystem, path: str, names: list[str], data: st.DataObject) -> None:
    """Flip a bit, cut or remove a file, fill it with zeros, or put another's in its place."""
    if not files.exists(path):
        return
    content = bytearray(files.contents()[path])
    at = data.draw(st.integers(0, max(len(content) - 1, 0)))
    kind = data.draw(st.sampled_from(["flip", "cut", "zeros", "other", "remove"]))
    if kind == "remove" or not content:
        files.remove(path)
        return
    if kind == "flip":
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "zeros":
        content[at:] = bytes(len(content) - at)
    elif kind == "cut":
        del content[at:]
    else:
        other = f"messages/{data.draw(st.sampled_from(names))}"
        content = bytearray(files.contents().get(other, b""))
    file = files.open(path)
    file.truncate(0)
    file.write([bytes(content)], 0)
    file.close()


@settings(max_examples=40)
@given(history=histories)
def test_a_search_in_steps_finds_each_once(history: list[Batch]) -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    sent = store(engine, history)
    with small_parts():
        index = index_of(engine, files)
        whole = KeyQuery(hash_of_key("orders", "a"), is_id=False)
        at, steps = (EVERYTHING, 0), []
        for _ in range(len(sent) + 1):
            some = found(index, whole._replace(before=at))[:2]
            if not some:
                break
            steps += some
            at = some[-1]
        assert steps == found(index, whole)

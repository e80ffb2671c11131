"""Exactly-once writes of a stream: stage, write down, publish.

The tasks of a micro-batch leave packed batches in files; nothing of it is in the broker yet. The
driver then writes a *manifest*, which names the files and gives every batch in them its number,
and sends the batches in that order as one named producer, whose numbers the broker stores once,
for good. A micro-batch that is repeated after a crash finds its manifest and sends *the same*
files again: what the broker has of it already, it does not store a second time; what new tasks
staged for it is thrown away. A file that a manifest names is kept until a later micro-batch is
published, also if Spark aborts the micro-batch meanwhile: a repeated commit finishes it. A
micro-batch without tasks leaves no manifest.

::

    <staging>/
        sink.json            who this sink is: the producer's id, the query it belongs to
        00000000000000000007.json   a manifest, by the number of the micro-batch
        <random>.batches     what one task staged
"""

import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from struct import Struct

import google_crc32c

from pulque.errors import CorruptionError, UsageError
from pulque.model.batch import HEADER, Flag, read_header, seal, seed_of
from pulque.model.names import PartitionName
from pulque.pipeline.brokers import split_held

__all__ = ["Manifest", "PackedBatch", "Staged", "Staging", "stage"]

_VERSION = 1
_SINK = "sink.json"
_HEAD = Struct("<IHI")
"""crc of what follows, length of the partition's name, length of the batch."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch without a producer, and the partition it is packed for."""

    partition: PartitionName
    """Of a cluster, as ``pulque.pipeline.brokers`` names it."""
    batch: bytes


@dataclass(frozen=True, slots=True)
class Staged:
    """What one task left behind."""

    file: str
    counts: dict[str, int]
    """Batches, by partition."""
    messages: int
    query: str
    """The query that the task belonged to, if that could be found out."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a micro-batch consists of."""

    number: int
    query: str
    files: list[str]
    firsts: dict[str, int]
    """The producer's sequence of the first batch, by partition."""
    nexts: dict[str, int]
    """Those of the micro-batch after it."""
    version: int = field(default=_VERSION)


def stage(directory: str, batches: Iterator[tuple[PackedBatch, int]], *, query: str) -> Staged:
    """Write what a task packed to a file that survives a power cut.

    Args:
        directory: The staging directory.
        batches: Batches, with the number of messages in each.
        query: The query that the task belongs to.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{secrets.token_hex(16)}.batches"
    counts: dict[str, int] = {}
    messages = 0
    with (folder / name).open("xb") as file:
        for packed, count in batches:
            encoded = packed.partition.encode()
            body = encoded + packed.batch
            head = _HEAD.pack(google_crc32c.value(body), len(encoded), len(packed.batch))
            file.write(head + body)
            counts[packed.partition] = counts.get(packed.partition, 0) + 1
            messages += count
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)
    return Staged(name, counts, messages, query)


class Staging:
    """The staging directory of one query, as its driver sees it.

    Args:
        directory: Where; it must live as long as the query's checkpoint.
    """

    def __init__(self, directory: str) -> None:
        self._folder = Path(directory)
        self._folder.mkdir(parents=True, exist_ok=True)

    def commit(
        self,
        number: int,
        staged: Sequence[Staged],
        send: Callable[[PartitionName, bytes], None],
    ) -> Manifest | None:
        """Publish a micro-batch, once, however often this is called for it.

        Args:
            number: Of the micro-batch.
            staged: What its tasks left, in order.
            send: Sends one batch and returns when it is confirmed.

        Returns:
            The manifest; None of a micro-batch that had no tasks.

        Raises:
            UsageError: The directory belongs to another query, or is ahead of this one.
            CorruptionError: A staged file is not what a task wrote.
        """
        query = next((each.query for each in staged if each.query), "")
        manifest = self._manifest(number)
        if manifest is None and not staged:
            # Nobody knows whose it is, so it must not touch what another query may have here.
            return None
        sink = self._sink(query)
        if manifest is None:
            self._check_not_behind(number)
            self._check_staged(staged)
            manifest = self._write_manifest(number, staged, sink)
        else:
            self.discard([each for each in staged if each.file not in manifest.files])
        sequences = dict(manifest.firsts)
        for name in manifest.files:
            for packed in self._read(name):
                sequence = sequences[packed.partition]
                sequences[packed.partition] = sequence + 1
                send(packed.partition, _numbered(packed, int(sink["producer"]), sequence))
        if staged:
            self._sweep(number)
        return manifest

    def discard(self, staged: Sequence[Staged]) -> None:
        """Remove what tasks staged, except the files that a manifest names.

        Spark aborts a micro-batch whose commit failed, also after the manifest was written and
        some of its batches were sent.
        """
        needed = self._named()
        for each in staged:
            if each.file not in needed:
                self._remove(each.file)

    def _named(self) -> set[str]:
        """Return the files that manifests name."""
        manifests = map(self._manifest, self._numbers())
        return {name for each in manifests if each is not None for name in each.files}

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            (self._folder / name).unlink()

    def _sink(self, query: str) -> dict[str, str | int]:
        path = self._folder / _SINK
        if not path.exists():
            # 1 to 2**63 - 1, as JSON has it everywhere.
            found = {"producer": secrets.randbits(62) + 1, "query": query, "version": _VERSION}
            self._replace(path, found)
        sink: dict[str, str | int] = json.loads(path.read_text())
        if query and sink["query"] and sink["query"] != query:
            raise UsageError(
                f"{self._folder} belongs to the streaming query {sink['query']}, and this is "
                f"{query}: a query with a new checkpoint needs a staging directory of its own"
            )
        if query and not sink["query"]:
            sink["query"] = query  # the first one whose tasks say who they are
            self._replace(path, sink)
        return sink

    def _check_not_behind(self, number: int) -> None:
        """Refuse a micro-batch that comes after later ones, as its numbers would be theirs."""
        last = max(self._numbers(), default=number)
        if last > number:
            raise UsageError(
                f"{self._folder} has published micro-batch {last}, and this is {number}: the "
                "checkpoint is older than the staging directory (a backup?), or another query "
                "uses it too; begin with a new checkpoint and a new staging directory"
            )

    def _check_staged(self, staged: Sequence[Staged]) -> None:
        """Check that files are there before a manifest names them for good."""
        for each in staged:
            if each.messages and not (self._folder / each.file).exists():
                raise CorruptionError(
                    each.file,
                    0,
                    f"a task staged this file in {self._folder}, and it is gone: let the driver "
                    "and all workers write to one directory, and restart the query",
                )

    def _manifest(self, number: int) -> Manifest | None:
        path = self._path(number)
        return Manifest(**json.loads(path.read_text())) if path.exists() else None

    def _write_manifest(
        self, number: int, staged: Sequence[Staged], sink: dict[str, str | int]
    ) -> Manifest:
        before = [at for at in self._numbers() if at < number]
        last = self._manifest(max(before)) if before else None
        firsts = dict(last.nexts) if last is not None else {}
        nexts = dict(firsts)
        for each in staged:
            for partition, count in each.counts.items():
                firsts.setdefault(partition, 0)
                nexts[partition] = nexts.get(partition, 0) + count
        files = [each.file for each in staged if each.messages]
        manifest = Manifest(number, str(sink["query"]), files, firsts, nexts)
        self._replace(self._path(number), asdict(manifest))
        return manifest

    def _read(self, name: str) -> Iterator[PackedBatch]:
        try:
            data = (self._folder / name).read_bytes()
        except FileNotFoundError:
            raise CorruptionError(name, 0, "a manifest names this file, and it is gone") from None
        at = 0
        while at < len(data):
            if len(data) - at < _HEAD.size:
                raise CorruptionError(name, at, "a staged batch is cut off")
            crc, name_size, size = _HEAD.unpack_from(data, at)
            body = data[at + _HEAD.size : at + _HEAD.size + name_size + size]
            if google_crc32c.value(body) != crc:
                raise CorruptionError(name, at, "a staged batch's crc does not match")
            yield PackedBatch(PartitionName(body[:name_size].decode()), body[name_size:])
            at += _HEAD.size + len(body)

    def _sweep(self, number: int) -> None:
        """Remove earlier manifests, and the staged files that no manifest names.

        The tasks of the next micro-batch start after this one is committed, so such files are of
        earlier micro-batches, or of tasks that died or were repeated.
        """
        for at in self._numbers():
            if at < number:
                self._path(at).unlink()
        needed = self._named()
        for path in self._folder.glob("*.batches"):
            if path.name not in needed:
                self._remove(path.name)

    def _numbers(self) -> list[int]:
        names = (path.stem for path in self._folder.glob("*.json"))
        return sorted(int(name) for name in names if name.isdigit())

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:020}.json"

    def _replace(self, path: Path, content: object) -> None:
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync(self._folder)


def _numbered(packed: PackedBatch, producer: int, sequence: int) -> bytes:
    """Give a batch its producer and its number there."""
    header = read_header(packed.batch)._replace(
        producer_id=producer, incarnation=0, producer_sequence=sequence
    )
    header = header._replace(flags=header.flags | Flag.NAMED_PRODUCER)
    rest = HEADER.pack(*header)[4:] + packed.batch[HEADER.size :]
    return seal(rest, seed_of(split_held(packed.partition)[1]))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

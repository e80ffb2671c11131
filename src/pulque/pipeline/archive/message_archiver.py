"""The archive: sealed segments become rows of a table, each of them once.

A segment goes through four steps. Tasks copy it and write its messages as rows, to files that
nobody reads (1); what they counted is compared with the segment's index (2); the copy gets its
name (3); the files are committed to the table together with the segment's name (4). Only the
last step makes anything visible, and it is one atomic write; batches that nobody can decode are
committed to a table of their own just before it. A run that dies before it leaves files that do
not count; one that dies after it has nothing left to do. Of two runs that reach it with the same
segment one is refused, and takes its files away.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import compress, pairwise
from typing import TYPE_CHECKING, Protocol

import google_crc32c
import numpy as np
import pyarrow as pa

from pulque.errors import CorruptionError, PulqueError, StorageError, UsageError
from pulque.pipeline.archive.tasks import (
    CopyDone,
    CopyWork,
    NotDone,
    Report,
    RowsDone,
    RowsWork,
    Work,
    do_work,
    raw_directory,
    report_from_json,
    report_to_json,
)
from pulque.pipeline.archive.totals import Tally, tally_of_entries
from pulque.pipeline.filesystem import Tree
from pulque.pipeline.lake.table import MESSAGES, QUARANTINE, Table, TableFile, TableKind
from pulque.pipeline.reading.segment_map import SegmentFile, SegmentMap, find_segments, map_segment
from pulque.pipeline.reading.stored_log import SegmentStretch, stretches_of
from pulque.storage.directory.archive_progress import ArchivedUpTo, write_archived
from pulque.storage.directory.layout import base_of
from pulque.storage.files import OsFileSystem

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "Archived",
    "Archiver",
    "Outcome",
    "SegmentFailure",
    "TaskRunner",
    "broker_of",
    "confirm",
    "run_here",
    "run_on_spark",
    "sealed_segments",
    "transaction_of",
]

_STRETCH_BYTES = 512 * 1024 * 1024
_ROUND_BYTES = 2 * 1024 * 1024 * 1024
"""What is given to Spark at once: enough small segments for all cores, and one large one."""
_BROKER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ENDS = 4096
_EVERYTHING = (0, 1 << 62)
_STAGED_FOR = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Archived:
    """A segment that is in the lake.

    Attributes:
        base: Where it begins.
        messages: How many it has.
        files: How many files they are in.
        size: Of the segment.
        was_there: Whether another run committed it meanwhile.
        quarantined: How many more messages it has, in batches that nobody can decode.
    """

    base: int
    messages: int
    files: int
    size: int
    was_there: bool = False
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class SegmentFailure:
    """A segment that is not in the lake, and why."""

    base: int
    reason: str
    is_damage: bool


Outcome = Archived | SegmentFailure


class TaskRunner(Protocol):
    """Does work somewhere, and returns all reports."""

    def __call__(self, works: Sequence[Work], /) -> Iterable[Report]:
        """Do it."""
        ...


def run_here(works: Sequence[Work]) -> Iterator[Report]:
    """Do work in this process, one after the other."""
    return map(do_work, works)


def run_on_spark(spark: "SparkSession") -> TaskRunner:
    """Do work as tasks of Spark."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    def run(works: Sequence[Work]) -> Iterable[Report]:
        # Frames, not RDDs: Spark Connect has no others. Spark ships the works with the function;
        # a row only says which of them a task does.
        frame = spark.createDataFrame([(at,) for at in range(len(works))], "at int")
        spread = frame.repartitionByRange(len(works), "at")
        task = partial(_do_numbered, do_work, works)
        try:
            found = spread.mapInArrow(task, "report string").collect()
        except (Py4JError, PySparkException) as error:
            # What a task finds it reports: this is an executor that died, or a cluster.
            raise StorageError(f"Spark could not do the work: {_first_line(error)}") from error
        return [report_from_json(row.report) for row in found]

    return run


def _do_numbered(
    do: Callable[[Work], Report], works: Sequence[Work], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Do the works whose numbers come, and yield their reports."""
    for batch in batches:
        for at in batch.column("at").to_pylist():
            report = report_to_json(do(works[at]))
            yield pa.RecordBatch.from_pydict({"report": [report]})


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])


def broker_of(where: str, name: str | None) -> str:
    """Return the name under which a directory's segments are archived.

    Args:
        where: A data directory, or one of segments.
        name: As the user wants it; else the id that the data directory was given.

    Raises:
        UsageError: There is none, or it cannot be part of a path.
    """
    found = name or _id_of(where)
    if found is None:
        raise UsageError(
            f"{where} does not say which broker it is of: name it with --broker, and never give "
            "two brokers one name"
        )
    if not _BROKER.fullmatch(found):
        raise UsageError(
            f"the broker's name {found!r} is not allowed: letters, digits, '.', '_' and '-', "
            "at most 64"
        )
    return found


def _id_of(where: str) -> str | None:
    tree = Tree(where)
    if "format.json" not in tree.names():
        return None
    file = tree.open("format.json")
    try:
        text = file.read(4096, 0)
    finally:
        file.close()
    try:
        found = json.loads(text).get("id")
    except (ValueError, AttributeError):
        return None
    return found if isinstance(found, str) and found else None


def sealed_segments(where: str) -> tuple[list[SegmentFile], list[SegmentFailure]]:
    """Return the segments that will not change any more, and those that are not whole.

    The last one may still grow, unless it has an index.
    """
    tree = Tree(where)
    found = find_segments(where)
    names = tree.names(found[0].path.rpartition("/")[0]) if found else []
    bases = [base_of(name, "log") for name in names]
    nexts = dict(pairwise(sorted(base for base in bases if base is not None)))
    sealed, torn = [], []
    for each in found:
        after = nexts.get(each.base)
        end = each.base + _size_of(tree, each.path)
        if end == after or (after is None and f"{each.base:020d}.index" in names):
            sealed.append(each)
        elif after is not None:
            reason = f"{each.path} at offset {end}: it ends here, and the next begins at {after}"
            torn.append(SegmentFailure(each.base, reason, is_damage=True))
    return sealed, torn


def transaction_of(broker: str, segment: SegmentFile) -> str:
    """Return the name under which a segment is committed.

    Part of it is made from the segment's own bytes: two brokers that were given one name by
    mistake must not be taken for one.
    """
    file = Tree(segment.where).open(segment.path)
    try:
        size = file.size()
        ends = file.read(_ENDS, 0) + file.read(_ENDS, max(size - _ENDS, 0))
    finally:
        file.close()
    return f"{broker}/{segment.base:020d}/{size}-{google_crc32c.value(ends):08x}"


def confirm(where: str, *, messages: int, actions: int) -> bool:
    """Tell a broker how far its logs are archived, so that it may remove what is.

    Returns:
        Whether there is a data directory on this machine to write it down in.

    Raises:
        StorageError: It cannot be written there.
    """
    tree = Tree(where)
    local = tree.local()
    if local is None or "format.json" not in tree.names():
        return False
    write_archived(OsFileSystem(str(local)), ArchivedUpTo(messages, actions))
    return True


def _size_of(tree: Tree, path: str) -> int:
    file = tree.open(path)
    try:
        return file.size()
    finally:
        file.close()


@dataclass(slots=True)
class _Pending:
    """A segment on its way."""

    segment: SegmentFile
    size: int
    expected: tuple[int, int]
    """The count, and the sum of sequences, that the index says."""
    works: list[Work]
    reports: list[Report] = field(default_factory=list)


class Archiver:
    """Brings the sealed segments of one broker into a lake.

    Args:
        lake: A path or a URL.
        where: The broker's data directory, or one of segments.
        broker: Its name in the lake.
        runner: Does the work; asked for only if there is some, as Spark takes its time to start.
        step: Told the name of each step before it is taken; tests let it fail there.
        should_stop: Asked now and then whether to leave the rest to another run.
    """

    def __init__(
        self,
        lake: str,
        where: str,
        broker: str,
        runner: Callable[[], TaskRunner],
        *,
        step: Callable[[str], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._lake = lake
        self._where = where
        self._broker = broker
        self._runner = runner
        self._step = step
        self._should_stop = should_stop
        self._table = Table(lake, MESSAGES)
        self._quarantine = Table(lake, QUARANTINE)

    def waiting(self) -> tuple[list[SegmentFile], list[SegmentFailure]]:
        """Return the sealed segments that are not in the lake, and those that are not whole."""
        sealed, torn = sealed_segments(self._where)
        if not self._table.exists():
            return sealed, torn
        table = self._table.open()
        is_new = [table.transaction_version(self._transaction_of(each)) is None for each in sealed]
        return list(compress(sealed, is_new)), torn

    def archived_up_to(self) -> int:
        """Return the offset before which everything that is still stored is in the lake."""
        sealed, torn = sealed_segments(self._where)
        waiting, _ = self.waiting()
        left = [*(each.base for each in waiting), *(each.base for each in torn)]
        tree = Tree(self._where)
        ends = [each.base + _size_of(tree, each.path) for each in sealed]
        return min([*left, max(ends, default=0)])

    def _transaction_of(self, segment: SegmentFile) -> str:
        return transaction_of(self._broker, segment)

    def run(self, *, keep_going: bool = False) -> Iterator[Outcome]:
        """Archive what waits, in order; yield what became of each segment.

        Args:
            keep_going: Whether to go on behind a segment that cannot be archived.
        """
        waiting, torn = self.waiting()
        if torn and not keep_going:
            waiting, torn = [each for each in waiting if each.base < torn[0].base], torn[:1]
        has_failed = False
        for some in _rounds(waiting):
            if self._should_stop():
                return
            for outcome in self._archive(some, keep_going=keep_going):
                yield outcome
                has_failed = has_failed or isinstance(outcome, SegmentFailure)
            if has_failed and not keep_going:
                return
        yield from torn
        self._sweep()

    def _archive(self, segments: Sequence[SegmentFile], *, keep_going: bool) -> Iterator[Outcome]:
        pending: list[_Pending] = []
        failed: list[SegmentFailure] = []
        for segment in segments:
            try:
                pending.append(self._planned(segment))
            except PulqueError as error:
                is_damage = isinstance(error, CorruptionError)
                failed.append(SegmentFailure(segment.base, str(error), is_damage))
                if not keep_going:
                    break
        self._write(pending)
        for at, each in enumerate(pending):
            outcome = self._finish(each)
            yield outcome
            if isinstance(outcome, SegmentFailure) and not keep_going:
                for later in pending[at + 1 :]:
                    self._give_up(later)
                return
        yield from failed

    def _write(self, pending: Sequence[_Pending]) -> None:
        works = [work for each in pending for work in each.works]
        if not works:
            return
        by_base = {each.segment.base: each for each in pending}
        self._step("write")
        for report in self._runner()(works):
            by_base[report.base].reports.append(report)

    def _planned(self, segment: SegmentFile) -> _Pending:
        """Say what is to be done for a segment.

        Raises:
            CorruptionError: It is damaged, as far as can be seen without reading it all.
        """
        found = map_segment(segment)
        for damage in found.damages:
            raise CorruptionError(damage.path, damage.offset, damage.reason)
        unknown = set(np.unique(found.entries["partition"]).tolist()) - set(found.names)
        if unknown:
            raise CorruptionError(
                segment.path, segment.base, f"partition {min(unknown)} is in no table"
            )
        # What takes longest comes first, so that no core waits for it at the end.
        works: list[Work] = [
            RowsWork(self._lake, self._broker, stretch, at)
            for at, stretch in enumerate(_stretches(found))
        ]
        works.append(CopyWork(self._lake, self._broker, segment))
        return _Pending(segment, found.size, tally_of_entries(found.entries), works)

    def _finish(self, pending: _Pending) -> Outcome:
        failures = [each for each in pending.reports if isinstance(each, NotDone)]
        try:
            if failures:
                worst = max(failures, key=lambda each: each.is_damage)
                self._give_up(pending)
                return SegmentFailure(worst.base, worst.reason, worst.is_damage)
            return self._commit(pending)
        except StorageError as error:
            return SegmentFailure(pending.segment.base, str(error), is_damage=False)

    def _commit(self, pending: _Pending) -> Archived:
        base = pending.segment.base
        rows = [each for each in pending.reports if isinstance(each, RowsDone)]
        self._step("verify")
        found = sum((each.written for each in rows), Tally())
        left = sum((each.unreadable for each in rows), Tally())
        together = found + left
        if (together.count, together.sequences) != pending.expected:
            self._give_up(pending)
            raise StorageError(
                f"{pending.segment.path}: its index has {pending.expected[0]} messages with "
                f"sequences that add up to {pending.expected[1]}, and {together.count} with "
                f"{together.sequences} were written"
            )
        self._step("publish")
        try:
            self._name_copies(pending)
        except StorageError:
            self._give_up(pending)
            raise
        self._commit_quarantine(pending.segment, rows)
        self._step("commit")
        files = [file for each in rows for file in each.files]
        try:
            is_ours = self._table.commit(files, self._transaction_of(pending.segment))
        except StorageError:
            # Over a network the write may still arrive, and then the files are needed.
            if self._table.tree.local() is not None:
                self._remove(MESSAGES, files)
            raise
        self._step("done")
        if not is_ours:
            self._remove(MESSAGES, files)
        return Archived(
            base,
            found.count,
            len(files),
            pending.size,
            was_there=not is_ours,
            quarantined=left.count,
        )

    def _commit_quarantine(self, segment: SegmentFile, rows: Sequence[RowsDone]) -> None:
        """Let the batches that cannot be decoded count, before the segment does.

        Whoever finds the segment in the table of messages finds them too. A run that dies in
        between leaves them, and the next one finds them committed.
        """
        files = [file for each in rows for file in each.quarantined]
        if not files:
            return
        self._step("quarantine")
        try:
            is_ours = self._quarantine.commit(files, self._transaction_of(segment))
        except StorageError:
            if self._table.tree.local() is not None:
                self._remove_rows(rows)
            raise
        if not is_ours:
            self._remove(QUARANTINE, files)

    def _name_copies(self, pending: _Pending) -> None:
        for each in pending.reports:
            if isinstance(each, CopyDone):
                for staged, to in each.staged:
                    self._table.tree.move(staged, to)

    def _give_up(self, pending: _Pending) -> None:
        self._remove_rows([each for each in pending.reports if isinstance(each, RowsDone)])
        for each in pending.reports:
            if isinstance(each, CopyDone):
                for staged, _ in each.staged:
                    self._table.tree.remove(staged)

    def _remove_rows(self, rows: Iterable[RowsDone]) -> None:
        for each in rows:
            self._remove(MESSAGES, each.files)
            self._remove(QUARANTINE, each.quarantined)

    def _remove(self, kind: TableKind, files: Iterable[TableFile]) -> None:
        for file in files:
            self._table.tree.remove(f"{kind.name}/{file.path}")

    def _sweep(self) -> None:
        """Remove copies that runs left behind which were killed."""
        tree = self._table.tree
        for each in tree.older_than(raw_directory(self._broker), _STAGED_FOR):
            if each.path.rpartition("/")[2].startswith("."):
                tree.remove(each.path)


def _rounds(segments: Sequence[SegmentFile]) -> Iterator[list[SegmentFile]]:
    """Deal segments to rounds of about the same size, in order."""
    current: list[SegmentFile] = []
    size = 0
    for each, after in pairwise([*segments, None]):
        assert each is not None  # noqa: S101  # only the last one is
        current.append(each)
        size += _ROUND_BYTES if after is None else after.base - each.base
        if size >= _ROUND_BYTES:
            yield current
            current, size = [], 0


def _stretches(found: SegmentMap) -> list[SegmentStretch]:
    """Cut a segment into stretches of about the same size, one for each task."""
    entries = found.entries
    if not len(entries):
        return []
    ranges = dict.fromkeys(found.names.values(), _EVERYTHING)
    count = -(-found.size // _STRETCH_BYTES)
    length = -(-found.size // count)
    offsets = entries["offset"].astype(np.int64)
    return stretches_of(found, ranges, entries, (offsets - found.segment.base) // length)

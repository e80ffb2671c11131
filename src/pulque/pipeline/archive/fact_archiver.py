"""The archive of what consumers did: sealed segments of the action log into their own table.

The same steps as for messages, but for a copy: a commit makes the rows of a segment visible, and
carries its name.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

from pulque.errors import PulqueError
from pulque.model.names import PartitionName
from pulque.pipeline.archive.message_archiver import (
    Archived,
    Outcome,
    SegmentFailure,
    TaskRunner,
    sealed_segments,
    transaction_of,
)
from pulque.pipeline.archive.tasks import FactsWork, NotDone, Report, RowsDone
from pulque.pipeline.filesystem import Tree
from pulque.pipeline.lake.consumer_facts import CONSUMPTION
from pulque.pipeline.lake.table import Table
from pulque.pipeline.reading.segment_map import SegmentFile, map_segment
from pulque.storage.directory.layout import ACTIONS, base_of

__all__ = ["FactsArchiver"]


class FactsArchiver:
    """Brings the sealed segments of a broker's action log into a lake.

    Args:
        lake: A path or a URL.
        where: The broker's data directory.
        broker: Its name in the lake.
        runner: Does the work.
    """

    def __init__(
        self, lake: str, where: str, broker: str, runner: Callable[[], TaskRunner]
    ) -> None:
        self._lake = lake
        self._where = where
        self._broker = broker
        self._runner = runner
        self._table = Table(lake, CONSUMPTION)

    def waiting(self) -> list[tuple[SegmentFile, int]]:
        """Return the sealed segments that are not in the lake, each with its end."""
        table = self._table.open() if self._table.exists() else None
        return [
            (segment, end)
            for segment, end in self._sealed()
            if table is None or table.transaction_version(self._transaction_of(segment)) is None
        ]

    def archived_up_to(self) -> int:
        """Return the offset before which everything that is still stored is in the lake."""
        sealed = self._sealed()
        ends = [end for _, end in sealed]
        return min([*(each.base for each, _ in self.waiting()), max(ends, default=0)])

    def run(self, *, keep_going: bool = False) -> Iterator[Outcome]:
        """Archive what waits, in order; yield what became of each segment."""
        waiting = self.waiting()
        if not waiting:
            return
        names = self._names()
        works = [FactsWork(self._lake, self._broker, each, names) for each, _ in waiting]
        reports = {report.base: report for report in self._runner()(works)}
        must_stop = False
        for segment, end in waiting:
            report = reports.get(segment.base)
            if must_stop:
                self._remove(report)
                continue
            outcome = self._finished(segment, end, report)
            if outcome is not None:
                must_stop = isinstance(outcome, SegmentFailure) and not keep_going
                yield outcome
            else:
                must_stop = True  # in order: what was archived must have no hole

    def _finished(self, segment: SegmentFile, end: int, report: Report | None) -> Outcome | None:
        if isinstance(report, NotDone):
            return SegmentFailure(report.base, report.reason, report.is_damage)
        if not isinstance(report, RowsDone):
            return None  # another time
        if report.read != report.written:
            self._remove(report)
            reason = f"{segment.path}: {report.written.count} rows of {report.read.count}"
            return SegmentFailure(segment.base, reason, is_damage=False)
        try:
            is_ours = self._table.commit(report.files, self._transaction_of(segment))
        except PulqueError as error:
            return SegmentFailure(segment.base, str(error), is_damage=False)
        if not is_ours:
            self._remove(report)
        count, files = report.read.count, len(report.files)
        return Archived(segment.base, count, files, end - segment.base, was_there=not is_ours)

    def _remove(self, report: Report | None) -> None:
        for each in report.files if isinstance(report, RowsDone) else ():
            self._table.tree.remove(f"{CONSUMPTION.name}/{each.path}")

    def _transaction_of(self, segment: SegmentFile) -> str:
        return f"actions/{transaction_of(self._broker, segment)}"

    def _sealed(self) -> list[tuple[SegmentFile, int]]:
        """Return all segments but the last, which may grow."""
        bases = [base_of(name, "log") for name in Tree(self._where).names(ACTIONS)]
        return [
            (SegmentFile(self._where, f"{ACTIONS}/{base:020d}.log", base), after)
            for base, after in pairwise(sorted(each for each in bases if each is not None))
        ]

    def _names(self) -> dict[int, PartitionName]:
        """Return what partitions are called, as the newest sealed segment of messages knows."""
        sealed, _ = sealed_segments(self._where)
        return map_segment(sealed[-1]).names if sealed else {}

"""What was promised, written down apart from the engine: the oracle of the crash tests.

The ledger knows every batch that was sent, in order, every fact and every checkpoint. After each
step of a workload it takes down a moment: how many file operations there were by then, what had
been promised (synced, or claimed to be) and what had at most been written. A power cut between
two moments must leave everything that the earlier one promised and nothing that the later one
does not know.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from pulque.model.actions import Action
from pulque.model.record import ENVELOPE_SIZE
from pulque.storage.engine import Engine
from pulque.storage.indexes.segment_index import Entry
from tests.crash.opening import OWN, Opened

__all__ = ["Ledger", "Moment", "Sent", "read_all"]


class Sent(NamedTuple):
    """One batch, as it was handed to the engine."""

    batch: bytes
    entry: Entry
    wants_disk: bool


class Moment(NamedTuple):
    """What was promised, and what was known at most, after so many operations."""

    operations: int
    durable: dict[str, int]
    """Ends of partitions: all messages before were promised to survive."""
    written: dict[str, int]
    starts: dict[str, int]
    """Where retention has let partitions begin."""
    durable_facts: int
    written_facts: int
    durable_state: int
    """The newest checkpoint that was promised."""
    written_state: int
    start_count: int


@dataclass(slots=True)
class Ledger:
    """The history of one data directory."""

    sent: dict[str, list[Sent]] = field(default_factory=dict)
    facts: list[Action] = field(default_factory=list)
    states: list[dict[bytes, bytes]] = field(default_factory=lambda: [{}])
    """What each checkpoint held; number 0 is none at all."""
    durable: dict[str, int] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    durable_facts: int = 0
    durable_state: int = 0
    start_count: int = 0
    moments: list[Moment] = field(default_factory=list)
    unknown: set[int] = field(default_factory=set)
    """Moments in which something was being refused: a cut there may leave it or not."""

    def end(self, name: str) -> int:
        sent = self.sent.get(name)
        return sent[-1].entry.first_sequence + sent[-1].entry.count if sent else 0

    def ends(self) -> dict[str, int]:
        return {name: self.end(name) for name in self.sent}

    def note(self, operations: int) -> None:
        """Take down a moment."""
        self.moments.append(
            Moment(
                operations,
                dict(self.durable),
                self.ends(),
                dict(self.starts),
                self.durable_facts,
                len(self.facts),
                self.durable_state,
                len(self.states) - 1,
                self.start_count,
            )
        )

    def promise(self, ends: dict[str, int]) -> None:
        for name, end in ends.items():
            self.durable[name] = max(self.durable.get(name, 0), end)

    def take_claims(self, engine: Engine) -> None:
        """Hold the engine to what it shows: confirmed messages, and how far the log is synced."""
        for name, sent in self.sent.items():
            partition = engine.partition(name)
            confirmed = 0 if partition is None else partition.confirmed
            for each in reversed(sent):
                end = each.entry.first_sequence + each.entry.count
                is_confirmed = each.wants_disk and end <= confirmed
                if end <= self.starts.get(name, 0):
                    break  # retention took it, so nobody waits for it
                if is_confirmed or each.entry.offset + each.entry.size <= engine.synced:
                    self.promise({name: end})
                    break

    def around(self, operations: int) -> tuple[Moment, Moment]:
        """Return the last moment before a cut, and the first one after it."""
        at = bisect_right(self.moments, operations, key=lambda m: m.operations)
        before = self.moments[at - 1]
        return before, before if before.operations == operations else self.moments[at]

    def check(self, opened: Opened, operations: int) -> None:
        """Hold what was recovered after a cut against what was promised by then."""
        before, after = self.around(operations)
        assert not opened.heard.corruptions, "a power cut was taken for corruption"
        assert opened.engine.start_count > before.start_count
        self._check_messages(opened, before, after)
        self._check_facts(opened, before, after)

    def fork(self, opened: Opened, operations: int) -> "Ledger":
        """Return the history of a survivor, as it is recovered for the first time."""
        before, _ = self.around(operations)
        number = int(opened.state.get(OWN + b"number", b"0"))
        other = Ledger(states=self.states[: number + 1])
        for name, partition in opened.engine.partitions.by_name.items():
            other.sent[name] = [
                s for s in self.sent[name] if s.entry.first_sequence < partition.end
            ]
            other.starts[name] = partition.start
        other.facts = self.facts[: _facts_before(opened.state) + len(opened.facts)]
        other.durable = dict(before.durable)
        other.durable_facts = before.durable_facts
        other.durable_state = before.durable_state
        other.start_count = before.start_count
        other.note(0)
        return other

    def opened(self, opened: Opened) -> None:
        """Hold the engine to what it came up with: all of that is durable from now on."""
        self.promise({n: p.confirmed for n, p in opened.engine.partitions.by_name.items()})
        self.durable_facts = len(self.facts)
        self.start_count = opened.engine.start_count

    def _check_messages(self, opened: Opened, before: Moment, after: Moment) -> None:
        engine = opened.engine
        assert set(engine.partitions.by_name) <= set(self.sent)
        for name, sent in self.sent.items():
            partition = engine.partition(name)
            if partition is None:
                assert not before.durable.get(name), f"{name} is gone"
                continue
            assert before.durable.get(name, 0) <= partition.end <= after.written.get(name, 0), name
            assert partition.confirmed == partition.end
            assert partition.start <= after.starts.get(name, 0)
            kept = [s for s in sent if partition.start <= s.entry.first_sequence < partition.end]
            assert read_all(engine, name) == [(s.entry, s.batch) for s in kept], name
            seen = opened.seen.get(name, [])
            first = int(opened.state.get(OWN + b"end:" + name.encode(), b"0"))
            expected = [
                (s.entry, s.batch) for s in sent if first <= s.entry.first_sequence < partition.end
            ]
            # What retention removed since the checkpoint cannot be seen again.
            assert seen == expected[len(expected) - len(seen) :], f"{name} was replayed wrongly"
            missed = expected[: len(expected) - len(seen)]
            assert all(e.first_sequence < partition.start for e, _ in missed), name

    def _check_facts(self, opened: Opened, before: Moment, after: Moment) -> None:
        number = int(opened.state.get(OWN + b"number", b"0"))
        assert before.durable_state <= number <= after.written_state
        assert opened.state == self.states[number]
        start = _facts_before(opened.state)
        end = start + len(opened.facts)
        assert opened.facts == self.facts[start:end]
        assert before.durable_facts <= end <= after.written_facts


def read_all(engine: Engine, name: str) -> list[tuple[Entry, bytes]]:
    """Return every stored batch of a partition, read the way a consumer's pull is."""
    partition = engine.partitions.by_name[name]
    found: list[tuple[Entry, bytes]] = []
    sequence = partition.start
    while sequence < partition.confirmed:
        span = engine.span(partition, sequence, max_messages=10**6, max_bytes=10**9)
        assert span.first_sequence == sequence, "there is a hole"
        assert span.end > sequence
        data = b"".join(engine.read(partition, span))
        at = 0
        for piece in span.pieces:
            end = at + piece.entry.size
            found.append((piece.entry, data[at + ENVELOPE_SIZE : end]))
            at = end
        assert at == len(data)
        sequence = span.end
    return found


def _facts_before(state: dict[bytes, bytes]) -> int:
    return int(state.get(OWN + b"facts", b"0"))

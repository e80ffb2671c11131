"""The due index against a model that is nothing but a set."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.rules.schedule import TICK_MS, Due, Schedule

partitions = st.sampled_from([PartitionId(1), PartitionId(2), PartitionId(3)])
times = st.integers(0, 3000)


class ScheduleMachine(RuleBasedStateMachine):
    """Adds, releases, restarts and lets time pass, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()
        self.saved: dict[bytes, bytes] = {}
        self.now_ms = 0
        self.ends: dict[PartitionId, int] = {}
        self.waiting: dict[tuple[PartitionId, int], int] = {}
        """Due times, as they were asked for."""
        self.postponed: dict[tuple[PartitionId, int], int] = {}
        """Until when what is due at one time waits."""

    def time_of(self, key: tuple[PartitionId, int]) -> int:
        """Return when a message goes, rounded up to its tick."""
        due_ms = -(-self.waiting[key] // TICK_MS) * TICK_MS
        return self.postponed.get((key[0], due_ms), due_ms)

    def forget_postponed(self) -> None:
        """What is through is not postponed any more."""
        left = {(key[0], -(-ms // TICK_MS) * TICK_MS) for key, ms in self.waiting.items()}
        self.postponed = {key: ms for key, ms in self.postponed.items() if key in left}

    def is_any_behind(self, due: Due) -> bool:
        """Return whether later messages are due at the same time."""
        return any(
            partition == due.partition
            and sequence > due.sequences[-1]
            and -(-ms // TICK_MS) * TICK_MS == due.due_ms
            for (partition, sequence), ms in self.waiting.items()
        )

    @rule(partition=partitions, due=st.lists(times, min_size=1, max_size=8))
    def add(self, partition: PartitionId, due: list[int]) -> None:
        first = self.ends.get(partition, 0)
        self.ends[partition] = first + len(due)
        self.schedule.add(partition, ConsumeSequence(first), due)
        self.waiting |= {(partition, first + i): ms for i, ms in enumerate(due)}

    @rule(ms=st.integers(0, 700))
    def pass_time(self, ms: int) -> None:
        self.now_ms += ms

    @rule(most=st.integers(1, 5), then=st.sampled_from(["nothing", "remove", "postpone"]))
    def release(self, most: int, then: str) -> None:
        due = self.schedule.due(self.now_ms, most)
        self.postponed = {key: ms for key, ms in self.postponed.items() if ms > self.now_ms}
        if due is None:
            assert all(self.time_of(key) > self.now_ms for key in self.waiting)
            return
        key = (due.partition, due.due_ms)
        assert key not in self.postponed
        assert 1 <= len(due.sequences) <= most
        assert due.sequences == sorted(due.sequences)
        for sequence in due.sequences:
            assert self.waiting[due.partition, sequence] <= due.due_ms <= self.now_ms
        if then == "remove":
            self.schedule.remove(due.partition, due.due_ms, due.sequences)
            for sequence in due.sequences:
                del self.waiting[due.partition, sequence]
            self.forget_postponed()
        elif then == "postpone":
            self.schedule.postpone(due, self.now_ms + 250)
            if not self.is_any_behind(due):
                self.postponed[key] = self.now_ms + 250

    @rule(data=st.data())
    def remove_one(self, data: st.DataObject) -> None:
        if self.waiting:
            key = data.draw(st.sampled_from(sorted(self.waiting)))
            self.schedule.remove(key[0], self.waiting.pop(key), [ConsumeSequence(key[1])])
            self.forget_postponed()

    @rule()
    def add_again(self) -> None:
        for (partition, sequence), ms in self.waiting.items():
            self.schedule.add(partition, ConsumeSequence(sequence), [ms])

    @rule(partition=partitions, share=st.floats(0, 1))
    def clip(self, partition: PartitionId, share: float) -> None:
        end = int(self.ends.get(partition, 0) * share)
        ends = {p: ConsumeSequence(e) for p, e in self.ends.items() if p != partition}
        if end:
            ends[partition] = ConsumeSequence(end)
        gone = [key for key in self.waiting if key[0] == partition and key[1] >= end]
        assert self.schedule.clip(ends) is bool(gone)
        for key in gone:
            del self.waiting[key]
        self.forget_postponed()

    @rule(is_restart=st.booleans())
    def checkpoint(self, *, is_restart: bool) -> None:
        for key, value in self.schedule.encode_changes().items():
            if value is None:
                self.saved.pop(key, None)
            else:
                self.saved[key] = value
        if is_restart:
            self.schedule = Schedule()
            self.schedule.load(self.saved)
            self.postponed = {}

    @invariant()
    def holds_what_waits(self) -> None:
        found = {(due.partition, s) for due in self.schedule.buckets() for s in due.sequences}
        assert found == set(self.waiting)
        assert len(self.schedule) == len(self.waiting)
        for partition in self.ends:
            count = sum(key[0] == partition for key in self.waiting)
            assert self.schedule.waiting_in(partition) == count

    @invariant()
    def knows_when_the_next_is_due(self) -> None:
        next_ms = self.schedule.next_due_ms()
        if not self.waiting:
            assert next_ms is None
        else:
            assert next_ms == min(self.time_of(key) for key in self.waiting)


TestSchedule = ScheduleMachine.TestCase
TestSchedule.settings = settings(deadline=None)


@given(due=st.lists(times, max_size=200), most=st.integers(1, 50))
def test_everything_is_released_once_and_in_order_of_ticks(due: list[int], most: int) -> None:
    schedule = Schedule()
    schedule.add(PartitionId(1), ConsumeSequence(0), due)
    released: list[int] = []
    ticks: list[int] = []
    while (found := schedule.due(10_000, most)) is not None:
        released += found.sequences
        ticks.append(found.due_ms)
        schedule.remove(found.partition, found.due_ms, found.sequences)

    assert sorted(released) == list(range(len(due)))
    assert ticks == sorted(ticks)

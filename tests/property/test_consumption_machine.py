"""Nothing is lost, nothing is settled that nobody settled, and a replay ends where life was.

Consumers of two groups open, pull, settle, nack, repeat themselves, come too late, lie, die and
come back; a broker records facts, redelivers, writes checkpoints, and loses its power with the
tails of its logs. After every step the rules are compared with ``Book``, which keeps every
message and every delivery on its own. The facts go through the bytes of the action log.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pulque.errors import FencedError, InvalidRequestError, StaleSettleError
from pulque.model.actions import (
    Action,
    ConsumerLost,
    GroupOpened,
    NackedDelivery,
    Pulled,
    Settled,
)
from pulque.model.batch import BatchHeader
from pulque.model.names import ConsumerId, Group
from pulque.model.positions import (
    ConsumeSequence,
    Epoch,
    PartitionId,
    PullSequence,
    StartCount,
    Tenure,
)
from pulque.rules.consumption import Consumption, check_incarnation
from pulque.rules.consumption_state import encode_changes, load_state
from pulque.rules.dedup import Dedup
from pulque.rules.lease import Leases
from pulque.rules.subscription import Subscription
from pulque.storage.logs.action_log import decode_action, encode_action
from tests.property.consumption_model import (
    Book,
    Did,
    DidCut,
    DidLose,
    DidOpen,
    DidPull,
    DidSettle,
    DidStart,
    Fate,
    Verdict,
    Who,
)

NAMES = ("x", "y")
GROUPS = (Group("g"), Group("h"))
CONSUMERS = (ConsumerId("a"), ConsumerId("b"))
LEASE_MS = 1000

names = st.sampled_from(NAMES)
groups = st.sampled_from(GROUPS)
consumers = st.sampled_from(CONSUMERS)


@dataclass(frozen=True)
class Made:
    """A partition was made."""

    partition: PartitionId
    name: str


@dataclass(frozen=True)
class Stored:
    """A batch of a producer is in the message log."""

    partition: PartitionId
    producer: int
    number: int
    first: int
    count: int


@dataclass(frozen=True)
class Retried:
    """A message is in a group's retry partition."""

    partition: PartitionId
    group: Group
    sequence: int
    counts: bool = True
    """Whether the fact that called for it is there: after a power cut it may not be, and another
    failure of the message calls for another one."""


Record = Made | Stored | Retried


@dataclass(frozen=True)
class Checkpoint:
    """What recovery starts from."""

    state: Mapping[bytes, bytes]
    facts: int
    records: int


@dataclass
class Disk:
    """The two logs and the last two checkpoints."""

    facts: list[bytes] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=lambda: [Checkpoint({}, 0, 0)])


def header_of(producer: int, number: int, count: int) -> BatchHeader:
    return BatchHeader(0, 0, 0, 4, count, 0, producer, 1, number, 0, 0)


class ConsumptionMachine(RuleBasedStateMachine):
    """A broker without network and files, its clients, and a book kept beside it."""

    @initialize()
    def begin(self) -> None:
        self.disk = Disk()
        self.history: list[tuple[bytes | None, Did]] = []
        """What happened, with the fact that tells of it; a power cut leaves none."""
        self.book = Book()
        self.live = Consumption()
        self.dedup = Dedup()
        self.leases = Leases(LEASE_MS)
        self.seen_at_ms: dict[tuple[Group, ConsumerId], int] = {}
        self.now_ms = 0
        self.tenure = Tenure(Epoch(0), StartCount(1))
        self.starts: dict[PartitionId, int] = {}
        self.ids: dict[str, PartitionId] = {}
        self.ends: dict[PartitionId, int] = {}
        self.called_for: Counter[tuple[PartitionId, Group, int]] = Counter()
        # Something to talk about, so that few steps already reach the rare cases.
        for number in range(3):
            self.send("x", 1, number, 4)
        for consumer in CONSUMERS:
            self.pull("x", GROUPS[0], consumer, 3, 0)

    # -- what clients do ---------------------------------------------------------------------

    @rule(
        name=names,
        producer=st.integers(1, 2),
        number=st.integers(0, 8),
        count=st.integers(1, 5),
    )
    def send(self, name: str, producer: int, number: int, count: int) -> None:
        partition = self._partition(name)
        header = header_of(producer, number, count)
        before = [
            r.first
            for r in self.disk.records
            if isinstance(r, Stored)
            and (r.partition, r.producer, r.number) == (partition, producer, number)
        ]

        found = self.dedup.find(partition, header)

        assert ([] if found is None else [found]) == before
        if found is None:
            first = self.ends[partition]
            self.dedup.stored(partition, header, ConsumeSequence(first), self.now_ms)
            self.disk.records.append(Stored(partition, producer, number, first, count))
            self.ends[partition] = first + count

    @rule(
        name=names,
        group=groups,
        consumer=consumers,
        most=st.integers(1, 6),
        unmatched=st.sampled_from([0, 0, 1, 3]),
    )
    def pull(
        self, name: str, group: Group, consumer: ConsumerId, most: int, unmatched: int
    ) -> None:
        who = self._open(name, group, consumer, newer=0)
        found = self._subscription(who)
        partition = who[0]
        first = max(self.book.next[partition, group], self.starts[partition])
        count = min(most, self.ends[partition] - first)
        if count < 1:
            return
        sequences = tuple(range(first, first + count))
        self._record(
            Pulled(
                found.id,
                self.tenure,
                found.next_pull,
                ConsumeSequence(first),
                count,
                self.now_ms,
                max(count - unmatched, 1),
            ),
            DidPull(who, self.tenure, sequences),
        )

    @rule(name=names, group=groups, consumer=consumers)
    def come_back_as_another_incarnation(
        self, name: str, group: Group, consumer: ConsumerId
    ) -> None:
        who = self._open(name, group, consumer, newer=0)
        held = list(self._subscription(who).held)

        self._open(name, group, consumer, newer=1)

        assert list(self._subscription(who).held) == held

    @precondition(lambda self: self.book.hands)
    @rule(data=st.data())
    def act_as_an_older_incarnation(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(sorted(self.book.hands)))
        incarnation = self.book.hands[who].incarnation - 1

        try:
            self.live.opened(*who, incarnation)
        except FencedError:
            return
        raise AssertionError(f"{who} was let in as {incarnation}")

    @precondition(lambda self: self._who_holds())
    @rule(data=st.data())
    def settle_some(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(self._who_holds()))
        hand = self.book.hands[who]
        held = hand.unsettled()
        tenure = held[0][2]
        same = [pull for pull, _, under in held if under == tenure]
        last = data.draw(st.sampled_from(same))
        nacked = data.draw(st.sets(st.sampled_from(range(hand.settled, last + 1)), max_size=3))
        overlap = data.draw(st.integers(0, 2))
        first = hand.settled - overlap
        assume(first >= 0 and not any(first <= pull for pull in hand.lost))

        self._settle(who, tenure, first, last, tuple(sorted(nacked)))

        assert self._subscription(who).settled > last

    @precondition(lambda self: self._who_holds())
    @rule(data=st.data())
    def settle_everything(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(self._who_holds()))
        while held := self.book.hands[who].unsettled():
            tenure = held[0][2]
            last = max(pull for pull, _, under in held if under == tenure)
            self._settle(who, tenure, held[0][0], last, ())

        assert not self._subscription(who).held
        assert self._subscription(who).held_count == 0

    @precondition(lambda self: self.book.hands)
    @rule(data=st.data())
    def settle_anything(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(sorted(self.book.hands)))
        hand = self.book.hands[who]
        held = hand.unsettled()
        first = max(hand.settled + data.draw(st.integers(-3, 2)), 0)
        last = max(first + data.draw(st.integers(-1, len(held) + 1)), 0)
        nacked = data.draw(st.lists(st.integers(first, max(first, last + 1)), max_size=2))
        tenure = data.draw(st.sampled_from([self.tenure, *(under for _, _, under in held)]))

        self._settle(who, tenure, first, last, tuple(nacked))

    @precondition(lambda self: any(hand.lost for hand in self.book.hands.values()))
    @rule(data=st.data())
    def settle_what_was_taken_away(self, data: st.DataObject) -> None:
        losers = sorted(who for who, hand in self.book.hands.items() if hand.lost)
        who = data.draw(st.sampled_from(losers))
        hand = self.book.hands[who]
        first = data.draw(st.sampled_from(sorted(hand.lost)))
        last = first + data.draw(st.integers(0, 3))

        self._settle(who, self.tenure, first, last, ())

    @precondition(lambda self: len(self.book.hands) > 1)
    @rule(data=st.data())
    def settle_what_another_holds(self, data: st.DataObject) -> None:
        holders = self._who_holds()
        assume(holders)
        holder = data.draw(st.sampled_from(holders))
        other = data.draw(st.sampled_from(sorted(set(self.book.hands) - {holder})))
        pull, _, tenure = self.book.hands[holder].unsettled()[-1]

        self._settle(other, tenure, self.book.hands[holder].settled, pull, ())

    # -- what time does ----------------------------------------------------------------------

    @rule(ms=st.integers(1, 700))
    def wait(self, ms: int) -> None:
        self.now_ms += ms
        expected = {key for key, seen in self.seen_at_ms.items() if self.now_ms - seen > LEASE_MS}

        expired = self.leases.expired(self.now_ms)

        assert sorted(expired) == sorted(expected)
        for group, consumer in expired:
            self._lose(group, consumer)

    @rule(group=groups, consumer=consumers)
    def leave(self, group: Group, consumer: ConsumerId) -> None:
        self._lose(group, consumer)

    @rule(name=names, keep=st.integers(0, 4))
    def retain(self, name: str, keep: int) -> None:
        partition = self._partition(name)
        self.starts[partition] = max(self.starts[partition], self.ends[partition] - keep)

    # -- what the broker does ----------------------------------------------------------------

    @precondition(lambda self: self.live.pending())
    @rule(data=st.data())
    def redeliver(self, data: st.DataObject) -> None:
        effect = data.draw(st.sampled_from(self.live.pending()))
        many = data.draw(st.integers(1, len(effect.redeliveries)))
        sequences = [r.sequence for r in effect.redeliveries[:many] if r.length == 1]
        for ranged in (r for r in effect.redeliveries[:many] if r.length > 1):
            # That the filter wants all of them is the hardest: none may be left out.
            end = ConsumeSequence(data.draw(st.integers(ranged.sequence + 1, ranged.end)))
            wanted = [ConsumeSequence(each) for each in range(ranged.sequence, end)]
            self.live.narrowed(effect.partition, effect.group, ranged, end, wanted)
            sequences += wanted[: data.draw(st.integers(0, len(wanted)))]
        self.disk.records += [Retried(effect.partition, effect.group, s) for s in sequences]

        self.live.redelivered(effect.partition, effect.group, sequences)

    @rule()
    def write_checkpoint(self) -> None:
        state = dict(self.disk.checkpoints[-1].state)
        changes: dict[bytes, bytes | None] = {
            **self.dedup.encode_changes(),
            **encode_changes(self.live),
        }
        for key, value in changes.items():
            if value is None:
                state.pop(key, None)
            else:
                state[key] = value
        done = Checkpoint(state, len(self.disk.facts), len(self.disk.records))
        self.disk.checkpoints = [self.disk.checkpoints[-1], done]

    @rule()
    def replay_beside_the_living(self) -> None:
        for checkpoint in self.disk.checkpoints:
            replayed, _, _ = self._recovered(checkpoint)
            replayed.clip({p: ConsumeSequence(end) for p, end in self.ends.items()})

            assert shown(replayed) == shown(self.live)

    @rule(data=st.data(), is_newest_damaged=st.booleans())
    def lose_power(self, data: st.DataObject, *, is_newest_damaged: bool) -> None:
        newest = self.disk.checkpoints[-1]
        used = self.disk.checkpoints[0 if is_newest_damaged else -1]
        facts = data.draw(st.integers(newest.facts, len(self.disk.facts)), label="facts kept")
        records = data.draw(
            st.integers(newest.records, len(self.disk.records)), label="records kept"
        )
        self._cut(facts, records)

        self.live, self.dedup, lacks_facts = self._recovered(used)
        clipped = self.live.clip({p: ConsumeSequence(end) for p, end in self.ends.items()})

        self._restart()
        if is_newest_damaged:
            self.disk.checkpoints = [used, used]
        self.write_checkpoint()
        if clipped or lacks_facts:
            # No fact tells of it: no checkpoint from before may be used again.
            self.write_checkpoint()

    # -- what must hold ----------------------------------------------------------------------

    @invariant()
    def the_rules_agree_with_the_book(self) -> None:
        assert {
            (s.partition, s.group, s.consumer): (
                s.incarnation,
                s.settled,
                s.next_pull,
                [
                    (h.first_pull + i, h.first_sequence + i, h.tenure)
                    for h in s.held
                    for i in range(h.length)
                ],
            )
            for s in self.live.subscriptions.values()
        } == {
            who: (hand.incarnation, hand.settled, len(hand.pulled), hand.unsettled())
            for who, hand in self.book.hands.items()
        }
        assert {
            key: state.next_sequence for key, state in self.live.groups.items()
        } == self.book.next

    @invariant()
    def every_message_handed_out_is_held_once_or_settled_or_comes_again(self) -> None:
        held = Counter(
            (s.partition, s.group, h.first_sequence + i)
            for s in self.live.subscriptions.values()
            for h in s.held
            for i in range(h.length)
        )
        pending = {
            (effect.partition, effect.group, sequence)
            for effect in self.live.pending()
            for r in effect.redeliveries
            for sequence in range(r.sequence, r.end)
        }
        redelivered = Counter(self._redelivered())
        assert all(times == 1 for times in held.values())
        assert all(times == 1 for times in redelivered.values())
        assert not pending & set(redelivered)
        assert self.book.retried() - set(redelivered) == pending
        assert set(held) == {k for k, fate in self.book.fates.items() if fate is Fate.HELD}

    @invariant()
    def positions_are_in_order(self) -> None:
        for s in self.live.subscriptions.values():
            assert 0 <= s.settled <= s.next_pull
            at = s.settled
            for held in s.held:
                assert held.length > 0
                assert held.first_pull == at
                at = held.end_pull
            assert at == s.next_pull
        for (partition, _), state in self.live.groups.items():
            assert 0 <= state.next_sequence <= self.ends[partition]

    # -- inside ------------------------------------------------------------------------------

    def _partition(self, name: str) -> PartitionId:
        if name not in self.ids:
            partition = PartitionId(1 + max(self.ids.values(), default=0))
            self.disk.records.append(Made(partition, name))
            self.ids[name] = partition
            self.ends[partition] = self.starts[partition] = 0
        return self.ids[name]

    def _subscription(self, who: Who) -> Subscription:
        found = self.live.subscription(*who)
        assert found is not None
        return found

    def _redelivered(self) -> list[tuple[PartitionId, Group, int]]:
        return [
            (r.partition, r.group, r.sequence)
            for r in self.disk.records
            if isinstance(r, Retried) and r.counts
        ]

    def _who_holds(self) -> list[Who]:
        return sorted(who for who, hand in self.book.hands.items() if hand.unsettled())

    def _open(self, name: str, group: Group, consumer: ConsumerId, newer: int) -> Who:
        partition = self._partition(name)
        who = (partition, group, consumer)
        hand = self.book.hands.get(who)
        incarnation = newer + (hand.incarnation if hand else 1)
        fact = self.live.opened(partition, group, consumer, incarnation)
        assert (fact is None) == (hand is not None and not newer)
        if fact is not None:
            self._record(fact, DidStart(who, incarnation))
        if (partition, group) not in self.book.next:
            start = ConsumeSequence(self.starts[partition])
            self._record(GroupOpened(partition, group, start), DidOpen((partition, group), start))
        self._hear_of(group, consumer)
        return who

    def _hear_of(self, group: Group, consumer: ConsumerId) -> None:
        self.leases.renew(group, consumer, self.now_ms)
        self.seen_at_ms[group, consumer] = self.now_ms

    def _settle(
        self, who: Who, tenure: Tenure, first: int, last: int, nacked: tuple[int, ...]
    ) -> None:
        """Do what a broker does with a settle, and compare its answer with the book's."""
        found = self._subscription(who)
        check_incarnation(found, self.book.hands[who].incarnation)
        expected = self.book.hands[who].verdict(tenure, first, last, nacked)
        try:
            start = found.check_settle(tenure, first, last, nacked)
        except InvalidRequestError:
            assert expected is Verdict.INVALID
            return
        except StaleSettleError:
            assert expected is Verdict.STALE
            return
        self._hear_of(who[1], who[2])
        if start is None:
            assert expected is Verdict.REPEATS
            return
        assert expected is Verdict.SETTLES
        news = tuple(n for n in nacked if n >= start)
        self._record(
            Settled(
                found.id,
                start,
                PullSequence(last),
                tuple(NackedDelivery(PullSequence(n), -1, "no") for n in news),
                self.now_ms,
            ),
            DidSettle(who, last, frozenset(news)),
        )

    def _lose(self, group: Group, consumer: ConsumerId) -> None:
        for found in self.live.subscriptions_of(group, consumer):
            if found.held_count:
                who = (found.partition, group, consumer)
                self._record(ConsumerLost(found.id, "gone", self.now_ms), DidLose(who))
        self.leases.end(group, consumer)
        self.seen_at_ms.pop((group, consumer), None)

    def _record(self, fact: Action, did: Did) -> None:
        """Log first, then let the rules see it; compare what they call for with the book."""
        encoded = encode_action(fact)
        self.disk.facts.append(encoded)
        self.history.append((encoded, did))
        before = self.book.retried()
        self.book.note(did)
        done = set(self._redelivered())

        effects = self.live.handle(decode_action(encoded))

        called = [
            (e.partition, e.group, sequence)
            for e in effects
            for r in e.redeliveries
            for sequence in range(r.sequence, r.end)
        ]
        self.called_for.update(called)
        assert set(called) == self.book.retried() - before - done
        assert all(self.called_for[each] == 1 for each in called)

    def _recovered(self, checkpoint: Checkpoint) -> tuple[Consumption, Dedup, bool]:
        """Do what a broker does when it starts, but for the clip."""
        consumption, dedup = load_state(checkpoint.state), Dedup()
        dedup.load(checkpoint.state)
        for record in self.disk.records[checkpoint.records :]:
            match record:
                case Stored(partition, producer, number, first, count):
                    header = header_of(producer, number, count)
                    dedup.stored(partition, header, ConsumeSequence(first), self.now_ms)
                case Retried(partition, group, sequence):
                    consumption.remember_redelivered(partition, group, [ConsumeSequence(sequence)])
                case Made():
                    pass
        for fact in self.disk.facts[checkpoint.facts :]:
            consumption.handle(decode_action(fact))
        lacks_facts = consumption.end_replay()
        return consumption, dedup, lacks_facts

    def _cut(self, facts: int, records: int) -> None:
        """Lose the tails of both logs, and tell the book."""
        lost = len(self.disk.facts) - facts
        while lost:
            lost -= self.history.pop()[0] is not None
        del self.disk.facts[facts:]
        del self.disk.records[records:]
        made = {r.partition: r.name for r in self.disk.records if isinstance(r, Made)}
        self.ids = {name: partition for partition, name in made.items()}
        self.ends = dict.fromkeys(made, 0)
        for record in self.disk.records:
            if isinstance(record, Stored):
                self.ends[record.partition] = record.first + record.count
        self.starts = {p: min(self.starts[p], end) for p, end in self.ends.items()}
        self.history.append((None, DidCut(tuple(self.ends.items()))))
        self.book = Book.of(did for _, did in self.history)
        called_for = self.book.retried()
        for at, each in enumerate(self.disk.records):
            if isinstance(each, Retried):
                key = (each.partition, each.group, each.sequence)
                self.disk.records[at] = replace(each, counts=each.counts and key in called_for)

    def _restart(self) -> None:
        self.tenure = Tenure(Epoch(0), StartCount(self.tenure.start + 1))
        self.called_for.clear()
        self.leases = Leases(LEASE_MS)
        self.seen_at_ms = {}
        for found in self.live.subscriptions.values():
            if found.held_count:
                self._hear_of(found.group, found.consumer)


def shown(consumption: Consumption) -> object:
    """Return all that can be seen of a consumption, in an order that means nothing."""
    return (
        {
            key: (
                s.next_sequence,
                {
                    sequence: replace(r, sequence=ConsumeSequence(sequence), length=1, matched=1)
                    for r in (*s.pending.values(), *s.ranges)
                    for sequence in range(r.sequence, r.end)
                },
            )
            for key, s in consumption.groups.items()
        },
        {
            number: (
                s.partition,
                s.group,
                s.consumer,
                s.incarnation,
                s.settled,
                s.next_pull,
                list(s.held),
                (s.lost_start, s.lost_end),
            )
            for number, s in consumption.subscriptions.items()
        },
        {
            (s.partition, s.group, s.consumer): consumption.subscription(
                s.partition, s.group, s.consumer
            )
            is s
            for s in consumption.subscriptions.values()
        },
        {
            (s.group, s.consumer): sorted(
                each.id for each in consumption.subscriptions_of(s.group, s.consumer)
            )
            for s in consumption.subscriptions.values()
        },
    )


TestConsumption = ConsumptionMachine.TestCase
TestConsumption.settings = settings(max_examples=max(100, settings().max_examples))

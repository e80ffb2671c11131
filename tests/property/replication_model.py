"""The failover of a broker group as a game of moves, for a search through all of its states.

Decision 0020 without files, sockets and time: brokers with a log and a list of epochs each, the
one row that says who leads, and what is on its way between them. Every move that the decision
allows can be made at any time: an election too, as what is stored must not depend on clocks. (Who
may *serve* at what time is another game: ``replication_lease_model``.)

``Game(size, broken)`` plays by all rules but the one named by ``broken``; ``replication_search``
walks through the states, the shortest ways first.

Left out: segments, checkpoints, records and the action log, which is compared and copied as the
message log is. A broker that is down is one that makes no move, so that a crash and the next start
are one move. Followers hear and answer at once, but one message may be late for as long as it
likes, and everything that goes to the row may be.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

__all__ = ["BROKEN", "Game", "Size"]

BROKEN = {
    "local_shrink": "the leader takes a follower out of the set by itself",
    "expand_race": "a new member is not waited for while the change is under way",
    "early_expand": "who has less than the leader had at the start of its epoch is let in",
    "no_cas_epoch": "the row is changed, whatever epoch and version the leader saw",
    "cut_to_confirmed": "a follower cuts its log to what it knows to be confirmed",
    "no_cut": "a follower keeps what it has behind the common point",
    "list_first": "a follower writes down the list of epochs before it cuts its log",
    "unclean": "a broker that is not in sync is elected",
    "no_sync": "a follower says that it has what it did not sync",
    "no_epoch_check": "messages of another epoch count",
    "read_beyond": "consumers see what is not confirmed",
    "follows_older": "a broker that restarted follows one that leads in an epoch before its own",
    "old_token": "a process leads by what was granted to the one before it",
}
"""The rules that can be broken, and what happens then."""


class Size(NamedTuple):
    """How far the game goes: all of it grows with each of them, steeply."""

    brokers: int
    sends: int
    epochs: int
    restarts: int
    changes: int
    """Of the in-sync set."""
    outside: int = 0
    """So many brokers are not in sync in the beginning."""
    late: bool = True
    """Whether a message can be late."""


class Row(NamedTuple):
    """What the authority has written down."""

    epoch: int
    version: int
    leader: int
    token: int
    in_sync: frozenset[int]


class Broker(NamedTuple):
    """One broker: what is on its disk, then what its process knows."""

    log: tuple[int, ...]
    synced: int
    epochs: tuple[tuple[int, int], ...]
    """Epochs and where the log was when they began."""
    token: int = 0
    epoch: int = 0
    """The one that it leads or follows in; 0 after a start."""
    leads: bool = False
    version: int = 0
    in_sync: frozenset[int] = frozenset()
    """As the leader saw it last …"""
    asked: frozenset[int] = frozenset()
    """… and as it will be, if the change that is under way succeeds."""
    acks: tuple[int, ...] = ()
    """How far each broker is synced, as it told its leader."""
    confirmed: int = 0


class State(NamedTuple):
    """All there is at one moment."""

    row: Row
    brokers: tuple[Broker, ...]
    grants: tuple[Row | None, ...]
    """Elections that their winners have not heard of."""
    changes: tuple[Row | None, ...]
    """Changes of the in-sync set on their way to the row."""
    late: tuple[str, int, int, int, int] | None
    """A message that was sent and has not arrived: kind, broker, epoch, offset, value."""
    sends: int
    seen: tuple[tuple[int, int], ...]
    """What was confirmed or shown to anybody, and the epoch in which it first was."""


Move = tuple[str, State]
T = TypeVar("T")

_CLASH = (0, 0)
"""In place of a message: two were seen at this offset."""


class Game:
    """All moves from a state, by all rules of the decision but one."""

    def __init__(self, size: Size, broken: str = "") -> None:
        self._size = size
        self._broken = broken
        self._all = range(size.brokers)

    def start(self) -> State:
        """Return the beginning: the first broker leads, and nothing was sent."""
        in_sync = frozenset(range(self._size.brokers - self._size.outside))
        row = Row(1, 1, 0, 0, in_sync)
        brokers = [Broker((), 0, ((1, 0),)) for _ in self._all]
        nothing = (None,) * self._size.brokers
        state = State(row, tuple(brokers), nothing, nothing, None, 0, ())
        return _put(state, 0, _leading(brokers[0], row, self._size.brokers))

    def moves(self, state: State) -> Iterator[Move]:
        """Yield what can happen next."""
        if state.late:
            yield f"late {state.late} arrives", self._arrive(state)
        for me, broker in enumerate(state.brokers):
            yield from self._elections(state, me)
            yield from self._restarts(state, me)
            if broker.leads:
                yield from self._lead(state, me)
            if state.changes[me]:
                yield f"the row hears of the change of {me}", self._change_row(state, me)
            for leader in self._all:
                if leader != me and state.brokers[leader].leads:
                    yield from self._follow(state, me, leader)

    def problem(self, state: State) -> str:
        """Say which promise does not hold; nothing if all do."""
        if _CLASH in state.seen:
            return "two messages were confirmed at one offset"
        for broker in state.brokers:
            for at, (value, epoch) in enumerate(state.seen if broker.leads else ()):
                if epoch <= broker.epoch and broker.log[at : at + 1] != (value,):
                    return f"{value} was confirmed, and the leader of {broker.epoch} lacks it"
        return _difference(state)

    # ---------------------------------------------------------------- the authority

    def _elections(self, state: State, me: int) -> Iterator[Move]:
        row, broker = state.row, state.brokers[me]
        is_new = (me, broker.token) != (row.leader, row.token)
        may = me in row.in_sync or self._broken == "unclean"
        if is_new and may and row.epoch < self._size.epochs:
            gone = frozenset() if me == row.leader else frozenset([row.leader])
            in_sync = (row.in_sync | {me}) - gone
            elected = Row(row.epoch + 1, row.version + 1, me, broker.token, in_sync)
            grants = _with(state.grants, me, elected)
            yield f"{me} is elected in {elected.epoch}", self._write_row(state, elected, grants)
        grant = state.grants[me]
        if grant and self._may_begin(broker, grant):
            after = _put(state, me, self._begin(broker, grant))
            after = after._replace(grants=_with(state.grants, me, None))
            yield f"{me} leads in {grant.epoch}", self._confirm(after, me)

    def _may_begin(self, broker: Broker, grant: Row) -> bool:
        if self._broken == "old_token":
            return not broker.leads
        return grant.token == broker.token and grant.epoch > _last_epoch(broker)

    def _begin(self, broker: Broker, grant: Row) -> Broker:
        """Sync what there is, and write down where the epoch begins: at its end."""
        end = len(broker.log)
        kept = [each for each in broker.epochs if each[1] <= end and each[0] < grant.epoch]
        epochs = (*kept, (grant.epoch, end))
        if broker.epochs[-1][0] == grant.epoch:
            epochs = broker.epochs
        return _leading(broker._replace(synced=end, epochs=epochs), grant, self._size.brokers)

    def _change_row(self, state: State, me: int) -> State:
        asked = state.changes[me]
        assert asked
        row = state.row
        state = state._replace(changes=_with(state.changes, me, None))
        is_current = (asked.epoch, asked.version) == (row.epoch, row.version)
        if not (is_current or self._broken == "no_cas_epoch"):
            return state
        return self._write_row(
            state, row._replace(version=row.version + 1, in_sync=asked.in_sync), state.grants
        )

    def _write_row(self, state: State, row: Row, grants: tuple[Row | None, ...]) -> State:
        """Write the row; what is on its way and will be refused need not be remembered."""
        changes = state.changes
        if self._broken != "no_cas_epoch":
            changes = (None,) * self._size.brokers
        return state._replace(row=row, grants=grants, changes=changes)

    # ---------------------------------------------------------------- a process

    def _restarts(self, state: State, me: int) -> Iterator[Move]:
        broker = state.brokers[me]
        if sum(each.token for each in state.brokers) >= self._size.restarts:
            return
        fresh = Broker(broker.log, broker.synced, broker.epochs, broker.token + 1)
        if self._broken == "cut_to_confirmed":
            fresh = fresh._replace(confirmed=broker.confirmed)
        grants = state.grants
        if self._broken != "old_token":
            grants = _with(grants, me, None)
        elif broker.leads:
            old = Row(broker.epoch, broker.version, me, broker.token, broker.in_sync)
            grants = _with(grants, me, old)
        state = state._replace(grants=grants)
        yield f"{me} restarts", _put(state, me, fresh)
        if broker.synced < len(broker.log):
            cut = fresh._replace(log=broker.log[: broker.synced])
            yield f"{me} loses what was not synced", _put(state, me, cut)

    # ---------------------------------------------------------------- leading

    def _lead(self, state: State, me: int) -> Iterator[Move]:
        broker = state.brokers[me]
        if state.sends < self._size.sends:
            sent = state.sends + 1
            after = _put(state, me, broker._replace(log=(*broker.log, sent)))
            after = after._replace(sends=sent)
            if self._broken == "read_beyond":
                after = _see(after, me, len(broker.log) + 1)
            yield f"{sent} is sent to {me}", after
        if broker.synced < len(broker.log):
            after = _put(state, me, broker._replace(synced=len(broker.log)))
            yield f"{me} syncs", self._confirm(after, me)
        if not broker.asked:
            yield from self._changes(state, me)
        elif state.changes[me] is None:
            yield f"{me} hears what became of its change", self._hear(state, me)

    def _changes(self, state: State, me: int) -> Iterator[Move]:
        broker = state.brokers[me]
        if broker.version - broker.epoch >= self._size.changes:
            return
        for other in self._all:
            if other == me:
                continue
            if other in broker.in_sync:
                asked = broker.in_sync - {other}
                if self._broken == "local_shrink":
                    after = _put(state, me, broker._replace(in_sync=asked))
                    yield f"{me} drops {other}", self._confirm(after, me)
                else:
                    yield f"{me} wants {other} out", self._ask(state, me, asked)
            elif broker.acks[other] >= self._least(broker):
                yield f"{me} wants {other} in", self._ask(state, me, broker.in_sync | {other})

    def _least(self, broker: Broker) -> int:
        start = 0 if self._broken == "early_expand" else broker.epochs[-1][1]
        return max(broker.confirmed, start)

    def _ask(self, state: State, me: int, asked: frozenset[int]) -> State:
        broker = state.brokers[me]
        change = Row(broker.epoch, broker.version, me, broker.token, asked)
        state = _put(state, me, broker._replace(asked=asked))
        return state._replace(changes=_with(state.changes, me, change))

    def _hear(self, state: State, me: int) -> State:
        broker, row = state.brokers[me], state.row
        if row.epoch != broker.epoch:
            return _put(state, me, _following(broker, 0))
        heard = broker._replace(version=row.version, in_sync=row.in_sync, asked=frozenset())
        return self._confirm(_put(state, me, heard), me)

    def _confirm(self, state: State, me: int) -> State:
        """Confirm what everybody has that is in sync, or is about to be."""
        broker = state.brokers[me]
        counted = broker.in_sync
        if self._broken != "expand_race":
            counted |= broker.asked
        confirmed = min([broker.synced, *(broker.acks[each] for each in counted if each != me)])
        if confirmed <= broker.confirmed:
            return state
        return _see(_put(state, me, broker._replace(confirmed=confirmed)), me, confirmed)

    # ---------------------------------------------------------------- following

    def _follow(self, state: State, me: int, leader: int) -> Iterator[Move]:
        mine, its = state.brokers[me], state.brokers[leader]
        known = mine.epoch if self._broken == "follows_older" else _last_epoch(mine)
        if mine.epoch == its.epoch and not mine.leads:
            yield from self._copying(state, me, leader)
        elif its.epoch >= known and its.epoch != mine.epoch:
            yield from self._begin_to_follow(state, me, leader)

    def _copying(self, state: State, me: int, leader: int) -> Iterator[Move]:
        mine, its = state.brokers[me], state.brokers[leader]
        if self._broken == "cut_to_confirmed":
            mine = mine._replace(confirmed=max(mine.confirmed, its.confirmed))
        if len(mine.log) < len(its.log):
            at = len(mine.log)
            copied = mine._replace(log=(*mine.log, its.log[at]))
            yield f"{me} copies {its.log[at]} from {leader}", _put(state, me, copied)
            if self._size.late and state.late is None:
                late = ("bytes", me, its.epoch, at, its.log[at])
                yield f"bytes of {leader} to {me} are late", state._replace(late=late)
        said = len(mine.log)
        synced = mine.synced if self._broken == "no_sync" else said
        if its.acks[me] < said:
            after = _put(state, me, mine._replace(synced=synced))
            if self._size.late and state.late is None:
                late = ("ack", me, its.epoch, said, leader)
                yield f"what {me} says to {leader} is late", after._replace(late=late)
            yield f"{me} says to {leader} that it has {said}", self._ack(after, me, leader, said)

    def _begin_to_follow(self, state: State, me: int, leader: int) -> Iterator[Move]:
        mine, its = state.brokers[me], state.brokers[leader]
        point = _common_point(mine, its)
        if self._broken == "cut_to_confirmed":
            point = min(mine.confirmed, len(mine.log))
        elif self._broken == "no_cut":
            point = len(mine.log)
        cut = mine._replace(log=mine.log[:point], synced=min(mine.synced, point))
        followed = _following(cut._replace(epochs=its.epochs), its.epoch)
        yield f"{me} follows {leader} from {point}", _put(state, me, followed)
        if sum(each.token for each in state.brokers) < self._size.restarts:
            half = mine._replace(epochs=its.epochs) if self._broken == "list_first" else cut
            for label, after in self._restarts(_put(state, me, half), me):
                yield f"{label}, amid its way to {leader}", after

    def _ack(self, state: State, me: int, leader: int, said: int) -> State:
        broker = state.brokers[leader]
        acks = _with(broker.acks, me, max(broker.acks[me], said))
        return self._confirm(_put(state, leader, broker._replace(acks=acks)), leader)

    def _arrive(self, state: State) -> State:
        assert state.late
        kind, me, epoch, offset, value = state.late
        state = state._replace(late=None)
        to = state.brokers[value if kind == "ack" else me]
        if to.epoch != epoch and self._broken != "no_epoch_check":
            return state
        if kind == "ack":
            return self._ack(state, me, value, offset) if to.leads else state
        if to.leads or not to.epoch or len(to.log) != offset:
            return state
        return _put(state, me, to._replace(log=(*to.log, value)))


def _difference(state: State) -> str:
    for leader in state.brokers:
        for other in state.brokers if leader.leads else ():
            is_following = other.epoch == leader.epoch and not other.leads
            if is_following and leader.log[: len(other.log)] != other.log:
                return f"{other.log} is no copy of {leader.log}"
    return ""


def _leading(broker: Broker, row: Row, brokers: int) -> Broker:
    return _following(broker, row.epoch)._replace(
        leads=True, version=row.version, in_sync=row.in_sync, acks=(-1,) * brokers
    )


def _last_epoch(broker: Broker) -> int:
    """Return the highest epoch that a broker knows of, over restarts too."""
    return max(broker.epoch, broker.epochs[-1][0])


def _following(broker: Broker, epoch: int) -> Broker:
    return Broker(broker.log, broker.synced, broker.epochs, broker.token, epoch)


def _common_point(mine: Broker, its: Broker) -> int:
    """Return up to where both logs are the same, by their lists of epochs."""
    ours = {epoch for epoch, _ in mine.epochs} & {epoch for epoch, _ in its.epochs}
    return min(_end(mine, max(ours)), _end(its, max(ours)))


def _end(broker: Broker, epoch: int) -> int:
    """Return where a leadership ended in the log of a broker: where a later one began."""
    later = [start for each, start in broker.epochs if each > epoch]
    return min([len(broker.log), *later])


def _see(state: State, me: int, end: int) -> State:
    """Note what the leader let others see: the first that saw it decides what it is."""
    broker, seen = state.brokers[me], list(state.seen)
    for at, value in enumerate(broker.log[:end]):
        if at == len(seen):
            seen.append((value, broker.epoch))
        elif seen[at][0] != value:
            seen[at] = _CLASH
        else:
            seen[at] = (value, min(seen[at][1], broker.epoch))
    return state._replace(seen=tuple(seen))


def _put(state: State, me: int, broker: Broker) -> State:
    return state._replace(brokers=_with(state.brokers, me, broker))


def _with(things: tuple[T, ...], at: int, thing: T) -> tuple[T, ...]:
    return (*things[:at], thing, *things[at + 1 :])

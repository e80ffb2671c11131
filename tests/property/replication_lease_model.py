"""Who of a broker group may serve at what time, as a game of moves.

Decision 0020 without the logs: the row that says who leads, brokers, and messages that may be on
their way for as long as they like. Time goes on in ticks, for everybody alike; all that is
remembered of it is how many ticks ago something was, up to the lease. (The tenth that a leader
takes off its lease is for clocks that do not go alike.)

The promise is that never two brokers serve at once. ``Game(size, broken)`` plays by all rules but
the one named by ``broken``.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

__all__ = ["BROKEN", "Game", "Size"]

BROKEN = {
    "no_promise": "a follower leads though its promise to the old leader has not run out",
    "forgotten_promise": "a broker forgets what it promised when it restarts",
    "unwritten": "a leader is answered, and the row does not know that it was heard of",
    "from_answer": "a leader counts its lease from the answer of the meta server on",
    "from_arrival": "a leader counts a follower's promise from when the request came",
    "one_is_enough": "a leader serves while one of those in sync asks it, not all",
    "change_not_counted": "a leader does not count those that may be in sync by now",
    "early_election": "another one is elected before the leader was silent for a lease",
    "serving_hand_over": "a leader goes on serving after it asked for another one",
}
"""The rules that can be broken, and what happens then."""


class Size(NamedTuple):
    """How far the game goes."""

    brokers: int
    epochs: int
    restarts: int
    changes: int
    lease: int
    """In ticks."""
    outside: int = 0
    """So many brokers are not in sync in the beginning."""


class Row(NamedTuple):
    """What the authority has written down."""

    epoch: int
    version: int
    leader: int
    token: int
    in_sync: frozenset[int]


class Broker(NamedTuple):
    """One process."""

    promised: int
    """How long ago it last asked a leader for more."""
    token: int = 0
    epoch: int = 0
    is_elected: bool = False
    leads: bool = False
    heard: int = 0
    """How long ago it sent the word to the meta servers that was answered last."""
    asked: tuple[int, ...] = ()
    """How long ago it sent each follower what that one answered with another question."""
    version: int = 0
    in_sync: frozenset[int] = frozenset()
    wanted: frozenset[int] = frozenset()
    """The set it asked for, if it does not know yet what became of that."""


class Word(NamedTuple):
    """A word to the meta servers, or, with a row, their answer."""

    token: int
    age: int
    row: Row | None


class Round(NamedTuple):
    """What a leader sent to a follower, or, when it is on its way back, the next question."""

    leader: int
    epoch: int
    age: int
    is_back: bool


class State(NamedTuple):
    """All there is at one moment."""

    row: Row
    silent: int
    """How long ago the authority last heard of the leader."""
    brokers: tuple[Broker, ...]
    words: tuple[Word | None, ...]
    rounds: tuple[Round | None, ...]
    """By follower."""
    changes: tuple[Row | None, ...]


Move = tuple[str, State]
T = TypeVar("T")


class Game:
    """All moves from a state, by all rules of the decision but one."""

    def __init__(self, size: Size, broken: str = "") -> None:
        self._size = size
        self._broken = broken
        self._all = range(size.brokers)
        self._over = (size.lease,) * size.brokers

    def start(self) -> State:
        """Return the beginning: the first broker leads, and was heard of just now."""
        in_sync = frozenset(range(self._size.brokers - self._size.outside))
        row = Row(1, 1, 0, 0, in_sync)
        leader = Broker(self._size.lease, 0, 1, True, True, 0, self._over, 1, row.in_sync)
        others = [Broker(self._size.lease, epoch=1) for _ in self._all[1:]]
        nothing = (None,) * self._size.brokers
        return State(row, 0, (leader, *others), nothing, nothing, nothing)

    def problem(self, state: State) -> str:
        """Say whether two brokers serve."""
        who = [me for me in self._all if self._serves(state.brokers[me], me)]
        return f"{' and '.join(map(str, who))} serve" if len(who) > 1 else ""

    def _serves(self, broker: Broker, me: int) -> bool:
        if not broker.leads:
            return False
        counted = broker.in_sync
        if self._broken != "change_not_counted":
            counted |= broker.wanted
        promised = [broker.asked[each] < self._size.lease for each in counted if each != me]
        enough = any(promised) if self._broken == "one_is_enough" and promised else all(promised)
        return broker.heard < self._size.lease or enough

    def moves(self, state: State) -> Iterator[Move]:
        """Yield what can happen next."""
        yield "a tick", self._tick(state)
        for me in self._all:
            yield from self._elections(state, me)
            yield from self._talk(state, me)
            yield from self._copying(state, me)
            if state.brokers[me].leads:
                yield from self._changes(state, me)
            if state.changes[me]:
                yield f"the row hears of the change of {me}", self._change_row(state, me)
            if sum(each.token for each in state.brokers) < self._size.restarts:
                kept = self._size.lease if self._broken == "forgotten_promise" else 0
                fresh = Broker(kept, state.brokers[me].token + 1)
                yield f"{me} restarts", _put(state, me, fresh)

    def _tick(self, state: State) -> State:
        old = self._size.lease

        def later(age: int) -> int:
            return min(age + 1, old)

        brokers = [
            each._replace(
                promised=later(each.promised),
                heard=later(each.heard),
                asked=tuple(map(later, each.asked)),
            )
            for each in state.brokers
        ]
        words = [each and each._replace(age=later(each.age)) for each in state.words]
        rounds = [each and each._replace(age=later(each.age)) for each in state.rounds]
        return state._replace(
            silent=later(state.silent),
            brokers=tuple(brokers),
            words=tuple(words),
            rounds=tuple(rounds),
        )

    def _elections(self, state: State, me: int) -> Iterator[Move]:
        row, broker = state.row, state.brokers[me]
        if row.epoch == self._size.epochs or me not in row.in_sync:
            return
        is_silent = state.silent >= self._size.lease or self._broken == "early_election"
        if me == row.leader and broker.token != row.token:
            elected = row._replace(token=broker.token)
        elif me != row.leader and is_silent:
            elected = row._replace(
                leader=me, token=broker.token, in_sync=row.in_sync - {row.leader}
            )
        else:
            return
        elected = elected._replace(epoch=row.epoch + 1, version=row.version + 1)
        yield f"{me} is elected in {elected.epoch}", state._replace(row=elected, silent=0)

    def _talk(self, state: State, me: int) -> Iterator[Move]:
        """Say a word to the meta servers, get their answer, and do as it says."""
        broker, word = state.brokers[me], state.words[me]
        is_leader = (state.row.leader, state.row.token) == (me, broker.token)
        if not is_leader and not broker.leads:
            if broker.epoch < state.row.epoch:
                known = Broker(broker.promised, broker.token, state.row.epoch)
                yield f"{me} hears who leads", _put(state, me, known)
        elif word is None:
            words = _with(state.words, me, Word(broker.token, 0, None))
            yield f"{me} says a word", state._replace(words=words)
        if word and word.row is None:
            words = _with(state.words, me, word._replace(row=state.row))
            is_heard = (state.row.leader, state.row.token) == (me, word.token)
            silent = 0 if is_heard and self._broken != "unwritten" else state.silent
            yield f"the row hears {me}", state._replace(words=words, silent=silent)
        elif word and word.row:
            after = state._replace(words=_with(state.words, me, None))
            if word.token == broker.token:
                after = _put(after, me, self._answered(broker, me, word, word.row))
            yield f"{me} is answered", after
        may = broker.promised >= self._size.lease or self._broken == "no_promise"
        if broker.is_elected and not broker.leads and may:
            yield f"{me} leads in {broker.epoch}", _put(state, me, broker._replace(leads=True))

    def _answered(self, broker: Broker, me: int, word: Word, row: Row) -> Broker:
        age = 0 if self._broken == "from_answer" else word.age
        if row.epoch > broker.epoch:
            is_elected = (row.leader, row.token) == (me, broker.token)
            if not is_elected:
                return Broker(broker.promised, broker.token, row.epoch)
            return Broker(
                *(broker.promised, broker.token, row.epoch, True, False, age, self._over),
                *(row.version, row.in_sync),
            )
        is_leader = (row.epoch, row.leader, row.token) == (broker.epoch, me, broker.token)
        if is_leader and broker.is_elected:
            return broker._replace(heard=min(broker.heard, age))
        return broker

    def _copying(self, state: State, me: int) -> Iterator[Move]:
        """Send a follower what it asked for, let it ask again, and take note of it."""
        broker, way = state.brokers[me], state.rounds[me]
        if way is None:
            for other, leader in enumerate(state.brokers):
                if leader.leads and leader.epoch == broker.epoch and other != me:
                    sent = _with(state.rounds, me, Round(other, leader.epoch, 0, False))
                    yield f"{other} sends something to {me}", state._replace(rounds=sent)
            return
        gone = state._replace(rounds=_with(state.rounds, me, None))
        leader = state.brokers[way.leader]
        if way.is_back and leader.leads and leader.epoch == way.epoch:
            age = 0 if self._broken == "from_arrival" else way.age
            asked = _with(leader.asked, me, min(leader.asked[me], age))
            after = _put(gone, way.leader, leader._replace(asked=asked))
            yield f"{way.leader} is asked by {me}", after
        elif not way.is_back and way.epoch == broker.epoch:
            rounds = _with(state.rounds, me, way._replace(is_back=True))
            asking = _put(state, me, broker._replace(promised=0))
            yield f"{me} asks {way.leader} for more", asking._replace(rounds=rounds)
        else:
            yield f"{me} and {way.leader} have parted", gone

    def _changes(self, state: State, me: int) -> Iterator[Move]:
        broker, row = state.brokers[me], state.row
        if broker.wanted and state.changes[me] is None and row.epoch == broker.epoch:
            heard = broker._replace(version=row.version, in_sync=row.in_sync, wanted=frozenset())
            yield f"{me} hears what became of its change", _put(state, me, heard)
        if broker.wanted or broker.version - broker.epoch >= self._size.changes:
            return
        for other in self._all:
            if other != me:
                wanted = broker.in_sync ^ {other}
                asking = broker._replace(wanted=wanted)
                yield f"{me} wants {sorted(wanted)}", _ask(state, me, asking, wanted)
        others = broker.in_sync - {me}
        if others and row.epoch < self._size.epochs:
            asking = Broker(broker.promised, broker.token, broker.epoch)
            if self._broken == "serving_hand_over":
                asking = broker._replace(wanted=broker.in_sync)
            yield f"{me} hands over", _ask(state, me, asking, others)

    def _change_row(self, state: State, me: int) -> State:
        asked, row = state.changes[me], state.row
        assert asked
        state = state._replace(changes=_with(state.changes, me, None))
        if (asked.epoch, asked.version) != (row.epoch, row.version):
            return state
        changed = row._replace(version=row.version + 1, in_sync=asked.in_sync)
        if me in asked.in_sync:
            return state._replace(row=changed)
        leader = min(asked.in_sync)
        token = state.brokers[leader].token
        elected = changed._replace(epoch=row.epoch + 1, leader=leader, token=token)
        return state._replace(row=elected, silent=0)


def _ask(state: State, me: int, asking: Broker, wanted: frozenset[int]) -> State:
    before = state.brokers[me]
    change = Row(before.epoch, before.version, me, before.token, wanted)
    return _put(state, me, asking)._replace(changes=_with(state.changes, me, change))


def _put(state: State, me: int, broker: Broker) -> State:
    return state._replace(brokers=_with(state.brokers, me, broker))


def _with(things: tuple[T, ...], at: int, thing: T) -> tuple[T, ...]:
    return (*things[:at], thing, *things[at + 1 :])

"""Groups of every mode, with and without filters, through any history: each gets what it wants.

The data path of a broker runs without its network; consumers pull, ack, nack, leave, and the
broker is killed and recovers. What each group has to get is worked out from the messages and
their tags alone. Before and after each restart, once all is redelivered, the state must be the
same.
"""

import asyncio
from collections import Counter
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from pulque.errors import PulqueError
from pulque.model.batch import seed_of
from pulque.model.groups import EVERYTHING, Filter, Mode, tag_filter
from pulque.model.names import ConsumerId, Group, broadcast_group, retry_partition
from pulque.model.names import Subject as SubjectName
from pulque.model.pack import BatchPacker
from pulque.model.positions import Tenure
from pulque.rules.consumption import Consumption
from pulque.testing.files import MemoryFileSystem
from pulque.testing.raw import messages_in
from pulque.wire.requests import (
    EARLIEST,
    FROM_SETTLED,
    Acks,
    Heartbeat,
    Nacked,
    Pull,
    Send,
    Settle,
    Subscribe,
    Wanted,
)
from pulque.wire.responses import Pulled, Subscribed
from tests.robustness.inside import Inside, open_inside

SUBJECT = SubjectName("orders")
TAGS = ("red", "big", "new")
PATIENCE_S = 10


class Who(NamedTuple):
    """One consumer, and what its group said."""

    name: str
    consumer: ConsumerId
    mode: Mode
    wanted: Filter

    @property
    def group(self) -> Group:
        if self.mode is Mode.BROADCAST:
            return broadcast_group(self.consumer)
        return Group(self.name)


RED = tag_filter(["red"])
BOTH = tag_filter(["new"], ["red", "big"])
CAST = (
    Who("all", ConsumerId("a"), Mode.SHARED, EVERYTHING),
    Who("red", ConsumerId("a"), Mode.SHARED, RED),
    Who("red", ConsumerId("b"), Mode.SHARED, RED),
    Who("once", ConsumerId("a"), Mode.ONCE, EVERYTHING),
    Who("once-red", ConsumerId("a"), Mode.ONCE, RED),
    Who("once-red", ConsumerId("b"), Mode.ONCE, RED),
    Who("", ConsumerId("reader"), Mode.BROADCAST, EVERYTHING),
    Who("", ConsumerId("picky"), Mode.BROADCAST, BOTH),
)


class Step(NamedTuple):
    """What happens next."""

    what: str
    who: Who
    number: int
    tags: list[frozenset[str]]


steps = st.builds(
    Step,
    st.sampled_from(["send", "send", "pull", "pull", "ack", "ack", "nack", "leave", "restart"]),
    st.sampled_from(CAST),
    st.integers(1, 7),
    st.lists(st.frozensets(st.sampled_from(TAGS)), min_size=1, max_size=8),
)


class Run(NamedTuple):
    """Deliveries that were handed out and may be settled."""

    partition: str
    tenure: Tenure
    first: int
    last: int
    bodies: dict[int, int]
    """The messages among them that the application sees, by their pull sequence."""


class World:
    """The messages, and what became of them."""

    def __init__(self) -> None:
        self.files = MemoryFileSystem()
        self.sent: list[frozenset[str]] = []
        self.handed: dict[Group, Counter[int]] = {who.group: Counter() for who in CAST}
        self.acked: dict[Group, Counter[int]] = {who.group: Counter() for who in CAST}
        self.held: dict[Who, list[Run]] = {}

    # -- what happens ------------------------------------------------------------------------

    async def send(self, inside: Inside, tags: list[frozenset[str]]) -> None:
        packer = BatchPacker()
        for each in tags:
            packer.add(b"%d" % len(self.sent), tags=sorted(each))
            self.sent.append(each)
        ids = bytes(16 * len(packer))
        batch = packer.encode(seed=seed_of(SUBJECT), ids=ids, created_at_ms=0)
        stored: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        request = Send(Acks.MEMORY, 1000, ((SUBJECT, batch),))
        inside.parts.receiver.send(request, stored.set_result)
        await stored

    async def begin(self, inside: Inside) -> None:
        """Give everybody something, so that few steps already reach the rare cases."""
        red, blank = frozenset({"red"}), frozenset[str]()
        await self.send(inside, [red] * 6 + [frozenset(TAGS)] + [blank])
        await self.send(inside, [blank] * 3)
        await self.send(inside, [blank, red, frozenset(TAGS), red])
        for who in CAST:
            await self.pull(inside, who, 3)

    async def subscribe(self, inside: Inside) -> None:
        for who in CAST:
            request = Subscribe(who.name, who.consumer, 1, SUBJECT, who.mode, who.wanted)
            answer: asyncio.Future[Subscribed] = asyncio.get_running_loop().create_future()
            inside.parts.registrar.subscribe(request, answer.set_result, answer.set_exception)
            assert (await answer).group == who.group

    async def pull(self, inside: Inside, who: Who, most: int) -> int:
        """Pull once; return how many deliveries came."""
        names = (SUBJECT, retry_partition(SUBJECT, who.group))
        request = Pull(
            who.group,
            who.consumer,
            1,
            most,
            1 << 20,
            0,
            EARLIEST,
            tuple(Wanted(name, FROM_SETTLED) for name in names),
        )
        answer: asyncio.Future[Pulled] = asyncio.get_running_loop().create_future()

        def refuse(error: PulqueError) -> None:
            answer.set_exception(error)

        inside.parts.puller.pull(request, object(), answer.set_result, refuse, lambda _: None)
        pulled = await answer
        self.held[who] = []
        matched = 0
        for each in pulled.deliveries:
            records = each.records if isinstance(each.records, tuple) else (each.records,)
            data = memoryview(b"".join(records))
            name = names[each.index]
            bodies = {
                each.first_pull + message.sequence - each.first_sequence: int(message.body)
                for message in messages_in(name, each.first_sequence, each.count, data)
                if name != SUBJECT or who.wanted.matches(message.tags)
            }
            matched += len(bodies)
            self.handed[who.group].update(bodies.values())
            last = each.first_pull + each.count - 1
            if who.mode is not Mode.ONCE:
                self.held[who].append(Run(name, each.tenure, each.first_pull, last, bodies))
        assert matched <= most, "more than was asked for"
        return sum(each.count for each in pulled.deliveries)

    def settle(self, inside: Inside, who: Who, *, nacks: bool) -> None:
        for run in self.held.pop(who, []):
            failed = list(run.bodies)[:1] if nacks else []
            nacked = tuple(Nacked(pull, 0, "no") for pull in failed)
            inside.parts.settler.settle(
                Settle(
                    run.partition,
                    who.group,
                    who.consumer,
                    1,
                    run.tenure,
                    run.first,
                    run.last,
                    nacked,
                )
            )
            done = (body for pull, body in run.bodies.items() if pull not in failed)
            self.acked[who.group].update(done)

    async def quiet(self, inside: Inside) -> None:
        """Wait until all that has to be redelivered is."""
        async with asyncio.timeout(PATIENCE_S):
            while inside.state.consumption.pending():  # noqa: ASYNC110  # nobody sets an event
                await asyncio.sleep(0.001)

    async def step(self, inside: Inside, step: Step) -> None:
        match step.what:
            case "send":
                await self.send(inside, step.tags)
            case "pull":
                await self.pull(inside, step.who, step.number)
            case "ack" | "nack":
                self.settle(inside, step.who, nacks=step.what == "nack")
                await self.quiet(inside)
            case _:
                beat = Heartbeat(step.who.group, step.who.consumer, 1, is_leaving=True)
                inside.parts.settler.heartbeat(beat)
                self.held.pop(step.who, None)
                await self.quiet(inside)

    async def drain(self, inside: Inside) -> None:
        for who in CAST:
            for _ in range(200):
                came = await self.pull(inside, who, 5)
                self.settle(inside, who, nacks=False)
                await self.quiet(inside)
                if not came:
                    break
            else:
                raise AssertionError(f"{who} never comes to an end")

    # -- what must hold ----------------------------------------------------------------------

    def check(self) -> None:
        for who in CAST:
            wanted = {i for i, tags in enumerate(self.sent) if who.wanted.matches(tags)}
            handed, acked = self.handed[who.group], self.acked[who.group]
            assert set(handed) == wanted, f"{who.group}: handed out, and wanted"
            if who.mode is Mode.ONCE:
                assert set(handed.values()) <= {1}, "handed out twice"
            else:
                assert acked == Counter(wanted), f"{who.group}: acked, and wanted"


def snapshot(consumption: Consumption) -> dict[object, object]:
    """Return all that a restart must bring back."""
    found: dict[object, object] = {
        key: (state.next_sequence, sorted(state.pending), state.ranges)
        for key, state in consumption.groups.items()
    }
    for number, each in consumption.subscriptions.items():
        held = tuple(each.held)
        found[number] = (each.group, each.consumer, each.settled, each.next_pull, held)
        found[number, "count"] = each.held_count
        assert each.held_count == sum(part.matched for part in held)
    for key in consumption.settings:
        found["settings", key] = consumption.settings.recorded(*key)
    return found


def between_restarts(history: list[Step]) -> list[list[Step]]:
    pieces: list[list[Step]] = [[]]
    for step in history:
        if step.what == "restart":
            pieces.append([])
        else:
            pieces[-1].append(step)
    return pieces


async def play(history: list[Step], checkpoints: list[bool]) -> None:
    world = World()
    pieces = between_restarts(history)
    before: dict[object, object] | None = None
    for number, piece in enumerate(pieces):
        async with open_inside(world.files) as inside:
            if before is not None:
                # No fact says which messages of a range a filter wants: the broker looks again.
                await world.quiet(inside)
                assert snapshot(inside.state.consumption) == before
            await world.subscribe(inside)
            if not number:
                await world.begin(inside)
            for step in piece:
                await world.step(inside, step)
            if number == len(pieces) - 1:
                await world.drain(inside)
            elif checkpoints[number % len(checkpoints)]:
                await inside.housekeeper.checkpoint()
            before = snapshot(inside.state.consumption)
            assert not inside.failures
    world.check()


@given(
    history=st.lists(steps, max_size=25),
    checkpoints=st.lists(st.booleans(), min_size=1, max_size=3),
)
def test_every_group_gets_what_it_wants_whatever_happens(
    history: list[Step], checkpoints: list[bool]
) -> None:
    asyncio.run(play(history, checkpoints))

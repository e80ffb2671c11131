"""What a consumer does, without I/O: pull, hold, settle.

A broker numbers the deliveries to a consumer in each partition: pull sequences. The consumer
holds those that it has not settled. It settles a prefix only, and only of what was acked or
nacked, with at most one settle on its way for each partition::

        settled          asked            expected
           │                │                 │
    ───────┼────────────────┼─────────────────┼─────→ pull sequence
     done  │ on their way   │ held            │ to be pulled next

The broker may know better: it gives deliveries to others when the lease runs out, and it may
lose the last ones with its power. Its answers say so, and what is not ours is *abandoned*.
"""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from pulque.client.connection.fork_safety import on_fork
from pulque.client.receiving.delivery_decoder import batches_of
from pulque.client.receiving.error_policy import problem_of
from pulque.client.receiving.partition_deliveries import UNKNOWN, PartitionDeliveries, finished_in
from pulque.client.receiving.pull_options import PullOptions
from pulque.client.receiving.received_message import (
    ANY_DELAY_MS,
    OPEN,
    DeliveryGap,
    ReceivedBatch,
    ReceivedMessage,
    ToDefer,
    UnreadableRange,
    expire,
)
from pulque.client.receiving.saved_positions import Kept, Progress, finish, finished_of
from pulque.errors import (
    ErrorCode,
    PulqueError,
    RemoteProtocolError,
    StaleSettleError,
    error_from_wire,
)
from pulque.model.groups import Mode
from pulque.model.names import PartitionName, owner_of
from pulque.model.positions import Tenure
from pulque.model.routes import RouteKind
from pulque.wire.ordered import NO_TOKEN
from pulque.wire.requests import (
    EARLIEST,
    Heartbeat,
    Pull,
    Request,
    Route,
    Settle,
    Subscribe,
    Wanted,
)
from pulque.wire.responses import (
    Delivered,
    Pulled,
    Response,
    Routed,
    Settled,
    State,
    Subscribed,
)

__all__ = ["IncomingCore"]

log = logging.getLogger("pulque.client")


class IncomingCore:
    """The deliveries of one consumer. Its owner's lock guards it; ack and nack need none.

    Which partitions the subject has, or the pattern covers, is asked on every new connection, and
    whenever the broker says that there are more.
    """

    def __init__(self, options: PullOptions, kept: Kept | None = None) -> None:
        self.options = options
        self._kept = Kept() if kept is None else kept
        """What was finished before a restart."""
        self._knows_routes = False
        self._is_routing = False
        self._routes_version = 0
        self.max_held = options.max_held
        """How many deliveries may be held: the consumer's share for this broker."""
        self.broker_group = ""
        """Whose deliveries these are, for who reads the messages."""
        self.abandoned = 0
        """How many deliveries the broker gave to others so far."""
        self.on_abandoned: Callable[[], None] | None = None
        """Called when there are more of them; the owner's lock is held."""
        self.held = 0
        """How many deliveries are held, handed out or not."""
        self._subscriptions: deque[PartitionDeliveries] = deque()
        self._by_partition: dict[PartitionName, PartitionDeliveries] = {}
        self._waiting: deque[ReceivedBatch] = deque()
        self._once: weakref.WeakSet[ReceivedBatch] = weakref.WeakSet()
        """What was delivered once, as long as anybody has it: it is not held."""
        self._pull: Pull | None = None
        self._max_delay_ms = ANY_DELAY_MS
        self.to_defer: ToDefer | None = None
        """What is wanted again at a certain time; None if there are no delay servers."""
        self._token = NO_TOKEN
        """Of the lock, where the group is an ordered one."""
        self._covers: tuple[str, ...] = (options.subject,)
        """What all partitions are pulled of: the broker tells when there are more."""
        on_fork(self, lambda core: core.after_fork())

    def after_fork(self) -> None:
        """Refuse acks and nacks in a child of what the parent holds, and hand none of it out."""
        for each in self._subscriptions:
            for batch in each.held:
                if isinstance(batch, ReceivedBatch):
                    batch.after_fork()
        for batch in self._once:
            batch.after_fork()

    def limit_delays(self, max_delay_ms: int) -> None:
        """Take in the longest delay that the broker lets a nack ask for."""
        self._max_delay_ms = max_delay_ms

    def subscribe(self, partitions: Iterable[PartitionName]) -> None:
        """Have these partitions pulled, too."""
        for partition in partitions:
            if partition not in self._by_partition:
                self._by_partition[partition] = each = PartitionDeliveries(partition)
                self._subscriptions.append(each)

    def subscribe_request(self) -> Subscribe:
        """Return what must be said on each connection before the first pull."""
        return self.options.subscribe_request()

    def subscribed(self, response: Response) -> None:
        """Take in the answer to that.

        Raises:
            RemoteProtocolError: It is no answer to that.
        """
        if not isinstance(response, Subscribed) or response.group != self.options.group:
            raise RemoteProtocolError(f"a subscribe for {self.options.group} got {response!r}")

    # ── pulling ────────────────────────────────────────────────────────────────────────────

    @property
    def is_pulling(self) -> bool:
        """Whether a pull, or a request for routes, has no answer yet."""
        return self._pull is not None or self._is_routing

    def connected(self) -> None:
        """Take note of a new connection: the broker may not be the one that it was."""
        self._knows_routes = self._is_routing = False

    def next_route(self) -> Request | None:
        """Return what to ask before the next pull: where to pull from, unless that is known."""
        if self._knows_routes or self._is_routing:
            return None
        self._is_routing = True
        return Route(self.options.subject, self.options.group, RouteKind.LOCAL)

    def routed(self, answer: Response | PulqueError) -> None:
        """Take in the answer to it, or raise why there is none."""
        if not isinstance(answer, Routed):
            self.pull_failed()
            raise problem_of(answer)
        self.subscribe(each.partition for each in answer.route.partitions)
        self._routes_version = answer.route.version
        self._is_routing = False
        self._knows_routes = True

    @property
    def room(self) -> int:
        """How many more deliveries may be held, once the settles on their way are there.

        A broker takes in a settle before the pull behind it. Were they not counted, the pull
        would ask for a splinter, for which the broker has to cut a batch. Not without end, as
        there may be a settle on its way for each of many partitions.
        """
        settling = sum(each.settling for each in self._subscriptions)
        return self.max_held - self.held + min(settling, self.max_held)

    def room_for(self, want: int, *, is_early: bool) -> int:
        """Return how many to ask for, if so many are wanted: 0 if there is no room.

        Nobody asks early for less than half: what is being handled will make room, and a broker
        does best with whole batches. Who has nothing else to hand out takes what there is.
        """
        room = self.room
        if is_early and 2 * room < min(want, self.max_held):
            return 0
        return max(0, min(want, room))

    def next_pull(self, max_messages: int, timeout: float) -> Pull:
        """Return the next pull; there must be none on its way."""
        wanted = []
        for each in self._subscriptions:
            each.floor = each.settled
            wanted.append(Wanted(each.partition, each.expected, self._token))
        options = self.options
        self._pull = Pull(
            options.group,
            options.consumer,
            options.incarnation,
            max_messages,
            options.max_bytes,
            int(timeout * 1000),
            EARLIEST,  # what exists was opened by the subscribe: this is for what comes later
            tuple(wanted),
            self._covers,
            self._routes_version,
        )
        return self._pull

    def pull_failed(self) -> None:
        """Take note that the pull on its way, or the request for routes, gets no answer."""
        self._pull = None
        self._is_routing = False

    def pulled(self, answer: Pulled) -> None:
        """Take in the answer to the pull on its way.

        Raises:
            PulqueError: The broker refuses a partition, or what it sent makes no sense.
        """
        pull, self._pull = self._pull, None
        assert pull is not None  # noqa: S101  # the shell matches answers by request id
        if answer.routes_changed:
            self._knows_routes = False
        else:
            self._routes_version = max(self._routes_version, answer.routes_version)
        current = []
        for wanted, state in zip(pull.wanted, answer.states, strict=True):
            each = self._by_partition[PartitionName(wanted.partition)]
            is_current = wanted.expected == each.expected and self._agree(each, state)
            current.append(each if is_current else None)
        for delivered in answer.deliveries:
            subscription = current[delivered.index]
            if subscription is not None:
                self._take_in(subscription, delivered)

    def _agree(self, each: PartitionDeliveries, state: State) -> bool:
        """Take in where the broker sees us; say whether its deliveries follow ours."""
        if state.code is ErrorCode.POSITION_LOST:
            self._abandon(each.lose_from(state.next_pull))
            if each.settled > state.next_pull:
                self._abandon(each.forget())
            return False
        if state.code is not ErrorCode.NONE:
            raise error_from_wire(state.code, f"{each.partition} cannot be pulled")
        if self.options.mode is Mode.ONCE:
            each.settled = each.asked = state.settled
            each.expected = state.next_pull
            return True
        return self._follow(each, state)

    def _follow(self, each: PartitionDeliveries, state: State) -> bool:
        if each.settled == UNKNOWN:
            self._kept.compare(each.partition, state.settled)
            each.settled = each.asked = state.settled
            each.expected = state.settled
        elif state.settled > each.asked:
            if self.options.mode is Mode.BROADCAST:
                # Nobody else gets what was asked for: it is settled, and a gap comes after it.
                self._settled(each, each.asked)
            self._abandon(each.lose_below(state.settled))
        elif state.settled < each.floor:
            # It forgot settles that it had answered: what they covered will be delivered again.
            self._abandon(each.forget())
            return False
        return True

    def _take_in(self, each: PartitionDeliveries, delivered: Delivered) -> None:
        if self.options.mode is Mode.ONCE:
            self._take_in_once(each, delivered)
            return
        if self.options.mode is Mode.BROADCAST:
            self._leave_out(each, delivered.first_pull, delivered.tenure)
        if delivered.first_pull != each.expected:
            raise RemoteProtocolError(
                f"delivery {delivered.first_pull} of {each.partition} came, "
                f"{each.expected} was expected",
            )
        for batch in batches_of(each.partition, delivered):
            first_pull = batch.first_pull
            if first_pull > each.expected:
                self._leave_out(each, first_pull, delivered.tenure)
            each.expected = batch.pull_until(batch.end)
            if isinstance(batch, UnreadableRange):
                self._reject(each, batch)
            else:
                self._take_in_batch(each, batch)
        self._leave_out(each, delivered.first_pull + delivered.count, delivered.tenure)

    def _take_in_batch(self, each: PartitionDeliveries, batch: ReceivedBatch) -> None:
        """Hold what can be decoded of a batch, and reject the rest."""
        batch.max_delay_ms = self._max_delay_ms
        batch.to_defer = self.to_defer
        batch.broker_group, batch.group = self.broker_group, self.options.group
        unreadable = batch.unreadable()
        if not unreadable:
            self._take_in_readable(each, batch)
            return
        at = batch.start
        for start, end, problem in unreadable:
            if at < start:
                self._take_in_readable(each, batch.window(at, start))
            self._reject(each, batch.rejected(start, end, problem))
            at = end
            gap = batch.pull_until(end) - batch.pull_of(end - 1) - 1
            if gap:
                each.held.append(DeliveryGap(batch.pull_until(end) - gap, gap, batch.tenure))
        if at < batch.end:
            self._take_in_readable(each, batch.window(at, batch.end))

    def _take_in_readable(self, each: PartitionDeliveries, batch: ReceivedBatch) -> None:
        if self._filters(each.partition):
            self._take_in_wanted(each, batch)
        else:
            self._hold(each, batch)

    def _reject(self, each: PartitionDeliveries, found: UnreadableRange) -> None:
        """Have messages that cannot be decoded settled; their group gets a dead letter."""
        self._warn_unreadable(each, found)
        if self.options.mode is Mode.BROADCAST:
            # Nobody looks for dead letters of a single consumer.
            each.held.append(DeliveryGap(found.pull_base, found.end, found.tenure))
        else:
            each.held.append(found)

    def _warn_unreadable(self, each: PartitionDeliveries, found: UnreadableRange) -> None:
        log.warning(
            "not handed out: %s/%d count=%d group=%s %s",
            each.partition,
            found.first_sequence,
            found.end,
            self.options.group,
            found.reason,
        )

    def _filters(self, partition: PartitionName) -> bool:
        """Whether the strings must be compared; what is retried was wanted already."""
        return bool(self.options.filter.kind) and owner_of(partition) is None

    def _take_in_wanted(self, each: PartitionDeliveries, batch: ReceivedBatch) -> None:
        """Hold the messages of a batch that the group wants; settle the others in silence."""
        if batch.is_wanted(self.options.filter):
            self._hold(each, batch)
            return
        for start, end, is_wanted in list(batch.runs(self.options.filter)):
            if is_wanted:
                self._hold(each, batch.window(start, end))
            else:
                first, until = batch.pull_until(start), batch.pull_until(end)
                each.held.append(DeliveryGap(first, until - first, batch.tenure))

    def _take_in_once(self, each: PartitionDeliveries, delivered: Delivered) -> None:
        """Have messages handed out that are settled already, whatever becomes of them."""
        wanted = self.options.filter
        for batch in batches_of(each.partition, delivered):
            if isinstance(batch, UnreadableRange):
                self._warn_unreadable(each, batch)
                continue
            batch.broker_group, batch.group = self.broker_group, self.options.group
            unreadable = batch.unreadable()
            for found in unreadable:
                self._warn_unreadable(each, batch.rejected(*found))
            for part in batch.without(unreadable):
                is_whole = not wanted.kind or part.is_wanted(wanted)
                runs = [(part.start, part.end, True)] if is_whole else part.runs(wanted)
                windows = [part.window(*run) for *run, is_wanted in runs if is_wanted]
                self._once.update(windows)
                self._waiting += windows

    def _hold(self, each: PartitionDeliveries, batch: ReceivedBatch) -> None:
        """Hold the messages of a batch, and have them handed out."""
        self.held += batch.end - batch.start
        if self._kept:
            self._take_in_kept(each, batch)
        else:
            each.held.append(batch)
            self._waiting.append(batch)

    def _take_in_kept(self, each: PartitionDeliveries, batch: ReceivedBatch) -> None:
        """Settle again what was finished before a restart; have the rest handed out."""
        windows = list(self._kept.windows(batch))
        for start, end, found in windows:
            part = batch.window(start, end) if len(windows) > 1 else batch
            each.held.append(part)
            if found is None:
                self._waiting.append(part)
            else:
                log.info("finished before the restart: %s count=%d", each.partition, end - start)
                finish(part, found)
        self._kept.pass_over(each.partition, batch.pull_until(batch.end))

    def _leave_out(self, each: PartitionDeliveries, until: int, tenure: Tenure) -> None:
        """Take note that there are no messages for the deliveries before ``until``."""
        missing = until - each.expected
        if missing > 0:
            if not self._filters(each.partition):
                log.warning("messages are not stored any more: %s %d", each.partition, missing)
            each.held.append(DeliveryGap(each.expected, missing, tenure))
            each.expected = until

    def next_batch(self) -> ReceivedBatch | None:
        """Return the next batch to hand out ``start..end`` of, or None if there is none here."""
        while self._waiting:
            batch = self._waiting.popleft()
            # What the broker gave to others since is not handed out.
            batch.start = max(batch.start, batch.settled)
            if batch.may_expire:
                _pass_over_expired(batch)
            if batch.start < batch.end:
                return batch
        return None

    def take_messages(self, batch: ReceivedBatch | None, limit: int) -> list[ReceivedMessage]:
        """Return at most ``limit`` messages of a batch and of those that wait behind it."""
        messages: list[ReceivedMessage] = []
        while batch is not None and len(messages) < limit:
            start, end = batch.start, batch.end
            if end - start == 1:
                messages.append(ReceivedMessage(batch, start))
            else:
                end = min(end, start + limit - len(messages))
                some = [ReceivedMessage(batch, index) for index in range(start, end)]
                if batch.may_expire:
                    some = [each for each in some if not expire(each)]
                messages += some
                self.put_back(batch, end)
            batch = self.next_batch() if len(messages) < limit else None
        return messages

    @property
    def has_waiting(self) -> bool:
        """Whether a batch waits to be handed out."""
        return bool(self._waiting)

    def put_back(self, batch: ReceivedBatch, start: int) -> None:
        """Have the rest of a batch, from ``start`` on, handed out next."""
        if start < batch.end:
            batch.start = start
            self._waiting.appendleft(batch)

    # ── staying, and leaving ───────────────────────────────────────────────────────────────

    def heartbeat(self) -> Heartbeat:
        """Return what keeps the lease."""
        options = self.options
        return Heartbeat(options.group, options.consumer, options.incarnation)

    def next_upkeep(self) -> Request | None:
        """Return what else must be said now so that all that is held stays held."""
        return None

    def upkept(self, response: Response | PulqueError) -> None:
        """Take in the answer to that."""

    def farewell(self) -> Request | None:
        """Return the last that is said to the broker, after all that is done is settled."""
        return replace(self.heartbeat(), is_leaving=True)

    # ── settling ───────────────────────────────────────────────────────────────────────────

    def next_settles(self) -> Iterator[Settle]:
        """Return the settles that may go now; each is on its way from then on."""
        for each in self._subscriptions:
            if each.on_the_way is None and each.held:
                finished = finished_in(each, self._max_delay_ms)
                if finished is not None:
                    settle = finished.settle(each.partition, self.options, self._token)
                    each.sent(settle, finished.messages)
                    yield settle

    def progress(self) -> list[Progress]:
        """Return how far this consumer got in every partition."""
        known = [
            Progress(
                each.partition,
                each.settled,
                each.expected,
                tuple(finished_of(each.held)),
                tuple(
                    (batch.tenure, batch.pull_until(batch.settled), batch.pull_until(batch.end))
                    for batch in each.held
                ),
                self._kept.remaining(each.partition, each.expected),
            )
            for each in self._subscriptions
            if each.settled != UNKNOWN
        ]
        return [*known, *self._kept.unheard_of([each.partition for each in known])]

    @property
    def is_told(self) -> bool:
        """Whether the broker has all that may be settled, and delay servers what is deferred."""
        return not self.to_defer and not any(
            each.on_the_way is not None or finished_in(each, self._max_delay_ms) is not None
            for each in self._subscriptions
        )

    def repeat_settles(self) -> list[Settle]:
        """Return the settles on their way, to be asked again; that does no harm."""
        return [each.on_the_way for each in self._subscriptions if each.on_the_way is not None]

    def is_on_the_way(self, settle: Settle) -> bool:
        """Say whether a settle still waits for its answer."""
        return self._by_partition[PartitionName(settle.partition)].on_the_way is settle

    def adopted(self, partition: PartitionName, tenure: Tenure, pull: int) -> None:
        """Take in that another broker retries a message: its own need not hear of the nack."""
        each = self._by_partition.get(partition)
        if each is not None:
            each.finish(tenure, pull)

    def settle_answered(self, settle: Settle, response: Response | PulqueError) -> None:
        """Take in the answer to a settle.

        Raises:
            PulqueError: There is no way to go on: another took over this consumer's id, say.
        """
        each = self._by_partition[PartitionName(settle.partition)]
        if each.on_the_way is not settle:
            return
        each.nothing_on_the_way()
        if isinstance(response, Settled):
            self._settled(each, settle.last + 1)
        elif isinstance(response, StaleSettleError):
            # What it was for is not ours any more.
            self._abandon(each.forget())
        elif not isinstance(response, PulqueError):
            raise RemoteProtocolError(f"a settle got {response!r}")
        elif not response.retryable:
            raise response

    def _settled(self, each: PartitionDeliveries, end: int) -> None:
        each.settled = max(each.settled, end)
        while each.held and each.held[0].pull_until(each.held[0].settled) < end:
            batch = each.held[0]
            until = min(batch.index_at(end), batch.end)
            if isinstance(batch, ReceivedBatch):
                self.held -= until - batch.settled
            batch.settled = until
            if until < batch.end:
                return
            each.held.popleft()

    def lose_contact(self) -> None:
        """Abandon what is not finished: the broker did not hear of us for the lease.

        It has given that to others, or will deliver it again. What is finished is still to be
        settled: if the broker was away itself, it counts.
        """
        for each in self._subscriptions:
            for batch in each.held:
                until = batch.finished_until()
                if until < batch.end:
                    self._abandon(each.lose_from(batch.pull_until(until)))
                    break

    def begin_anew(self) -> None:
        """Abandon everything, after an interrupt (Ctrl-C, say) in the middle of a change.

        The broker delivers again what it knows no outcome of. What is delivered once stays here:
        it does not come again.
        """
        self.pull_failed()
        for each in self._subscriptions:
            self._abandon(each.forget())
        if self.options.mode is not Mode.ONCE:
            self._waiting.clear()
            self.held = 0

    def _abandon(self, count: int) -> None:
        self.abandoned += count
        self.held -= count
        if count:
            log.warning("deliveries abandoned: consumer=%s count=%d", self.options.consumer, count)
            if self.on_abandoned is not None:
                self.on_abandoned()


def _pass_over_expired(batch: ReceivedBatch) -> None:
    """Settle what has expired, and begin with the first message that has not."""
    for index in range(batch.start, batch.end):
        expire(ReceivedMessage(batch, index))
    found = batch.states.find(OPEN, batch.start, batch.end)
    batch.start = batch.end if found < 0 else found

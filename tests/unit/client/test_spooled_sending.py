"""Whatever dies, a spool's messages are stored once, and those of a key in their order.

The machine of strict sending, with producers that have a spool: they end in the middle, by a
``kill -9`` or with a power cut, also while they find out what became of the last run's batches,
and requests of theirs arrive after they are gone. Brokers deduplicate as they do in earnest.
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, rule

from pulque.client.blocking.pending_sends import PendingSend
from pulque.client.options.client_options import send_options
from pulque.client.persistence.message_spool import KeptMessage, SendSpool
from pulque.client.persistence.spool_directory import Folder, SpoolFiles
from pulque.client.routing.targets import Targets
from pulque.client.sending.outgoing_batch import OutgoingBatch
from pulque.client.sending.outgoing_message import Outgoing
from pulque.client.sending.spooled_producer_core import SpoolingCore, is_stored
from pulque.errors import ErrorCode, FencedError, SpoolFullError, StorageError
from pulque.model.batch import read_header
from pulque.model.ids import IdSource
from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.model.routes import Slots
from pulque.rules.dedup import Dedup
from pulque.testing.files import Cut, MemoryFileSystem
from pulque.wire.responses import Outcome
from tests.unit.client.durable import DurableFolders
from tests.unit.client.test_dispatch import TIMEOUT, ManualTime, messages_in
from tests.unit.client.test_strict_sending import KEYS, SplittingBroker, StrictSending

LIMIT = 1_000_000


class NamingBroker(SplittingBroker):
    """Knows producers over their restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.dedup = Dedup()
        self.stored: dict[str, list[bytes]] = defaultdict(list)
        self.ids: dict[str, PartitionId] = {}

    def _store(self, partition: str, data: bytes, code: ErrorCode) -> Outcome:
        header = read_header(data)
        number = self.ids.setdefault(partition, PartitionId(len(self.ids)))
        try:
            known = self.dedup.find(number, header)
        except FencedError as error:
            return Outcome(ErrorCode.FENCED, False, ConsumeSequence(0), 0, str(error))
        if known is not None:
            return Outcome(ErrorCode.NONE, True, known, 1)
        if self.slots[partition] == Slots(0, 0):
            code = ErrorCode.STALE_ROUTE
        if code is not ErrorCode.NONE:
            return Outcome(code, False, ConsumeSequence(0), 0, "no")
        first = ConsumeSequence(len(self.bodies[partition]))
        self.dedup.stored(number, header, first, 1)
        self.stored[partition].append(data)
        self.bodies[partition] += [message.body for message in messages_in(partition, data)]
        return Outcome(ErrorCode.NONE, False, first, 1)


def make_spooling(
    spool: SendSpool, clock: ManualTime, *, linger: float = 0.0
) -> SpoolingCore[PendingSend]:
    return SpoolingCore(
        send_options(
            acks="disk",
            linger=linger,
            max_batch=3,
            max_batch_bytes=1000,
            max_in_flight=8,
            max_buffered_bytes=10_000,
            timeout=TIMEOUT,
            compression=None,
        ),
        spool=spool,
        ids=IdSource(spool.incarnation),
        promise=PendingSend,
        monotonic=clock,
        now_ms=lambda: int(clock.now * 1000),
        draw=lambda: 0.5,
    )


def open_spool(files: SpoolFiles, *, limit: int = LIMIT, is_synced: bool = True) -> SendSpool:
    return SendSpool(files, limit=limit, is_synced=is_synced, now_ms=lambda: 1000)


class SpooledSending(StrictSending):
    broker: NamingBroker

    @initialize(linger=st.sampled_from([0.0, 0.005]))
    def start(self, linger: float) -> None:
        self.clock = ManualTime()
        self.broker = NamingBroker()
        self.linger = linger
        self.files = MemoryFileSystem()
        self.sent = defaultdict(list)
        self.pending = {}
        self.taken: list[bytes] = []
        self.connection = 0
        self.requests = 0
        self._begin(None)

    def _begin(self, questions: int | None) -> bool:
        """Open the spool and ask, but only so often; say whether the producer got to send."""
        self.core = make_spooling(open_spool(self.files), self.clock, linger=self.linger)
        self.dispatch = self.core.dispatch
        for asked, (_, note) in enumerate(self.core.undecided()):
            if asked == questions:
                return False
            answer = self.broker.handle(self.core.question(note, 1.0), ErrorCode.NONE)
            self.core.decide(note, is_stored=is_stored(answer))
        self.heard = 0
        self.hear_of_it()
        self.core.resume()
        return True

    @rule(key=st.sampled_from(KEYS), count=st.integers(1, 3))
    def add(self, key: str, count: int) -> None:
        for _ in range(count):
            body = f"{len(self.taken)}".encode()
            self.pending[body] = self.core.add_keyed("a", body, key)
            self.taken.append(body)

    @rule(
        cut=st.sampled_from([None, Cut.LOST, Cut.KEPT, Cut.TORN, Cut.ZEROED, Cut.GARBAGE]),
        seed=st.integers(0, 99),
        questions=st.sampled_from([None, None, 0, 1]),
    )
    def die(self, cut: Cut | None, seed: int, questions: int | None) -> None:
        self.connection += 1
        self.pending = {}
        if cut is not None:
            self.files = self.files.after_power_cut(self.files.operations, cut, Random(seed))
        if not self._begin(questions):
            self._begin(None)

    def stored_of(self, key: str) -> list[bytes]:
        return [
            message.body
            for partition in self.broker.lineage()
            for data in self.broker.stored[partition]
            for message in messages_in(partition, data)
            if message.order_key == key
        ]

    @invariant()
    def nothing_is_stored_twice(self) -> None:
        for key in KEYS if hasattr(self, "broker") else []:
            stored = self.stored_of(key)
            assert len(stored) == len(set(stored)), f"{key} is stored as {stored}"

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        super().teardown()
        self.connection += 1
        for _ in range(500):
            self.core.flush()
            found = self.take()
            if found is not None:
                self.answer(self.handle(found, ErrorCode.NONE))
            elif not self.dispatch.unresolved():
                break
            self.clock.now += 0.5
        everything = {body for key in KEYS for body in self.stored_of(key)}
        assert everything == set(self.taken)
        self.nothing_is_stored_twice()
        assert not open_spool(self.files).messages()


SpooledSending.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestSpooledSending = SpooledSending.TestCase


def send_all(core: SpoolingCore[PendingSend], broker: NamingBroker, clock: ManualTime) -> None:
    for number in range(100):
        core.flush()
        batches: list[OutgoingBatch] = core.dispatch.take(clock.now)
        if not batches:
            return
        request = core.dispatch.request(batches, clock.now)
        core.dispatch.sent(number, batches)
        core.dispatch.answered(number, broker.handle(request, ErrorCode.NONE), clock.now)


def kept_bodies(files: MemoryFileSystem) -> list[bytes]:
    """Return what a spool has after the power failed now."""
    left = files.after_power_cut(files.operations, Cut.LOST, Random(1))
    return [message.body for _, message in open_spool(left).messages()]


WAYS: dict[str, Callable[[SpoolingCore[PendingSend]], object]] = {
    "add": lambda core: [core.add("a", body) for body in (b"0", b"1")],
    "add_keyed": lambda core: [core.add_keyed("a", body, "anna") for body in (b"0", b"1")],
    "add_message": lambda core: [core.add_message("a", Outgoing(each)) for each in (b"0", b"1")],
    "add_many": lambda core: core.add_many("a", [b"0", b"1"]),
    "add_in_steps": lambda core: list(core.add_in_steps("a", [b"0", Outgoing(b"1")])),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_was_taken_in_survives_a_power_cut_whichever_way_it_came(way: str) -> None:
    files, clock, broker = MemoryFileSystem(), ManualTime(), NamingBroker()
    core = make_spooling(open_spool(files), clock)
    core.add_way("a", Targets(broker.route()))
    WAYS[way](core)

    assert kept_bodies(files) == [b"0", b"1"]


@pytest.mark.parametrize("is_in_steps", [False, True])
def test_what_came_before_one_that_is_refused_survives_a_power_cut(*, is_in_steps: bool) -> None:
    files, clock, broker = MemoryFileSystem(), ManualTime(), NamingBroker()
    core = make_spooling(open_spool(files, limit=300), clock)
    core.add_way("a", Targets(broker.route()))
    bodies = [b"0" * 200, b"1" * 200, b"2"]
    with pytest.raises(SpoolFullError):
        _ = list(core.add_in_steps("a", bodies)) if is_in_steps else core.add_many("a", bodies)

    assert kept_bodies(files) == bodies[:2]


def test_what_was_decided_survives_a_power_cut_before_anything_new_is_sent() -> None:
    """Else it would be asked about again, when the broker has forgotten it for newer batches."""
    files, clock, broker = MemoryFileSystem(), ManualTime(), NamingBroker()
    core = make_spooling(open_spool(files), clock)
    core.add_way("a", Targets(broker.route()))
    core.add("a", b"0")
    core.flush()
    batches = core.dispatch.take(clock.now)
    broker.handle(core.dispatch.request(batches, clock.now), ErrorCode.NONE)  # and is killed

    core = make_spooling(open_spool(files), clock)
    core.add_way("a", Targets(broker.route()))
    ((_, note),) = core.undecided()
    answer = broker.handle(core.question(note, 1.0), ErrorCode.NONE)
    core.decide(note, is_stored=is_stored(answer))
    core.resume()

    assert kept_bodies(files) == []


@pytest.mark.parametrize("cut", list(Cut))
def test_what_is_kept_survives_a_power_cut_while_the_file_is_written_anew(cut: Cut) -> None:
    files = MemoryFileSystem()
    spool = open_spool(files, limit=10_000_000)

    def keep(body: bytes) -> int:
        number = spool.keep(KeptMessage("a", body, bytes(16), 0))
        spool.settle()
        return number

    keep(b"stays")
    began = files.operations
    sizes = [0]
    while sizes[-1] >= sizes[-2:][0]:
        spool.done([keep(b"x" * 400_000)])
        sizes.append(sum(map(len, files.contents().values())))
    written_anew = files.operations
    keep(b"later")

    bodies: set[bytes] = set()
    for at in range(began, files.operations + 1):
        left = files.after_power_cut(at, cut, Random(at))
        bodies = {message.body for _, message in open_spool(left).messages()}
        assert b"stays" in bodies, f"{cut} after {at}: {files.operation(at - 1)}"
    assert b"later" in bodies, f"it was kept after {written_anew}"


def test_what_a_real_folder_keeps_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable = DurableFolders(monkeypatch)
    clock, broker = ManualTime(), NamingBroker()
    core = make_spooling(open_spool(Folder(tmp_path / "spool")), clock)
    core.add_way("a", Targets(broker.route()))
    core.add_many("a", [b"0", b"1"])
    left = tmp_path / "left"
    left.mkdir()
    for name, contents in durable.left_in(tmp_path / "spool").items():
        (left / name).write_bytes(contents)

    spool = open_spool(Folder(left))
    assert [message.body for _, message in spool.messages()] == [b"0", b"1"]
    assert not spool.notes()


def test_all_that_a_message_has_survives() -> None:
    files, clock, broker = MemoryFileSystem(), ManualTime(), NamingBroker()
    core = make_spooling(open_spool(files), clock)
    core.add_way("a", Targets(broker.route()))
    core.add_message(
        "a",
        Outgoing(
            b"body",
            key="key",
            order_key="anna",
            tags=iter(["one", "two"]),
            headers={"name": "value"},
            reliable=False,
        ),
    )
    core = make_spooling(open_spool(files), clock)
    core.add_way("a", Targets(broker.route()))
    core.resume()
    send_all(core, broker, clock)
    (message,) = messages_in("a", broker.stored["a"][0])
    assert (message.body, message.key, message.order_key) == (b"body", "key", "anna")
    assert message.tags == ("one", "two")
    assert message.headers["name"] == "value"


def test_a_spool_has_a_limit_and_room_again_when_it_is_empty() -> None:
    files, clock, broker = MemoryFileSystem(), ManualTime(), NamingBroker()
    core = make_spooling(open_spool(files, limit=500), clock)
    core.add_way("a", Targets(broker.route()))
    for _ in range(5):
        core.add_keyed("a", b"x" * 50, "anna")
    with pytest.raises(SpoolFullError, match="500"):
        core.add_keyed("a", b"x" * 50, "anna")
    before = len(broker.stored["a"])
    send_all(core, broker, clock)
    assert len(broker.stored["a"]) > before
    assert not core.is_crowded
    core.add_keyed("a", b"x" * 50, "anna")


def test_the_file_does_not_grow_for_ever() -> None:
    files, clock, broker = MemoryFileSystem(), ManualTime(), NamingBroker()
    core = make_spooling(open_spool(files), clock)
    core.add_way("a", Targets(broker.route()))
    sizes = []
    for _ in range(60):
        core.add_keyed("a", b"x" * 100_000, "anna")
        send_all(core, broker, clock)
        sizes.append(sum(map(len, files.contents().values())))
    assert max(sizes) < 2_000_000
    assert len(broker.bodies["a"]) == 60


def test_a_disk_that_fails_ends_the_producer_before_anything_overtakes() -> None:
    files, clock, broker = MemoryFileSystem(), ManualTime(), NamingBroker()
    core = make_spooling(open_spool(files), clock)
    core.add_way("a", Targets(broker.route()))
    first = core.add_keyed("a", b"0", "anna")
    files.fail_sync_after(0, StorageError("broken"))
    send_all(core, broker, clock)
    assert isinstance(first.exception(), StorageError)
    with pytest.raises(StorageError, match="broken"):
        core.add_keyed("a", b"1", "anna")
    assert not broker.stored["a"]

    core = make_spooling(open_spool(files), clock)
    core.add_way("a", Targets(broker.route()))
    for _, note in core.undecided():
        answer = broker.handle(core.question(note, 1.0), ErrorCode.NONE)
        core.decide(note, is_stored=is_stored(answer))
    core.resume()
    core.add_keyed("a", b"2", "anna")
    send_all(core, broker, clock)
    assert broker.bodies["a"] == [b"0", b"2"]


def test_unsynced_spools_say_when_a_power_cut_made_them_unsure() -> None:
    files = MemoryFileSystem()

    def opened(boot: str) -> SendSpool:
        return SendSpool(files, limit=LIMIT, is_synced=False, now_ms=lambda: 1000, boot=boot)

    assert not opened("first").may_be_doubled
    assert not opened("first").may_be_doubled
    assert opened("second").may_be_doubled

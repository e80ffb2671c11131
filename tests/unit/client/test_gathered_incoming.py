"""A consumer with a filter settles what its caller said, and what lies between in silence.

The machine of ``test_incoming`` again, with a broker that gathers: of each run it hands out the
messages that may match, with gaps between them, and now and then a batch as it is.
"""

from struct import pack

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from pulque.client.receiving.consumer_core import IncomingCore
from pulque.client.receiving.pull_options import PullOptions
from pulque.client.receiving.received_message import ReceivedMessage
from pulque.model.batch import seed_of
from pulque.model.gathered import pack_gathered
from pulque.model.groups import Mode, tag_filter
from pulque.model.ids import IdSource
from pulque.model.message import Message, StoredBatch
from pulque.model.names import ConsumerId, Group, PartitionName, owner_of
from pulque.model.pack import BatchPacker, ProducedBy
from pulque.model.record import Envelope, pack_envelope
from pulque.wire.responses import Pulled
from tests.unit.client.fake_broker import BrokerModel
from tests.unit.client.test_incoming import NAMES, Consuming, over_the_wire

WANTED = tag_filter(["wanted"], [])
_KINDS = ("wanted", "other", "near", "wanted", "wanted", "other", "other", "near")


def kind_of(sequence: int) -> str:
    """Return the tag of a message: some that are near are handed out, and not wanted."""
    return _KINDS[sequence * 7 % len(_KINDS)]


class GatheringModel(BrokerModel):
    """Leaves out what cannot match."""

    def records(self, name: str, start: int, end: int) -> tuple[bytes, ...]:
        if owner_of(PartitionName(name)) is not None:
            return super().records(name, start, end)
        buffers: list[bytes] = []
        waiting: list[Message] = []
        for envelope, data in self.partition(name).records:
            first = int(envelope.first_sequence)
            if first >= end or start >= first + envelope.count:
                continue
            if first % 4 == 3:
                buffers += [*gathered(name, waiting), pack_envelope(envelope) + data]
                waiting = []
                continue
            waiting += [
                message
                for message in stored(name, envelope, data)
                if start <= message.sequence < end and kind_of(message.sequence) != "other"
            ]
        return (*buffers, *gathered(name, waiting))


def stored(name: str, envelope: Envelope, data: bytes) -> list[Message]:
    batch = StoredBatch(
        data,
        partition=PartitionName(name),
        first_sequence=envelope.first_sequence,
        stored_at_ms=envelope.stored_at_ms,
    )
    return [Message(batch, index) for index in range(len(batch))]


def gathered(name: str, messages: list[Message]) -> list[bytes]:
    """Pack messages together, one by one."""
    if not messages:
        return []
    packer = BatchPacker()
    for message in messages:
        tags = "\0".join(message.tags).encode()
        packer.add_encoded(message.body, tags=tags, message_id=bytes.fromhex(message.id))
    count, first = len(messages), messages[0].sequence
    batch = packer.encode(seed=seed_of(name), ids=bytes(16 * count), created_at_ms=0)
    places = pack(f"<{count}I", *[message.sequence - first for message in messages])
    times = pack(f"<{count}q", *[message.stored_at_ms for message in messages])
    return [pack_gathered(first, count, places, times, batch)]


class TaggingSender:
    """Stores batches in the model, with tags that follow from the sequences."""

    def __init__(self, model: BrokerModel) -> None:
        self._model = model
        self._number = 0
        self._ids = IdSource(3)

    def store(self, partition: str, count: int) -> None:
        packer = BatchPacker()
        first = self._model.partition(partition).end
        for sequence in range(first, first + count):
            packer.add(b"%d" % sequence, tags=[kind_of(sequence)])
        data = packer.encode(
            seed=seed_of(partition),
            ids=self._ids.many(1, count),
            created_at_ms=1,
            produced_by=ProducedBy(1, 0, self._number),
        )
        self._number += 1
        self._model.store(partition, data)


def make_core(*, max_held: int = 1000, mode: Mode = Mode.SHARED) -> IncomingCore:
    limits = (100, 1 << 20, max_held)
    options = PullOptions("s", Group("g"), ConsumerId("c"), 1, *limits, mode, WANTED)
    core = IncomingCore(options)
    core.subscribe(NAMES)
    return core


class Gathering(Consuming):
    @initialize(max_held=st.integers(1, 30))
    def start(self, max_held: int) -> None:
        super().start(max_held)
        self.model = GatheringModel()
        self.core = make_core(max_held=max_held)
        self.sender = TaggingSender(self.model)  # type: ignore[assignment]

    def hand_out(self) -> None:
        before = len(self.handed)
        super().hand_out()
        for message in self.handed[before:]:
            assert message.body == b"%d" % message.sequence
            assert message.tags == (kind_of(message.sequence),)
            assert message.partition != "s" or message.tags == ("wanted",)
            assert message.pull_sequence >= 0

    def _only_what_was_said_is_settled(self) -> None:
        self.model.settled = [
            settled
            for settled in self.model.settled
            if settled[0] != "s"
            or kind_of(settled[2].sequence) == "wanted"
            or settled[3] != "ack"  # whoever nacks what it was not handed is wrong
        ]
        super()._only_what_was_said_is_settled()


TestGathering = Gathering.TestCase
TestGathering.settings = settings(stateful_step_count=60)


def take(core: IncomingCore, model: BrokerModel) -> list[ReceivedMessage]:
    answer = over_the_wire(model.try_pull(core.next_pull(100, 0)))
    assert isinstance(answer, Pulled)
    core.pulled(answer)
    messages: list[ReceivedMessage] = []
    while (batch := core.next_batch()) is not None:
        messages += core.take_messages(batch, 100)
    return messages


def wanted_until(end: int) -> list[int]:
    return [sequence for sequence in range(end) if kind_of(sequence) == "wanted"]


def test_a_settle_reaches_to_the_next_message_that_is_open() -> None:
    model, core = GatheringModel(), make_core()
    sender = TaggingSender(model)
    for _ in range(8):
        sender.store("s", 4)
    messages = take(core, model)
    assert [message.sequence for message in messages] == wanted_until(32)
    assert [message.pull_sequence for message in messages] == wanted_until(32)
    assert [message.stored_at_ms for message in messages] == [
        1000 + each // 4 * 4 for each in wanted_until(32)
    ]

    for message in messages[:5]:
        message.ack()
    (settle,) = core.next_settles()

    assert settle.first == 0
    near = list(range(messages[4].sequence, messages[5].sequence + 1))
    assert settle.last + 1 in near[1:]
    assert all(kind_of(each) != "wanted" for each in near[1 : near.index(settle.last + 1)])


def test_what_is_wanted_once_is_handed_out_and_nothing_else() -> None:
    model, core = GatheringModel(), make_core(mode=Mode.ONCE)
    sender = TaggingSender(model)
    for count in (1, 7, 5, 9):
        sender.store("s", count)

    assert [message.sequence for message in take(core, model)] == wanted_until(22)

"""The hash index of a tick finds every message, however it grew, and notices what is spoilt."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pulque.model.batch import seed_of
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker
from pulque.storage.events import SilentListener
from pulque.storage.schedule.message_id_index import TickDigests
from pulque.storage.schedule.schedule_log import TickFile, encode_entry
from pulque.testing.files import MemoryFileSystem

TICK = 1_794_819_600_000
PARTITIONS = ("orders", "refunds")


class Told(SilentListener):
    """Remembers what storage reports."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def corruption_found(self, path: str, offset: int, size: int, reason: str) -> None:
        del path, offset, size
        self.reasons.append(reason)


def grown(file: TickFile, end: int, ids: Sequence[Sequence[bytes]]) -> int:
    """Add an entry for each list of ids; return where the file ends."""
    for i, each in enumerate(ids):
        partition = PartitionName(PARTITIONS[i % 2])
        packer = BatchPacker()
        for message_id in each:
            packer.add_encoded(b"x", due_at_ms=TICK + 5, message_id=message_id)
        batch = packer.encode(
            seed=seed_of(partition), ids=bytes(16 * len(each)), created_at_ms=TICK
        )
        head, _ = encode_entry(
            [batch],
            partition,
            count=len(each),
            offset=end,
            tick=TICK,
            replayed=1,
            dues_ms=(TICK + 5, TICK + 5),
        )
        end = file.append([head, batch], end)
    return end


some_id = st.integers(1, 60).map(lambda number: number.to_bytes(16, "big"))
steps = st.lists(
    st.lists(st.lists(some_id, min_size=1, max_size=8), min_size=1, max_size=5),
    min_size=1,
    max_size=3,
)


@given(steps=steps, asked=st.lists(some_id, max_size=5))
def test_all_entries_that_hold_an_id_are_found(
    steps: list[list[list[bytes]]], asked: list[bytes]
) -> None:
    files, told = MemoryFileSystem(), Told()
    files.make_directory("schedule")
    file = TickFile(files, TICK, told)
    digests = TickDigests(files, TICK, told)
    end = 0
    for step in steps:
        before, end = end, grown(file, end, step)
        digests.extend(digests.head(), file.entries(before, end=end), end)
    head = digests.head()
    assert head is not None
    held = [ids for step in steps for ids in step]
    everything = list(zip(file.entries(), held, strict=True))

    assert head.covered == end
    assert head.rows == sum(map(len, held))
    for message_id in [*asked, held[0][0], held[-1][-1]]:
        holding = [(e.offset, e.size) for e, ids in everything if message_id in ids]
        assert digests.find(head, message_id) == holding
    assert told.reasons == []


@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_before_it_hides_a_message(at: float, bit: int) -> None:
    files, told = MemoryFileSystem(), Told()
    files.make_directory("schedule")
    file = TickFile(files, TICK, told)
    ids = [i.to_bytes(16, "big") for i in range(1, 1501)]
    end = grown(file, 0, [ids[:700], ids[700:]])
    digests = TickDigests(files, TICK, told)
    digests.extend(None, file.entries(), end)
    opened = files.open(digests.path)
    place = int(at * opened.size())
    (byte,) = opened.read(1, place)
    opened.write([bytes([byte ^ (1 << bit)])], place)
    entries = list(file.entries())

    for number, message_id in enumerate(ids):
        head = digests.head()
        found = None if head is None else digests.find(head, message_id)
        if found is None:
            break
        holding = entries[number >= 700]
        assert (holding.offset, holding.size) in found
    assert len(told.reasons) == 1
    assert not files.exists(digests.path)

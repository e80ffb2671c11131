"""Messages with order keys go to the partition that has the slot of their key."""

import google_crc32c

from pulque.model.batch import seed_of
from pulque.model.names import PartitionName, Pattern, Subject
from pulque.model.pack import BatchPacker
from pulque.model.routes import SLOTS, PartitionRoute, Route, Slots
from pulque.testing.clock import ManualClock
from tests.unit.delay.running import FakeBrokers, StartDelay, eventually

SECOND = 1000


async def test_each_key_goes_to_the_partition_of_its_slot_in_the_order_of_due_times(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    half = SLOTS // 2
    partitions = (
        PartitionRoute(PartitionName("orders"), "group-a", "127.0.0.1", 1, slots=Slots(0, half)),
        PartitionRoute(
            PartitionName("orders#1"), "group-b", "127.0.0.1", 2, slots=Slots(half, SLOTS)
        ),
    )

    async def route(subject: Subject) -> Route:
        return Route(Pattern(subject), 1, partitions)

    vars(brokers)["route"] = route
    running = await start_delay()
    packer = BatchPacker()
    due = clock.now_ms() + SECOND
    for i in range(200):
        packer.add_encoded(
            b"key %d, %03d" % (i % 10, i), order_key=b"key %d" % (i % 10), due_at_ms=due + i
        )
    batch = packer.encode(
        seed=seed_of("orders"),
        ids=b"".join(i.to_bytes(16, "big") for i in range(1, 201)),
        created_at_ms=5,
    )
    outcome = await running.send_batch(batch)
    assert not outcome.code, outcome.text
    clock.advance(3 * SECOND)
    await eventually(lambda: len(brokers.accepted) == 200)

    for each in brokers.accepted:
        slot = google_crc32c.value(each.body.split(b",")[0]) % SLOTS
        assert each.partition == ("orders" if slot < half else "orders#1")
    assert {each.partition for each in brokers.accepted} == {"orders", "orders#1"}
    assert len(brokers.batches) < 10, "what goes to one partition goes together"
    for key in range(10):
        of_key = [body for body in brokers.bodies if body.startswith(b"key %d," % key)]
        assert of_key == sorted(of_key)
        assert len(of_key) == 20

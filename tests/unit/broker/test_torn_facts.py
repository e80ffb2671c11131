"""A power cut may take what a segment of the action log begins with; recovery writes it again."""

import pytest

from pulque.broker.recovery import recover
from pulque.model.actions import GroupOpened, SubscriptionId, SubscriptionOpened
from pulque.model.names import ConsumerId, Group, PartitionName
from pulque.model.positions import ConsumeSequence
from pulque.storage.engine import Engine
from pulque.storage.events import SilentListener
from pulque.storage.logs.action_log import DIRECTORY, walk_actions
from pulque.storage.logs.fact_codec import decode_action
from pulque.storage.options import StorageOptions
from pulque.testing.files import MemoryFileSystem

GROUP = Group("billing")


def opened(files: MemoryFileSystem) -> Engine:
    return recover(files, StorageOptions(), SilentListener(), 0)[0]


def facts_of_newest(files: MemoryFileSystem) -> list[object]:
    """Return what the newest segment holds, read as the archive reads it."""
    name = files.list(DIRECTORY)[-1]
    data = files.contents()[f"{DIRECTORY}/{name}"]
    found = walk_actions(data, int(name.removesuffix(".log")))
    return [decode_action(fact) for _, _, fact in found if fact is not None]


@pytest.mark.parametrize("kept", [0, 5])
def test_a_torn_segment_begins_anew_with_its_subscriptions(kept: int) -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    orders = engine.create_partition(PartitionName("orders"), 0)
    known = SubscriptionOpened(SubscriptionId(1), orders.id, GROUP, ConsumerId("c"), 1)
    engine.append_action(GroupOpened(orders.id, GROUP, ConsumeSequence(0)))
    engine.append_action(known)
    engine.actions.start_segment([known])
    engine.close()
    path = f"{DIRECTORY}/{files.list(DIRECTORY)[-1]}"
    file = files.open(path)
    file.truncate(kept)
    file.write([bytes(40)], kept)
    file.close()

    opened(files).close()

    assert facts_of_newest(files) == [known]

"""Every fact comes back as it was, once, in order, from whichever checkpoint the replay starts."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pulque.model.actions import (
    Action,
    ConsumerLost,
    DeadPurged,
    GroupConfigured,
    GroupOpened,
    GroupReset,
    LockGranted,
    LockReleased,
    NackedDelivery,
    PartitionClosed,
    PassedOver,
    Pulled,
    Settled,
    Skipped,
    SubscriptionId,
    SubscriptionOpened,
)
from pulque.model.groups import GroupSettings, Mode, RetrySettings, tag_filter
from pulque.model.names import ConsumerId, Group, Pattern
from pulque.model.positions import (
    ConsumeSequence,
    Epoch,
    PartitionId,
    PullSequence,
    StartCount,
    Tenure,
)
from pulque.storage.logs.action_log import decode_action, encode_action
from pulque.testing.files import MemoryFileSystem
from tests.crash.opening import OWN, open_engine
from tests.crash.workload import SMALL

NOW_MS = 1_700_000_000_000
small = st.integers(0, 2**32 - 1)
large = st.integers(0, 2**64 - 1)
time_ms = st.integers(-(2**63), 2**63 - 1)
subscriptions = small.map(SubscriptionId)
partitions = small.map(PartitionId)
pulls = large.map(PullSequence)
sequences = large.map(ConsumeSequence)
tenures = st.builds(Tenure, small.map(Epoch), small.map(StartCount))
names = st.text("abcXYZ019._-", min_size=1, max_size=255)
reasons = st.text(max_size=250)
nacked = st.lists(st.builds(NackedDelivery, pulls, time_ms, reasons), max_size=4).map(tuple)
tags = st.lists(st.text("abcü:", min_size=1, max_size=20), max_size=3)
group_settings = st.builds(
    GroupSettings,
    st.sampled_from(Mode),
    st.builds(tag_filter, tags, tags),
    st.builds(
        RetrySettings,
        st.lists(small, max_size=4).map(tuple),
        st.integers(0, 255),
        st.integers(0, 0xFFFF),
    ),
)
facts: st.SearchStrategy[Action] = st.one_of(
    st.builds(GroupOpened, partitions, names.map(Group), sequences),
    st.builds(
        SubscriptionOpened,
        subscriptions,
        partitions,
        names.map(Group),
        names.map(ConsumerId),
        large,
    ),
    st.builds(Pulled, subscriptions, tenures, pulls, sequences, small, time_ms, small),
    st.builds(Settled, subscriptions, pulls, pulls, nacked, time_ms),
    st.builds(PassedOver, partitions, names.map(Group), sequences),
    st.builds(GroupConfigured, names.map(Group), names.map(Pattern), group_settings),
    st.builds(ConsumerLost, subscriptions, reasons, time_ms, st.booleans()),
    st.builds(DeadPurged, partitions, sequences, sequences, time_ms),
    st.builds(GroupReset, partitions, names.map(Group), sequences, time_ms),
    st.builds(
        LockGranted,
        partitions,
        names.map(Group),
        names.map(ConsumerId),
        large,
        large,
        st.booleans(),
        time_ms,
    ),
    st.builds(LockReleased, partitions, names.map(Group), large, time_ms, st.booleans()),
    st.builds(Skipped, partitions, names.map(Group), sequences, time_ms, reasons),
    st.builds(PartitionClosed, partitions, time_ms),
)


@given(fact=facts)
def test_a_fact_is_decoded_as_it_was(fact: Action) -> None:
    assert decode_action(encode_action(fact)) == fact


@given(reason=st.text(min_size=900, max_size=2000))
def test_a_long_reason_is_cut(reason: str) -> None:
    fact = ConsumerLost(SubscriptionId(1), reason, 5)
    decoded = decode_action(encode_action(fact))

    assert isinstance(decoded, ConsumerLost)
    assert len(encode_action(fact)) <= 1100
    kept = decoded.reason.rstrip("\N{REPLACEMENT CHARACTER}")
    assert reason.startswith(kept)
    assert len(kept.encode()) >= min(len(reason.encode()), 1000) - 3


@given(
    groups=st.lists(st.lists(facts, max_size=6), min_size=1, max_size=6),
    size=st.sampled_from([60, 300, 10**6]),
    closed=st.booleans(),
)
def test_a_replay_gives_all_facts_since_its_checkpoint_once(
    groups: list[list[Action]],
    size: int,
    closed: bool,  # noqa: FBT001  # hypothesis passes it by name
) -> None:
    files = MemoryFileSystem()
    options = replace(SMALL, action_segment_bytes=size)
    engine = open_engine(files, options, NOW_MS).engine
    history: list[Action] = []
    before: list[int] = [0]
    for group in groups:
        for fact in group:
            if engine.actions.needs_roll():
                engine.actions.start_segment([fact])
                history.append(fact)
            engine.append_action(fact)
            history.append(fact)
        before.append(len(history))
        job = engine.begin_checkpoint({OWN + b"facts": b"%d" % len(history)})
        job.run()
        engine.finish_checkpoint(job)
    last = groups[0]
    for fact in last:
        engine.append_action(fact)
    history += last
    if closed:
        engine.close()
    newest = open_engine(files, options, NOW_MS)
    path = max(p for p in files.contents() if p.startswith("checkpoints/"))
    files.remove(path)
    older = open_engine(files, options, NOW_MS)

    assert int(newest.state[OWN + b"facts"]) == before[-1]
    assert newest.facts == history[before[-1] :]
    if older.state:
        assert int(older.state[OWN + b"facts"]) == before[-2]
    assert older.facts == history[before[-2] :]

"""An adoption is known by its origin, for as long as anybody may ask again."""

from hypothesis import given
from hypothesis import strategies as st

from pulque.model.names import Group, PartitionName
from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.rules.adoption import (
    IDLE_MS,
    MOST_ADOPTIONS,
    Adoption,
    Adoptions,
    adoption_name,
    is_adoption,
)
from pulque.rules.retry import parse_position

G = Group("g")
names = st.sampled_from(["@east/orders/1/1", "@east/%retry%orders%#host:app/0/2/2", "@a/é/3/1"])
places = st.builds(
    Adoption,
    st.integers(1, 3).map(PartitionId),
    st.integers(0, 9).map(ConsumeSequence),
    st.integers(0, 10**13),
)


def place(at_ms: int = 0, sequence: int = 5, partition: int = 1) -> Adoption:
    return Adoption(PartitionId(partition), ConsumeSequence(sequence), at_ms)


def test_what_is_not_adopted_is_not_known() -> None:
    assert Adoptions().find(G, "@east/orders/1/1") is None


def test_the_first_place_counts() -> None:
    found = Adoptions()
    found.stored(G, "@a/b/1/1", place(sequence=5))
    found.stored(G, "@a/b/1/1", place(sequence=9))

    assert found.find(G, "@a/b/1/1") == place(sequence=5)
    assert found.find(Group("h"), "@a/b/1/1") is None


def test_an_adoption_is_never_taken_for_a_record_of_this_broker() -> None:
    name = adoption_name("east", PartitionName("orders"), ConsumeSequence(41), 2)

    assert name == "@east/orders/41/2"
    assert is_adoption(name)
    assert not is_adoption("orders/41")
    # What reads origins of its own finds no partition of that name.
    assert parse_position(name) == ("@east/orders/41", 2)


def test_old_ones_are_forgotten() -> None:
    found = Adoptions()
    found.stored(G, "@a/b/1/1", place(at_ms=0))
    found.stored(G, "@a/b/2/1", place(at_ms=IDLE_MS))
    found.forget_old(IDLE_MS + 1)

    assert found.find(G, "@a/b/1/1") is None
    assert found.find(G, "@a/b/2/1") is not None


def test_of_too_many_the_oldest_are_forgotten() -> None:
    found = Adoptions()
    for number in range(MOST_ADOPTIONS + 3):
        found.stored(G, f"@a/b/{number}/1", place(at_ms=1))
    found.forget_old(2)

    assert len(found) == MOST_ADOPTIONS
    assert found.find(G, "@a/b/2/1") is None
    assert found.find(G, "@a/b/3/1") is not None


def test_what_a_power_cut_took_away_is_forgotten() -> None:
    found = Adoptions()
    found.stored(G, "@a/b/1/1", place(sequence=5))
    found.stored(G, "@a/b/2/1", place(sequence=6))
    found.stored(G, "@a/b/3/1", place(partition=2))

    assert found.clip({PartitionId(1): ConsumeSequence(6)})
    assert [found.find(G, f"@a/b/{n}/1") is not None for n in (1, 2, 3)] == [True, False, False]
    assert not found.clip({PartitionId(1): ConsumeSequence(6)})


@given(st.lists(st.tuples(st.sampled_from([G, Group("#host:app/0")]), names, places)))
def test_a_checkpoint_holds_all(stored: list[tuple[Group, str, Adoption]]) -> None:
    live, state = Adoptions(), dict[bytes, bytes]()
    for each in stored:
        live.stored(*each)
        state |= {k: v for k, v in live.encode_changes().items() if v is not None}
    loaded = Adoptions()
    loaded.load(state)

    assert all(loaded.find(*each[:2]) == live.find(*each[:2]) for each in stored)
    assert len(loaded) == len(live)
    assert live.encode_changes() == {}

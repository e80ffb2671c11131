"""Ids of one source are unique and in order, whatever the calls that made them."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.model.ids import ID_SIZE, IdSource, created_at_ms_of, show_id

NOW = 1_700_000_000_000


def split(ids: bytes) -> list[bytes]:
    return [ids[i : i + ID_SIZE] for i in range(0, len(ids), ID_SIZE)]


def source_at(counter: int, random: int = 0x2A_AAAA_AAAA) -> IdSource:
    source = IdSource(random)
    source._counter = counter  # noqa: SLF001  # nobody waits for sixteen million ids
    return source


@given(
    calls=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=30),
    counter=st.one_of(st.just(0), st.integers(2**24 - 60, 2**24 + 5), st.integers(0, 2**35)),
    random=st.integers(0, 2**64),
)
def test_ids_are_unique_and_sorted_over_calls(
    calls: list[tuple[int, int]], counter: int, random: int
) -> None:
    source = source_at(counter, random)
    made: list[bytes] = []
    now_ms = NOW
    for later_ms, count in calls:
        now_ms += later_ms
        made += split(source.many(now_ms, count) if count > 1 else source.one(now_ms))

    assert len(made) == sum(count for _, count in calls)
    assert made == sorted(set(made))
    assert all(len(id) == ID_SIZE for id in made)


@pytest.mark.parametrize("before", [0, 1, 2, 3, 4, 5, 6])
def test_a_run_of_ids_over_the_end_of_the_low_bits_is_like_single_ones(before: int) -> None:
    start = 2**24 - before
    single = source_at(start)
    expected = [single.one(NOW) for _ in range(5)]

    assert split(source_at(start).many(NOW, 5)) == expected
    assert expected == sorted(set(expected))


@given(count=st.integers(1, 10_000), counter=st.integers(0, 2**36 - 1))
def test_many_gives_as_many_as_asked(count: int, counter: int) -> None:
    assert len(set(split(source_at(counter).many(NOW, count)))) == count


@given(now_ms=st.integers(0, 2**48 - 1), random=st.integers(0), counter=st.integers(0, 2**40))
def test_other_tools_see_a_uuid_of_version_7(now_ms: int, random: int, counter: int) -> None:
    id = source_at(counter, random).one(now_ms)
    uuid = UUID(bytes=id)

    assert uuid.version == 7
    assert uuid.variant == "specified in RFC 4122"
    assert created_at_ms_of(id) == now_ms
    assert show_id(id) == uuid.hex


def test_two_sources_make_different_ids_at_one_instant() -> None:
    assert IdSource(1).one(NOW) != IdSource(2).one(NOW)


def test_the_layout_is_as_written() -> None:
    id = source_at((0xABC << 24) | 0xDEF012, random=0x3F_FFFF_FFFF).one(0x1234_5678_9ABC)

    assert id.hex() == "123456789abc" + "7abc" + f"{0b10 << 62 | 0xDEF012 << 38 | 0x3FFFFFFFFF:x}"

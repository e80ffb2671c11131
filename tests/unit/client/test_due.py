"""When a message is due: what may be said, and what it means."""

from datetime import UTC, date, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pulque
from pulque import Outgoing, UsageError
from pulque.client.arguments.due_times import LEVELS, check_longest, due_of

NOW = datetime(2026, 11, 16, 9, 30, tzinfo=UTC)
NOW_MS = int(NOW.timestamp() * 1000)
NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001  # what is to be refused
YEAR_MS = 365 * 24 * 3600 * 1000


@given(st.integers(1, 2 * YEAR_MS))
def test_any_millisecond_can_be_said_in_three_ways(ahead_ms: int) -> None:
    exact = timedelta(milliseconds=ahead_ms)
    assert due_of(exact, None, None, NOW_MS) == NOW_MS + ahead_ms
    assert due_of(None, NOW + exact, None, NOW_MS) == NOW_MS + ahead_ms
    # As a float it may be a hair more, never less: rounded up.
    assert 0 <= due_of(ahead_ms / 1000, None, None, NOW_MS) - NOW_MS - ahead_ms <= 1


@given(st.integers(1, 999))
def test_a_part_of_a_millisecond_is_rounded_up(microseconds: int) -> None:
    ahead = timedelta(seconds=5, microseconds=microseconds)
    assert due_of(ahead, None, None, NOW_MS) == NOW_MS + 5001
    assert due_of(None, NOW + ahead, None, NOW_MS) == NOW_MS + 5001


@given(st.timedeltas(timedelta(days=-9000), timedelta(0)))
def test_what_is_past_is_due_at_once(ago: timedelta) -> None:
    assert due_of(None, NOW + ago, None, NOW_MS) == 0


def test_no_wait_is_at_once() -> None:
    assert due_of(0, None, None, NOW_MS) == due_of(timedelta(0), None, None, NOW_MS) == 0
    assert due_of(None, None, None, NOW_MS) == 0
    assert Outgoing(b"x").due_at_ms(NOW_MS) == 0


def test_zones_and_clock_changes_make_no_difference() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    # The hour that comes twice: the fold says which of them is meant.
    first = datetime(2026, 10, 25, 2, 30, tzinfo=berlin)
    second = first.replace(fold=1)
    before = int(datetime(2026, 10, 24, tzinfo=UTC).timestamp() * 1000)
    assert due_of(None, second, None, before) - due_of(None, first, None, before) == 3_600_000
    east = timezone(timedelta(hours=14))
    assert due_of(None, (NOW + timedelta(hours=1)).astimezone(east), None, NOW_MS) == (
        NOW_MS + 3_600_000
    )


@pytest.mark.accepts("004-67")
def test_there_are_eighteen_levels() -> None:
    assert len(LEVELS) == 18
    units = {"s": 1000, "m": 60_000, "h": 3_600_000}
    told = ("1s", "5s", "10s", "30s", *(f"{n}m" for n in (*range(1, 11), 20, 30)), "1h", "2h")
    for level, text in enumerate(told, 1):
        assert due_of(None, None, level, NOW_MS) == NOW_MS + int(text[:-1]) * units[text[-1]]


@pytest.mark.parametrize(
    "delay", [-1, -0.001, float("nan"), float("inf"), timedelta(-1), True, "5", 10**400, b"1", NOW]
)
def test_what_is_no_delay_is_refused_by_name(delay: object) -> None:
    with pytest.raises(UsageError, match=r"delay is .*0 or more seconds") as caught:
        due_of(delay, None, None, NOW_MS)
    assert repr(delay)[:20] in str(caught.value)


@pytest.mark.parametrize("at", [NAIVE, 1e12, "tomorrow", date(2027, 1, 1), True])
def test_what_is_no_instant_is_refused_by_name(at: object) -> None:
    with pytest.raises(UsageError, match=r"at is .*time zone") as caught:
        due_of(None, at, None, NOW_MS)
    assert repr(at) in str(caught.value)


@pytest.mark.parametrize("level", [0, 19, -1, 1.0, True, "1", float("nan")])
def test_what_is_no_level_is_refused_by_name(level: object) -> None:
    with pytest.raises(UsageError, match=r"level is .*1 .* to 18") as caught:
        due_of(None, None, level, NOW_MS)
    assert repr(level) in str(caught.value)


def test_only_one_of_them_may_be_said() -> None:
    with pytest.raises(UsageError, match=r"only one of delay, at and level"):
        due_of(5, NOW, None, NOW_MS)
    with pytest.raises(UsageError, match=r"delay=0 and level=3"):
        due_of(0, None, 3, NOW_MS)


def test_too_far_ahead_names_both() -> None:
    check_longest(NOW_MS + 1000, NOW_MS, 1000)
    with pytest.raises(UsageError, match=r"due in 731\.0 days; at most 730\.0 days"):
        check_longest(NOW_MS + 731 * 86_400_000, NOW_MS, 730 * 86_400_000)


def test_what_expires_before_it_is_due_is_refused() -> None:
    message = Outgoing(b"x", delay=10, expires_at=NOW + timedelta(seconds=10))
    with pytest.raises(UsageError, match=r"nobody would ever get it"):
        message.due_at_ms(NOW_MS)
    Outgoing(b"x", delay=10, expires_at=NOW + timedelta(seconds=11)).due_at_ms(NOW_MS)


def test_a_receipt_shows_its_instant() -> None:
    receipt = pulque.Receipt("00" * 16, "s", 0, 0, "g", False)  # type: ignore[arg-type]
    assert receipt.due_at is None
    assert receipt._replace(due_at_ms=NOW_MS).due_at == NOW

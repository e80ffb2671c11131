"""The checker in a table: in a transaction of its own, and in that of the work."""

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import (
    Column,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    func,
    insert,
    select,
)
from sqlalchemy.pool import NullPool

from pulque.dedup import sql
from pulque.dedup.sql import SqlChecker
from pulque.errors import InvalidNameError, UnavailableError, UsageError
from pulque.model.message import Message
from tests.forks import in_child

NewMessage = Callable[[], Message]

tickets = Table(
    "tickets", MetaData(), Column("id", Integer, primary_key=True), Column("message", String(32))
)


class Clock:
    def __init__(self) -> None:
        self.ms = 1_700_000_000_000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def new_checker(engine: Engine, clock: Clock) -> Callable[..., SqlChecker]:
    """Make a checker, as another process would."""
    tickets.create(engine)

    def make(group: str = "ticketing", **options: Any) -> SqlChecker:
        checker = SqlChecker(engine, group=group, now_ms=clock, **options)
        checker.create_table()
        return checker

    return make


@pytest.fixture
def checker(new_checker: Callable[..., SqlChecker]) -> SqlChecker:
    return new_checker()


def handles(checker: SqlChecker, message: Message) -> bool:
    with checker.once(message) as is_first:
        return is_first


def sell(engine: Engine, checker: SqlChecker, message: Message) -> bool:
    """Do the work and remember it, in one transaction."""
    with engine.begin() as connection:
        is_new = checker.mark(connection, message)
        if is_new:
            connection.execute(insert(tickets).values(message=message.id))
    return is_new


def sold(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(tickets)).scalar_one()


class TestOnItsOwn:
    def test_a_message_is_handled_once(
        self, checker: SqlChecker, message: Message, new_message: NewMessage
    ) -> None:
        assert handles(checker, message)
        assert not handles(checker, message)
        assert handles(checker, new_message())

    def test_all_processes_know_it(
        self, new_checker: Callable[..., SqlChecker], message: Message
    ) -> None:
        assert handles(new_checker(), message)
        assert not handles(new_checker(), message)

    def test_groups_do_not_know_each_other(
        self, new_checker: Callable[..., SqlChecker], message: Message
    ) -> None:
        assert handles(new_checker("ticketing"), message)
        assert handles(new_checker("billing"), message)

    def test_what_failed_may_be_handled_again(self, checker: SqlChecker, message: Message) -> None:
        with pytest.raises(OSError, match="no milk"), checker.once(message):
            raise OSError("no milk")

        assert handles(checker, message)

    def test_what_another_handles_comes_later(
        self, new_checker: Callable[..., SqlChecker], message: Message
    ) -> None:
        assert new_checker().begin(message)

        with pytest.raises(UnavailableError, match="being handled by another consumer"):
            new_checker().begin(message)

    def test_what_a_dead_process_began_is_taken_over(
        self, new_checker: Callable[..., SqlChecker], message: Message, clock: Clock
    ) -> None:
        dead, other = (
            new_checker(claim=timedelta(seconds=30)),
            new_checker(claim=timedelta(seconds=30)),
        )
        assert dead.begin(message)
        clock.ms += 29_999
        with pytest.raises(UnavailableError):
            other.begin(message)
        clock.ms += 1

        assert other.begin(message)
        # It was not dead after all, but it does not give up what is another's now.
        dead.give_up(message)
        with pytest.raises(UnavailableError):
            new_checker().begin(message)
        other.finish(message)
        assert not handles(dead, message)

    def test_one_that_finishes_late_has_handled_it(
        self, new_checker: Callable[..., SqlChecker], message: Message, clock: Clock
    ) -> None:
        slow = new_checker(keep=timedelta(minutes=2))
        assert slow.begin(message)
        clock.ms += 600_000
        assert new_checker(keep=timedelta(minutes=2)).purge() == 1
        slow.finish(message)

        assert not handles(slow, message)

    def test_what_is_old_is_forgotten(
        self, new_checker: Callable[..., SqlChecker], new_message: NewMessage, clock: Clock
    ) -> None:
        checker = new_checker(keep=timedelta(hours=1))
        old, other = new_message(), new_message()
        handles(checker, old)
        handles(new_checker("billing"), old)
        clock.ms += 3_600_001
        handles(checker, other)

        assert checker.purge() == 1
        assert handles(checker, old)
        assert not handles(checker, other)
        assert not handles(new_checker("billing"), old)


class TestInTheTransactionOfTheWork:
    def test_the_work_is_done_once(
        self, engine: Engine, checker: SqlChecker, message: Message, new_message: NewMessage
    ) -> None:
        assert sell(engine, checker, message)
        assert not sell(engine, checker, message)
        assert sell(engine, checker, new_message())

        assert sold(engine) == 2

    def test_work_that_is_rolled_back_is_not_remembered(
        self, engine: Engine, checker: SqlChecker, message: Message
    ) -> None:
        with engine.connect() as connection:
            transaction = connection.begin()
            assert checker.mark(connection, message)
            connection.execute(insert(tickets).values(message=message.id))
            transaction.rollback()
        assert sold(engine) == 0

        assert sell(engine, checker, message)
        assert sold(engine) == 1

    def test_a_duplicate_does_not_spoil_the_transaction(
        self, engine: Engine, checker: SqlChecker, message: Message
    ) -> None:
        sell(engine, checker, message)
        with engine.begin() as connection:
            assert not checker.mark(connection, message)
            connection.execute(insert(tickets).values(message="something else"))

        assert sold(engine) == 2

    def test_many_at_once_do_the_work_once(
        self, engine: Engine, new_checker: Callable[..., SqlChecker], new_message: NewMessage
    ) -> None:
        messages = [new_message() for _ in range(10)]
        checkers = [new_checker() for _ in range(6)]
        problems: list[BaseException] = []

        def work(checker: SqlChecker) -> None:
            try:
                for message in messages:
                    sell(engine, checker, message)
            except BaseException as error:  # noqa: BLE001  # a thread tells its test
                problems.append(error)

        threads = [threading.Thread(target=work, args=(each,)) for each in checkers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert problems == []
        assert sold(engine) == 10

    def test_the_second_waits_for_the_first_and_does_the_work_if_that_fails(
        self, engine: Engine, checker: SqlChecker, message: Message
    ) -> None:
        outcome: list[bool] = []
        with engine.connect() as first:
            transaction = first.begin()
            assert checker.mark(first, message)
            second = threading.Thread(
                target=lambda: outcome.append(sell(engine, checker, message))
            )
            second.start()
            second.join(0.3)
            assert second.is_alive()
            transaction.rollback()
        second.join(30)

        assert outcome == [True]
        assert sold(engine) == 1

    # Python's driver for SQLite begins no transaction before a savepoint.
    @pytest.mark.server
    @pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
    def test_a_database_that_knows_no_better_is_asked_with_a_savepoint(
        self,
        engine: Engine,
        checker: SqlChecker,
        message: Message,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(sql, "_INSERTS", {})

        assert sell(engine, checker, message)
        assert not sell(engine, checker, message)
        assert sold(engine) == 1

    def test_what_another_handles_on_its_own_comes_later(
        self, engine: Engine, new_checker: Callable[..., SqlChecker], message: Message
    ) -> None:
        new_checker().begin(message)

        with pytest.raises(UnavailableError):
            sell(engine, new_checker(), message)
        assert sold(engine) == 0


class TestBadInput:
    def test_times_must_be_more_than_none(self, engine: Engine) -> None:
        with pytest.raises(UsageError, match="more than 0"):
            SqlChecker(engine, group="g", keep=timedelta())
        with pytest.raises(UsageError, match="more than 0"):
            SqlChecker(engine, group="g", claim=timedelta(seconds=-1))

    def test_the_group_must_be_one(self, engine: Engine) -> None:
        with pytest.raises(InvalidNameError):
            SqlChecker(engine, group="no spaces")


def test_a_child_of_fork_waits_for_no_thread_of_its_parent(
    tmp_path: Path, new_message: NewMessage
) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}", poolclass=NullPool)
    checker = SqlChecker(engine, group="ticketing")
    checker.create_table()
    begun, new = new_message(), new_message()
    assert checker.begin(begun)

    def handle() -> bool:
        checker.give_up(begun)  # the parent's, who goes on with it
        return handles(checker, new)

    with checker._lock:  # noqa: SLF001  # as another thread may
        assert in_child(handle)
    with pytest.raises(UnavailableError, match="being handled"):
        checker.begin(begun)
    assert not handles(checker, new)

"""A checker in a table of a SQL database, for all consumers of a group.

It can be used in two ways. ``once`` has a transaction of its own: a handled message is not handled
again, except after a crash between the work and the end of the block. ``mark`` is part of the
transaction of the work: both are committed or neither, which is as close to exactly
once as possible::

    with engine.begin() as connection:
        if checker.mark(connection, message):
            connection.execute(insert(tickets).values(...))
    message.ack()

Needs ``pulque[sql]``.
"""

import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Engine,
    MetaData,
    Row,
    String,
    Table,
    and_,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from pulque.dedup.checker import Checker, on_fork
from pulque.errors import UnavailableError, UsageError
from pulque.model.message import Message
from pulque.model.names import parse_group

__all__ = ["SqlChecker"]

TABLE = "pulque_handled"
_TRIES = 5
_PURGE_EVERY = 1000
_INSERTS: dict[str, Callable[[Table], postgresql.Insert | sqlite.Insert]] = {
    "postgresql": postgresql.insert,
    "sqlite": sqlite.insert,
}


class SqlChecker(Checker):
    """Remembers the handled messages of a group in a table. Thread-safe.

    Args:
        engine: The database; for ``mark`` the one in which the work is done.
        group: The group whose messages are remembered; several groups may share a table, each
            with a checker of its own. Messages of another group are refused.
        table: The table's name; ``create_table`` creates it.
        keep: How long to remember a message; longer than the time after which it can still be
            redelivered: its retries, and the broker's retention.
        claim: How long a message that was begun belongs to the consumer that began it; longer
            than the slowest handler.
        now_ms: The time in milliseconds since 1970; consumers' clocks must agree to within a
            small part of ``claim``.

    Raises:
        UsageError: A duration is not more than 0.
        InvalidNameError: The group is not a valid name.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        group: str,
        table: str = TABLE,
        keep: timedelta = timedelta(days=7),
        claim: timedelta = timedelta(minutes=1),
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        if keep <= timedelta() or claim <= timedelta():
            raise UsageError(f"keep is {keep} and claim is {claim}; more than 0 are allowed")
        self._engine = engine
        self.group = parse_group(group)
        self._keep_ms = keep // timedelta(milliseconds=1)
        self._claim_ms = claim // timedelta(milliseconds=1)
        self._now_ms = now_ms
        self._table = Table(
            table,
            MetaData(),
            Column("group_name", String(255), primary_key=True),
            Column("message_id", String(32), primary_key=True),
            Column("begun_at_ms", BigInteger, nullable=False, index=True),
            Column("handled_at_ms", BigInteger),
            Column("holder", String(32), nullable=False),
        )
        self._holders: dict[str, str] = {}
        """By message id: the random word that identifies our own rows."""
        self._finished = 0
        self._lock = threading.Lock()
        on_fork(self, SqlChecker._after_fork)

    def _after_fork(self) -> None:
        # The parent's rows are the parent's to give up, and one of its threads may hold the lock.
        self._holders = {}
        self._lock = threading.Lock()

    def create_table(self) -> None:
        """Create the table, if it does not exist."""
        self._table.create(self._engine, checkfirst=True)

    # ── in the transaction of the work ─────────────────────────────────────────────────────

    def mark(self, connection: Connection, message: Message) -> bool:
        """Record in a transaction that a message is handled; return False if it was already.

        Another transaction that marks the same message waits until this one has ended. If this one
        is rolled back, so is the record.

        Raises:
            UnavailableError: Another consumer began it with ``once``, less than ``claim`` ago.
            UsageError: The message was delivered to another group.
        """
        for _ in range(_TRIES):
            found = self._take(connection, message, "", handled_at_ms=self._now_ms())
            if found is not None:
                return found
        raise self._restless(message)

    # ── in a transaction of its own ────────────────────────────────────────────────────────

    def begin(self, message: Message) -> bool:
        """Begin a message; return False if it was handled before.

        Raises:
            UnavailableError: Another consumer began it less than ``claim`` ago, and has not
                finished.
            UsageError: The message was delivered to another group.
        """
        holder = secrets.token_hex(16)
        for _ in range(_TRIES):
            with self._engine.begin() as connection:
                found = self._take(connection, message, holder, handled_at_ms=None)
            if found is not None:
                if found:
                    with self._lock:
                        self._holders[message.id] = holder
                return found
        raise self._restless(message)

    def finish(self, message: Message) -> None:
        """Record that a message was handled."""
        now_ms = self._now_ms()
        with self._engine.begin() as connection:
            values = update(self._table).where(self._is(message)).values(handled_at_ms=now_ms)
            if not connection.execute(values).rowcount:
                self._insert(connection, message, now_ms, handled_at_ms=now_ms, holder="")
        with self._lock:
            self._holders.pop(message.id, None)
            self._finished += 1
            is_purge_due = self._finished % _PURGE_EVERY == 0
        if is_purge_due:
            self.purge()

    def give_up(self, message: Message) -> None:
        """Allow a message that was begun to be begun again."""
        with self._lock:
            holder = self._holders.pop(message.id, "")
        table = self._table
        ours = and_(self._is(message), table.c.holder == holder, table.c.handled_at_ms.is_(None))
        with self._engine.begin() as connection:
            connection.execute(delete(table).where(ours))

    def purge(self) -> int:
        """Delete this group's rows that are older than ``keep``; return how many there were.

        The checker also does so itself now and then.
        """
        table = self._table
        old = and_(
            table.c.group_name == self.group,
            table.c.begun_at_ms < self._now_ms() - self._keep_ms,
        )
        with self._engine.begin() as connection:
            return connection.execute(delete(table).where(old)).rowcount

    # ── rows ───────────────────────────────────────────────────────────────────────────────

    def _take(
        self, connection: Connection, message: Message, holder: str, *, handled_at_ms: int | None
    ) -> bool | None:
        """Return whether the message is to be handled, or None to try again."""
        self._check_group(message)
        now_ms = self._now_ms()
        if self._insert(connection, message, now_ms, handled_at_ms=handled_at_ms, holder=holder):
            return True
        row = self._row(connection, message)
        if row is None:
            return None  # it was given up in between
        if row.handled_at_ms is not None:
            return False
        if now_ms - row.begun_at_ms < self._claim_ms:
            raise UnavailableError(
                f"message {message.id} is being handled by another consumer since "
                f"{now_ms - row.begun_at_ms} ms"
            )
        table = self._table
        same = and_(
            self._is(message), table.c.holder == row.holder, table.c.handled_at_ms.is_(None)
        )
        taken = (
            update(table)
            .where(same)
            .values(begun_at_ms=now_ms, handled_at_ms=handled_at_ms, holder=holder)
        )
        return True if connection.execute(taken).rowcount else None

    def _check_group(self, message: Message) -> None:
        if message.group not in {"", self.group}:
            raise UsageError(
                f"message {message.id} was delivered to group {message.group}, and this checker "
                f"remembers what {self.group} handled: give each group a SqlChecker of its own"
            )

    @staticmethod
    def _restless(message: Message) -> UnavailableError:
        return UnavailableError(f"message {message.id} is begun and given up all the time")

    def _row(self, connection: Connection, message: Message) -> "Row[tuple[object, ...]] | None":
        return connection.execute(select(self._table).where(self._is(message))).one_or_none()

    def _is(self, message: Message) -> "ColumnElement[bool]":
        table = self._table
        return and_(table.c.group_name == self.group, table.c.message_id == message.id)

    def _insert(
        self,
        connection: Connection,
        message: Message,
        now_ms: int,
        *,
        handled_at_ms: int | None,
        holder: str,
    ) -> bool:
        """Insert a row; return False if it exists."""
        values = {
            "group_name": self.group,
            "message_id": message.id,
            "begun_at_ms": now_ms,
            "handled_at_ms": handled_at_ms,
            "holder": holder,
        }
        # Where a database has a way without an error: that would spoil the transaction.
        special = _INSERTS.get(connection.dialect.name)
        if special is None:
            return self._insert_or_not(connection, values)
        new = special(self._table).values(values).on_conflict_do_nothing()
        return connection.execute(new.returning(self._table.c.message_id)).first() is not None

    def _insert_or_not(self, connection: Connection, values: dict[str, object]) -> bool:
        try:
            with connection.begin_nested():
                connection.execute(insert(self._table).values(values))
        except IntegrityError:
            return False
        return True

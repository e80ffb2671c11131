"""The connection to the database: SQLite in a file, or PostgreSQL by URL.

A transaction that writes begins by taking the only right to write, in either of them: so what it
reads is what it changes, and writers of several meta servers come one after the other. Whatever
goes wrong between here and the database is told as ``UnavailableError``: it may be back later.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from pulque.errors import ConfigError, DataDirectoryError, UnavailableError
from pulque.meta.migrations import NEWEST, VERSION_TABLE

__all__ = ["Database", "check_directory", "parse_database_url"]

_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
_MIGRATIONS = Path(__file__).parent.parent / "migrations"
_LOCK = 0x50514D  # one number for all meta servers: only one of them changes the tables
_MIGRATE_S = 60.0
_POOL = 3


def parse_database_url(text_: str) -> URL:
    """Return the URL with the driver that is used here.

    Raises:
        ConfigError: It is none, or of a database that is not known, or holds a password.
    """
    try:
        url = make_url(text_)
        kind = url.get_backend_name()
    except ArgumentError:
        raise ConfigError(
            "not a database URL; allowed is postgresql://user@host:5432/name or sqlite:///file"
        ) from None
    if kind not in _DRIVERS:
        raise ConfigError(f"a database of kind {kind!r}; allowed are {', '.join(_DRIVERS)}")
    if url.password is not None:
        raise ConfigError(
            "a URL with a password, which would be seen in files and lists of processes: give it "
            "in database.password_file or PULQUE_META__DATABASE__PASSWORD"
        )
    return url.set(drivername=_DRIVERS[kind])


class Database:
    """Opens transactions. Lives in one event loop.

    Args:
        url: As ``parse_database_url`` returns it.
        password: If the database wants one.
        timeout_s: How long any transaction may take before the database counts as away.
    """

    def __init__(self, url: URL, *, password: str | None, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._is_sqlite = url.get_backend_name() == "sqlite"
        self._engine = self._make_engine(password)
        # Whoever waits for SQLite's lock looks again now and then, and is passed over by those
        # who begin at the right moment: so only one of this process waits for it at a time.
        self._turn: AbstractAsyncContextManager[None] = (
            asyncio.Lock() if self._is_sqlite else nullcontext()
        )

    @property
    def shown(self) -> str:
        """Where it is, without secrets."""
        return self._url.set(drivername=self._url.get_backend_name()).render_as_string()

    async def migrate(self) -> None:
        """Bring the tables to what this version needs.

        Raises:
            UnavailableError: The database is away.
            ConfigError: The tables are of a newer version.
        """
        async with self._translated(_MIGRATE_S), self._engine.begin() as connection:
            await self.lock(connection)
            if not await connection.run_sync(_is_current):
                await connection.run_sync(_upgrade, self.shown)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that only reads.

        Raises:
            UnavailableError: The database is away.
        """
        async with (
            self._translated(self._timeout_s),
            self._turn,
            self._engine.connect() as connection,
        ):
            yield connection

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that writes; it is committed at the end.

        Raises:
            UnavailableError: The database is away. What was written may be there or not.
        """
        async with (
            self._translated(self._timeout_s),
            self._turn,
            self._engine.begin() as connection,
        ):
            yield connection

    async def lock(self, connection: AsyncConnection) -> None:
        """Wait until no other meta server does what only one may do, until the end of this."""
        if not self._is_sqlite:
            # In SQLite, the transaction itself is the lock.
            await connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()

    def _make_engine(self, password: str | None) -> AsyncEngine:
        if self._is_sqlite:
            engine = create_async_engine(
                self._url,
                hide_parameters=True,
                connect_args={"timeout": self._timeout_s},
                pool_size=_POOL,
            )
            event.listen(engine.sync_engine, "connect", _prepare_sqlite)
            event.listen(engine.sync_engine, "begin", _begin_sqlite)
            return engine
        arguments: dict[str, Any] = {
            "timeout": self._timeout_s,
            "command_timeout": _MIGRATE_S,
            "server_settings": {"application_name": "pulque meta"},
        }
        if password is not None:
            arguments["password"] = password
        return create_async_engine(
            self._url,
            hide_parameters=True,
            pool_pre_ping=True,
            pool_size=_POOL,
            pool_timeout=self._timeout_s,
            connect_args=arguments,
        )

    @asynccontextmanager
    async def _translated(self, timeout_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise self._away(f"no answer in {timeout_s:g} s") from None
        except _errors() as error:
            raise self._away(_reason(error)) from error

    def _away(self, reason: str) -> UnavailableError:
        return UnavailableError(
            f"the database of the meta servers is away ({reason}): what is known goes on, new "
            "subjects and new servers have to wait"
        )


def _errors() -> tuple[type[Exception], ...]:
    """Return what the libraries raise when a database does not do as it should."""
    import asyncpg

    return (
        SQLAlchemyError,
        OSError,
        sqlite3.Error,
        asyncpg.PostgresError,
        asyncpg.InterfaceError,
    )


def _reason(error: BaseException) -> str:
    inner = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    lines = str(inner).strip().splitlines() or [type(inner).__name__]
    return lines[0].partition(">: ")[2] or lines[0]


def _is_current(connection: Connection) -> bool:
    """Say whether the tables are what this version needs."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return False
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars().all()  # noqa: S608
    return list(found) == [NEWEST]


def _upgrade(connection: Connection, shown: str) -> None:
    # Most starts find nothing to do, and alembic takes its time to be imported.
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise ConfigError(
            f"the tables in {shown} are of a newer version of Pulque: {error}"
        ) from None


def _prepare_sqlite(connection: Any, _record: object) -> None:
    # The driver must begin no transactions by itself: `_begin_sqlite` does.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def check_directory(path: Path) -> None:
    """Make the directory of a SQLite file, if it is not there.

    Raises:
        DataDirectoryError: It cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataDirectoryError(f"{path} cannot be made: {error.strerror}") from None

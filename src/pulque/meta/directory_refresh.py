"""Keeps the directory up to date: with the database, with other meta servers, and with time."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from pulque.errors import ConfigError, UnavailableError
from pulque.meta.components import MetaParts
from pulque.meta.saved_directory import read_recollection, recollect, write_recollection
from pulque.model.names import Subject

__all__ = ["Refresher"]

_SLOWEST_S = 5.0
_WRITE_EVERY_MS = 5000
_NEVER = -1


class Refresher:
    """Reads what others wrote, and tells those who wait. Lives in one event loop.

    Args:
        parts: What is to be up to date, and who is told.
        refresh_s: How often to look at the database.
        beat_s: How often to count heartbeats there.
        file: Where to write down what is known, for a start while the database is away; None
            if nowhere.
    """

    def __init__(
        self, parts: MetaParts, *, refresh_s: float, beat_s: float, file: Path | None = None
    ) -> None:
        self._store = parts.store
        self._directory = parts.directory
        self._watches = parts.watches
        self._online = parts.online
        self._clock = parts.clock
        self._warn = parts.warn
        self._refresh_s = refresh_s
        self._beat_s = beat_s
        self._beats: dict[str, int] = {}
        self._heard_here: set[str] = set()
        self._reading = asyncio.Lock()
        self._counting = asyncio.Lock()
        self._is_stopping = asyncio.Event()
        self._file = file
        self._is_open = False
        self._is_written = True
        self._write_at_ms = 0
        self.cluster = ""
        """The id of the cluster; empty until it is known."""
        self.recalled_ms: int | None = None
        """As of when things are known, if not from the database, which was never read yet."""
        self.told: list[Callable[[], None]] = []
        """Called when the cluster is not what it was."""
        self.away: str = ""
        """Why the database cannot be used now; empty if it can."""

    def heard(self, name: str) -> None:
        """Take note that a server said itself that it lives."""
        self._heard_here.add(name)

    async def refresh(self) -> None:
        """Read what changed, and tell who waits for it.

        Raises:
            UnavailableError: The database is away.
            ConfigError: Its tables are of a newer version.
        """
        async with self._reading:
            try:
                if not self._is_open:
                    self._opened(await self._store.open())
                # What was only remembered may be wrong: then everything is read.
                is_true = self.recalled_ms is None
                since = self._directory.revision if is_true else _NEVER
                changes = await self._store.changes(since)
            except UnavailableError as error:
                self._is_away(str(error))
                raise
            self._is_back()
            self.recalled_ms = None
        if changes is not None:
            self._is_written = False
            self._tell(self._directory.apply(changes))

    def recall(self) -> None:
        """Go on with what was written down last, as the database cannot be read."""
        if self._file is None:
            return
        try:
            found = read_recollection(self._file)
        except (OSError, ValueError) as error:
            self._warn("last_known_not_readable", file=str(self._file), reason=str(error))
            return
        if found is None or self._directory.is_loaded:
            return
        self.cluster, self.recalled_ms = found.cluster, found.at_ms
        self._directory.apply(found.known)
        self._warn(
            "going_on_with_what_was_known_last",
            cluster=found.cluster,
            as_of_ms=found.at_ms,
            servers=len(found.known.servers),
            subjects=len(found.known.subjects),
        )

    def _opened(self, cluster: str) -> None:
        if self.cluster not in {"", cluster}:
            self._warn("last_known_of_another_cluster", found=self.cluster, cluster=cluster)
            self._directory.forget()
        self.cluster = cluster
        self._is_open = True

    async def run(self) -> None:
        """Refresh again and again, count heartbeats, and notice who is silent, until stopped."""
        beat_at_ms = 0
        pause_s = self._refresh_s
        while not self._is_stopping.is_set():
            try:
                await self.refresh()
                now_ms = self._clock.monotonic_ms()
                if now_ms >= beat_at_ms:
                    beat_at_ms = now_ms + int(self._beat_s * 1000)
                    await self.count_beats()
                pause_s = self._refresh_s
            except UnavailableError:
                pause_s = min(max(pause_s * 2, self._refresh_s), max(_SLOWEST_S, self._refresh_s))
            except ConfigError as error:
                self._is_away(str(error))
            self.look()
            self._online.forget_silent()
            await self._write_down()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_stopping.wait(), pause_s)

        self._write_at_ms = 0
        await self._write_down()

    async def _write_down(self) -> None:
        """Keep what is known for the next start, if it differs, but not all the time."""
        now_ms = self._clock.monotonic_ms()
        if self._file is None or self._is_written or now_ms < self._write_at_ms:
            return
        self._write_at_ms = now_ms + _WRITE_EVERY_MS
        self._is_written = True
        found = recollect(self.cluster, self._directory, self._clock.now_ms())
        try:
            await asyncio.to_thread(write_recollection, self._file, found)
        except OSError as error:
            self._warn("last_known_not_written", file=str(self._file), reason=str(error))

    def stop(self) -> None:
        """Have ``run`` end when it is done with what it does."""
        self._is_stopping.set()

    def check_loaded(self) -> None:
        """Refuse what cannot be answered before the database was read.

        Raises:
            UnavailableError: It never was.
        """
        if not self._directory.is_loaded:
            raise UnavailableError(
                "this meta server was just started and knows nothing yet: "
                + (self.away or "it reads its database")
            )

    def look(self) -> None:
        """Notice who came and who is silent."""
        if self._directory.look():
            self._tell(None)

    def is_uncounted(self, name: str) -> bool:
        """Whether a server was heard of here, and the database does not know it yet."""
        return name in self._heard_here

    async def count_beats(self) -> Mapping[str, int]:
        """Count who was heard of here, and take note of whom others heard; return all counts.

        Raises:
            UnavailableError: The database is away.
        """
        async with self._counting:
            mine, self._heard_here = self._heard_here, set()
            try:
                beats = await self._store.beat(sorted(mine))
            except UnavailableError:
                self._heard_here |= mine
                raise
            now_ms = self._clock.monotonic_ms()
            for name, count in beats.items():
                if self._beats.get(name, count) != count:
                    self._directory.heard.hear(name, now_ms)
            self._beats = beats
        return beats

    def _tell(self, subjects: set[Subject] | None) -> None:
        if subjects is None:
            self._watches.all_changed()
        else:
            self._watches.changed(subjects)
        for told in self.told:
            told()

    def _is_away(self, reason: str) -> None:
        if reason != self.away:
            self._warn("database_away", reason=reason)
        self.away = reason

    def _is_back(self) -> None:
        if self.away:
            self._warn("database_back")
        self.away = ""

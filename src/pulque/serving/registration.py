"""How a server belongs to a cluster: it registers at every meta server, over and over.

The cluster is the first one whose meta server accepts the server. Its id is written into the data
directory, and another cluster is refused from then on.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from pulque.client.connection.url import Address
from pulque.errors import ConfigError, FencedError, NotAllowedError
from pulque.serving.metalink import Describe, MetaLink
from pulque.wire.registration import Registered

__all__ = ["Registration"]

_FIRST_ANSWER_S = 2.0


class Registration(ABC):
    """Keeps a server known to its cluster.

    Args:
        addresses: Where the meta servers listen.
        name: The server's own name.
        describe: Returns what the server says about itself.
        warn: Logs an event with its fields.
        server: What the server calls itself in errors.
        role: What it is, for the logs of the meta servers.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        name: str,
        describe: Describe,
        warn: Callable[..., None],
        server: str,
        role: str,
    ) -> None:
        self._server = server
        self._warn = warn
        self.links = [
            MetaLink(
                address, name=name, describe=describe, heard=self._heard, warn=warn, role=role
            )
            for address in addresses
        ]
        """One for each meta server."""
        self._fenced: FencedError | None = None
        self._is_fenced = asyncio.Event()
        for link in self.links:
            link.on_fenced = self._on_fenced
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def registered_at(self) -> list[str]:
        """The meta servers that know of this server now."""
        return [str(each.address) for each in self.links if each.connection and each.is_registered]

    async def start(self) -> None:
        """Begin to register; wait until a meta server answered, or none can be reached.

        Raises:
            ConfigError: A meta server does not want this server, and says why.
        """
        self._tasks = [asyncio.create_task(link.run()) for link in self.links]
        tries = [asyncio.create_task(link.tried.wait()) for link in self.links]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_ANSWER_S):
                while tries and not any(link.is_registered for link in self.links):
                    done, _ = await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)
                    tries = [each for each in tries if each not in done]
        for each in tries:
            each.cancel()
        for link in self.links:
            if link.refusal is not None:
                raise ConfigError(
                    f"the meta server at {link.address} refuses this {self._server}: "
                    f"{link.refusal}"
                )
        if not self.registered_at:
            self._warn("no_meta_server_yet", meta=[str(link.address) for link in self.links])

    async def watch(self) -> None:
        """Wait until another process has the data directory, or a copy of it.

        Raises:
            ConfigError: It has, and only one of them may run.
        """
        await self._is_fenced.wait()
        raise ConfigError(f"this {self._server} stops: {self._fenced}")

    async def close(self) -> None:
        """Say that the server stops, to all who listen."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.leave() for link in self.links))

    @abstractmethod
    def _heard(self, answer: Registered) -> None:
        """Note how the server stands in its cluster.

        Raises:
            NotAllowedError: It belongs to another cluster.
        """

    def _check_cluster(self, known: str, answer: Registered, *, remedy: str) -> None:
        """Refuse a meta server of another cluster than the one that the server belongs to.

        Raises:
            NotAllowedError: It is of another one.
        """
        if known and answer.cluster != known:
            raise NotAllowedError(
                f"this {self._server}'s data directory belongs to cluster {known}, and the meta "
                f"server is of cluster {answer.cluster}: name the meta servers of {known} in "
                f"cluster.meta, or {remedy}"
            )

    def _on_fenced(self, error: FencedError) -> None:
        self._fenced = error
        self._is_fenced.set()

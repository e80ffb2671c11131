"""How a broker belongs to a cluster: it registers at every meta server, and hears how it stands.

The cluster is the first one whose meta server accepts the broker; its id is written into the data
directory, and another cluster is refused from then on. What is heard goes to the gate.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from pulque.broker.receiving.admission import Gate
from pulque.client.connection.url import Address
from pulque.errors import ConfigError, FencedError, NotAllowedError
from pulque.model.standing import Standing
from pulque.serving.metalink import Describe, MetaLink
from pulque.wire.registration import Registered

__all__ = ["Registration"]

_FIRST_ANSWER_S = 2.0


class Registration:
    """Keeps a broker known to its cluster.

    Args:
        addresses: Where the meta servers listen.
        name: The broker's own.
        describe: What it says about itself.
        gate: What is told how the broker stands.
        warn: Logs an event with its fields.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        name: str,
        describe: Describe,
        gate: Gate,
        warn: Callable[..., None],
    ) -> None:
        self._gate = gate
        self._warn = warn
        self.links = [
            MetaLink(address, name=name, describe=describe, heard=self._heard, warn=warn)
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
        """The meta servers that know of this broker now."""
        return [str(each.address) for each in self.links if each.connection and each.is_registered]

    async def start(self) -> None:
        """Begin to register; wait until a meta server answered, or none can be reached.

        Raises:
            ConfigError: A meta server does not want this broker, and says why.
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
                    f"the meta server at {link.address} refuses this broker: {link.refusal}"
                )
        if not self.registered_at:
            self._warn("no_meta_server_yet", meta=[str(link.address) for link in self.links])

    async def watch(self) -> None:
        """Wait until another process has the data directory, or a copy of it.

        Raises:
            ConfigError: It has, and only one of them may run.
        """
        await self._is_fenced.wait()
        raise ConfigError(f"this broker stops: {self._fenced}")

    def _on_fenced(self, error: FencedError) -> None:
        self._fenced = error
        self._is_fenced.set()

    async def close(self) -> None:
        """Say that the broker stops, to all who listen."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.leave() for link in self.links))

    def _heard(self, answer: Registered) -> None:
        known = self._gate.standing.cluster
        if known and answer.cluster != known:
            raise NotAllowedError(
                f"this broker's data directory belongs to cluster {known}, and the meta server "
                f"is of cluster {answer.cluster}: name the meta servers of {known} in "
                "cluster.meta, or give the broker an empty data directory"
            )
        self._gate.update(
            Standing(
                cluster=answer.cluster,
                is_read_only=answer.is_read_only,
                is_draining=answer.is_draining,
                may_create=answer.may_create,
                read_only=frozenset(answer.read_only),
            )
        )

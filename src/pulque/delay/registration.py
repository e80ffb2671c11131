"""Register a delay server at every meta server of its cluster."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from pulque.client.connection.url import Address
from pulque.errors import ConfigError, NotAllowedError
from pulque.model.standing import ALONE
from pulque.serving.metalink import Describe, MetaLink
from pulque.storage.directory.cluster_membership import read_standing, write_standing
from pulque.storage.files import FileSystem
from pulque.wire.registration import Registered

__all__ = ["Joining"]

_FIRST_ANSWER_S = 2.0


class Joining:
    """Keeps a delay server registered.

    Args:
        addresses: The addresses of the meta servers.
        files: The data directory, which belongs to one cluster for good.
        name: The delay server's name.
        describe: Returns its description.
        warn: Logs an event with its fields.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        files: FileSystem,
        *,
        name: str,
        describe: Describe,
        warn: Callable[..., None],
    ) -> None:
        self._files = files
        self._warn = warn
        self.cluster = read_standing(files).cluster
        """The id of the cluster; empty if it never was in one."""
        self.is_read_only = False
        """Whether it takes no sends, by command."""
        self.links = [
            MetaLink(
                address, name=name, describe=describe, heard=self._heard, warn=warn, role="delay"
            )
            for address in addresses
        ]
        """One for each meta server."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start to register; wait until a meta server answered, or all are unreachable.

        Raises:
            ConfigError: A meta server refuses this delay server; the text gives the reason.
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
                    f"the meta server at {link.address} refuses this delay server: {link.refusal}"
                )
        if not self.registered_at:
            self._warn("no_meta_server_yet", meta=[str(link.address) for link in self.links])

    @property
    def registered_at(self) -> list[str]:
        """The meta servers at which this delay server is registered now."""
        return [str(each.address) for each in self.links if each.connection and each.is_registered]

    async def close(self) -> None:
        """Deregister at all reachable meta servers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.leave() for link in self.links))

    def _heard(self, answer: Registered) -> None:
        if self.cluster and answer.cluster != self.cluster:
            raise NotAllowedError(
                f"this delay server's data directory belongs to cluster {self.cluster}, and the "
                f"meta server is of cluster {answer.cluster}: name the meta servers of "
                f"{self.cluster} in cluster.meta, or use an empty data directory"
            )
        self.is_read_only = answer.is_read_only or answer.is_draining
        if not self.cluster:
            self.cluster = answer.cluster
            write_standing(self._files, ALONE._replace(cluster=answer.cluster))

"""How a delay server belongs to a cluster: whether it takes messages, and whose it is."""

from collections.abc import Callable, Sequence

from pulque.client.connection.url import Address
from pulque.model.standing import ALONE
from pulque.serving.metalink import Describe
from pulque.serving.registration import Registration
from pulque.storage.directory.cluster_membership import read_standing, write_standing
from pulque.storage.files import FileSystem
from pulque.wire.registration import Registered

__all__ = ["DelayRegistration"]


class DelayRegistration(Registration):
    """Keeps a delay server known to its cluster.

    Args:
        addresses: The addresses of the meta servers.
        files: The data directory, which belongs to one cluster for good.
        name: The delay server's own name.
        describe: Returns what it says about itself.
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
        self.cluster = read_standing(files).cluster
        """The id of the cluster; empty if it never was in one."""
        self.is_read_only = False
        """Whether it takes no sends, by command."""
        super().__init__(
            addresses, name=name, describe=describe, warn=warn, server="delay server", role="delay"
        )

    def _heard(self, answer: Registered) -> None:
        self._check_cluster(self.cluster, answer, remedy="use an empty data directory")
        self.is_read_only = answer.is_read_only or answer.is_draining
        if not self.cluster:
            self.cluster = answer.cluster
            write_standing(self._files, ALONE._replace(cluster=answer.cluster))

"""``/cluster``, ``/config``, ``/definitions``: what holds for all of it; and how the server is."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query

import pulque
from pulque.admin.cluster import KnownServer
from pulque.admin.context import Context
from pulque.admin.definitions import changed_policies, export_definitions, import_definitions
from pulque.admin.http.guard import ALIVE
from pulque.admin.models.cluster import (
    ClusterShown,
    ConfigChange,
    ConfigRow,
    ConfigShown,
    Definitions,
    Health,
    ImportDone,
)

__all__ = ["ClusterApi", "HealthApi"]

DryRun = Annotated[bool, Query(description="Only say what would happen; say false to do it.")]
_ALLOWED = {
    "create": "first-send or beforehand",
    "allowed": "a list of subjects and patterns",
    "spread": "1 to 64",
}


class ClusterApi:
    """Answers for the whole cluster."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._cluster = context.cluster
        self.router = router = APIRouter(tags=["cluster"])
        router.get("/cluster", summary="Show the cluster")(self.show)
        router.get("/config", summary="Settings that may change")(self.config)
        router.patch("/config", summary="Change settings")(self.change)
        router.get("/definitions", summary="Export definitions")(self.export_all)
        router.put("/definitions", summary="Import definitions")(self.import_all)

    async def show(self) -> ClusterShown:
        """Return the cluster at a glance."""
        servers = await self._cluster.servers()
        states: dict[str, int] = {}
        for server in servers:
            states[server.state] = states.get(server.state, 0) + 1
        return ClusterShown(
            cluster=self._cluster.id,
            version=pulque.__version__,
            brokers=states,
            broker_groups=sorted({server.broker_group for server in servers}),
            read_only=list(await self._cluster.read_only_marks()),
            short_of_copies=_short_of_copies(servers),
        )

    async def config(self) -> ConfigShown:
        """Return the settings that may change while the cluster runs."""
        policies = await self._cluster.policies()
        return ConfigShown(
            items=[
                ConfigRow(
                    key=key,
                    value=list(value) if isinstance(value, tuple) else value,
                    allowed=_ALLOWED[key],
                    description=ConfigChange.model_fields[key].description or "",
                )
                for key, value in policies._asdict().items()
            ]
        )

    async def change(self, change: ConfigChange) -> ConfigShown:
        """Change settings; they hold at once, and for all meta servers."""
        policies = await self._cluster.policies()
        wanted = changed_policies(policies, change)
        if wanted != policies:
            await self._cluster.set_policies(wanted)
        return await self.config()

    async def export_all(self) -> Definitions:
        """Return subjects, groups and policies as one file."""
        return await export_definitions(self._context)

    async def import_all(self, definitions: Definitions, *, dry_run: DryRun = True) -> ImportDone:
        """Make what is defined in a file and not there; nothing is removed."""
        return await import_definitions(self._context, definitions, dry_run=dry_run)


class HealthApi:
    """Answers for this server alone."""

    def __init__(self, context: Context) -> None:
        self._cluster = context.cluster
        self.router = router = APIRouter(tags=["health"])
        router.get(ALIVE, summary="Does it live?")(self.alive)
        router.get("/readyz", summary="May it be asked?")(self.ready)

    async def alive(self) -> Health:
        """Say that the process lives."""
        return Health()

    async def ready(self) -> Health:
        """Say that changes can be stored; 503 while the database does not answer."""
        await self._cluster.check_ready()
        return Health()


def _short_of_copies(servers: Sequence[KnownServer]) -> int:
    """Return how many broker groups lack a copy that they should have."""
    led = [each for each in servers if each.epoch]
    groups = {each.broker_group: each.min_in_sync for each in led}
    short = {each.broker_group for each in led if not each.is_in_sync}
    for group, least in groups.items():
        if sum(each.broker_group == group for each in led) < least:
            short.add(group)
    return len(short)

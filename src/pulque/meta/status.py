"""What a meta server says about itself and its cluster; see `pulque status`."""

from typing import Any

from pulque.meta.components import MetaParts
from pulque.meta.directory_refresh import Refresher
from pulque.meta.leadership.elections import Elections
from pulque.meta.leadership.leases import LeaderLeases
from pulque.meta.registration import ServerRegistrar
from pulque.model.cluster import GroupMarks, Server
from pulque.model.leadership import Leadership

__all__ = ["status_report"]

_NO_MARKS = GroupMarks()


def status_report(
    parts: MetaParts,
    refresher: Refresher,
    registrar: ServerRegistrar,
    elections: Elections,
    leading: LeaderLeases,
) -> dict[str, Any]:
    """Return the report; fields are added without notice."""
    directory = parts.directory
    return {
        "role": "meta",
        "cluster": refresher.cluster,
        "database": refresher.away or "ok",
        "as_of_ms": refresher.recalled_ms,
        "subjects": len(directory.subjects),
        "clients": len(parts.online),
        "watches": parts.watches.waiting,
        "leads": leading.waiting,
        "servers": [
            _server(parts, registrar, each)
            for _, each in sorted(directory.servers.items())
            if not each.is_removed
        ],
        "leaderships": [
            _leadership(parts, elections, each)
            for _, each in sorted(directory.leaderships.items())
        ],
    }


def _leadership(parts: MetaParts, elections: Elections, row: Leadership) -> dict[str, Any]:
    leader = parts.directory.broker_in(row.broker_group, row.leader)
    return {
        "broker_group": row.broker_group,
        "epoch": row.epoch,
        "version": row.version,
        "leader": leader.name if leader else None,
        "directory": row.leader,
        "in_sync": list(row.in_sync),
        "min_in_sync": row.min_in_sync,
        # As this meta server saw it itself: at the length of the lease it elects another one.
        "silent_ms": elections.silent_ms.get(row.broker_group),
    }


def _server(parts: MetaParts, registrar: ServerRegistrar, server: Server) -> dict[str, Any]:
    directory = parts.directory
    marks = directory.marks.get(server.broker_group, _NO_MARKS)
    report = registrar.reports.get(server.name)
    return {
        "name": server.name,
        "broker_group": server.broker_group,
        "role": server.role.name.lower(),
        "address": server.address,
        "state": server.state.name.lower(),
        "is_serving": directory.is_serving(server),
        "silent_ms": directory.heard.silent_ms(server.name, parts.clock.monotonic_ms()),
        "is_read_only": marks.is_read_only,
        "is_draining": marks.is_draining,
        "partitions": report.partitions if report else None,
        "log_bytes": report.log_bytes if report else None,
        "clock_apart_ms": report.clock_apart_ms if report else None,
    }

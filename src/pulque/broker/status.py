"""How a broker is doing, as one JSON object."""

import os
import resource
from collections.abc import Iterator
from itertools import islice
from typing import Any

from pulque.broker.cluster.membership import ClusterSide
from pulque.broker.components import BrokerParts
from pulque.broker.state import BrokerState
from pulque.model.names import is_retry
from pulque.net.steps import Steps, in_slices
from pulque.serving.commit import Committer

__all__ = ["cluster_report", "status_report"]

_MOST_ROWS = 1000


def cluster_report(cluster: ClusterSide) -> dict[str, Any]:
    """Return how a broker stands in its cluster."""
    standing, registration = cluster.gate.standing, cluster.registration
    return {
        "id": standing.cluster,
        "group": cluster.broker_group,
        "registered_at": [] if registration is None else registration.registered_at,
        "meta_servers": [str(each.address) for each in registration.links] if registration else [],
        "is_read_only": standing.is_read_only,
        "is_draining": standing.is_draining,
        "may_create": standing.may_create,
        "read_only_subjects": sorted(standing.read_only)[:_MOST_ROWS],
    }


def status_report(
    state: BrokerState, parts: BrokerParts, committer: Committer, connections: int
) -> Steps[dict[str, Any]]:
    """Return counts, positions and sizes; long lists are cut at a thousand rows.

    The counts are of one instant, the rows of others soon after.
    """
    engine = state.engine
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found: dict[str, Any] = {
        "pid": os.getpid(),
        "start": engine.start_count,
        "connections": connections,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "messages_sent": parts.receiver.messages,
        "batches_sent": parts.receiver.batches,
        "sends_refused": parts.receiver.refused,
        "messages_delivered": parts.puller.delivered,
        "pulls_waiting": parts.puller.waiting,
        "deliveries_settled": parts.settler.settled,
        "deliveries_nacked": parts.settler.nacked,
        "deliveries_lost": parts.settler.lost,
        "messages_redelivered": parts.redeliverer.redelivered + parts.releaser.released,
        "messages_waiting": len(state.schedule),
        "messages_left": _left(state),
        "messages_resent": parts.office.resent,
        "messages_adopted": parts.adopter.adopted,
        "messages_died": parts.redeliverer.died + parts.releaser.expired,
        "syncs": committer.syncs,
        "bytes_unconfirmed": committer.waiting_bytes,
        "is_full": engine.is_full,
        "messages_damaged": sum(hole.end - hole.first for _, hole in engine.damages.rows()),
        "message_log": {
            "start": engine.segments[0].base,
            "end": engine.end,
            "synced": engine.synced,
            "segments": len(engine.segments),
        },
        "partition_count": len(engine.partitions.by_id),
    }
    yield
    for name, rows in (
        ("partitions", _partitions(state)),
        ("groups", _groups(state)),
        ("damaged", _damaged(state)),
        ("subscriptions", _subscriptions(state)),
    ):
        listed: list[dict[str, Any]] = []
        for some in in_slices(rows):
            listed += some
            yield
        found[name] = listed
    return found


_Rows = Iterator[dict[str, Any]]


def _partitions(state: BrokerState) -> _Rows:
    first = list(islice(state.engine.partitions.by_id.values(), _MOST_ROWS))
    return ({"name": p.name, "start": p.start, "end": p.confirmed} for p in first)


def _groups(state: BrokerState) -> _Rows:
    engine = state.engine
    for (number, group), found in list(islice(state.consumption.groups.items(), _MOST_ROWS)):
        partition = engine.partitions.by_id[number]
        yield {
            "partition": partition.name,
            "group": group,
            "next_sequence": found.next_sequence,
            "lag": partition.confirmed - found.next_sequence,
            "damaged": engine.damages.count(partition),
            "redeliveries_pending": found.pending_count,
        }


def _damaged(state: BrokerState) -> _Rows:
    for partition, hole in islice(state.engine.damages.rows(), _MOST_ROWS):
        yield {"partition": partition.name, "first_sequence": hole.first, "end": hole.end}


def _subscriptions(state: BrokerState) -> _Rows:
    by_id = state.engine.partitions.by_id
    for each in list(islice(state.consumption.subscriptions.values(), _MOST_ROWS)):
        yield {
            "partition": by_id[each.partition].name,
            "group": each.group,
            "consumer": each.consumer,
            "settled": each.settled,
            "next_pull": each.next_pull,
        }


def _left(state: BrokerState) -> int:
    """Return how many messages groups have still to do with, confirmed or not.

    In one go, and not in steps: a message that moves on while others are counted must not be
    missed, as a broker may be removed when this is 0.
    """
    partitions, groups = state.engine.partitions.by_id, state.consumption.groups
    left = len(state.schedule)
    for (number, _), found in groups.items():
        partition = partitions[number]
        end, first = partition.end, found.next_sequence
        if end > first:
            left += max(end - max(first, partition.start), 0)
        if found.pending or found.ranges:
            left += found.pending_count
    left += sum([each.held_count for each in state.consumption.subscriptions.values()])
    # Retries of a group that has not come for them yet.
    retries = [each for each in partitions.values() if is_retry(each.name)]
    if retries:
        known = {number for number, _ in groups}
        left += sum(each.end - each.start for each in retries if each.id not in known)
    return left

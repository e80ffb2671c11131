"""How a broker is doing, as one JSON object."""

import os
import resource
from typing import Any

from pulque.broker.belonging import ClusterSide
from pulque.broker.parts import Parts
from pulque.broker.state import BrokerState
from pulque.model.names import is_retry
from pulque.serving.commit import Committer
from pulque.storage.partitions import Partition

__all__ = ["cluster_report", "status_report"]

_MOST_ROWS = 1000


def cluster_report(cluster: ClusterSide) -> dict[str, Any]:
    """Return how a broker stands in its cluster."""
    standing, registration = cluster.gate.standing, cluster.registration
    return {
        "id": standing.cluster,
        "group": cluster.broker_group,
        "registered_at": [] if registration is None else registration.registered_at,
        "is_read_only": standing.is_read_only,
        "is_draining": standing.is_draining,
        "may_create": standing.may_create,
        "read_only_subjects": sorted(standing.read_only)[:_MOST_ROWS],
    }


def status_report(
    state: BrokerState, parts: Parts, committer: Committer, connections: int
) -> dict[str, Any]:
    """Return counts, positions and sizes; long lists are cut at a thousand rows."""
    engine, consumption = state.engine, state.consumption
    usage = resource.getrusage(resource.RUSAGE_SELF)
    partitions = list(engine.partitions.by_id.values())
    return {
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
        "message_log": {
            "start": engine.segments[0].base,
            "end": engine.end,
            "synced": engine.synced,
            "segments": len(engine.segments),
        },
        "partition_count": len(partitions),
        "partitions": [
            {"name": p.name, "start": p.start, "end": p.confirmed} for p in partitions[:_MOST_ROWS]
        ],
        "groups": [
            {
                "partition": engine.partitions.by_id[partition].name,
                "group": group,
                "next_sequence": found.next_sequence,
                "lag": engine.partitions.by_id[partition].confirmed - found.next_sequence,
                "redeliveries_pending": found.pending_count,
            }
            for (partition, group), found in list(consumption.groups.items())[:_MOST_ROWS]
        ],
        "subscriptions": [
            {
                "partition": engine.partitions.by_id[s.partition].name,
                "group": s.group,
                "consumer": s.consumer,
                "settled": s.settled,
                "next_pull": s.next_pull,
            }
            for s in list(consumption.subscriptions.values())[:_MOST_ROWS]
        ],
    }


def _left(state: BrokerState) -> int:
    """Return how many messages groups have still to do with, at this one instant."""
    partitions, groups = state.engine.partitions.by_id, state.consumption.groups
    known = {partition for partition, _ in groups}
    behind = sum(
        _stored_from(partitions[partition], found.next_sequence) + found.pending_count
        for (partition, _), found in groups.items()
    )
    held = sum(each.held_count for each in state.consumption.subscriptions.values())
    # Retries of a group that has not come for them yet.
    unopened = sum(
        each.confirmed - each.start
        for each in partitions.values()
        if each.id not in known and is_retry(each.name)
    )
    return behind + held + unopened + len(state.schedule)


def _stored_from(partition: Partition, sequence: int) -> int:
    return max(partition.confirmed - max(sequence, partition.start), 0)

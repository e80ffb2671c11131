"""How a broker is doing, as one JSON object."""

import os
import resource
from typing import Any

from pulque.broker.commit import Committer
from pulque.broker.pull import Puller
from pulque.broker.receive import Receiver
from pulque.broker.retry import Redeliverer
from pulque.broker.settle import Settler
from pulque.rules.consumption import Consumption
from pulque.storage.engine import Engine

__all__ = ["status_report"]

_MOST_ROWS = 1000


def status_report(
    engine: Engine,
    consumption: Consumption,
    receiver: Receiver,
    puller: Puller,
    settler: Settler,
    redeliverer: Redeliverer,
    committer: Committer,
    connections: int,
) -> dict[str, Any]:
    """Return counts, positions and sizes; long lists are cut at a thousand rows."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    partitions = list(engine.partitions.by_id.values())
    return {
        "pid": os.getpid(),
        "start": engine.start_count,
        "connections": connections,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "messages_sent": receiver.messages,
        "batches_sent": receiver.batches,
        "sends_refused": receiver.refused,
        "messages_delivered": puller.delivered,
        "pulls_waiting": puller.waiting,
        "deliveries_settled": settler.settled,
        "deliveries_nacked": settler.nacked,
        "deliveries_lost": settler.lost,
        "messages_redelivered": redeliverer.redelivered,
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
                "next_sequence": state.next_sequence,
                "lag": engine.partitions.by_id[partition].confirmed - state.next_sequence,
                "redeliveries_pending": len(state.pending),
            }
            for (partition, group), state in list(consumption.groups.items())[:_MOST_ROWS]
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

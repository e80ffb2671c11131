"""The peers there are, by the name used on the command line."""

from __future__ import annotations

from bench.peers.kafka import Kafka
from bench.peers.nats_jetstream import NatsJetStream
from bench.peers.peer import Peer
from bench.peers.rabbitmq import RabbitMQ
from bench.peers.redis_streams import RedisStreams

__all__ = ["all_peers"]


def all_peers() -> dict[str, Peer]:
    """New peers, none of them started."""
    return {
        "redis": RedisStreams(),
        "nats": NatsJetStream(),
        "rabbitmq-quorum": RabbitMQ("quorum"),
        "rabbitmq-classic": RabbitMQ("classic"),
        "kafka": Kafka(),
    }

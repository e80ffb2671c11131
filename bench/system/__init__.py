"""Benchmarks of a whole broker in a process of its own; each gives a ``Section``."""

from collections.abc import Callable

from bench.options import Options
from bench.outcome import Section
from bench.system import (
    archive,
    backlog,
    cluster_brokers,
    delay,
    fanout,
    filters,
    latency,
    meta,
    ordered,
    peers,
    profile,
    replication,
    restart,
    retries,
    sharing,
    spark,
    stream,
    subjects,
    waiting,
    wire,
)

__all__ = ["BENCHMARKS", "Benchmark"]

Benchmark = Callable[[Options], Section]

BENCHMARKS: dict[str, Benchmark] = {
    "peers": peers.measure,
    "wire": wire.measure,
    "latency": latency.measure,
    "subjects": subjects.measure,
    "backlog": backlog.measure,
    "restart": restart.measure,
    "fanout": fanout.measure,
    "sharing": sharing.measure,
    "ordered": ordered.measure,
    "waiting": waiting.measure,
    "retries": retries.measure,
    "filters": filters.measure,
    "cluster": cluster_brokers.measure,
    "replication": replication.measure,
    "delay": delay.measure,
    "meta": meta.measure,
    "spark": spark.measure,
    "stream": stream.measure,
    "archive": archive.measure,
    "profile": profile.measure,
}

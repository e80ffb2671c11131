"""Load that lasts for some seconds; each worker returns how many messages went through."""

from __future__ import annotations

import time

import pulque
from bench.measure import Gate
from bench.outcome import BenchFailedError
from bench.peers import batches
from bench.raw import PullPlan, RawClient, send_frames
from pulque.wire.requests import Acks

__all__ = ["consume", "pull_frames", "pull_singly", "send", "send_count", "send_frames_for"]

SUBJECT = "load"
_SIZE = 100


def send_count(gate: Gate, *, port: int, count: int, batch: int, window: int = 16) -> int:
    """Send so many messages in frames made beforehand."""
    with RawClient(port) as client:
        gate()
        client.send_all(send_frames(SUBJECT, count=count, size=_SIZE, batch=batch), window)
    return count


def send_frames_for(
    gate: Gate, *, port: int, seconds: float, batch: int, window: int, acks: Acks
) -> int:
    """Send frames made beforehand."""
    frames = list(send_frames(SUBJECT, count=64 * batch, size=_SIZE, batch=batch, acks=acks))
    sent = 0
    with RawClient(port) as client:
        gate()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            client.send_all(frames, window)
            sent += len(frames) * batch
    return sent


def pull_frames(gate: Gate, *, port: int, seconds: float, stored: int, messages: int) -> int:
    """Pull all that is stored, for one new group after the other."""
    pulled = 0
    with RawClient(port) as client:
        gate()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            client.pull_all(PullPlan(SUBJECT, f"group-{pulled}", messages), stored)
            pulled += stored
    return pulled


def send(gate: Gate, *, url: str, seconds: float) -> int:
    """Send lists of a thousand through the client's producer."""
    bodies = next(batches(count=1000, size=_SIZE, batch=1000))
    sent = 0
    with (
        pulque.connect(url, name="bench", acks="memory") as client,
        client.producer() as producer,
    ):
        gate()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            producer.send_many(SUBJECT, bodies)
            sent += len(bodies)
    return sent


def pull_singly(gate: Gate, *, url: str, subject: str, group: str, count: int) -> list[float]:
    """Send one message, pull it, and again; return how long each pull took, in microseconds."""
    times_us = []
    with (
        pulque.connect(url, name="bench", acks="memory") as client,
        client.consumer(subject, group=group, consumer_id="bench", start="latest") as consumer,
    ):
        consumer.pull(1, timeout=0.05)  # makes the group, at the end
        gate()
        for (body,) in batches(count=count, size=_SIZE, batch=1):
            client.send(subject, body)
            begin = time.perf_counter()
            (message,) = consumer.pull(1, timeout=10)
            times_us.append(1e6 * (time.perf_counter() - begin))
            if message.body != body:
                raise BenchFailedError("another message came")
            message.ack()
    return times_us


def consume(gate: Gate, *, url: str, seconds: float) -> int:
    """Consume through the client, and ack each message."""
    consumed = 0
    with (
        pulque.connect(url, name="bench") as client,
        client.consumer(SUBJECT, group="group", consumer_id="bench") as consumer,
    ):
        gate()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for message in consumer.pull(1000, timeout=0.5):
                len(message.body)
                message.ack()
                consumed += 1
    return consumed

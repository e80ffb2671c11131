"""Producers and consumers as processes of their own, each with its history.

``python -m tests.robustness.workers producer --url … --history … --process p0 --subject s``

They go through the client that applications use, and end on SIGTERM: a producer when each of
its messages has an outcome, a consumer when what it has in hand is settled.
"""

import argparse
import hashlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pulque
from pulque.client.receiving.received_message import ReceivedMessage
from pulque.errors import PulqueError, RejectedError, StorageFullError, UnavailableError
from tests.robustness.history import Event, HistoryWriter

__all__ = ["body_of", "id_in"]

_TIMEOUT = 60.0
_LARGEST_FILLER = 2000

stop = threading.Event()


def body_of(id: str) -> bytes:
    """Return the body of a message: its id, and a filler that follows from it."""
    digest = hashlib.sha256(id.encode()).digest()
    size = int.from_bytes(digest[:2], "little") % _LARGEST_FILLER
    return id.encode() + b"|" + (digest * (size // 32 + 1))[:size]


def id_in(body: bytes) -> str:
    """Return the id of a message whose body is as it was sent; else what is there instead."""
    id = body.partition(b"|")[0].decode(errors="replace")
    return id if body == body_of(id) else f"damaged {body[:40]!r} of {len(body)} bytes"


def produce(arguments: argparse.Namespace) -> None:
    """Send until told to stop: one at a time, or many underway."""
    with (
        HistoryWriter(arguments.history, arguments.process) as history,
        _connect(arguments, acks=arguments.acks) as client,
    ):
        if arguments.pipelined:
            _produce_many(client, history, arguments)
        else:
            _produce_one_by_one(client, history, arguments)


def _ids(arguments: argparse.Namespace) -> Iterator[str]:
    pause = 1 / arguments.rate
    for counter in range(arguments.most):
        if stop.wait(pause):
            return
        yield f"{arguments.process}-{counter}"


def _produce_one_by_one(
    client: pulque.Client, history: HistoryWriter, arguments: argparse.Namespace
) -> None:
    for id in _ids(arguments):
        history.write("invoke", "send", id)
        try:
            receipt = client.send(arguments.subject, body_of(id))
        except PulqueError as error:
            _write_failure(history, id, error)
        else:
            _write_success(history, id, receipt)


def _produce_many(
    client: pulque.Client, history: HistoryWriter, arguments: argparse.Namespace
) -> None:
    with client.producer(
        linger=0.002, max_batch=20, max_in_flight=arguments.in_flight, timeout=_TIMEOUT
    ) as producer:
        pending: list[tuple[str, pulque.PendingSend]] = []
        for id in _ids(arguments):
            history.write("invoke", "send", id)
            pending.append((id, producer.send(arguments.subject, body_of(id))))
            if len(pending) >= 100:
                _write_outcomes(history, pending[:50])
                del pending[:50]
        producer.flush()
        _write_outcomes(history, pending)


def _write_outcomes(history: HistoryWriter, sends: list[tuple[str, pulque.PendingSend]]) -> None:
    for id, send in sends:
        try:
            receipt = send.result(_TIMEOUT)
        except PulqueError as error:
            _write_failure(history, id, error)
        else:
            _write_success(history, id, receipt)


def _write_success(history: HistoryWriter, id: str, receipt: pulque.Receipt) -> None:
    history.write("ok", "send", id, partition=receipt.partition, sequence=receipt.sequence)


def _write_failure(history: HistoryWriter, id: str, error: PulqueError) -> None:
    """Only the broker's own no is a no: all else may have been stored."""
    is_no = isinstance(error, RejectedError | StorageFullError)
    is_no = is_no and not isinstance(error, UnavailableError)
    history.write("fail" if is_no else "info", "send", id, detail=f"{error!r}"[:200])


def _connect(arguments: argparse.Namespace, **options: Any) -> pulque.Client:
    """Connect; the broker may have been killed since this process was started."""
    deadline = time.monotonic() + _TIMEOUT
    while True:
        try:
            return pulque.connect(arguments.url, timeout=_TIMEOUT, **options)
        except UnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def consume(arguments: argparse.Namespace) -> None:
    """Pull, handle and ack until told to stop; nack some at their first attempt."""
    draw = random.Random(arguments.process)
    with (
        HistoryWriter(arguments.history, arguments.process) as history,
        _connect(arguments, state_dir=arguments.state) as client,
        client.consumer(
            arguments.subject, arguments.group, consumer_id=arguments.process, max_messages=200
        ) as consumer,
    ):
        while not stop.is_set():
            try:
                messages = consumer.pull(timeout=0.5)
            except UnavailableError:
                continue  # the broker was killed, and comes back
            history.write_all(_delivery(arguments, message) for message in messages)
            for message in messages:
                _handle(history, arguments, message, draw)
        consumer.close()


def _delivery(arguments: argparse.Namespace, message: ReceivedMessage) -> Event:
    return Event(
        arguments.process,
        "ok",
        "pull",
        id_in(message.body),
        partition=message.partition,
        sequence=message.sequence,
        group=arguments.group,
        attempt=message.attempt,
    )


def _handle(
    history: HistoryWriter,
    arguments: argparse.Namespace,
    message: ReceivedMessage,
    draw: random.Random,
) -> None:
    id = id_in(message.body)
    if arguments.work:
        time.sleep(arguments.work)
    if message.attempt == 1 and draw.random() < arguments.nack:
        history.write("invoke", "nack", id, group=arguments.group)
        message.nack("drawn")
        return
    # Before the ack: what is settled must be found handled, even if this process dies here.
    history.write("ok", "handle", id, group=arguments.group)
    message.ack()


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["producer", "consumer"])
    parser.add_argument("--url", required=True)
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("--process", required=True)
    parser.add_argument("--subject", required=True)
    parser.add_argument("--group", default="g")
    parser.add_argument("--state", type=Path)
    parser.add_argument("--acks", default="disk")
    parser.add_argument("--pipelined", action="store_true")
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--most", type=int, default=1_000_000)
    parser.add_argument("--nack", type=float, default=0.05)
    parser.add_argument("--work", type=float, default=0.0)
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        # In a thread: the one that is interrupted may hold the lock of ``stop.wait``.
        signal.signal(number, lambda *_: threading.Thread(target=stop.set).start())
    arguments.history.with_suffix(".ready").touch()
    if arguments.role == "producer":
        produce(arguments)
    else:
        consume(arguments)


if __name__ == "__main__":
    main()

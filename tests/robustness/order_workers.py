"""Producers and consumers of ordered messages as processes of their own, each with its history.

``python -m tests.robustness.order_workers consumer --url … --history … --process c0 --subject s``

A producer's keys are its own: what one thread sends one after the other is the order of a key.
A consumer handles several keys at the same time. A storm is many consumers in one process, of
which one comes or goes every 200 ms. All end on SIGTERM.
"""

import argparse
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pulque
from pulque.client.ordered.window import OrderedMessage
from pulque.errors import PulqueError, UnavailableError
from tests.robustness.history import Event, HistoryWriter, counter_of

_TIMEOUT = 60.0
_AT_ONCE = 4

stop = threading.Event()


def produce(arguments: argparse.Namespace) -> None:
    """Send messages of a few keys until told to stop, many underway."""
    with (
        HistoryWriter(arguments.history, arguments.process) as history,
        _connect(arguments) as client,
        client.producer(linger=0.002, max_batch=20, timeout=_TIMEOUT) as producer,
    ):
        pending: list[tuple[Event, pulque.PendingSend]] = []
        for id in _ids(arguments):
            key = f"{arguments.process}.{counter_of(id) % arguments.keys}"
            event = Event(arguments.process, "invoke", "send", id, key=key)
            history.write_all([event])
            send = producer.send(arguments.subject, id.encode(), order_key=key)
            pending.append((event, send))
            while pending and pending[0][1].done():
                _write_outcome(history, *pending.pop(0))
        producer.flush()
        for event, send in pending:
            _write_outcome(history, event, send)


def _ids(arguments: argparse.Namespace) -> Iterator[str]:
    for counter in range(arguments.most):
        if stop.wait(1 / arguments.rate):
            return
        yield f"{arguments.process}-{counter}"


def _write_outcome(history: HistoryWriter, event: Event, send: pulque.PendingSend) -> None:
    try:
        receipt = send.result(_TIMEOUT)
    except PulqueError as error:
        history.write_all([replace(event, type="info", detail=f"{error!r}"[:200])])
        return
    place = f"{receipt.broker_group}/{receipt.partition}"
    history.write_all([replace(event, type="ok", partition=place, sequence=receipt.sequence)])


def consume(arguments: argparse.Namespace) -> None:
    """Handle messages until told to stop, several keys at a time; fail some."""
    with _connect(arguments) as client:
        consume_by(client, arguments, stop)


def storm(arguments: argparse.Namespace) -> None:
    """Have one of many consumers come or go, again and again; none is left in the end."""
    draw = random.Random(arguments.process)
    running: dict[int, tuple[threading.Event, threading.Thread]] = {}
    with _connect(arguments) as client:
        while not stop.wait(arguments.every):
            number = draw.randrange(arguments.consumers)
            if number in running:
                leave, thread = running.pop(number)
                leave.set()
                thread.join()
                continue
            name = f"{arguments.process}.{number}"
            one = argparse.Namespace(**vars(arguments))
            one.process, one.history = name, arguments.history.with_name(f"{name}.jsonl")
            leave = threading.Event()
            thread = threading.Thread(target=consume_by, args=(client, one, leave))
            running[number] = leave, thread
            thread.start()
        for leave, _ in running.values():
            leave.set()
        for _, thread in running.values():
            thread.join()


def consume_by(
    client: pulque.Client, arguments: argparse.Namespace, leave: threading.Event
) -> None:
    """Handle messages by one consumer until it is to leave."""
    with (
        HistoryWriter(arguments.history, arguments.process) as history,
        client.consumer(
            arguments.subject,
            arguments.group,
            ordered=True,
            consumer_id=arguments.process,
            retry=pulque.RetryPolicy(delays=[0.05]),
        ) as consumer,
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        history.write("ok", "start", "-")
        worker = Worker(history, arguments)
        while not leave.is_set():
            try:
                messages = consumer.pull(_AT_ONCE, timeout=0.2)
            except UnavailableError:
                continue  # somebody was killed, and comes back
            jobs = [pool.submit(worker.handle, *worker.note(each)) for each in messages]
            for job in jobs:
                job.result()
            worker.write_settled()
        consumer.close()
        worker.write_settled()


class Worker:
    """Handles messages, and writes down what became of them."""

    def __init__(self, history: HistoryWriter, arguments: argparse.Namespace) -> None:
        self._history = history
        self._arguments = arguments
        self._draw = random.Random(arguments.process)
        self._acked: list[tuple[OrderedMessage, Event]] = []

    def note(self, message: pulque.ReceivedMessage) -> tuple[OrderedMessage, Event]:
        """Write down that a message was handed out, and when."""
        assert isinstance(message, OrderedMessage)
        event = Event(
            self._arguments.process,
            "ok",
            "pull",
            message.body.decode(),
            partition=f"{message.broker_group}/{message.partition}",
            sequence=message.sequence,
            group=self._arguments.group,
            attempt=message.attempt,
            key=message.order_key or "",
            token=message.token,
            t=int(message.handed_at * 1e9),
        )
        self._history.write_all([event])
        return message, replace(event, t=0)

    def handle(self, message: OrderedMessage, event: Event) -> None:
        """Do the work; fail at some first attempts."""
        time.sleep(self._arguments.work)
        if message.attempt == 1 and self._draw.random() < self._arguments.nack:
            self._history.write_all([replace(event, f="nack", type="invoke")])
            message.nack("drawn", delay=0.05 if self._arguments.in_place else None)
            return
        # Before the ack: what is settled must be found handled, even if this process dies here.
        self._history.write_all(
            [replace(event, f="handle"), replace(event, f="settle", type="invoke")]
        )
        message.ack()
        self._acked.append((message, event))

    def write_settled(self) -> None:
        """Write down which acks the broker has accepted."""
        left = []
        for message, event in self._acked:
            batch, index = message.source()
            is_settled = batch.settled > index  # type: ignore[attr-defined]
            if message.is_abandoned and not is_settled:
                continue
            if is_settled:
                if not any(index in lost for lost in batch.lost):  # type: ignore[attr-defined]
                    self._history.write_all([replace(event, f="settle")])
            else:
                left.append((message, event))
        self._acked = left


def _connect(arguments: argparse.Namespace) -> pulque.Client:
    """Connect; servers may have been killed since this process was started."""
    deadline = time.monotonic() + _TIMEOUT
    while True:
        try:
            return pulque.connect(arguments.url, timeout=_TIMEOUT, state_dir=arguments.state)
        except UnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["producer", "consumer", "storm"])
    parser.add_argument("--url", required=True)
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("--process", required=True)
    parser.add_argument("--subject", required=True)
    parser.add_argument("--group", default="g")
    parser.add_argument("--state", type=Path)
    parser.add_argument("--keys", type=int, default=10)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--most", type=int, default=1_000_000)
    parser.add_argument("--nack", type=float, default=0.02)
    parser.add_argument("--in-place", action="store_true")
    parser.add_argument("--consumers", type=int, default=30)
    parser.add_argument("--every", type=float, default=0.2)
    parser.add_argument("--work", type=float, default=0.002)
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        # In a thread: the one that is interrupted may hold the lock of ``stop.wait``.
        signal.signal(number, lambda *_: threading.Thread(target=stop.set).start())
    arguments.history.with_suffix(".ready").touch()
    {"producer": produce, "consumer": consume, "storm": storm}[arguments.role](arguments)


if __name__ == "__main__":
    main()

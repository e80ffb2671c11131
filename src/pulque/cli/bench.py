"""``pulque bench``: how fast this broker is from here.

For a first impression and for comparing settings; ``make bench`` compares with other systems.
Rates are of confirmed messages, as Python objects at both ends.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from struct import Struct
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pulque.cli.common.exit_codes import ExitCode
from pulque.cli.common.options import (
    AcksChoice,
    AcksOption,
    OutputOption,
    Timeout,
    Url,
    open_client,
)
from pulque.cli.common.output import Output, print_json, print_table, print_warning
from pulque.errors import PulqueError, RequestTimeoutError, error_from_wire

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from pulque import Client, Consumer

__all__ = ["app"]

app = typer.Typer(help="Measure how fast the broker is from here.", rich_markup_mode=None)

Advance = Callable[[int], None]
"""Called with how many more are done."""

_STAMP = Struct("<q")
_SAMPLED_EVERY = 50

SubjectOption = Annotated[str, typer.Option(help="Which subject to use.")]
SizeOption = Annotated[int, typer.Option(min=8, max=16 * 1024**2, help="Bytes of each body.")]
CountOption = Annotated[int, typer.Option(min=1, help="How many messages.")]
BatchOption = Annotated[int, typer.Option(min=1, max=10_000, help="Messages in a batch.")]


@dataclass(slots=True)
class Measured:
    """What came out."""

    messages: int
    bytes: int
    seconds: float
    latencies_ms: list[float] = field(default_factory=list)

    def fields(self) -> dict[str, int | float]:
        """Return the figures as JSON has them."""
        seconds = max(self.seconds, 1e-9)
        found: dict[str, int | float] = {
            "messages": self.messages,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 4),
            "messages_per_second": round(self.messages / seconds),
            "megabytes_per_second": round(self.bytes / seconds / 1e6, 2),
        }
        if len(self.latencies_ms) > 1:
            from statistics import quantiles

            cuts = quantiles(self.latencies_ms, n=100)
            found |= {
                "latency_ms_p50": round(cuts[49], 3),
                "latency_ms_p99": round(cuts[98], 3),
            }
        return found


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to send and pull."""

    subject: str
    size: int
    count: int
    batch: int
    timeout: float


@app.command(name="send")
def bench_send(
    context: typer.Context,
    *,
    subject: SubjectOption = "bench",
    size: SizeOption = 100,
    count: CountOption = 100_000,
    batch: BatchOption = 1000,
    acks: AcksOption = AcksChoice.DISK,
    url: Url = None,
    timeout: Timeout = 30.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Send messages through a batching producer, until all are confirmed."""
    plan = _Plan(subject, size, count, batch, timeout)
    with open_client(context, url, timeout) as client, _progress("sent", count, output) as advance:
        measured = _send_all(client, plan, acks, advance)
    _print(measured, output)


@app.command(name="pull")
def bench_pull(
    context: typer.Context,
    *,
    subject: SubjectOption = "bench",
    group: Annotated[
        str | None, typer.Option(help="For which group; a new one if not given.")
    ] = None,
    count: CountOption = 100_000,
    batch: BatchOption = 1000,
    url: Url = None,
    timeout: Timeout = 30.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Pull and ack messages that are there; `pulque bench send` leaves some.

    Exits with 4 if there are none.
    """
    name = group or f"bench-{time.time_ns():x}"
    with (
        open_client(context, url, timeout) as client,
        client.consumer(subject, group=name, max_messages=batch) as consumer,
        _progress("pulled", count, output) as advance,
    ):
        measured = _pull_all(consumer, count, batch, min(timeout, 2.0), advance)
        measured.latencies_ms.clear()  # they waited for us, not for the broker
    if not measured.messages:
        print_warning(f"there are no messages in {subject}: run pulque bench send first")
        raise typer.Exit(ExitCode.NOTHING)
    _print(measured, output)


@app.command()
def e2e(
    context: typer.Context,
    *,
    subject: Annotated[
        str | None, typer.Option(help="Which subject to use; a new one if not given.")
    ] = None,
    size: SizeOption = 100,
    count: CountOption = 100_000,
    batch: BatchOption = 1000,
    acks: AcksOption = AcksChoice.DISK,
    url: Url = None,
    timeout: Timeout = 30.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Send from this process and pull in another, at the same time.

    A latency is from handing a message to the producer until the consumer has it.
    """
    plan = _Plan(subject or f"bench-{time.time_ns():x}", size, count, batch, timeout)
    with (
        open_client(context, url, timeout) as client,
        _other_process(url, plan) as results,
        _progress("sent", count, output) as advance,
    ):
        began = time.monotonic()
        _send_all(client, plan, acks, advance)
        if not results.poll(timeout):
            raise RequestTimeoutError(f"the consumer did not get all messages in {timeout:g} s")
        pulled = Measured(**_told_by(results))
        seconds = time.monotonic() - began
    if pulled.messages != count:
        raise RequestTimeoutError(f"the consumer got {pulled.messages} of {count} messages")
    _print(Measured(count, count * size, seconds, pulled.latencies_ms), output)


def _send_all(client: "Client", plan: _Plan, acks: AcksChoice, advance: Advance) -> Measured:
    size, count, batch = plan.size, plan.count, plan.batch
    filling = bytes(size - _STAMP.size)
    began = time.monotonic()
    with client.producer(acks=acks.value, max_batch=batch, timeout=plan.timeout) as producer:
        pending = []
        for start in range(0, count, batch):
            some = min(batch, count - start)
            body = _STAMP.pack(time.monotonic_ns()) + filling
            pending.append(producer.send_many(plan.subject, [body] * some))
            advance(some)
        producer.flush(plan.timeout)
        for each in pending:
            each.result()
    return Measured(count, count * size, time.monotonic() - began)


def _pull_all(
    consumer: "Consumer", count: int, batch: int, patience: float, advance: Advance
) -> Measured:
    """Pull until there are enough, or none come for a while; that while is not counted."""
    began = time.monotonic()
    measured = Measured(0, 0, 0.0)
    while measured.messages < count:
        messages = consumer.pull(min(count - measured.messages, batch), timeout=patience)
        if not messages:
            break
        now = time.monotonic_ns()
        for message in messages:
            measured.bytes += len(message.body)
            message.ack()
        for message in messages[::_SAMPLED_EVERY]:
            sent = _STAMP.unpack_from(message.body.ljust(_STAMP.size))[0]
            measured.latencies_ms.append((now - sent) / 1e6)
        measured.messages += len(messages)
        measured.seconds = time.monotonic() - began
        advance(len(messages))
    return measured


@contextmanager
def _other_process(url: str | None, plan: _Plan) -> Iterator["Connection"]:
    """Run a consumer in a process of its own; yield where it tells its latencies."""
    import multiprocessing

    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe(duplex=False)
    process = spawning.Process(target=_consume, args=(theirs, url, plan), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(plan.timeout):
            raise RequestTimeoutError(f"the consumer did not start in {plan.timeout:g} s")
        _told_by(ours)
        yield ours
        process.join(plan.timeout)
    finally:
        if process.is_alive():
            process.terminate()
            process.join()


def _consume(results: "Connection", url: str | None, plan: _Plan) -> None:
    import pulque

    try:
        with (
            pulque.connect(url, timeout=plan.timeout) as client,
            client.consumer(plan.subject, group="bench", max_messages=plan.batch) as consumer,
        ):
            results.send_bytes(b'{"is_ready": true}')
            measured = _pull_all(consumer, plan.count, plan.batch, plan.timeout, lambda _: None)
            results.send_bytes(json.dumps(asdict(measured)).encode())
    except PulqueError as error:
        results.send_bytes(json.dumps({"code": error.code, "text": str(error)}).encode())


def _told_by(results: "Connection") -> dict[str, Any]:
    """Return what the other process says, or raise what it raised."""
    try:
        told: dict[str, Any] = json.loads(results.recv_bytes())
    except EOFError:
        raise PulqueError("the consumer's process ended before its time") from None
    if "code" in told:
        raise error_from_wire(told["code"], told["text"])
    return told


@contextmanager
def _progress(verb: str, count: int, output: Output) -> Iterator[Advance]:
    """Show a bar on stderr while work goes on, if somebody is there to see it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(verb), BarColumn(bar_width=None), MofNCompleteColumn())
    console = Console(stderr=True)
    is_hidden = output is Output.JSON or not sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as progress:
        task = progress.add_task(verb, total=count)
        yield lambda done: progress.advance(task, done)


def _print(measured: Measured, output: Output) -> None:
    if output is Output.JSON:
        print_json(measured.fields())
    else:
        rows = [
            (name.replace("_", " "), f"{value:,}") for name, value in measured.fields().items()
        ]
        print_table(("what", "value"), rows)

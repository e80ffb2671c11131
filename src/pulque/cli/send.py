"""``pulque send``: messages from the command line, a file or a pipe."""

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from itertools import repeat
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from pulque.cli.common.options import (
    AcksChoice,
    AcksOption,
    OutputOption,
    Timeout,
    Url,
    open_client,
    opened,
)
from pulque.cli.common.output import Output, instant, print_json, print_line
from pulque.cli.delay import AtOption, DelayOption, LevelOption, parse_delay, parse_instant
from pulque.errors import UsageError
from pulque.model.names import DEFAULT_LEVEL, MAX_LEVEL
from pulque.settings.foreign import quoted

if TYPE_CHECKING:
    from pulque import PendingSend, Receipt

__all__ = ["bodies_of", "parse_headers", "send"]

_MOST_PENDING = 10_000


def send(
    context: typer.Context,
    subject: Annotated[
        str, typer.Argument(metavar="SUBJECT", help="Where to.", show_default=False)
    ],
    body: Annotated[
        str | None, typer.Argument(metavar="BODY", help="The body.", show_default=False)
    ] = None,
    *,
    key: Annotated[str | None, typer.Option(help="What the message is about.")] = None,
    order_key: Annotated[
        str | None, typer.Option(help="Messages of one order key stay in order.")
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(help="A word to filter by. May be repeated.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header. May be repeated.")
    ] = None,
    priority: Annotated[
        int, typer.Option(min=0, max=MAX_LEVEL, help="0 to 9, higher first.")
    ] = DEFAULT_LEVEL,
    delay: DelayOption = None,
    at: AtOption = None,
    level: LevelOption = None,
    count: Annotated[int, typer.Option(min=1, help="Send it this often.")] = 1,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Take the body from a file; - is stdin.")
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line is a message.")] = False,
    acks: AcksOption = AcksChoice.DISK,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Send messages and print their receipts.

    A receipt is printed once the broker has confirmed the message. With --delay, --at or --level
    a delay server has it until then; `pulque delay` shows, moves and cancels such messages.
    """
    headers = parse_headers(header or [])
    due = _Due(delay=parse_delay(delay), at=parse_instant(at, "--at"), level=level)
    bodies = bodies_of(body, file, is_lines=lines, count=count)
    sent = _Sent(output)
    with (
        open_client(context, url, timeout) as client,
        client.producer(acks=acks.value, timeout=timeout) as producer,
    ):
        for each in bodies:
            sent.add(
                producer.send(
                    subject,
                    each,
                    key=key,
                    order_key=order_key,
                    tags=tag or (),
                    headers=headers,
                    priority=priority,
                    **due,
                )
            )
        producer.flush()
        sent.finish()
    if output is Output.TABLE:
        print_line(sent.summary(subject))


class _Due(TypedDict):
    """When messages are to be delivered."""

    delay: timedelta | None
    at: datetime | None
    level: int | None


class _Sent:
    """Messages on their way, in order; receipts are printed as they come."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._pending: deque[PendingSend] = deque()
        self._started = time.monotonic()
        self._total = 0
        self._last: Receipt | None = None

    def add(self, pending: "PendingSend") -> None:
        self._pending.append(pending)
        while len(self._pending) > _MOST_PENDING or (self._pending and self._pending[0].done()):
            self._take()

    def finish(self) -> None:
        while self._pending:
            self._take()

    def summary(self, subject: str) -> str:
        if self._total == 1 and self._last is not None:
            if self._last.due_at_ms:
                due = instant(self._last.due_at_ms)
                return f"sent {self._last.id}, due {due}, to {self._last.broker_group}"
            return f"sent {self._last.id} as {self._last.partition}/{self._last.sequence}"
        elapsed = max(time.monotonic() - self._started, 0.001)
        rate = f"{self._total / elapsed:,.0f}/s"
        return f"sent {self._total:,} messages to {subject} in {elapsed:.2f} s ({rate})"

    def _take(self) -> None:
        self._last = receipt = self._pending.popleft().result()
        self._total += 1
        if self._output is Output.JSON:
            print_json(receipt_fields(receipt))


def receipt_fields(receipt: "Receipt") -> dict[str, object]:
    """Return a receipt as JSON has it."""
    return {
        "id": receipt.id,
        "partition": receipt.partition,
        "sequence": receipt.sequence,
        "stored_at": instant(receipt.stored_at_ms),
        "broker_group": receipt.broker_group,
        "is_duplicate": receipt.is_duplicate,
        "due_at": instant(receipt.due_at_ms) if receipt.due_at_ms else None,
    }


def bodies_of(
    body: str | None, file: str | None, *, is_lines: bool, count: int
) -> Iterator[bytes]:
    """Return the bodies that the options ask for; lines of a pipe are read as they come.

    Raises:
        UsageError: There is no body, or there are two.
    """
    if is_lines and count != 1:
        raise UsageError("--count does not go with --lines")
    if file is not None and body is None:
        parts = _open(file)
    elif body is not None and file is None:
        # Bytes that are no text in this locale arrive as surrogates, and leave as they came.
        parts = iter([body.encode(errors="surrogateescape")])
    else:
        raise UsageError("give either BODY or --file FILE (- for stdin)")
    if is_lines:
        return _split(parts)
    return repeat(b"".join(parts), count)


def parse_headers(texts: Iterable[str]) -> dict[str, str]:
    """Return headers that were written NAME=VALUE.

    Raises:
        UsageError: One was not.
    """
    headers = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--header {quoted(text)}: it must look like NAME=VALUE")
        headers[name] = value
    return headers


def _split(parts: Iterable[bytes]) -> Iterator[bytes]:
    for part in parts:
        for line in part.removesuffix(b"\n").split(b"\n"):
            yield line.removesuffix(b"\r")


def _open(file: str) -> Iterator[bytes]:
    """Yield the lines of a file with their ends."""
    if file == "-":
        yield from sys.stdin.buffer
        return
    with opened(file, "--file ") as source:
        yield from source

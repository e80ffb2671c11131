"""``pulque pull``: messages for a group, printed and settled one by one."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from pulque.cli.exits import ExitCode
from pulque.cli.messages import MessageOutput, print_message
from pulque.cli.options import Start, Url, open_client
from pulque.cli.output import flush
from pulque.errors import UsageError

if TYPE_CHECKING:
    from pulque import Consumer, ReceivedMessage

__all__ = ["pull"]

_LEAST_CONNECT_S = 2.0
_LEAST_PULL_S = 0.2
_AT_ONCE = 1000


def pull(
    context: typer.Context,
    subject: Annotated[
        str, typer.Argument(metavar="SUBJECT", help="Where from.", show_default=False)
    ],
    *,
    group: Annotated[str, typer.Option(help="For which group.", show_default=False)],
    number: Annotated[int, typer.Option("-n", min=1, help="Stop after this many messages.")] = 1,
    timeout: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Stop after this time, with what there is."),
    ] = 5.0,
    nack: Annotated[
        bool, typer.Option("--nack", help="Nack instead of ack: they will come again.")
    ] = False,
    reason: Annotated[str, typer.Option(help="With --nack: why.")] = "",
    delay: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="With --nack: when they come again; else as the group says."
        ),
    ] = None,
    start: Annotated[
        Start, typer.Option(help="Where a group begins that never pulled from this subject.")
    ] = Start.EARLIEST,
    consumer_id: Annotated[
        str | None, typer.Option(help="Who to be; others with this id are fenced off.")
    ] = None,
    url: Url = None,
    output: Annotated[
        MessageOutput,
        typer.Option(
            "--output", "-o", help="For people, JSON per message, or bodies as they are."
        ),
    ] = MessageOutput.TABLE,
) -> None:
    """Pull messages for a group; each is acked once it is printed.

    Exits with 4 if no message came in time.
    """
    if (reason or delay is not None) and not nack:
        raise UsageError("--reason and --delay go with --nack")
    got = 0
    nacked: list[ReceivedMessage] = []
    with (
        open_client(context, url, max(timeout, _LEAST_CONNECT_S)) as client,
        client.consumer(
            subject,
            group,
            consumer_id=consumer_id,
            start=start.value,
            max_held=max(number, 2 * _AT_ONCE),
        ) as consumer,
    ):
        for message in _print_some(consumer, number, timeout, output):
            got += 1
            if nack:
                nacked.append(message)
            else:
                message.ack()
        # Not before the end: they would come again at once, and count as new ones.
        for message in nacked:
            message.nack(reason, delay=delay)
    if not got:
        raise typer.Exit(ExitCode.NOTHING)


def _print_some(
    consumer: "Consumer", number: int, timeout: float, output: MessageOutput
) -> Iterator["ReceivedMessage"]:
    """Print messages until there are enough or time is up; yield each once it is printed."""
    # In less time than this an answer may miss us, and its messages would have to come again.
    deadline = time.monotonic() + max(timeout, _LEAST_PULL_S)
    while number > 0 and (left := deadline - time.monotonic()) > 0:
        messages = consumer.pull(min(number, _AT_ONCE), timeout=left)
        if not messages:
            return
        for message in messages:
            print_message(message, output)
            # Whoever reads has it before the broker is told so.
            flush()
            yield message
        number -= len(messages)

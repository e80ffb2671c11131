"""``pulque pull``: messages for a group, printed and settled one by one."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from pulque.cli.common.durations import parse_seconds
from pulque.cli.common.exit_codes import ExitCode
from pulque.cli.common.message_output import MessageOutput, print_message
from pulque.cli.common.options import Url, open_client
from pulque.cli.common.output import flush
from pulque.cli.group import parse_place
from pulque.client.arguments.filter_expressions import parse_filter
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
    group: Annotated[
        str | None,
        typer.Option(help="For which group."),
    ] = None,
    broadcast: Annotated[
        bool,
        typer.Option("--broadcast", help="All messages for this consumer id, without a group."),
    ] = False,
    number: Annotated[int, typer.Option("-n", min=1, help="Stop after this many messages.")] = 1,
    timeout: Annotated[
        float,
        typer.Option(
            parser=parse_seconds, metavar="TIME", help="Stop after this time, with what there is."
        ),
    ] = 5.0,
    nack: Annotated[
        bool, typer.Option("--nack", help="Nack instead of ack: they will come again.")
    ] = False,
    reason: Annotated[str, typer.Option(help="With --nack: why.")] = "",
    delay: Annotated[
        float | None,
        typer.Option(
            parser=parse_seconds,
            metavar="TIME",
            help="With --nack: when they come again; else as the group says.",
        ),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            metavar="PLACE",
            help="Where a group begins that was never here: earliest, latest, a sequence, an "
            "instant (2026-11-16T09:30:00Z) or how long ago (2h).",
        ),
    ] = "earliest",
    tags: Annotated[
        str | None,
        typer.Option(metavar="FILTER", help="Only messages with these tags: a || b, or a && b."),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="A group that gets each message one time only.")
    ] = False,
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
    if group is None and not broadcast:
        raise UsageError("say for which --group, or --broadcast")
    if broadcast and once:
        raise UsageError("--once does not go with --broadcast")
    any_of, all_of = ([], []) if tags is None else parse_filter(tags)
    got = 0
    nacked: list[ReceivedMessage] = []
    with (
        open_client(context, url, max(timeout, _LEAST_CONNECT_S)) as client,
        client.consumer(
            subject,
            group,
            consumer_id=consumer_id,
            start=parse_place(start, now_ms=time.time_ns() // 1_000_000, option="--start"),
            mode="once" if once else None,
            broadcast=broadcast or None,
            tags=any_of,
            all_tags=all_of,
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

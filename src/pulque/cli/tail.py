"""``pulque tail``: messages as they are stored, without a group and without effect."""

from itertools import islice
from typing import Annotated, Literal

import typer

from pulque.cli.common.message_output import MessageOutput, print_message
from pulque.cli.common.options import Timeout, Url, open_client
from pulque.cli.common.output import flush
from pulque.errors import UsageError
from pulque.settings.foreign import quoted

__all__ = ["tail"]

_STARTS: dict[str, Literal["earliest", "latest"]] = {"earliest": "earliest", "latest": "latest"}


def tail(
    context: typer.Context,
    subject: Annotated[
        str, typer.Argument(metavar="SUBJECT", help="Where from.", show_default=False)
    ],
    *,
    start: Annotated[
        str,
        typer.Option(
            "--from", metavar="earliest|latest|SEQUENCE", help="The first message to print."
        ),
    ] = "latest",
    number: Annotated[
        int | None, typer.Option("-n", min=1, help="Stop after this many messages.")
    ] = None,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: Annotated[
        MessageOutput,
        typer.Option(
            "--output", "-o", help="For people, JSON per message, or bodies as they are."
        ),
    ] = MessageOutput.TABLE,
) -> None:
    """Print messages as they are stored, until ctrl-C. No group is moved by it."""
    first = _parse_start(start)
    with open_client(context, url, timeout) as client:
        for message in islice(client.tail(subject, start=first), number):
            print_message(message, output)
            flush()


def _parse_start(text: str) -> Literal["earliest", "latest"] | int:
    if text in _STARTS:
        return _STARTS[text]
    if text.isascii() and text.isdigit():
        return int(text)
    raise UsageError(f"--from {quoted(text)}: it must be earliest, latest or a sequence")

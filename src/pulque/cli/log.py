"""``pulque log``: look into the files of a stopped broker. Nothing is ever written."""

from pathlib import Path
from typing import Annotated

import typer

from pulque.cli.common.exit_codes import ExitCode
from pulque.cli.common.options import OutputOption
from pulque.cli.common.output import Output

__all__ = ["app"]

app = typer.Typer(
    help="Look into the files of a stopped broker; nothing is written.", rich_markup_mode=None
)

PathArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="A data directory, or one of its files.", show_default=False
    ),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Read although a broker runs on the directory.")
]


@app.command()
def dump(
    path: PathArgument,
    *,
    messages: Annotated[
        bool, typer.Option("--messages", help="Print every message, not only the batches.")
    ] = False,
    force: ForceOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print what the files hold, record by record."""
    from pulque.cli.log_files import open_files, print_file

    files, found = open_files(path, force=force)
    for each in found:
        print_file(files, each, output, with_messages=messages)


@app.command()
def verify(
    path: PathArgument, *, force: ForceOption = False, output: OutputOption = Output.TABLE
) -> None:
    """Walk all files, check every crc, and compare indexes with the log.

    Exits with 1 if anything is damaged. A torn tail is no damage: it was being written when the
    broker was killed, nobody was promised it, and the next start cuts it off.
    """
    from pulque.cli.log_files import open_files, print_verified
    from pulque.storage.inspection.verification import verify as verify_files

    files, found = open_files(path, force=force)
    verified = verify_files(files, found)
    print_verified(verified, output)
    if verified.damages:
        raise typer.Exit(ExitCode.FAILED)

"""``pulque status`` and ``pulque version``."""

import platform
from importlib.metadata import version as version_of

import typer

from pulque.cli.options import OutputOption, Timeout, Url, open_client
from pulque.cli.output import Output, print_json, print_line, print_table, rows_of

__all__ = ["status", "version"]


def status(
    context: typer.Context,
    *,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Ask a broker how it is doing."""
    with open_client(context, url, timeout) as client:
        report = client.status()
    if output is Output.JSON:
        print_json(report)
    else:
        print_table(("what", "value"), list(rows_of(report)))


def version(*, output: OutputOption = Output.TABLE) -> None:
    """Print which version this is."""
    found = {"pulque": version_of("pulque"), "python": platform.python_version()}
    if output is Output.JSON:
        print_json(found)
    else:
        print_line(f"pulque {found['pulque']} (Python {found['python']})")

"""``pulque status`` and ``pulque version``."""

import platform
from collections.abc import Mapping
from importlib.metadata import version as version_of
from typing import Any

import typer

from pulque.cli.common.options import OutputOption, Timeout, Url, open_client
from pulque.cli.common.output import Output, print_json, print_line, print_table, rows_of

__all__ = ["status", "version"]

_OF_EACH = (
    "connections",
    "messages_sent",
    "messages_delivered",
    "messages_left",
    "messages_waiting",
    "messages_damaged",
    "is_full",
)


def status(
    context: typer.Context,
    *,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Ask a broker or a meta server how it is doing, and all brokers of its cluster."""
    with open_client(context, url, timeout) as client:
        report = client.status()
        if _is_of_cluster(report):
            report["brokers"] = [_row(*each) for each in client.statuses().items()]
    if output is Output.JSON:
        print_json(report)
        return
    lists = {name: rows for name, rows in report.items() if _is_table(rows)}
    print_table(
        ("what", "value"),
        list(rows_of({name: value for name, value in report.items() if name not in lists})),
    )
    for name, rows in lists.items():
        if rows:
            print_line("")
            print_line(f"{name}:")
            print_table(list(rows[0]), [[cell for _, cell in rows_of(row)] for row in rows])


def _is_of_cluster(report: Mapping[str, Any]) -> bool:
    cluster = report.get("cluster")
    return bool(cluster.get("id") if isinstance(cluster, dict) else cluster)


def _row(broker: str, report: Mapping[str, Any]) -> dict[str, object]:
    found: dict[str, object] = {"broker_group": broker}
    found |= {name: report.get(name) for name in _OF_EACH}
    return found | {"error": report.get("error", "")}


def _is_table(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def version(*, output: OutputOption = Output.TABLE) -> None:
    """Print which version this is."""
    found = {"pulque": version_of("pulque"), "python": platform.python_version()}
    if output is Output.JSON:
        print_json(found)
    else:
        print_line(f"pulque {found['pulque']} (Python {found['python']})")

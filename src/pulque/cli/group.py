"""``pulque group``: where groups are, and how they are changed or set to another place."""

import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pulque.cli.common.admin_client import Admin, open_admin, path_of
from pulque.cli.common.options import OutputOption, Timeout, Url, open_client
from pulque.cli.common.output import (
    Output,
    print_broker_table,
    print_json,
    print_line,
    print_rows,
    print_table,
    print_warning,
)
from pulque.cli.ordered import ordered, skip
from pulque.client.arguments.filter_expressions import parse_filter
from pulque.client.inspecting.groups import GroupTotals, totals_of
from pulque.client.inspecting.stored_messages import damaged_of
from pulque.errors import UnknownGroupError, UsageError
from pulque.settings.foreign import quoted
from pulque.settings.units import parse_duration

if TYPE_CHECKING:
    from pulque import Client, GroupState, PartitionReset
    from pulque.client.options.group_options import ModeName, StartAt

__all__ = ["app", "parse_place"]

app = typer.Typer(
    help="See where groups are, change them, and set them to another place.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(ordered)
app.command()(skip)
_RATES = ("sent_per_second", "settled_per_second")
_WAYS = (
    "earliest, latest, a sequence (1200), an instant (2026-11-16T09:30:00.250Z) or how long ago "
    "(2h30m)"
)


@app.command("list")
def list_groups(
    context: typer.Context,
    subject: Annotated[
        str | None,
        typer.Argument(metavar="[SUBJECT]", help="Only of this subject, or of order.* say."),
    ] = None,
    *,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """List groups with what they have not settled yet.

    Exits with 4 if there are none.
    """
    with open_client(context, url, timeout) as client:
        found = client.groups(subject)
        _warn_of_damage(client, found)
    rows = [each._asdict() for each in totals_of(found)]
    where = "here" if subject is None else f"{subject} here"
    lines = [list(map(str, row.values())) for row in rows]
    nothing = f"no groups have consumed {where}"
    print_rows(output, rows, GroupTotals._fields, lines, nothing=nothing)


@app.command()
def show(
    context: typer.Context,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Which.", show_default=False)],
    *,
    subject: Annotated[
        str | None, typer.Option(help="Only of this subject, or of order.* say.")
    ] = None,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show where a group is in each partition, and what each consumer holds."""
    with open_client(context, url, timeout) as client:
        found = client.groups(subject, group=group)
        _warn_of_damage(client, found)
    if not found:
        where = "here" if subject is None else f"{subject} here"
        raise UnknownGroupError(f"group {group} never consumed {where}")
    if output is Output.JSON:
        for state in found:
            print_json(_fields(state))
        return
    print_broker_table(
        ("partition", "mode", "next", "end", "lag", "held"),
        [
            (s.broker_group, s.partition, s.mode, *map(str, (s.next_sequence, s.end)),
             str(s.lag), str(s.held))
            for s in found
        ],
    )  # fmt: skip
    consumers = [(state, each) for state in found for each in state.consumers]
    if consumers:
        print_line("")
        print_line("consumers:")
        print_broker_table(
            ("partition", "consumer", "held", "last heard"),
            [
                (state.broker_group, state.partition, each.consumer, str(each.held),
                 _heard(each.silent))
                for state, each in consumers
            ],
        )  # fmt: skip


@app.command()
def lag(
    context: typer.Context,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Which.", show_default=False)],
    *,
    subject: Annotated[
        str | None, typer.Option(help="Only of this subject, or of order.* say.")
    ] = None,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show how far a group is behind on each broker of a cluster, and when it will be done."""
    path = path_of("groups", group, "lag")
    rows = list(open_admin(context, url, admin, timeout).rows(path, {"subject": subject}))
    if output is Output.JSON:
        for row in rows:
            print_json(row)
        return
    columns = (
        *("broker group", "partition", "lag", "damaged", "held", "oldest"),
        *("sent/s", "settled/s", "done"),
    )
    print_table(columns, list(map(_lag_line, rows)))


@app.command()
def change(
    context: typer.Context,
    subject: Annotated[
        str,
        typer.Argument(
            metavar="SUBJECT", help="What it subscribed to, or order.*", show_default=False
        ),
    ],
    *,
    group: Annotated[str, typer.Option(help="Which group.", show_default=False)],
    tags: Annotated[
        str | None,
        typer.Option(metavar="FILTER", help="The filter from now on: 'a || b' or 'a && b'."),
    ] = None,
    no_filter: Annotated[
        bool, typer.Option("--no-filter", help="From now on, all messages.")
    ] = False,
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="shared|once|ordered", help="The mode; its consumers must hold nothing."
        ),
    ] = None,
    url: Url = None,
    timeout: Timeout = 10.0,
) -> None:
    """Change the filter or the mode of a group, for all its consumers.

    Consumers that run are refused from then on; start them anew with the group's new ways.
    """
    if tags is not None and no_filter:
        raise UsageError("--tags does not go with --no-filter")
    if tags is None and not no_filter and mode is None:
        raise UsageError("say what to change: --tags, --no-filter or --mode")
    any_of, all_of = ([], []) if tags is None else parse_filter(tags)
    is_filter = no_filter or tags is not None
    with open_client(context, url, timeout) as client:
        client.change_group(
            subject,
            group,
            mode=cast("ModeName | None", mode),
            tags=any_of if is_filter else None,
            all_tags=all_of if is_filter else None,
        )
    print_line(f"group {group} of {subject} is changed; start its consumers anew")


@app.command()
def reset(
    context: typer.Context,
    subject: Annotated[
        str,
        typer.Argument(metavar="SUBJECT", help="Of which subject, or order.*", show_default=False),
    ],
    *,
    group: Annotated[str, typer.Option(help="Which group.", show_default=False)],
    to: Annotated[str, typer.Option(metavar="PLACE", help=f"{_WAYS}.", show_default=False)],
    partition: Annotated[str | None, typer.Option(help="Only this partition.")] = None,
    broker: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP", help="Only this broker group's; a sequence needs it in a cluster."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run/--yes", help="Only say what would happen, or do it.")
    ] = True,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have a group go on from another place; without --yes, only say what would happen.

    What its consumers hold is taken from them, and is not retried.
    """
    place = parse_place(to, now_ms=time.time_ns() // 1_000_000)
    with open_client(context, url, timeout) as client:
        rows = client.reset(
            subject, group, place, partition=partition, broker=broker, dry_run=dry_run
        )
    if output is Output.JSON:
        for row in rows:
            print_json(row._asdict())
        return
    was = "now" if dry_run else "was"
    print_broker_table(
        ("partition", was, "target", "reread", "skipped", "taken back"),
        [
            (r.broker_group, r.partition,
             *map(str, (r.position, r.target, r.reread, r.skipped, r.held)))
            for r in rows
        ],
    )  # fmt: skip
    print_line(_summary(group, rows, dry_run=dry_run))
    if dry_run:
        print_warning("nothing was changed; --yes does it")


def parse_place(text: str, *, now_ms: int, option: str = "--to") -> "StartAt":
    """Return where to go on, or to begin.

    Raises:
        UsageError: It is no place.
    """
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    if text.isascii() and text.isdigit():
        return int(text)
    found = _instant(text) or _ago(text, now_ms)
    if found is None:
        raise UsageError(f"{option} {quoted(text)}: allowed are {_WAYS}")
    if found.tzinfo is None:
        whole = text if len(text) > len("2026-11-16") else f"{text}T00:00"
        raise UsageError(
            f"{option} {quoted(text)}: which time zone? Write {whole}Z for UTC, or {whole}+01:00"
        )
    return found


def _instant(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _ago(text: str, now_ms: int) -> datetime | None:
    try:
        ago = parse_duration(text)
    except ValueError:
        return None
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=now_ms) - ago


def _summary(group: str, rows: Iterable["PartitionReset"], *, dry_run: bool) -> str:
    found = list(rows)
    reread, skipped = sum(row.reread for row in found), sum(row.skipped for row in found)
    would = "would read" if dry_run else "reads"
    also = "skip" if dry_run else "skips"
    return f"{group} {would} {reread:,} messages again and {also} {skipped:,}"


def _warn_of_damage(client: "Client", states: Iterable["GroupState"]) -> None:
    """Say which messages groups never get: the lag does not count them."""
    shown = {(state.broker_group, state.partition) for state in states}
    for broker, report in client.statuses().items():
        for each in damaged_of(report):
            if (broker, each.partition) in shown:
                print_warning(
                    f"messages {each.first_sequence} to {each.end - 1} of {each.partition}"
                    + (f" on {broker}" if broker else "")
                    + " are damaged: groups pass them over, and the lag does not count them"
                )


def _fields(state: "GroupState") -> dict[str, object]:
    return {**state._asdict(), "consumers": [each._asdict() for each in state.consumers]}


def _lag_line(row: Mapping[str, Any]) -> tuple[str, ...]:
    oldest, done = row["oldest_age_seconds"], row["drain_seconds"]
    return (
        row["broker_group"],
        row["partition"],
        str(row["lag"]),
        str(row["damaged"]),
        str(row["held"]),
        "-" if oldest is None else f"{oldest:,.1f} s",
        *("?" if row[n] is None else f"{row[n]:,.1f}" for n in _RATES),
        "?" if done is None else f"in {done:,.1f} s" if row["lag"] else "now",
    )


def _heard(silent: float | None) -> str:
    return "gone" if silent is None else f"{silent:.1f} s ago"

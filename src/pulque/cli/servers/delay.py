"""``pulque delay``: the command that runs a delay server."""

from typing import Annotated

import typer

from pulque.cli.common.interrupts import importing
from pulque.cli.common.options import ConfigFile, Port, SetOption
from pulque.cli.common.output import print_ready
from pulque.cli.config import flags_of, load_delay
from pulque.errors import UsageError

__all__ = ["app"]

app = typer.Typer(
    help="Run a delay server, or look at messages that are due later.", rich_markup_mode=None
)
DelayDirectory = Annotated[
    str | None,
    typer.Option("--data", metavar="DIR", help="Where delayed messages rest (storage.directory)."),
]
MetaServers = Annotated[
    str | None,
    typer.Option(
        "--meta", metavar="HOST:PORT,…", help="Where the meta servers listen (cluster.meta)."
    ),
]


@app.callback(invoke_without_command=True)
def delay(
    context: typer.Context,
    *,
    data: DelayDirectory = None,
    meta: MetaServers = None,
    port: Port = None,
    config: ConfigFile = None,
    set_values: SetOption = None,
) -> None:
    """Run a delay server: it holds messages until they are due, then sends them to a broker.

    It belongs to the cluster of its meta servers. Keeps everything in ./pulque-delay unless told
    otherwise. Prints one line when it serves, "ready pulque://127.0.0.1:7460", and stops cleanly
    on ctrl-C or SIGTERM.
    """
    if context.invoked_subcommand is not None:
        return
    with importing():
        from pulque.delay.server import run_delay
        from pulque.settings.preflight import check_world
        from pulque.settings.sources import Given

    flags = flags_of(data, port, set_values)
    if meta is not None:
        flags["cluster.meta"] = Given(meta, "--meta")
    loaded = load_delay(config, flags)
    if not loaded.settings.cluster.meta:
        raise UsageError(
            "--meta HOST:PORT is missing (cluster.meta): a delay server asks meta servers where "
            "messages go; `pulque up` has all of them"
        )
    check_world(loaded)
    run_delay(loaded.settings, on_ready=print_ready)

"""``pulque meta``: the command that runs a meta server."""

from typing import Annotated

import typer

from pulque.cli.common.interrupts import importing
from pulque.cli.common.options import ConfigFile, Port, SetOption
from pulque.cli.common.output import print_ready
from pulque.cli.config import flags_of, load_meta

__all__ = ["meta"]

MetaDirectory = Annotated[
    str | None,
    typer.Option("--data", metavar="DIR", help="Where its files go (storage.directory)."),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database", metavar="URL", help="postgresql://user@host:5432/name (database.url)."
    ),
]


def meta(
    *,
    data: MetaDirectory = None,
    database: DatabaseUrl = None,
    port: Port = None,
    config: ConfigFile = None,
    set_values: SetOption = None,
) -> None:
    """Run a meta server: brokers register there, and clients learn who serves what.

    Keeps what it knows in ./pulque-meta unless told otherwise; several share one PostgreSQL, and
    keep in --data what they knew last, to be started while it is away. The password comes from
    PULQUE_META__DATABASE__PASSWORD or database.password_file. Prints one line when it serves,
    "ready pulque://127.0.0.1:7440", and stops cleanly on ctrl-C or SIGTERM.
    """
    with importing():
        from pulque.meta.server import run_meta
        from pulque.settings.preflight import check_world
        from pulque.settings.sources import Given

    flags = flags_of(data, port, set_values)
    if database is not None:
        flags["database.url"] = Given(database, "--database")
    loaded = load_meta(config, flags)
    check_world(loaded)
    run_meta(loaded.settings, on_ready=print_ready)

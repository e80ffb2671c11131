"""``pulque pipeline``: history on Spark. Everything heavy is imported when it is needed."""

import typer

from pulque.cli.pipeline.archive import archive
from pulque.cli.pipeline.audit import audit
from pulque.cli.pipeline.maintenance import compact, expire
from pulque.cli.pipeline.query import query
from pulque.cli.pipeline.replay import replay
from pulque.cli.pipeline.report import report

__all__ = ["app"]

app = typer.Typer(
    help="Keep the history of messages in a lake, and ask it. Needs pulque[pipeline].",
    rich_markup_mode=None,
)
app.command()(archive)
app.command()(query)
app.command()(replay)
app.command()(audit)
app.command()(report)
app.command()(compact)
app.command()(expire)

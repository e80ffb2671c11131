"""All commands together, and how each of them ends.

An error is one plain line on stderr that begins with its name; a traceback means a bug of ours.
"""

import sys
from collections.abc import Sequence
from typing import cast

import typer

import pulque
from pulque.cli import bench, broker, client, cluster, dead, delay, group, message, subject
from pulque.cli import config as settings
from pulque.cli import log as inspect
from pulque.cli.common.exit_codes import ExitCode, exit_code_of
from pulque.cli.common.options import Tools
from pulque.cli.common.output import forget_stdout
from pulque.cli.pipeline import commands as pipeline
from pulque.cli.pull import pull
from pulque.cli.run import run as run_application
from pulque.cli.send import send
from pulque.cli.servers import commands as servers
from pulque.cli.status import status, version
from pulque.cli.tail import tail
from pulque.errors import PulqueError
from pulque.settings.foreign import escaped

__all__ = ["app", "run", "run_process"]

app = typer.Typer(
    name="pulque",
    help="A durable message queue.",
    epilog="Exit codes: 0 done, 1 failed or refused, 2 wrong usage or settings, 3 no broker "
    "answered, 4 nothing there, 130 interrupted.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,  # in 40 columns, boxes leave no room for the names of options
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(servers.up)
broker.app.callback(invoke_without_command=True)(servers.broker)
app.add_typer(broker.app, name="broker")
app.command()(servers.meta)
delay.app.callback(invoke_without_command=True)(servers.delay)
app.add_typer(delay.app, name="delay")
app.command()(send)
app.command()(pull)
app.command()(tail)
app.command("run")(run_application)
app.command()(status)
app.add_typer(cluster.app, name="cluster")
app.add_typer(client.app, name="client")
app.add_typer(subject.app, name="subject")
app.add_typer(group.app, name="group")
app.add_typer(dead.app, name="dead")
app.add_typer(message.app, name="message")
app.add_typer(inspect.app, name="log")
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(bench.app, name="bench")
app.add_typer(settings.app, name="config")
app.command()(version)


@app.callback()
def about(context: typer.Context) -> None:
    """A durable message queue."""
    if context.invoked_subcommand is None:
        print(context.get_help())


# What typer raises for a wrong command line is private to it, or to click, by version.
_USAGE_ERROR = cast(
    "type[typer.BadParameter]",
    next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"),
)


def run_process(arguments: Sequence[str]) -> int:
    """Run a command with the streams of this process."""
    for stream in (sys.stdout, sys.stderr):
        # A name that the locale cannot show is no reason to fail.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    code = run(arguments, Tools(connect=pulque.connect))
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        forget_stdout()
    except OSError as error:
        forget_stdout()
        return _fail("OSError", str(error), ExitCode.FAILED)
    return code


def run(arguments: Sequence[str], tools: Tools) -> int:
    """Run one command and return its exit code."""
    try:
        return _invoke(arguments, tools)
    except PulqueError as error:
        return _fail(type(error).__name__, str(error), exit_code_of(error))
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        forget_stdout()
        return ExitCode.OK
    except OSError as error:
        return _fail("OSError", str(error), ExitCode.FAILED)


def _invoke(arguments: Sequence[str], tools: Tools) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context("pulque", list(arguments), obj=tools) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except typer.Abort:
        return ExitCode.INTERRUPTED
    except _USAGE_ERROR as error:
        where = "pulque" if error.ctx is None else error.ctx.command_path
        text = f"{error.format_message()} Try: {where} --help"
        return _fail("UsageError", " ".join(text.split()), ExitCode.USAGE)
    return ExitCode.OK


def _fail(name: str, text: str, code: ExitCode) -> int:
    for line in text.splitlines() or [""]:
        print(f"error: {name}: {escaped(line)}", file=sys.stderr)
    return code

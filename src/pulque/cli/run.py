"""``pulque run``: the handlers of an application, until it is told to stop."""

import importlib
import logging
import sys
import traceback
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pulque.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from types import ModuleType

    from pulque import App

__all__ = ["find_application", "run"]


class LogLevel(StrEnum):
    """How much to tell."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def run(
    application: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:APP",
            help="Where the pulque.App is, as Python would import it from this folder.",
            show_default=False,
        ),
    ],
    *,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where the broker listens; else as the application says, else $PULQUE_URL.",
            show_default=False,
        ),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="How much to tell, on stderr.")] = (
        LogLevel.INFO
    ),
) -> None:
    """Run the handlers of an application.

    Stops on ctrl-C or SIGTERM: nothing new is begun, calls may end within the application's
    grace, what is done is settled and the rest handed back. A second signal ends it at once.
    """
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)-7s %(name)s  %(message)s"
    )
    app = find_application(application)
    if url is not None:
        app.url = url
    app.run()


def find_application(path: str) -> "App":
    """Import an application that can be run.

    Raises:
        UsageError: The path is not one, or what is there cannot be run.
        ConfigError: The module cannot be imported.
    """
    from pulque.app.app import App

    name, colon, attribute = path.partition(":")
    if not colon or not attribute or not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{path!r} is not MODULE:APP; shop.handlers:app would be")
    module = _import(name)
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{name} has no {attribute!r}; {_others(module)}")
        found = getattr(found, part)
    if not isinstance(found, App):
        raise UsageError(f"{path} is a {type(found).__name__}, no pulque.App; {_others(module)}")
    if not found.handlers:
        raise UsageError(f"{path} has no handlers; register them with @{attribute}.subscribe")
    if found.name is None:
        found.name = name
    return found


def _import(name: str) -> "ModuleType":
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise UsageError(f"there is no module {error.name}; looked in {here} too") from None
        problem: Exception = error
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the application's
        problem = error
    traceback.print_exception(problem)
    raise ConfigError(f"{name} cannot be imported: {type(problem).__name__}: {problem}")


def _others(module: "ModuleType") -> str:
    """Say which applications a module has."""
    from pulque.app.app import App

    names = [name for name, value in vars(module).items() if isinstance(value, App)]
    return f"its applications: {', '.join(names)}" if names else "it has no application"

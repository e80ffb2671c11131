"""Writes the reference pages of commands, settings and the API from the code that they describe.

::

    python -m tools.reference           write commands.md, settings.md and openapi.json, and the
                                        tables of wire-protocol.md
    python -m tools.reference --check   exit with 1 if a page is not what the code says
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from pulque.admin.app import openapi
from pulque.broker.config import BrokerSettings
from pulque.cli.app import app
from pulque.cli.common.exit_codes import ExitCode
from pulque.delay.config import DelaySettings
from pulque.meta.config import MetaSettings
from pulque.settings.schema import Setting, environment_name, settings_of, show_value
from pulque.settings.sections import ServerSettings
from tools.wire_page import with_tables

__all__ = ["main", "pages"]

_FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
_WIRE = _FOLDER / "wire-protocol.md"
_WIDTH = 80
_MADE = "<!-- Made by `python -m tools.reference`; a test compares this page with the code. -->"


def pages() -> dict[Path, str]:
    """Return what each page should hold."""
    return {
        _FOLDER / "commands.md": "\n".join(_commands()) + "\n",
        _FOLDER / "settings.md": "\n".join(_settings()) + "\n",
        _FOLDER / "openapi.json": _openapi(),
        _WIRE: with_tables(_WIRE.read_text(encoding="utf-8")),
    }


# -- the administration API ---------------------------------------------------------------------


def _openapi() -> str:
    return f"{json.dumps(openapi(), indent=2, ensure_ascii=False)}\n"


# -- commands -----------------------------------------------------------------------------------


def _commands() -> Iterator[str]:
    yield from ("# Commands", "", _MADE, "")
    yield from (
        "Results go to stdout, everything else to stderr. `-o json` prints one JSON value per",
        "line, and is what scripts should read; the form for people may change. Names, headers",
        "and bodies are printed with control characters escaped, so that no terminal acts upon",
        "them; only `-o raw` prints bodies as they are.",
        "",
        "An error is one line on stderr that begins with `error:` and the error's name.",
        "",
        "| Variable | Means |",
        "|---|---|",
        "| `PULQUE_URL` | Where a broker or a meta server listens, if `--url` does not say. |",
        "| `PULQUE_ADMIN` | Where the administration API listens; else `PULQUE_URL` tells. |",
        "| `PULQUE_STATE_DIR` | Where consumers keep their ids between runs. |",
        "| `PULQUE_SPIN` | `0`: who sends one by one sleeps for every answer. |",
        "| `PULQUE_BROKER__…` | [Settings](settings.md) of `pulque up` and `pulque broker`. |",
        "| `PULQUE_META__…` | [Settings](settings.md#of-a-meta-server) of `pulque meta`. |",
        "| `PULQUE_DELAY__…` | [Settings](settings.md#of-a-delay-server) of `pulque delay`. |",
        "| `NO_COLOR` | If it is set, nothing is coloured. |",
        "",
        "## Exit codes",
        "",
        "A code never changes its meaning.",
        "",
        "| Code | Means |",
        "|---|---|",
    )
    for code in ExitCode:
        yield f"| {code.value} | {code.meaning} |"
    yield ""
    root = typer.main.get_command(app)
    with root.make_context("pulque", ["version"], **_FIXED_WIDTH) as context:
        yield from _command(root, context)


_FIXED_WIDTH: dict[str, Any] = {"terminal_width": _WIDTH, "max_content_width": _WIDTH}


def _command(command: Any, context: Any) -> Iterator[str]:
    yield from (f"## {context.command_path}", "", "```text")
    yield from (line.rstrip() for line in command.get_help(context).strip().splitlines())
    yield from ("```", "")
    for name in getattr(command, "commands", {}):
        inner = command.commands[name]
        inner_context = type(context)(
            inner,
            info_name=name,
            parent=context,
            help_option_names=["-h", "--help"],
            **_FIXED_WIDTH,
        )
        yield from _command(inner, inner_context)


# -- settings -----------------------------------------------------------------------------------


def _settings() -> Iterator[str]:
    example = "storage.retention"
    yield from ("# Settings", "", _MADE, "")
    yield from (
        "From the weakest to the strongest: the default, the TOML file given with `--config`, the",
        "environment, a flag (`--data`, `--port`, `--set key=value`). A key that does not exist",
        "is refused. `pulque config show` prints every value in force and where it came from, and",
        "`pulque config check` tells every problem with its file and line.",
        "",
        "```toml",
        "[storage]",
        'directory = "/var/lib/pulque"',
        'retention = "7d"',
        "```",
        "",
        f"In the environment the same is `{environment_name(BrokerSettings, example)}=7d`.",
        "",
        "A duration is written like `500ms`, `90s`, `1h30m` or `7d`, or as in ISO 8601 (`P7D`); a",
        "size like `64MiB` or as a number of bytes.",
        "",
    )
    yield from ("# Of a broker", "", "For `pulque broker` and `pulque up`.", "")
    yield from _sections(BrokerSettings)
    yield from (
        "# Of a meta server",
        "",
        f"For `pulque meta`; in the environment {environment_name(MetaSettings, 'listen.port')}",
        "and so on. `pulque config show --server meta` prints what is in force.",
        "",
    )
    yield from _sections(MetaSettings)
    yield from (
        "# Of a delay server",
        "",
        f"For `pulque delay`; in the environment {environment_name(DelaySettings, 'listen.port')}",
        "and so on. `pulque config show --server delay` prints what is in force.",
        "",
    )
    yield from _sections(DelaySettings)


def _sections(model: type[ServerSettings]) -> Iterator[str]:
    sections: dict[str, list[Setting]] = {}
    for setting in settings_of(model).values():
        sections.setdefault(setting.section, []).append(setting)
    for section, settings in sections.items():
        yield from _section(model, section, settings)


def _section(model: type[ServerSettings], section: str, settings: list[Setting]) -> Iterator[str]:
    heading = section if model is BrokerSettings else f"{model.server}: {section}"
    if section:
        field = model.model_fields[section]
        yield from (f"## {heading}", "", field.description or "", "")
    else:
        yield from (f"## {heading or ''}{'A' if model is BrokerSettings else 'a'}t the top", "")
    yield from ("| Key | Value | Default | What it does |", "|---|---|---|---|")
    for each in settings:
        kind = f"{each.kind}: {each.allowed}" if each.allowed else each.kind
        default = "must be given" if each.is_required else f"`{show_value(each.default)}`"
        if each.default is None and not each.is_required:
            default = "none"
        yield f"| `{each.key}` | {kind} | {default} | {each.description} |"
    yield ""


def main(arguments: list[str]) -> int:
    """Write the pages, or check them."""
    outdated = [
        path
        for path, text in pages().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in arguments:
        for path in outdated:
            print(f"{path.name} is not what the code says: run python -m tools.reference")
        return 1 if outdated else 0
    _FOLDER.mkdir(parents=True, exist_ok=True)
    for path in outdated:
        path.write_text(pages()[path], encoding="utf-8")
        print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

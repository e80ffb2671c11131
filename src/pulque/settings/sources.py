"""Load settings from a file, the environment and flags, with the source of every value.

From the weakest to the strongest: the default, the TOML file, ``PULQUE_<SERVER>__SECTION__KEY``
in the environment, a flag. An unknown key is an error that names its place and the key that was
probably meant. One error lists all problems.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pydantic import ValidationError

from pulque.errors import ConfigError
from pulque.settings.foreign import quoted
from pulque.settings.schema import Setting, environment_name, environment_prefix, settings_of
from pulque.settings.sections import ServerSettings

__all__ = ["DEFAULT", "Given", "LoadedSettings", "load_settings"]

DEFAULT = "default"
_LARGEST_FILE = 1024 * 1024
_HEADING = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]")
SettingsT = TypeVar("SettingsT", bound=ServerSettings)
_KEY = re.compile(r"\s*([A-Za-z0-9_.\" '-]+?)\s*=")


class Given(NamedTuple):
    """A value and its source."""

    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class LoadedSettings(Generic[SettingsT]):
    """Complete and valid settings."""

    settings: SettingsT
    origins: dict[str, str]
    """For every key: ``default``, ``file:line``, a variable or a flag."""


def load_settings(
    model: type[SettingsT],
    *,
    file: Path | None = None,
    environ: Mapping[str, str],
    flags: Mapping[str, Given],
    fallbacks: Mapping[str, object] | None = None,
) -> LoadedSettings[SettingsT]:
    """Load and validate settings.

    Args:
        model: The settings class of the server.
        file: A TOML file.
        environ: The environment; only this server's variables count (``PULQUE_BROKER__…``).
        flags: Values from the command line, by key.
        fallbacks: The command's own defaults for keys that have none.

    Raises:
        ConfigError: A value is not allowed; every problem is a line of its text.
    """
    given = {key: Given(value, DEFAULT) for key, value in (fallbacks or {}).items()}
    if file is not None:
        given |= _from_file(file)
    given |= _from_environment(model, environ)
    given |= flags
    problems = list(_unknown(model, given))
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        settings = model.model_validate(_nested(model, given))
    except ValidationError as error:
        raise ConfigError("\n".join(_told(model, error, given, file))) from None
    origins = {key: given[key].origin if key in given else DEFAULT for key in settings_of(model)}
    return LoadedSettings(settings, origins)


# -- the file -----------------------------------------------------------------------------------


def _from_file(file: Path) -> dict[str, Given]:
    text = _read(file)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column \d+\)", str(error))
        where = f"{file}:{found[1]}" if found else str(file)
        raise ConfigError(f"{where}: not valid TOML: {error}") from None
    lines = _lines_of(text)
    return {key: Given(value, _place(file, lines, key)) for key, value in _flat(table)}


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            data = opened.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    if len(data) > _LARGEST_FILE:
        raise ConfigError(f"{file}: over {_LARGEST_FILE} bytes is no file of settings")
    try:
        # Editors of some systems put a byte order mark first; it means nothing.
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}:{line}: not UTF-8") from None


def _flat(table: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, dict):
            # An empty section says nothing, but its name must still exist.
            yield from _flat(value, f"{prefix}{name}.") if value else [(f"{prefix}{name}", value)]
        else:
            yield f"{prefix}{name}", value


def _lines_of(text: str) -> dict[str, int]:
    """Return the line of every key, as far as a line scan without a parser finds it."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if heading := _HEADING.match(line):
            section = _bare(heading[1])
            lines.setdefault(section, number)
            section += "."
        elif key := _KEY.match(line):
            lines.setdefault(section + _bare(key[1]), number)
    return lines


def _bare(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


def _place(file: Path, lines: Mapping[str, int], key: str) -> str:
    line = lines.get(key, lines.get(key.rpartition(".")[0]))
    return f"{file}:{line}" if line else str(file)


# -- environment --------------------------------------------------------------------------------


def _from_environment(model: type[ServerSettings], environ: Mapping[str, str]) -> dict[str, Given]:
    prefix = environment_prefix(model)
    return {
        name.removeprefix(prefix).lower().replace("__", "."): Given(value, name)
        for name, value in sorted(environ.items())
        if name.startswith(prefix)
    }


# -- problems -----------------------------------------------------------------------------------


def _unknown(model: type[ServerSettings], given: Mapping[str, Given]) -> Iterable[str]:
    known = settings_of(model)
    sections = {setting.section for setting in known.values()}
    for key, (value, origin) in given.items():
        if key in known or (key in sections and value == {}):
            continue
        if key in sections:
            yield f"{origin}: {key} is a section; set one of {', '.join(_keys_in(known, key))}"
        else:
            yield f"{origin}: there is no setting {quoted(key)}{_meant(model, key, origin)}"


def _meant(model: type[ServerSettings], key: str, origin: str) -> str:
    known = settings_of(model)
    section, _, last = key.rpartition(".")
    sections = sorted({setting.section for setting in known.values()})
    if section not in sections:
        close = difflib.get_close_matches(f"{section}.{last}", known, n=1, cutoff=0.8)
        close = close or difflib.get_close_matches(section, sections, n=1)
        section = section if not close or close[0] in known else close[0]
    else:
        namesakes = [each for each in known if each.rpartition(".")[2] == last]
        close = namesakes or difflib.get_close_matches(key, known, n=1)
    allowed = ", ".join(_keys_in(known, section) or _keys_in(known, ""))
    if not close:
        return f"; allowed are {allowed}"
    is_variable = origin.startswith(environment_prefix(model))
    spelled = environment_name(model, close[0]) if is_variable else close[0]
    return f"; did you mean {spelled}? (allowed are {allowed})"


def _keys_in(known: Mapping[str, Setting], section: str) -> list[str]:
    keys = [key for key, setting in known.items() if setting.section == section]
    if not section:
        keys += sorted({f"{s.section}.…" for s in known.values() if s.section})
    return keys


def _nested(model: type[ServerSettings], given: Mapping[str, Given]) -> dict[str, object]:
    required = (each.section for each in settings_of(model).values() if each.is_required)
    tree: dict[str, object] = {section: {} for section in required if section}
    for key, (value, _) in given.items():
        *sections, last = key.split(".")
        table = tree
        for section in sections:
            inner = table.setdefault(section, {})
            assert isinstance(inner, dict)  # noqa: S101  # _unknown refused all else
            table = inner
        table[last] = value
    return tree


def _told(
    model: type[ServerSettings],
    error: ValidationError,
    given: Mapping[str, Given],
    file: Path | None,
) -> Iterable[str]:
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        setting = settings_of(model).get(key)
        if problem["type"] == "missing":
            yield f"{file or 'settings'}: {key} is missing: {_lower(setting)}"
            continue
        if problem["type"] == "value_error":
            what = str(problem["ctx"]["error"])
        elif setting is not None:
            what = f"allowed is {f'{setting.kind} {setting.allowed}'.strip()}"
        else:
            what = problem["msg"]
        if setting is None:
            yield f"{_origin_of_section(key, given)}: {key}: {what}"
        else:
            origin = given[key].origin
            yield f"{origin}: {key} is {quoted(problem['input'])}: {what}"


def _lower(setting: object) -> str:
    description = getattr(setting, "description", "")
    return description[:1].lower() + description[1:]


def _origin_of_section(section: str, given: Mapping[str, Given]) -> str:
    origins = {each.origin for key, each in given.items() if key.startswith(f"{section}.")}
    return ", ".join(sorted(origins - {DEFAULT})) or "settings"

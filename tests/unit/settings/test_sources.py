"""Every value has one origin, and every problem is told with its place."""

from pathlib import Path

import pytest

from pulque.broker.config import BrokerSettings
from pulque.errors import ConfigError
from pulque.settings.sources import Given, LoadedSettings, load_settings

DATA = {"storage.directory": Given("data", "--data")}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "broker.toml"


def load(
    file: Path | None = None,
    environ: dict[str, str] | None = None,
    flags: dict[str, Given] | None = None,
) -> LoadedSettings[BrokerSettings]:
    return load_settings(
        BrokerSettings, file=file, environ=environ or {}, flags={**DATA, **(flags or {})}
    )


def problems(file: Path | None = None, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(file, environ)
    return str(caught.value).splitlines()


def test_a_stronger_source_wins_and_is_the_origin(file: Path) -> None:
    file.write_text('name = "a"\n[storage]\nretention = "1d"\nreserve = "2MiB"\n')
    environ = {
        "PULQUE_BROKER__STORAGE__RETENTION": "P2D",
        "PULQUE_BROKER__LISTEN__PORT": "1",
        "PULQUE_URL": "pulque://elsewhere",
        "HOME": "/",
    }
    loaded = load(file, environ, {"listen.port": Given(2, "--port")})

    assert loaded.settings.name == "a"
    assert loaded.settings.storage.retention.days == 2
    assert loaded.settings.listen.port == 2
    assert loaded.origins["name"] == f"{file}:1"
    assert loaded.origins["storage.reserve"] == f"{file}:4"
    assert loaded.origins["storage.retention"] == "PULQUE_BROKER__STORAGE__RETENTION"
    assert loaded.origins["listen.port"] == "--port"
    assert loaded.origins["listen.host"] == "default"


def test_a_missing_value_is_named_and_explained(file: Path) -> None:
    file.write_text("")
    with pytest.raises(ConfigError, match=r"storage\.directory is missing: holds all logs"):
        load_settings(BrokerSettings, file=file, environ={}, flags={})


def test_a_commands_own_default_counts_as_default() -> None:
    loaded = load_settings(
        BrokerSettings, environ={}, flags={}, fallbacks={"storage.directory": "here"}
    )

    assert loaded.settings.storage.directory == Path("here")
    assert loaded.origins["storage.directory"] == "default"


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("[storage]\nretension = '7d'", 2, "did you mean storage.retention?"),
        ("retention = '7d'", 1, "did you mean storage.retention?"),
        ("[limts]\n\nmax_held = 1", 3, "did you mean limits.max_held?"),
        ("[storage]\nlevel = 'info'", 2, "did you mean log.level?"),
        ("[flux]\ncapacitor = 1", 2, "allowed are name, cluster.…, consumption.…"),
        ("# a remark\n[nonsense]", 2, "allowed are name"),
        ("[listen]\nport.x = 1", 2, "did you mean listen.port?"),
        ("listen = 7450", 1, "listen is a section; set one of listen.host, listen.port"),
        ("[listen]\nport = 'x'", 2, "listen.port is 'x': allowed is whole number 0 to 65535"),
        ("[listen]\nport = -1", 2, "listen.port is -1"),
        ("[storage]\nsegment_size = -5", 2, "allowed is size 64KiB to 16GiB"),
        ("[storage]\nretention = 7", 2, "a duration is written like 7d"),
        ("[log]\nlevel = 'loud'", 2, "one of debug, info, warning, error"),
        ("[listen]\nhost = '0.0.0.0'", 2, "authentication does not exist yet"),
        ("[listen]\nport = [1]", 2, "listen.port is [1]"),
        ('"listen"."port" = 70000', 1, "listen.port is 70000"),
    ],
)
def test_a_problem_in_a_file_is_told_with_line_and_remedy(
    file: Path, text: str, line: int, says: str
) -> None:
    file.write_text(text)

    (problem,) = problems(file)
    assert problem.startswith(f"{file}:{line}: ")
    assert says in problem


def test_all_problems_are_told_at_once(file: Path) -> None:
    file.write_text("[listen]\nport = -1\n[log]\nlevel = 'loud'")

    assert [problem.split(":")[1] for problem in problems(file)] == ["2", "4"]


def test_values_that_do_not_fit_together_are_told_with_both_places(file: Path) -> None:
    file.write_text("[limits]\nmax_message = '2MiB'\nmax_batch = '1MiB'")

    (problem,) = problems(file)
    assert f"{file}:2, {file}:3: limits: max_message (2MiB) is over max_batch (1MiB)" in problem


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("PULQUE_BROKER__STORAGE__RETENSION", "did you mean PULQUE_BROKER__STORAGE__RETENTION?"),
        ("PULQUE_BROKER__RETENTION", "did you mean PULQUE_BROKER__STORAGE__RETENTION?"),
        ("PULQUE_BROKER__STORAGE", "storage is a section"),
        ("PULQUE_BROKER__LISTEN__PORT", "listen.port is 'x'"),
    ],
)
def test_a_problem_in_the_environment_is_told_with_the_variable(name: str, says: str) -> None:
    (problem,) = problems(environ={name: "x"})

    assert problem.startswith(f"{name}: ")
    assert says in problem


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"[listen\nport = 1", ":1: not valid TOML"),
        (b"name = 'a'\nname = 'b'", "not valid TOML"),
        (b"a = 1\nb = '\xff'", ":2: not UTF-8"),
        (b"x" * 2_000_000, "no file of settings"),
    ],
)
def test_a_file_that_cannot_be_understood_is_refused(file: Path, data: bytes, says: str) -> None:
    file.write_bytes(data)

    (problem,) = problems(file)
    assert problem.startswith(str(file))
    assert says in problem


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert problems(tmp_path / "gone.toml") == [
        f"{tmp_path / 'gone.toml'}: cannot be read: No such file or directory"
    ]
    assert problems(tmp_path) == [f"{tmp_path}: cannot be read: Is a directory"]


def test_byte_order_mark_tabs_and_windows_lines_are_fine(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf[listen]\r\n\tport\t=\t7\r\n")
    loaded = load(file)

    assert loaded.settings.listen.port == 7
    assert loaded.origins["listen.port"] == f"{file}:2"


def test_foreign_text_in_a_problem_is_escaped_and_cut(file: Path) -> None:
    file.write_text('"\\u001b[31m" = 1\n[log]\n', encoding="utf-8")
    (unknown,) = problems(file)
    (wrong,) = problems(environ={"PULQUE_BROKER__LOG__LEVEL": "\x1b" + "x" * 5000})

    assert unknown.isprintable()
    assert wrong.isprintable()
    assert len(wrong) < 300


def test_an_empty_section_says_nothing(file: Path) -> None:
    file.write_text("[listen]\n[storage]\n")

    assert load(file).settings.listen.port == 7450

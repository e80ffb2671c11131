"""What a meta server can be told, and what it never tells."""

from pathlib import Path

import pytest

from pulque.errors import ConfigError
from pulque.meta.config import MetaSettings
from pulque.meta.database.connection import Database, parse_database_url
from pulque.settings.schema import show_value, values_of
from pulque.settings.sources import Given, LoadedSettings, load_settings

WORD = "correct-horse"


def loaded(
    environ: dict[str, str] | None = None, /, **flags: object
) -> LoadedSettings[MetaSettings]:
    given = {key.replace("__", "."): Given(value, "--set") for key, value in flags.items()}
    return load_settings(MetaSettings, environ=environ or {}, flags=given)


def test_a_directory_is_enough() -> None:
    settings = loaded(storage__directory="/var/lib/pulque-meta").settings

    assert settings.database_url() == "sqlite:////var/lib/pulque-meta/meta.sqlite"
    assert settings.listen.port == 7440


def test_so_is_a_database() -> None:
    settings = loaded(database__url="postgresql://me@db/pulque").settings

    assert settings.database_url() == "postgresql://me@db/pulque"


def test_one_of_them_has_to_be_given() -> None:
    with pytest.raises(ConfigError, match=r"storage\.directory is missing, and so is database"):
        loaded()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"database__url": f"postgresql://me:{WORD}@db/x"}, "a URL with a password"),
        ({"database__url": "oracle://me@db/x"}, "allowed are sqlite, postgresql"),
        ({"database__url": "::"}, "not a database URL"),
        ({"subjects__create": "sometimes"}, "first-send, beforehand"),
        ({"subjects__allowed": "a b*"}, "subjects.allowed"),
        ({"subjects__spread": 0}, "1 to 64"),
        ({"listen__host": "0.0.0.0"}, "not a loopback address"),
        ({"nonsense": 1}, "there is no setting 'nonsense'"),
    ],
)
def test_what_is_not_allowed_is_told(flags: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(storage__directory="x", **flags)

    assert told in str(refused.value)
    assert WORD not in str(refused.value)


def test_a_password_is_never_shown() -> None:
    environ = {"PULQUE_META__DATABASE__PASSWORD": WORD}
    found = loaded(environ, database__url="postgresql://me@db/x")
    shown = [show_value(value) for value in values_of(found.settings).values()]

    assert found.settings.database.read_password() == WORD
    assert found.origins["database.password"] == "PULQUE_META__DATABASE__PASSWORD"
    assert WORD not in "".join(shown)
    assert WORD not in repr(found.settings)


def test_a_password_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{WORD}\n")
    flags = {"database__url": "postgresql://me@db/x", "database__password_file": str(file)}

    assert loaded(**flags).settings.database.read_password() == WORD
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        loaded(**flags).settings.database.read_password()


def test_without_one_there_is_none() -> None:
    assert loaded(storage__directory="x").settings.database.read_password() is None


async def test_where_the_database_is_may_be_shown() -> None:
    url = parse_database_url("postgresql://me@db:5432/x")
    database = Database(url, password=WORD, timeout_s=1.0)

    assert database.shown == "postgresql://me@db:5432/x"
    await database.close()

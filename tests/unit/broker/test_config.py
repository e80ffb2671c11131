"""Settings are frozen, bounded and described; what cannot work together is refused."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from pulque.broker.config import BrokerSettings
from pulque.settings.schema import environment_name, settings_of, show_value, values_of


def settings(**sections: object) -> BrokerSettings:
    return BrokerSettings.model_validate({"storage": {"directory": "data"}, **sections})


def test_a_directory_is_all_that_must_be_given() -> None:
    made = settings()

    assert made.storage.directory == Path("data")
    assert [key for key, each in settings_of(BrokerSettings).items() if each.is_required] == [
        "storage.directory"
    ]


def test_settings_never_change() -> None:
    made = settings()

    with pytest.raises(ValidationError, match="frozen"):
        made.name = "other"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        made.listen.port = 1  # type: ignore[misc]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_a_loopback_host_is_allowed(host: str) -> None:
    assert settings(listen={"host": host}).listen.host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "10.0.0.1", "8.8.8.8"])
def test_any_other_address_is_refused_as_there_is_no_authentication(host: str) -> None:
    with pytest.raises(ValidationError, match="authentication does not exist yet"):
        settings(listen={"host": host})


@pytest.mark.parametrize("host", ["example.org", "", "localhost.example.org", "127.0.0.1:80"])
def test_a_host_that_is_no_address_is_refused(host: str) -> None:
    with pytest.raises(ValidationError, match="not an address"):
        settings(listen={"host": host})


@pytest.mark.parametrize(
    "sections",
    [
        {"listen": {"port": -1}},
        {"listen": {"port": 65536}},
        {"listen": {"port": True}},
        {"listen": {"ports": 1}},
        {"listening": {}},
        {"name": "../x"},
        {"name": ""},
        {"name": "a\x1b"},
        {"storage": {"directory": "data", "segment_size": 0}},
        {"storage": {"directory": "data", "segment_size": -1}},
        {"storage": {"directory": "data", "retention": "0s"}},
        {"storage": {"directory": "data", "sync_interval": "2m"}},
        {"limits": {"max_message": "64MiB"}},
        {"limits": {"max_batch": "17MiB"}},
        {"limits": {"max_connections": 0}},
        {"consumption": {"lease": "0s"}},
        {"log": {"level": "loud"}},
        {"log": {"format": "xml"}},
    ],
    ids=str,
)
def test_what_is_out_of_bounds_or_unknown_is_refused(sections: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        settings(**sections)


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        ("limits", {"max_message": "2MiB", "max_batch": "1MiB"}, "fit into no batch"),
        ("limits", {"max_in_flight": "8MiB"}, "never be sent"),
        ("consumption", {"lease": "1s"}, "noticed too late"),
    ],
)
def test_values_that_cannot_work_together_are_refused(
    section: str, values: dict[str, str], says: str
) -> None:
    with pytest.raises(ValidationError, match=says):
        settings(**{section: values})


def test_every_setting_is_described_in_a_sentence() -> None:
    undescribed = [
        key
        for key, each in settings_of(BrokerSettings).items()
        if len(each.description) < 15 or each.description[-1] not in ".…"
    ]

    assert undescribed == []


def test_every_number_size_and_duration_has_limits() -> None:
    unlimited = [
        key
        for key, each in settings_of(BrokerSettings).items()
        if each.kind in {"whole number", "size", "duration"} and not each.allowed
    ]

    assert unlimited == []


def test_every_default_is_a_value_that_can_be_written() -> None:
    given: dict[str, object] = {}
    for key, each in settings_of(BrokerSettings).items():
        if each.default is not None:
            section, _, name = key.rpartition(".")
            table = given.setdefault(section, {}) if section else given
            assert isinstance(table, dict)
            table[name] = show_value(each.default)
    given["storage"] = {"directory": "data", **dict(given["storage"])}  # type: ignore[call-overload]

    assert BrokerSettings.model_validate(given) == settings()


def test_the_variable_of_a_key_has_its_section() -> None:
    assert (
        environment_name(BrokerSettings, "storage.retention")
        == "PULQUE_BROKER__STORAGE__RETENTION"
    )
    assert environment_name(BrokerSettings, "name") == "PULQUE_BROKER__NAME"


def test_values_are_listed_by_key() -> None:
    values = values_of(settings(listen={"port": 0}))

    assert list(values) == list(settings_of(BrokerSettings))
    assert values["listen.port"] == 0
    assert all(re.fullmatch(r"[a-z_]+(\.[a-z_]+)?", key) for key in values)

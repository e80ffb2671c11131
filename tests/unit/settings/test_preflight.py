"""What cannot work is told before data is opened, with the setting and its origin."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pulque.broker.config import BrokerSettings
from pulque.errors import ConfigError
from pulque.settings.preflight import check_world
from pulque.settings.sources import Given, LoadedSettings, load_settings


def loaded(directory: Path, port: int = 0) -> LoadedSettings[BrokerSettings]:
    flags = {
        "storage.directory": Given(str(directory), "--data"),
        "listen.port": Given(port, "--port"),
    }
    return load_settings(BrokerSettings, environ={}, flags=flags)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_directory_that_can_be_made_is_fine_and_is_not_made(tmp_path: Path) -> None:
    check_world(loaded(tmp_path / "a" / "b"))
    check_world(loaded(tmp_path))

    assert list(tmp_path.iterdir()) == []


def test_a_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--data: storage\.directory is .* not a directory"):
        check_world(loaded(tmp_path / "file" / "data"))


def test_a_port_in_use_is_refused(tmp_path: Path, taken_port: int) -> None:
    with pytest.raises(ConfigError, match=rf"--port: listen\.port is {taken_port}: another proc"):
        check_world(loaded(tmp_path, taken_port))


def test_all_problems_are_told(tmp_path: Path, taken_port: int) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        check_world(loaded(tmp_path / "file", taken_port))

    assert len(str(caught.value).splitlines()) == 2

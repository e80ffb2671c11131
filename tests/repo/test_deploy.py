"""The files of ``deploy/`` are read by the code that reads them in earnest."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pulque.broker.config import BrokerSettings
from pulque.delay.config import DelaySettings
from pulque.meta.config import MetaSettings
from pulque.settings.sections import ServerSettings
from pulque.settings.sources import load_settings
from tests.repo.tree import ROOT

DEPLOY = ROOT / "deploy"
SIZES = {"1-machine": (1, 0), "3-machines": (3, 1), "6-machines": (6, 3)}
"""How many brokers and meta servers each sample is for."""


def environ_of(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(line.split("=", 1) for line in lines)


def loaded(folder: Path, kind: type[ServerSettings], number: int) -> ServerSettings:
    name = kind.server
    environ = environ_of(folder / f"{name}-{number}.env")
    return load_settings(kind, file=folder / f"{name}.toml", environ=environ, flags={}).settings


@pytest.mark.parametrize("folder", SIZES)
def test_the_samples_make_a_cluster(folder: str) -> None:
    count, metas = SIZES[folder]
    brokers = [loaded(DEPLOY / "settings" / folder, BrokerSettings, n + 1) for n in range(count)]
    servers = [loaded(DEPLOY / "settings" / folder, MetaSettings, n + 1) for n in range(metas)]

    names = {each.name for each in brokers if isinstance(each, BrokerSettings)}
    assert len(names) == count
    for broker in brokers:
        assert isinstance(broker, BrokerSettings)
        assert len(broker.cluster.meta_addresses) == metas
        assert bool(broker.cluster.advertise) == bool(metas)
    for server in servers:
        assert isinstance(server, MetaSettings)
        # Several of them need a database that they can share.
        assert metas == 1 or server.database.url.startswith("postgresql://")


@pytest.mark.parametrize("folder", ["3-machines", "6-machines"])
def test_the_sample_of_a_delay_server_belongs_to_the_cluster(folder: str) -> None:
    delay = loaded(DEPLOY / "settings" / folder, DelaySettings, 1)
    broker = loaded(DEPLOY / "settings" / folder, BrokerSettings, 1)

    assert isinstance(delay, DelaySettings)
    assert isinstance(broker, BrokerSettings)
    assert delay.cluster.meta == broker.cluster.meta
    assert delay.storage.directory != broker.storage.directory
    assert delay.cluster.advertise


def test_every_file_of_settings_is_read_by_a_test() -> None:
    files = {path.name for path in (DEPLOY / "settings").rglob("*") if path.is_file()}

    assert {path.name for path in (DEPLOY / "settings").iterdir()} == set(SIZES)
    assert all(re.fullmatch(r"(broker|meta|delay)(\.toml|-[1-6]\.env)", name) for name in files)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_the_units_are_valid(tmp_path: Path) -> None:
    units = []
    for path in sorted((DEPLOY / "systemd").iterdir()):
        text = path.read_text()
        # The commands are not installed here; that something can be run is looked at, too.
        text = re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", text, flags=re.MULTILINE)
        # systemd looks at an instance of a template.
        unit = tmp_path / path.name.replace("@.", "@7450.").replace("%i", "7450")
        unit.write_text(text.replace("%i", "7450"))
        units.append(str(unit))
    told = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units],  # wherever it is
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )

    ours = [line for line in told.stderr.splitlines() if str(tmp_path) in line or "pulque" in line]
    assert ours == []


def test_units_run_the_commands_that_there_are() -> None:
    for server in ("broker", "meta", "delay"):
        text = (DEPLOY / "systemd" / f"pulque-{server}.service").read_text()
        assert f"pulque {server} --config /etc/pulque/{server}.toml" in text

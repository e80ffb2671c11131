"""A process of a broker group that is told to lead: when it does, and when it must not."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from pulque.broker.config import BrokerSettings
from pulque.broker.replicated_server import ReplicatedBroker, open_logs
from pulque.client.connection.url import parse_url
from pulque.errors import PulqueError, UnavailableError
from pulque.model.leadership import EpochStart, Leadership
from pulque.model.positions import ActionOffset, Epoch, MessageOffset
from pulque.net.server import FrameServer
from pulque.serving.listener import LoggingListener
from pulque.storage.directory.identity import DirectoryIdentity
from pulque.storage.files import OsFileSystem
from pulque.storage.options import StorageOptions
from pulque.storage.replication.leadership_epochs import write_epochs
from pulque.storage.replication.synced_bounds import Known, write_known
from pulque.testing.clock import ManualClock
from pulque.testing.files import Cut, MemoryFileSystem
from pulque.wire.frame import FrameReader
from pulque.wire.leadership import Lead, Led
from pulque.wire.registration import ServerState
from pulque.wire.requests import Hello, encode_request
from pulque.wire.responses import Response, Welcome, decode_response
from tests.unit.broker.fake_meta import FakeMeta
from tests.unit.broker.test_leading import until
from tests.unit.storage.copying import led as leading_engine
from tests.unit.storage.copying import opened_logs

LEASE_MS = 60_000
"""Longer than any test."""
BEATS = 25
"""So many heartbeats are more than enough for one that leads to say so."""


@pytest.fixture
async def meta() -> AsyncIterator[FakeMeta]:
    found = FakeMeta()
    await found.start()
    yield found
    await found.stop()


@pytest.fixture
def files(tmp_path: Path) -> OsFileSystem:
    """The data directory of the broker below, which is not started yet."""
    (tmp_path / "data").mkdir()
    found = OsFileSystem(str(tmp_path / "data"))
    DirectoryIdentity.open(found)
    return found


@pytest.fixture
async def broker(meta: FakeMeta, files: OsFileSystem) -> AsyncIterator[ReplicatedBroker]:
    """Alone in its group, and elected as soon as it asks."""
    settings = BrokerSettings.model_validate(
        {
            "listen": {"port": 0},
            "storage": {"directory": files.root, "reserve": "1MiB"},
            "cluster": {"meta": [meta.address], "group": "g1"},
            "replication": {"copies": 2, "min_in_sync": 1},
        }
    )
    found = ReplicatedBroker(settings, ManualClock())
    yield found
    await found.close()


def elect_whoever_asks(meta: FakeMeta, token: str = "") -> None:
    """Have the directory of whoever asks lead, by the process that asks or by a named one."""
    elected: set[tuple[str, str]] = set()

    def lead(asker: Lead) -> Led | PulqueError:
        if (asker.directory, asker.token) in elected:
            return UnavailableError("it was said once, and nothing is new")
        elected.add((asker.directory, asker.token))
        members = (asker.directory,)
        chosen = token or asker.token
        row = Leadership("g1", Epoch(9), 7, asker.directory, chosen, members, 1)
        return Led(row, "broker", "127.0.0.1", 1, LEASE_MS)

    meta.lead = lead


async def leads(meta: FakeMeta) -> bool:
    """Return whether the broker leads by the time it has said often what it does."""
    wanted = len(meta.heard) + BEATS
    await until(lambda: len(meta.heard) >= wanted or ServerState.READY in meta.states)
    return ServerState.READY in meta.states


async def test_one_that_is_elected_leads(broker: ReplicatedBroker, meta: FakeMeta) -> None:
    elect_whoever_asks(meta)
    await broker.start()

    assert await leads(meta)


async def test_a_client_that_greets_it_when_it_begins_to_lead_is_welcome(
    broker: ReplicatedBroker, meta: FakeMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.start()
    (address,) = parse_url(broker.url)
    reader, writer = await asyncio.open_connection(*address)
    answers: list[Response | PulqueError] = []
    close, stop_listening = FrameServer.close, FrameServer.stop_listening

    def stop_listening_then(server: FrameServer) -> None:
        """Leave what came before that, a frame in the middle of its turn say."""
        if answers:
            stop_listening(server)

    async def greet_and_close(server: FrameServer) -> None:
        if not answers:
            writer.write(b"".join(encode_request(Hello(1, 1, "late"), 1, 0)))
            frames = FrameReader()
            while (frame := frames.next_frame()) is None:
                received = await reader.read(len(frames.buffer()))
                frames.buffer()[: len(received)] = received
                frames.received(len(received))
            answers.append(decode_response(frame))
        await close(server)

    monkeypatch.setattr(FrameServer, "close", greet_and_close)
    monkeypatch.setattr(FrameServer, "stop_listening", stop_listening_then)
    elect_whoever_asks(meta)

    await until(lambda: bool(answers))
    assert isinstance(answers[0], Welcome)
    writer.close()


async def test_one_that_followed_gives_the_leader_before_its_time(
    broker: ReplicatedBroker, files: OsFileSystem, meta: FakeMeta
) -> None:
    # It may have promised that, and have been killed and started again since.
    write_epochs(files, (EpochStart(Epoch(8), MessageOffset(0), ActionOffset(0)),))
    elect_whoever_asks(meta)
    await broker.start()

    assert not await leads(meta)


async def test_one_that_was_started_after_its_directory_was_elected_does_not_lead(
    broker: ReplicatedBroker, meta: FakeMeta
) -> None:
    elect_whoever_asks(meta, token="that of the process before")
    await broker.start()

    assert not await leads(meta)


async def test_one_that_is_elected_in_an_epoch_that_was_before_asks_for_a_later_one(
    broker: ReplicatedBroker, files: OsFileSystem, meta: FakeMeta
) -> None:
    """A database from an older backup counts epochs again; the broker goes on all the same."""
    write_epochs(files, (EpochStart(Epoch(9), MessageOffset(0), ActionOffset(0)),), led=9)
    tokens: list[str] = []

    def lead(asker: Lead) -> Led | PulqueError:
        if asker.token not in tokens:
            tokens.append(asker.token)
        epoch = Epoch(7 + len(tokens))
        members = (asker.directory,)
        row = Leadership("g1", epoch, len(tokens), asker.directory, asker.token, members, 1)
        return Led(row, "broker", "127.0.0.1", 1, LEASE_MS)

    meta.lead = lead
    await broker.start()

    assert await leads(meta)
    assert len(tokens) == 3


async def test_one_that_lost_what_it_had_on_disk_does_not_lead(
    broker: ReplicatedBroker, files: OsFileSystem, meta: FakeMeta
) -> None:
    write_known(files, Known(1000, 1000), is_durable=True)
    elect_whoever_asks(meta)
    await broker.start()

    assert not await leads(meta)


def test_a_follower_syncs_what_it_finds_before_it_says_how_much_that_is() -> None:
    files = MemoryFileSystem()
    engine = leading_engine()
    killed = opened_logs(files)  # it wrote, and was killed before it synced
    while killed.message_end < engine.end:
        killed.append_messages(*engine.message_bytes(killed.message_end, 400))

    logs = open_logs(files, StorageOptions(), LoggingListener())
    assert logs.message_synced == engine.end
    left = opened_logs(files.after_power_cut(files.operations, Cut.LOST, Random(1)))
    assert left.message_end == engine.end

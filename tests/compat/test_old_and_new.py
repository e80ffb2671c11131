"""Old and new work together: an old client, an old broker's folder, and those of today."""

import tarfile
from pathlib import Path

import pytest

from pulque.errors import PulqueError
from pulque.testing.raw import Handed, RawConnection
from pulque.wire.frame import FrameReader
from pulque.wire.responses import Beaten, Pulled, Response, Sent, Settled, Welcome
from tests.compat import conversation
from tests.compat.conversation import LAST, SECTIONS, data_file, talk_file
from tests.unit.broker.running import Running, numbered

RETRIES = "%retry%orders%g"


def frames_of(data: bytes) -> list[bytes]:
    """Return the frames of a stream, each as its bytes."""
    reader, found, at = FrameReader(), [], 0
    while at < len(data):
        before = at
        while reader.next_frame() is None:
            reader.buffer()[:1] = data[at : at + 1]
            reader.received(1)
            at += 1
        found.append(data[before:at])
    return found


async def replay(raw: RawConnection, talk: bytes) -> list[Response | PulqueError]:
    """Say what an old client said, each thing after the answer to the one before."""
    answers = []
    for frame in frames_of(talk):
        await raw.put_bytes(frame)
        answers.append((await raw.get())[1])
    return answers


@pytest.mark.accepts("002-02")
async def test_old_and_new_clients_share_an_old_folder(tmp_path: Path) -> None:
    with tarfile.open(data_file("v1")) as archive:
        archive.extractall(tmp_path, filter="data")
    running = Running(tmp_path / "broker", SECTIONS, None, None)
    await running.start()
    try:
        old = await running.connect(is_greeting=False)
        answers = await replay(old, talk_file("v1").read_bytes())
        new = await running.connect()
        _, stored = await new.read("orders")
        await new.send("orders", [b"from a new client"])
        left = await new.pull("orders", RETRIES, consumer="new")
    finally:
        await running.close()

    greeting, sent, pulled, *settled, farewell = answers
    assert (type(greeting), type(sent), type(farewell)) == (Welcome, Sent, Beaten)
    assert {type(answer) for answer in settled} == {Settled}
    assert isinstance(pulled, Pulled)
    handed = Handed.of(pulled, ["orders", RETRIES])
    # First what the last run of the consumer held, then what it never saw.
    assert sorted(handed.bodies) == sorted([*numbered(11, 4), LAST, b"0"])
    assert [message.body for message in stored] == [*numbered(15), LAST]
    assert left.bodies == [b"from a new client"]


def test_what_was_kept_is_never_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    before = data_file("v1").read_bytes(), talk_file("v1").read_bytes()

    assert conversation.main(["v1"]) == 1

    assert (data_file("v1").read_bytes(), talk_file("v1").read_bytes()) == before
    assert "stays as it is" in capsys.readouterr().err

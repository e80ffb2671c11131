"""A leader whose log has a hole that no index names: its followers may have what is missing."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pulque.errors import UnavailableError
from pulque.testing.raw import Handed, RawConnection
from pulque.wire.requests import Acks, Seal
from pulque.wire.responses import Sealed
from tests.unit.broker.running import eventually
from tests.unit.broker.test_leading import EPOCH, LeaderAlone

BODIES = [b"first", b"victim", b"third"]
MAGIC = b"PL"


@pytest.fixture
async def held(tmp_path: Path) -> Handed:
    """What a consumer holds; the leader that handed it out is gone, and one batch damaged."""
    leader = LeaderAlone(tmp_path / "data", min_in_sync=1)
    await leader.broker.start()
    raw = await leader.connect()
    for body in BODIES:
        await raw.send("orders", [body], acks=Acks.DISK)
    found = await raw.pull("orders")
    await raw.ask(Seal(), Sealed)
    await leader.close()
    assert found.bodies == BODIES
    (path,) = (tmp_path / "data" / "messages").glob("0*0.log")
    content = bytearray(path.read_bytes())
    at = content.rindex(MAGIC, 0, content.index(b"victim"))
    content[at : at + len(MAGIC)] = b"??"
    path.write_bytes(content)
    path.with_suffix(".index").unlink(missing_ok=True)
    return found


@pytest.fixture
async def raw(tmp_path: Path, held: Handed) -> AsyncIterator[RawConnection]:
    """A connection to the leader that is elected next, on the same directory."""
    leader = LeaderAlone(tmp_path / "data", min_in_sync=1, epoch=EPOCH + 1)
    await leader.broker.start()
    yield await leader.connect()
    await leader.close()


async def test_a_consumer_that_holds_what_is_in_a_hole_is_not_handed_nothing_instead(
    raw: RawConnection,
) -> None:
    assert (await raw.pull("orders", expected=0, max_messages=1)).bodies == [b"first"]
    for most in (1, 2):
        with pytest.raises(UnavailableError, match="another one of its group has to lead"):
            await raw.pull("orders", expected=1, max_messages=most)
    assert (await raw.pull("orders", expected=2)).bodies == [b"third"]


async def test_a_failed_message_in_a_hole_waits_for_a_broker_that_has_it(
    held: Handed, raw: RawConnection
) -> None:
    with capture_logs() as lines:
        await raw.settle(held.runs[0], nacked={1: "it failed"})

        async def is_decided() -> bool:
            return any(line["event"].startswith("redelivery_") for line in lines)

        await eventually(is_decided)

    events = {line["event"] for line in lines}
    assert "redelivery_delayed" in events
    assert "redelivery_impossible" not in events
    assert (await raw.status())["groups"][0]["redeliveries_pending"] == 1

"""What a broker that follows says to clients."""

from typing import cast

from pulque.broker.clients import ClientTable
from pulque.broker.cluster.membership import ClusterSide
from pulque.broker.config import BrokerSettings
from pulque.broker.parameters import connection_limits
from pulque.broker.replication.follower import FollowerHandler
from pulque.broker.replication.leadership_client import Authority
from pulque.clock import SystemClock
from pulque.model.positions import Epoch, StartCount, Tenure
from pulque.net.server import FrameServer
from pulque.rules.consumption import Consumption
from pulque.storage.logs.partitions import Partitions
from pulque.testing.raw import RawConnection
from pulque.wire.requests import Hello
from pulque.wire.responses import Welcome
from pulque.wire.versions import NEWEST


async def test_a_follower_speaks_the_version_that_both_sides_agreed_on() -> None:
    # A broker of a later release, and a client of this one.
    later = Welcome(
        NEWEST + 1, "follower", Tenure(Epoch(1), StartCount(1)), 1024, 1024, 1000, 1000
    )
    clock = SystemClock()
    handler = FollowerHandler(
        lambda: later,
        cast("ClusterSide", None),
        ClientTable(Consumption(), Partitions(), clock),
        cast("Authority", None),
        dict,
    )
    settings = BrokerSettings.model_validate({"storage": {"directory": "unused"}})
    limits = connection_limits(settings)
    server = FrameServer(handler, limits, clock, lambda *_, **__: None)
    host, port = await server.listen("127.0.0.1", 0)
    try:
        async with await RawConnection.open(f"pulque://{host}:{port}", is_greeting=False) as raw:
            welcome = await raw.ask(Hello(1, NEWEST, "me"), Welcome)
    finally:
        server.stop_listening()
        await server.close()

    assert welcome.version == NEWEST

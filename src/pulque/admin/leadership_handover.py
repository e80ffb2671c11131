"""Hand leadership over by command: the leader itself is asked.

Only the leader can stop serving before another broker begins, and knows who has everything. Were
another one elected in its place, both would serve until it hears of that.
"""

from pulque.admin.cluster import KnownServer
from pulque.admin.context import Context
from pulque.errors import (
    DisconnectedError,
    InvalidRequestError,
    NotAllowedError,
    RemoteProtocolError,
    RequestTimeoutError,
    UnavailableError,
)
from pulque.model.leadership import Leadership
from pulque.wire.leadership import HandedOver, HandOver
from pulque.wire.responses import Response

__all__ = ["hand_over"]


async def hand_over(context: Context, name: str) -> KnownServer:
    """Have a broker lead its group in the place of the one that does; return it as it is then.

    Raises:
        UnknownServerError: There is none of that name.
        InvalidRequestError: Its group has no followers.
        NotAllowedError: It does not have all that was confirmed, does not live, or another one was
            elected meanwhile.
        UnavailableError: The database or the leader is away, or the leader could not hand over.
    """
    await context.cluster.check_ready()  # reads who leads, as others may have changed it
    chosen = await context.server(name)
    if chosen.standing == "leader":
        return chosen
    _check(chosen)
    leader = await _leader_of(context, chosen.broker_group)
    unheard: UnavailableError | None = None
    try:
        await context.brokers.ask(leader, HandOver(chosen.directory), _handed_over)
    except (DisconnectedError, RequestTimeoutError) as error:
        # It may have been done all the same: the database knows.
        unheard = error
    await context.cluster.check_ready()
    found = await context.server(name)
    if found.standing == "leader":
        return found
    if unheard is not None and found.epoch == chosen.epoch:
        raise _away(leader.name, chosen.broker_group, str(unheard))
    raise NotAllowedError(
        f"the leadership of broker group {chosen.broker_group} was changed at the same time; look "
        "at it, and try again"
    )


def _check(chosen: KnownServer) -> None:
    """Refuse what the leader would refuse, too, in words that name the broker."""
    name, group = chosen.name, chosen.broker_group
    if chosen.standing == "alone":
        raise InvalidRequestError(
            f"broker group {group} has no followers, so {name} cannot take over from anybody"
        )
    if not chosen.is_in_sync:
        raise NotAllowedError(
            f"{name} does not have all that was confirmed in broker group {group}: it can lead "
            "once it is in sync"
        )
    if not chosen.is_alive:
        raise NotAllowedError(f"{name} was not heard of lately: it cannot lead")


async def _leader_of(context: Context, broker_group: str) -> KnownServer:
    for each in await context.cluster.servers():
        if (each.broker_group, each.standing) == (broker_group, "leader"):
            if each.is_alive:
                return each
            raise _away(each.name, broker_group, f"it is {each.state}")
    raise _away("the broker", broker_group, "nobody has its data directory any more")


def _away(leader: str, broker_group: str, reason: str) -> UnavailableError:
    return UnavailableError(
        f"{leader} that leads broker group {broker_group} cannot be reached ({reason}): if it "
        "stays away, another one is elected by itself after the lease (replication.lease)"
    )


def _handed_over(response: Response) -> Leadership:
    if not isinstance(response, HandedOver):
        raise RemoteProtocolError(f"a request to hand over got {response!r}")
    return response.leadership

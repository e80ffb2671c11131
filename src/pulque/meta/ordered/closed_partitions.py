"""Partitions that were split or merged: closed at their brokers, and watched until they are empty.

A child partition is allotted to consumers of an ordered group only when its parents are closed
and the group has settled all that is in them. Only their brokers know, so they are asked.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from pulque.client.aio.connection import AsyncConnection
from pulque.client.connection.url import Address
from pulque.errors import PulqueError, RemoteProtocolError, UnavailableError
from pulque.meta.database.allotment_store import OrderKey
from pulque.meta.directory import Directory
from pulque.meta.ordered.partition_allotment import PartitionAllotment
from pulque.model.cluster import Placement
from pulque.model.groups import FROM_EARLIEST
from pulque.model.names import PartitionName
from pulque.wire.groups import ChangeGroup, GroupChanged, Subscribe, Subscribed
from pulque.wire.ordered import Close, Closed, Ordered, OrderedReport
from pulque.wire.requests import Request
from pulque.wire.responses import Response

__all__ = ["Drains"]

T = TypeVar("T")
_PATIENCE_S = 3.0
_OWN = "pulque-meta"
_Place = tuple[str, PartitionName]


class Drains:
    """Asks brokers about closed partitions. Lives in one event loop.

    Args:
        directory: The cluster.
        attendance: Told what is drained.
        pause_s: How often to ask.
        warn: Logs an event with its fields.
    """

    def __init__(
        self,
        directory: Directory,
        attendance: PartitionAllotment,
        *,
        pause_s: float,
        warn: Callable[..., None],
    ) -> None:
        self._directory = directory
        self._attendance = attendance
        self._pause_s = pause_s
        self._warn = warn
        self._lines: dict[Address, AsyncConnection] = {}
        self._closed: set[_Place] = set()
        """What brokers said to be closed."""
        self._told = ""
        self._is_stopping = asyncio.Event()

    async def run(self) -> None:
        """Look after closed partitions until stopped."""
        while not self._is_stopping.is_set():
            await self.look()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_stopping.wait(), self._pause_s)
        for line in self._lines.values():
            await line.close()

    def stop(self) -> None:
        """Have ``run`` end."""
        self._is_stopping.set()

    async def look(self) -> None:
        """Close what is to be closed, and find out what is drained."""
        for subject in sorted(self._directory.divided):
            placed = self._directory.subjects[subject]
            try:
                await self._close(placed)
                for key in [each for each in self._directory.online if each[0] == subject]:
                    await self._watch(key, placed)
            except PulqueError as error:
                if str(error) != self._told:
                    self._told = str(error)
                    self._warn("closed_partitions_unknown", subject=subject, reason=str(error))

    async def _close(self, placed: Sequence[Placement]) -> None:
        for partition, broker_group, _, is_closed, _ in placed:
            if is_closed and (broker_group, partition) not in self._closed:
                found = await self._ask(broker_group, Close(partition), _closed)
                if found is not None:
                    self._closed.add((broker_group, partition))

    async def _watch(self, key: OrderKey, placed: Sequence[Placement]) -> None:
        """Find out which of the closed partitions a group has emptied."""
        subject, group = key
        drained = self._directory.allotment(key).drained
        waiting = {
            place: each
            for place, each in enumerate(placed)
            if each.is_closed
            and place not in drained
            and drained.issuperset(each.parents)
            and (each.broker_group, each.partition) in self._closed
        }
        for broker_group in sorted({each.broker_group for each in waiting.values()}):
            report = await self._ask(broker_group, Ordered(subject, group), _reported)
            rows = {row.partition: row for row in report.rows} if report is not None else {}
            for place, each in waiting.items():
                row = rows.get(each.partition)
                if each.broker_group == broker_group and row is not None and row.is_drained:
                    if row.token:
                        await self._carry_over(key, placed, place)
                    await self._attendance.drained(key, place)

    async def _carry_over(self, key: OrderKey, placed: Sequence[Placement], place: int) -> None:
        """Have a group that consumed a partition begin those that follow it at their start.

        A consumer that comes to their brokers for the first time may ask for the latest: it would
        pass over what was sent there while the partition was being drained.
        """
        subject, group = key
        look = ChangeGroup(group, subject)
        found = await self._ask(placed[place].broker_group, look, _settings)
        if found is None:
            raise UnavailableError(f"nobody of broker group {placed[place][1]} can be reached")
        told = Subscribe(
            group, _OWN, 0, subject, found.mode, found.filter, FROM_EARLIEST, found.retry
        )
        for broker_group in sorted({e.broker_group for e in placed if place in e.parents}):
            if await self._ask(broker_group, told, _subscribed) is None:
                raise UnavailableError(f"nobody of broker group {broker_group} can be reached")

    async def _ask(
        self, broker_group: str, request: Request, convert: Callable[[Response], T]
    ) -> T | None:
        """Ask a broker group; None if nobody of it can be reached."""
        there = self._directory.brokers.get(broker_group)
        if there is None:
            return None
        address = Address(there.host, there.port)
        line = self._lines.get(address)
        if line is None or not line.is_open:
            line = await AsyncConnection.open(address, client="pulque-meta", timeout=_PATIENCE_S)
            self._lines[address] = line
        return await line.request(request, _PATIENCE_S, convert)


def _closed(response: Response) -> Closed:
    if not isinstance(response, Closed):
        raise RemoteProtocolError(f"{type(response).__name__} came instead of Closed")
    return response


def _settings(response: Response) -> GroupChanged:
    if not isinstance(response, GroupChanged):
        raise RemoteProtocolError(f"{type(response).__name__} came instead of GroupChanged")
    return response


def _subscribed(response: Response) -> Subscribed:
    if not isinstance(response, Subscribed):
        raise RemoteProtocolError(f"{type(response).__name__} came instead of Subscribed")
    return response


def _reported(response: Response) -> OrderedReport:
    if not isinstance(response, OrderedReport):
        raise RemoteProtocolError(f"{type(response).__name__} came instead of OrderedReport")
    return response

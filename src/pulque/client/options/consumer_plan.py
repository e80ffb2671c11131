"""What a consumer is made of, one part for each broker that it pulls from."""

import time
from dataclasses import dataclass, replace
from typing import NamedTuple

from pulque.client.ordered.partition_core import OrderedCore, OrderedOptions, Permit, RetryCore
from pulque.client.persistence.consumer_identity import ConsumerIdentity
from pulque.client.persistence.consumer_state import LocalState
from pulque.client.persistence.nack_spool import NackRefuge
from pulque.client.receiving.consumer_core import IncomingCore
from pulque.client.receiving.pull_options import PullOptions
from pulque.client.routing.targets import HOME
from pulque.model.groups import FROM_EARLIEST, Mode, StartKind
from pulque.model.names import PartitionName, Subject, is_pattern, owner_of, retry_partition
from pulque.model.ordered import OrderStrategy

__all__ = ["ConsumerPart", "ConsumerPlan"]


class ConsumerPart(NamedTuple):
    """What a consumer needs for one broker."""

    core: IncomingCore
    local: LocalState | None
    """What it keeps over a restart; None if it has no place for that."""


@dataclass(frozen=True, slots=True)
class ConsumerPlan:
    """Who a consumer is, and what it was told."""

    options: PullOptions
    identity: ConsumerIdentity
    ordered: OrderedOptions | None = None
    """What an ordered consumer was told beside; None for all others."""

    def part(
        self, place: str, *, is_late: bool = False, refuge: NackRefuge | None = None
    ) -> ConsumerPart:
        """Return what is needed for one broker.

        Args:
            place: The broker group, or ``HOME``.
            is_late: Whether it came to the subject while the consumer ran: what it has by then is
                new to the group, wherever the group began elsewhere.
            refuge: Where nacks go while it is away, before the spool.
        """
        options = self.options
        if is_late and options.start.kind is not StartKind.TIME:
            options = replace(options, start=FROM_EARLIEST)
        local = self._local(place, refuge)
        kept = None
        if local is not None:
            kept = local.load()
            if options.mode is Mode.BROADCAST:
                # Its pull sequences go back when it is reset: what is read again would be taken
                # for what was finished before.
                kept = None
        core = IncomingCore(options, kept)
        core.broker_group = place
        if not is_pattern(options.subject):
            # It saves the question for it when the first message is redelivered.
            core.subscribe([retry_partition(Subject(options.subject), options.group)])
        return ConsumerPart(core, local)

    def ordered_core(
        self, partition: PartitionName, order: OrderStrategy, permit: Permit, *, is_late: bool
    ) -> OrderedCore:
        """Return what an ordered consumer needs for one partition."""
        options = self.options
        if is_late and options.start.kind is not StartKind.TIME:
            options = replace(options, start=FROM_EARLIEST)
        kind = OrderedCore if owner_of(partition) is None else RetryCore
        return kind(
            options,
            partition,
            order=order,
            permit=permit,
            wishes=self.ordered or OrderedOptions(),
            monotonic=time.monotonic,
        )

    def _local(self, place: str, refuge: NackRefuge | None) -> LocalState | None:
        stem = self.identity.stem
        if stem is None:
            return None
        if place != HOME:
            stem = stem.with_name(f"{stem.name}@{place}")
        return LocalState(stem, self.options.group, self.options.consumer, refuge)

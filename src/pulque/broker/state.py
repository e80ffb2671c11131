"""What a broker knows, and what it has at hand. Passed to the parts of the data path."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from pulque.broker.cluster.partition_coverage import PartitionCoverage
from pulque.clock import Clock
from pulque.errors import NotAllowedError, PulqueError
from pulque.model.actions import Action, DeadPurged
from pulque.model.groups import Mode
from pulque.model.names import ConsumerId, Group, PartitionName, subject_of
from pulque.model.positions import Tenure
from pulque.rules.adoption import Adoptions
from pulque.rules.consumption import Consumption, Effect
from pulque.rules.dead import DeadLetterState
from pulque.rules.dedup import Dedup
from pulque.rules.groups import GroupsSettings
from pulque.rules.lease import Leases
from pulque.rules.locks import LockTimes, can_be_locked
from pulque.rules.schedule import Schedule
from pulque.serving.batches import SendLimits
from pulque.storage.engine import Engine
from pulque.storage.logs.partitions import Partition

__all__ = ["BrokerState", "PullLimits", "SendLimits", "Surroundings"]


@dataclass(frozen=True, slots=True)
class BrokerState:
    """The logs, and what follows from them."""

    engine: Engine
    consumption: Consumption
    """Who was handed what."""
    dedup: Dedup
    """What producers sent lately."""
    leases: Leases
    """Which consumers live."""
    tenure: Tenure
    """The epoch and the start that this broker hands out messages under."""
    places: PartitionCoverage = field(default_factory=lambda: PartitionCoverage(()))
    """Which partitions a subscription covers."""
    schedule: Schedule = field(default_factory=Schedule)
    """What waits for its next attempt."""
    dead: DeadLetterState = field(default_factory=DeadLetterState)
    """Which dead letters were dealt with."""
    adoptions: Adoptions = field(default_factory=Adoptions)
    """What was taken over from brokers that were away."""
    lock_times: LockTimes = field(default_factory=lambda: LockTimes(10_000, 0))
    """How long the locks of ordered groups still last."""
    outdated: set[tuple[Group, ConsumerId]] = field(default_factory=set)
    """Consumers that must subscribe anew, as their group was changed."""
    max_partitions: int = 100_000
    max_subscriptions: int = 500_000

    @property
    def groups_settings(self) -> GroupsSettings:
        """How groups want to be served."""
        return self.consumption.settings

    def must_lock(self, partition: PartitionName, group: Group) -> bool:
        """Whether only the consumer that has the lock may pull from a partition."""
        settings = self.consumption.settings
        return (
            group in settings.ordered
            and can_be_locked(partition)
            and settings.of(group, subject_of(partition)).mode is Mode.ORDERED
        )

    def make_partition(self, name: PartitionName, now_ms: int) -> Partition:
        """Return a partition that a client asked for, which is made if need be.

        Raises:
            NotAllowedError: There are too many.
            StorageError: It cannot be written down.
        """
        found = self.engine.partition(name)
        if found is None and len(self.engine.partitions.by_id) >= self.max_partitions:
            raise NotAllowedError(
                f"there are {self.max_partitions} partitions already, and {name} would be one "
                "more: raise limits.max_partitions, or use fewer subjects"
            )
        return found or self.engine.create_partition(name, now_ms)

    def record(self, fact: Action) -> list[Effect]:
        """Write a fact to the action log, then apply it; return what follows from it.

        Raises:
            StorageError: It is not in the log, so it did not happen.
        """
        self.engine.append_action(fact)
        if isinstance(fact, DeadPurged):
            self.dead.handle(fact)
        return self.consumption.handle(fact)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The world around the data path."""

    clock: Clock
    executor: Executor
    """For work that waits for the disk."""
    warn: Callable[..., None]
    """Logs an event with its fields."""
    fail: Callable[[PulqueError], None]
    """Called when the disk failed and the broker must stop."""


@dataclass(frozen=True, slots=True)
class PullLimits:
    """What a pull or a read may ask for; more is cut."""

    max_messages: int
    max_bytes: int
    max_held: int
    """Deliveries that one consumer may have unsettled in all partitions that it pulls from."""
    low_priority_share: float = 0.1
    """Which share of a group's pulls begins with another priority than the highest."""
    cold_reads: int = 3
    """How many pulls may have threads read from the disk at a time."""

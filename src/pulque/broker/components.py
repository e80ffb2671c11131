"""The parts of the data path that requests go to."""

from dataclasses import dataclass

from pulque.broker.clients import ClientTable
from pulque.broker.groups.group_reset import Resetter
from pulque.broker.groups.ordered_groups import Steward
from pulque.broker.groups.partition_allotment import LoneAttendance
from pulque.broker.groups.pull_locks import Locker
from pulque.broker.groups.subscriptions import GroupRegistrar
from pulque.broker.pulling.partition_reads import Browser
from pulque.broker.pulling.puller import Puller
from pulque.broker.receiving.receiver import BrokerReceiver
from pulque.broker.settling.adopted_nacks import Adopter
from pulque.broker.settling.dead_letters import DeadLetterOffice
from pulque.broker.settling.due_retries import Releaser
from pulque.broker.settling.retry import Redeliverer
from pulque.broker.settling.settler import Settler

__all__ = ["BrokerParts"]


@dataclass(frozen=True, slots=True)
class BrokerParts:
    """One of each."""

    receiver: BrokerReceiver
    puller: Puller
    settler: Settler
    browser: Browser
    redeliverer: Redeliverer
    registrar: GroupRegistrar
    releaser: Releaser
    resetter: Resetter
    office: DeadLetterOffice
    adopter: Adopter
    clients: ClientTable
    locker: Locker
    steward: Steward
    attendance: LoneAttendance

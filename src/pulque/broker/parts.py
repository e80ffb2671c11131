"""The parts of the data path that requests go to."""

from dataclasses import dataclass

from pulque.broker.adopt import Adopter
from pulque.broker.attendance import LoneAttendance
from pulque.broker.clients import ClientTable
from pulque.broker.dead import DeadLetterOffice
from pulque.broker.groups import Registrar
from pulque.broker.locks import Locker
from pulque.broker.ordered import Steward
from pulque.broker.pull import Puller
from pulque.broker.read import Browser
from pulque.broker.receive import Receiver
from pulque.broker.reset import Resetter
from pulque.broker.retry import Redeliverer
from pulque.broker.settle import Settler
from pulque.broker.waiting import Releaser

__all__ = ["Parts"]


@dataclass(frozen=True, slots=True)
class Parts:
    """One of each."""

    receiver: Receiver
    puller: Puller
    settler: Settler
    browser: Browser
    redeliverer: Redeliverer
    registrar: Registrar
    releaser: Releaser
    resetter: Resetter
    office: DeadLetterOffice
    adopter: Adopter
    clients: ClientTable
    locker: Locker
    steward: Steward
    attendance: LoneAttendance

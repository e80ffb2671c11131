"""A load of ordered messages on a cluster, the faults it has to stand, and the verdict."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import pulque
from pulque.cli.common.admin_client import AdminClient
from pulque.testing.cluster import ClusterProcesses
from tests.repo.tree import ROOT
from tests.robustness.brokers import wait_until
from tests.robustness.history import read_history
from tests.robustness.network import Network
from tests.robustness.order_checkers import check_order_of_keys

__all__ = ["CUTS", "FAULTS", "Fault", "OrderLoad"]

_END = 60.0
_SUBJECT = "order.book"
_MOST_PARTITIONS = 16
_FEWEST_PARTITIONS = 2
_BACKLOG = 0.5
"""So many seconds of messages wait before a split, and so many behind it."""


class OrderLoad:
    """Producers and consumers of one ordered subject. What it starts ends with it.

    Where there is a network, each server is on a machine of its own name, consumers are on
    ``east`` and ``west`` by turns, and all else is where the test is.
    """

    def __init__(
        self,
        cluster: ClusterProcesses,
        folder: Path,
        *,
        is_strict: bool,
        seed: int = 0,
        network: Network | None = None,
    ) -> None:
        self.cluster = cluster
        self.network = network
        self.dice = random.Random(seed)
        self.pause = 4.0
        """Longer than a consumer may be silent, in seconds."""
        self.partitions = 2
        self._folder = folder
        self._is_strict = is_strict
        self._producers: dict[str, subprocess.Popen[bytes]] = {}
        self.consumers: dict[str, subprocess.Popen[bytes]] = {}
        self._storms: dict[str, subprocess.Popen[bytes]] = {}
        self._next = 0
        folder.mkdir(exist_ok=True)

    def create_subject(self) -> None:
        """Have the subject placed, and say how its order is kept."""
        self.admin().ask("POST", "/subjects", {"subject": _SUBJECT})
        order = "strict" if self._is_strict else "best-effort"
        self.admin().ask("PUT", f"/subjects/{_SUBJECT}/order", {"order": order})

    def admin(self) -> AdminClient:
        """Return what commands the cluster."""
        with pulque.connect(self.cluster["meta-1"].url) as client:
            return AdminClient(str(client.status()["admin"]), _END)

    def add_producer(self, *options: str) -> None:
        """Start a producer with keys of its own."""
        name = f"p{len(self._producers)}"
        self._producers[name] = self._start("producer", name, *options)

    def begin_storm(self, consumers: int = 30) -> None:
        """Have one of many consumers come or go every 200 ms, until ``end_storms``."""
        name = f"cs{len(self._storms)}"
        more = ("--consumers", str(consumers))
        self._storms[name] = self._start("storm", name, *more, machine="east")

    def end_storms(self) -> None:
        """Have all consumers of storms hand over and end."""
        for name, process in self._storms.items():
            if process.poll() is None:
                self._end(name, process)

    def at(self, machine: str) -> AbstractContextManager[None]:
        """Have what is started meanwhile be on a machine, where there are machines."""
        return nullcontext() if self.network is None else self.network.inside(machine)

    def add_consumer(self, name: str | None = None) -> str:
        """Start a consumer, under a new name or one that was here before."""
        if name is None:
            name, self._next = f"c{self._next}", self._next + 1
        machine = "east" if int(name.removeprefix("c")) % 2 else "west"
        self.consumers[name] = self._start("consumer", name, machine=machine)
        return name

    def stop_consumer(self, name: str) -> None:
        """Have a consumer hand over and end."""
        process = self.consumers.pop(name)
        self._end(name, process)

    def kill_consumer(self, name: str) -> None:
        """End a consumer at once."""
        process = self.consumers.pop(name)
        process.kill()
        process.wait()

    def any_consumer(self) -> str:
        """Return the name of one that runs."""
        return self.dice.choice(sorted(self.consumers))

    def signal_consumers(self, number: int) -> None:
        """Send all consumers a signal."""
        for process in (*self.consumers.values(), *self._storms.values()):
            if process.poll() is None:
                process.send_signal(number)

    def handled(self) -> int:
        """Return how many messages were handled so far."""
        return sum(
            path.read_text(encoding="utf-8").count('"f": "handle"')
            for path in self._folder.glob("c*.jsonl")
        )

    def go_on(self, messages: int = 100) -> None:
        """Wait until so many more messages are handled."""
        goal = self.handled() + messages
        wait_until(
            lambda: self.handled() >= goal,
            within=2 * _END,
            what=f"{messages} more\n{self._said()}",
        )

    def problems(self) -> list[str]:
        """Stop sending, drain, stop, and judge the whole history."""
        for name, process in self._producers.items():
            self._end(name, process)
        self._producers.clear()
        self.end_storms()
        deadline = time.monotonic() + _END
        while found := self._judge():
            if not all("never handled" in each for each in found):
                break
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        for name in list(self.consumers):
            self.stop_consumer(name)
        return self._judge()

    def _judge(self) -> list[str]:
        events = read_history(self._folder.glob("*.jsonl"))
        return check_order_of_keys(events, is_strict=self._is_strict)

    def _start(
        self, role: str, name: str, *options: str, machine: str = "clients"
    ) -> subprocess.Popen[bytes]:
        (self._folder / f"{name}.ready").unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "tests.robustness.order_workers", role),
            *("--url", self.cluster.url, "--process", name),
            *("--history", str(self._folder / f"{name}.jsonl")),
            *("--subject", _SUBJECT, "--state", str(self._folder / "state")),
            *(["--in-place"] if self._is_strict else []),
            *options,
        ]
        with (self._folder / f"{name}.stderr").open("ab") as log, self.at(machine):
            return subprocess.Popen(
                command, cwd=ROOT, stderr=log, env=os.environ, start_new_session=True
            )

    def _end(self, name: str, process: subprocess.Popen[bytes]) -> None:
        ready = self._folder / f"{name}.ready"
        wait_until(ready.exists, within=_END, what=f"{name} has started\n{self._said()}")
        process.send_signal(signal.SIGTERM)
        assert not process.wait(_END), self._said()

    def _said(self) -> str:
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self._folder.glob("*.stderr"))
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        mine = [*self._producers.values(), *self.consumers.values(), *self._storms.values()]
        for process in mine:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong; a new kind of fault is one more of these."""

    name: str
    strike: Callable[[OrderLoad], None]


def kill_a_consumer(load: OrderLoad) -> None:
    """End one with ``kill -9``, and start it again under its name."""
    name = load.any_consumer()
    load.kill_consumer(name)
    load.add_consumer(name)


def pause_a_consumer(load: OrderLoad) -> None:
    """Freeze one for longer than it may be silent; then it wakes up late."""
    process = load.consumers[load.any_consumer()]
    process.send_signal(signal.SIGSTOP)
    time.sleep(load.pause)
    process.send_signal(signal.SIGCONT)


def join_and_leave(load: OrderLoad) -> None:
    """Have consumers come and go all the time."""
    for _ in range(5):
        load.add_consumer()
        time.sleep(0.2)
        if len(load.consumers) > 2:
            load.stop_consumer(load.any_consumer())


def kill_a_broker(load: OrderLoad) -> None:
    """End a broker with ``kill -9``; it comes back after a while."""
    name = load.dice.choice(sorted(load.cluster.brokers))
    load.cluster[name].kill()
    time.sleep(load.dice.random())
    with load.at(name):
        load.cluster[name].restart()


def split_partitions(load: OrderLoad) -> None:
    """Have twice as many partitions, while messages flow."""
    if load.partitions < _MOST_PARTITIONS:
        load.partitions *= 2
        count = {"partitions": load.partitions}
        load.admin().ask("POST", f"/subjects/{_SUBJECT}/extend", count)


def split_behind_a_backlog(load: OrderLoad) -> None:
    """Have messages wait in the partitions that are split, and in those that follow them.

    Whoever begins with the latter too early is handed a key's messages in the wrong order.
    """
    load.signal_consumers(signal.SIGSTOP)
    time.sleep(_BACKLOG)
    split_partitions(load)
    time.sleep(_BACKLOG)
    load.signal_consumers(signal.SIGCONT)


def merge_partitions(load: OrderLoad) -> None:
    """Have half as many partitions, but no fewer than there were at first."""
    if load.partitions > _FEWEST_PARTITIONS:
        load.partitions //= 2
        count = {"partitions": load.partitions}
        load.admin().ask("POST", f"/subjects/{_SUBJECT}/merge", count)


def begin_a_storm(load: OrderLoad) -> None:
    """Have consumers come and go every 200 ms from now on, whatever else goes wrong."""
    load.end_storms()
    load.begin_storm()


def kill_the_meta_server(load: OrderLoad) -> None:
    """End the meta server; it comes back soon."""
    load.cluster["meta-1"].kill()
    time.sleep(load.dice.random())
    with load.at("meta-1"):
        load.cluster["meta-1"].restart()


def _cut(load: OrderLoad, one: str, others: list[str], *, one_way: bool = False) -> None:
    assert load.network is not None
    for other in others:
        load.network.cut(one, other, one_way=one_way)
    time.sleep(load.pause)
    load.network.heal()


def cut_off_consumers(load: OrderLoad) -> None:
    """Cut half of the consumers off from all servers, for longer than they may be silent."""
    _cut(load, load.dice.choice(["east", "west"]), sorted(load.cluster))


def cut_consumers_from_the_meta_server(load: OrderLoad) -> None:
    """Let half of the consumers reach the brokers only: their time runs out all the same."""
    _cut(load, load.dice.choice(["east", "west"]), sorted(load.cluster.metas))


def cut_off_a_broker(load: OrderLoad) -> None:
    """Cut a broker off from everybody."""
    name = load.dice.choice(sorted(load.cluster.brokers))
    _cut(load, name, ["clients", "east", "west", *load.cluster.metas])


def lose_answers_of_a_broker(load: OrderLoad) -> None:
    """Have what is sent arrive and be stored, and nobody learn so."""
    name = load.dice.choice(sorted(load.cluster.brokers))
    _cut(load, name, ["clients", "east", "west"], one_way=True)


def cut_a_broker_from_the_meta_server(load: OrderLoad) -> None:
    """Have clients reach a broker that the meta server takes to be away."""
    _cut(load, load.dice.choice(sorted(load.cluster.brokers)), sorted(load.cluster.metas))


FAULTS = [
    Fault("a consumer is killed", kill_a_consumer),
    Fault("a consumer is paused", pause_a_consumer),
    Fault("consumers come and go", join_and_leave),
    Fault("a broker is killed", kill_a_broker),
    Fault("partitions are split", split_partitions),
    Fault("the meta server is killed", kill_the_meta_server),
    Fault("partitions are merged", merge_partitions),
    Fault("a storm of consumers", begin_a_storm),
    Fault("a backlog is split", split_behind_a_backlog),
]

CUTS = [
    Fault("consumers are cut off", cut_off_consumers),
    Fault("consumers are cut off from the meta server", cut_consumers_from_the_meta_server),
    Fault("a broker is cut off", cut_off_a_broker),
    Fault("answers of a broker are lost", lose_answers_of_a_broker),
    Fault("a broker is cut off from the meta server", cut_a_broker_from_the_meta_server),
]
"""Those that need a network of machines."""

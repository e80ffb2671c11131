"""A broker group of three processes, what can happen to it, and whether its logs are the same."""

import json
import random
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pulque
from pulque.errors import PulqueError
from pulque.testing.cluster import ClusterProcesses
from pulque.testing.process import ServerProcess
from tests.robustness.brokers import wait_until

__all__ = ["LEASE_S", "Faults", "ReplicatedGroup", "check_copies", "ends_of"]

LEASE_S = 1.0
GROUP = "g1"
_NAMES = ("b1", "b2", "b3")
_META = {"replication": {"lease": f"{LEASE_S:g}s"}, "cluster": {"heartbeat": "300ms"}}
_BROKER: dict[str, dict[str, object]] = {
    "cluster": {"group": GROUP},
    "replication": {"copies": 3, "lag": "2s"},
    "storage": {
        "segment_size": "256KiB",
        "action_segment_size": "64KiB",
        "checkpoint_records": 300,
        "checkpoint_interval": "1s",
    },
    "consumption": {"lease": "2s", "lease_check": "100ms"},
    "retry": {"delays": "100ms 300ms"},
}
_LOGS = ("messages", "actions")
_REFUSED = {403, 409, 503}
"""Not in sync, another one was elected meanwhile, the database is away."""


class ReplicatedGroup:
    """Meta servers and three brokers of one group. All of them end with it.

    Args:
        folder: Where settings, data and logs go.
        metas: How many meta servers there are.
    """

    def __init__(self, folder: Path, *, metas: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.cluster = ClusterProcesses(folder)
        try:
            for number in range(1, metas + 1):
                self.cluster.add_meta(f"meta-{number}", _META)
            made = [self.cluster.make_broker(name, _BROKER) for name in _NAMES]
            with ThreadPoolExecutor(len(made)) as pool:
                list(pool.map(ServerProcess.restart, made))
            self.wait_until_whole()
        except BaseException:
            self.cluster.close()
            raise

    def __getitem__(self, name: str) -> ServerProcess:
        return self.cluster[name]

    @property
    def leadership(self) -> dict[str, Any]:
        """Who leads, as the first meta server that answers knows it; nothing if none does."""
        for meta in self.cluster.metas.values():
            if meta.is_running:
                try:
                    with pulque.connect(meta.url, timeout=2) as client:
                        return next(iter(client.status()["leaderships"]), {})
                except PulqueError:
                    continue
        return {}

    @property
    def leader(self) -> str:
        """The name of the broker that leads."""
        wait_until(lambda: bool(self.leadership), within=30, what="somebody leads")
        return str(self.leadership["leader"])

    @property
    def followers(self) -> list[str]:
        """The names of the others."""
        leader = self.leader
        return [name for name in _NAMES if name != leader]

    def status_of_leader(self, within: float = 30) -> dict[str, Any]:
        """Return what the leader reports."""
        deadline = time.monotonic() + within
        while True:
            try:
                with pulque.connect(self[self.leader].url, timeout=5) as client:
                    status = client.status()
                if status["replication"]["role"] == "leader":
                    return status
            except PulqueError:
                pass
            assert time.monotonic() < deadline, "nobody says that it leads"
            time.sleep(0.05)

    def wait_until_whole(self, within: float = 60) -> None:
        """Wait until all are in sync, and every meta server has the leader in its routes."""
        wait_until(
            lambda: all(map(_is_whole, self.cluster.metas.values())),
            within=within,
            what=f"all are in sync: {self.leadership}",
        )

    def kill_as_copies(self) -> None:
        """Wait until nobody lacks anything, and kill all: a clean stop would write more."""
        wait_until(self._is_copied, within=30, what="all have both logs to their ends")
        for name in (self.leader, *self.followers):
            self[name].send_signal(signal.SIGKILL)
        for name in _NAMES:
            self[name].wait()

    def _is_copied(self) -> bool:
        found = self.status_of_leader()["replication"]
        ends = (found["message_end"], found["action_end"])
        return [
            (each["message_synced"], each["action_synced"]) for each in found["followers"]
        ] == [ends] * (len(_NAMES) - 1)

    def hand_over_to(self, name: str) -> bool:
        """Have a broker lead, as an operator would; say whether it was let."""
        meta = next(iter(self.cluster.metas.values()))
        with pulque.connect(meta.url) as client:
            admin = client.status()["admin"]
        request = urllib.request.Request(  # noqa: S310  # our own server
            f"{admin}/api/v1/brokers/{name}/lead",
            data=json.dumps({}).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=10):  # noqa: S310
                return True
        except urllib.error.HTTPError as error:
            if error.code not in _REFUSED:
                raise
            return False

    def close(self) -> None:
        self.cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Faults:
    """What may happen to the processes of a group."""

    def __init__(self, group: ReplicatedGroup, draw: random.Random) -> None:
        self._group = group
        self._draw = draw

    def kill_leader(self) -> None:
        self._kill(self._group.leader)

    def kill_follower(self) -> None:
        self._kill(self._draw.choice(self._group.followers))

    def kill_leader_and_follower(self) -> None:
        self._kill(self._group.leader, self._draw.choice(self._group.followers))

    def kill_all(self) -> None:
        self._kill(*_NAMES)

    def pause_leader(self) -> None:
        """It wakes up when somebody else leads, and must not go on as if nothing was."""
        self._pause(self._group.leader, self._draw.uniform(1.5, 4) * LEASE_S)

    def pause_leader_shortly(self) -> None:
        """It may or may not lose its leadership."""
        self._pause(self._group.leader, self._draw.uniform(0.5, 1.5) * LEASE_S)

    def pause_follower(self) -> None:
        self._pause(self._draw.choice(self._group.followers), self._draw.uniform(0.5, 4))

    def stop_leader(self) -> None:
        """It hands over first."""
        leader = self._group[self._group.leader]
        assert leader.stop() == 0
        leader.restart()

    def restart_follower_of_paused_leader(self) -> None:
        """Whoever restarts has to keep what it promised, and nobody else has what it has."""
        leader = self._group[self._group.leader]
        follower = self._group[self._draw.choice(self._group.followers)]
        leader.send_signal(signal.SIGSTOP)
        follower.kill()
        follower.restart()
        time.sleep(self._draw.uniform(0, 2) * LEASE_S)
        leader.send_signal(signal.SIGCONT)

    def command(self) -> None:
        """An operator has another one lead."""
        self._group.hand_over_to(self._draw.choice(self._group.followers))

    def kill_metas(self) -> None:
        """Nobody can be elected meanwhile; the group goes on by itself."""
        metas = list(self._group.cluster.metas)
        for name in metas:
            self._group[name].kill()
        time.sleep(self._draw.uniform(0.5, 3) * LEASE_S)
        for name in metas:
            self._group[name].restart()

    def _kill(self, *names: str) -> None:
        for name in names:
            self._group[name].send_signal(signal.SIGKILL)
        for name in names:
            self._group[name].wait()
        # Before and after the others noticed.
        time.sleep(self._draw.choice([0, 0.5, 2, 4]) * LEASE_S)
        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(lambda name: self._group[name].restart(), names))

    def _pause(self, name: str, seconds: float) -> None:
        self._group[name].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._group[name].send_signal(signal.SIGCONT)


def _is_whole(meta: ServerProcess) -> bool:
    with pulque.connect(meta.url, timeout=5) as client:
        status = client.status()
    serving = {each["name"] for each in status["servers"] if each["is_serving"]}
    return any(
        len(each["in_sync"]) == len(_NAMES) and each["leader"] in serving
        for each in status["leaderships"]
    )


def check_copies(folder: Path) -> list[str]:
    """Say where the logs of brokers that have stopped differ, byte by byte.

    Segments that retention removed at one of them are not compared.
    """
    problems = []
    for log in _LOGS:
        first, *others = [_bytes_of(folder / name / log) for name in _NAMES]
        for name, other in zip(_NAMES[1:], others, strict=True):
            problems += [
                f"{log}/{base}: {name} differs from {_NAMES[0]} at {_difference(mine, its)}"
                for base, mine in first.items()
                if (its := other.get(base)) is not None and _difference(mine, its) is not None
            ]
    return problems


def ends_of(folder: Path) -> dict[str, set[int]]:
    """Return where the logs end, at all brokers: one number for each log, if they are the same."""
    ends: dict[str, set[int]] = {}
    for log in _LOGS:
        found = [_bytes_of(folder / name / log) for name in _NAMES]
        ends[log] = {max(base + len(data) for base, data in each.items()) for each in found}
    return ends


def _bytes_of(folder: Path) -> dict[int, bytes]:
    return {int(path.stem): path.read_bytes() for path in folder.glob("*.log")}


def _difference(mine: bytes, its: bytes) -> int | None:
    shorter = min(len(mine), len(its))
    if mine[:shorter] == its[:shorter]:
        return None
    return next(at for at in range(shorter) if mine[at] != its[at])

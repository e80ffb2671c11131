"""A whole cluster of real processes on loopback ports, for tests and demonstrations.

::

    with ClusterProcesses.start(tmp_path, brokers=3) as cluster:
        client = pulque.connect(cluster.url)
        cluster["broker-1"].kill()
        cluster["broker-1"].restart()
        cluster.add_broker("broker-4")

Each server is known by its name: ``meta-1`` …, ``broker-1`` …, and delay servers by those that
``add_delay`` gives them; each can be killed, stopped, paused
(``send_signal``) and restarted on its own, on the same port and data.
"""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pulque.client.blocking.client import connect
from pulque.errors import UsageError
from pulque.testing.process import BrokerProcessError, ServerProcess

__all__ = ["ClusterProcesses"]

Sections = Mapping[str, Mapping[str, Any]]
"""Settings as in a TOML file: ``{"consumption": {"lease": "2s"}}``."""
_PAUSE_S = 0.05


class ClusterProcesses:
    """Meta servers, brokers and delay servers, each a process. Made by ``start``.

    Used by one thread.

    Args:
        folder: Where their settings, data and logs go.
        database: The database of the meta servers; a SQLite file of theirs if not given.
        environ: More variables for all of them.
        timeout: How long starting and stopping one may take, in seconds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        database: str = "",
        environ: Mapping[str, str] | None = None,
        timeout: float = 30.0,
    ) -> None:
        self.folder = folder
        """Holds a folder, a file of settings and a log for each server."""
        self.metas: dict[str, ServerProcess] = {}
        """The meta servers by their names."""
        self.brokers: dict[str, ServerProcess] = {}
        """The brokers by their names."""
        self.delays: dict[str, ServerProcess] = {}
        """The delay servers by their names."""
        self._database = database or f"sqlite:///{folder / 'meta.sqlite'}"
        self._environ = environ
        self._timeout = timeout

    @classmethod
    def start(  # noqa: PLR0913  # how a cluster may differ from the usual one
        cls,
        folder: Path,
        *,
        brokers: int = 3,
        metas: int = 1,
        broker_settings: Sections | None = None,
        meta_settings: Sections | None = None,
        database: str = "",
        copies: int = 1,
    ) -> Self:
        """Start a cluster and wait until all of it serves.

        Args:
            folder: Where settings, data and logs go.
            brokers: How many brokers there are, ``broker-1`` …
            metas: How many meta servers there are, ``meta-1`` …
            broker_settings: Sections of settings for all brokers.
            meta_settings: Sections of settings for all meta servers.
            database: The database of the meta servers; a SQLite file of theirs if not given.
            copies: How many brokers have the same messages: the first so many are of group
                ``group-1``, one of them leads and the others follow, and so on.

        Raises:
            BrokerProcessError: One of them does not serve in time; none is left then.
        """
        folder.mkdir(parents=True, exist_ok=True)
        cluster = cls(folder, database=database)
        try:
            for number in range(1, metas + 1):
                cluster.add_meta(f"meta-{number}", meta_settings)
            made = [
                cluster.make_broker(
                    f"broker-{number + 1}",
                    _with_copies(broker_settings or {}, f"group-{number // copies + 1}", copies),
                )
                for number in range(brokers)
            ]
            with ThreadPoolExecutor(max(len(made), 1)) as pool:
                list(pool.map(ServerProcess.restart, made))
            cluster.wait_until_known()
        except BaseException:
            cluster.close()
            raise
        return cluster

    def __getitem__(self, name: str) -> ServerProcess:
        """Return a server by its name."""
        return {**self.metas, **self.brokers, **self.delays}[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all servers."""
        return iter({**self.metas, **self.brokers, **self.delays})

    @property
    def url(self) -> str:
        """The home of clients: all meta servers."""
        return _joined(self.metas)

    @property
    def broker_url(self) -> str:
        """The same by way of the brokers, any of which can be a home."""
        return _joined(self.brokers)

    def add_meta(self, name: str, settings: Sections | None = None) -> ServerProcess:
        """Start one more meta server and wait until it serves."""
        database = {"url": self._database, **(settings or {}).get("database", {})}
        admin = {"port": 0, **(settings or {}).get("admin", {})}
        sections = {**(settings or {}), "name": name, "database": database, "admin": admin}
        process = self._process("meta", name, sections)
        self.metas[name] = process
        process.restart()
        return process

    def add_broker(self, name: str, settings: Sections | None = None) -> ServerProcess:
        """Start one more broker and wait until it serves."""
        process = self.make_broker(name, settings)
        process.restart()
        return process

    def make_broker(self, name: str, settings: Sections | None = None) -> ServerProcess:
        """Make one more broker that does not run yet; ``restart`` starts it."""
        told = settings or {}
        metas = [meta.url.removeprefix("pulque://") for meta in self.metas.values()]
        sections = {
            **told,
            "name": name,
            "storage": {
                "directory": str(self.folder / name),
                "reserve": "1MiB",
                **told.get("storage", {}),
            },
            "cluster": {"meta": metas, **told.get("cluster", {})},
        }
        process = self._process("broker", name, sections)
        self.brokers[name] = process
        return process

    def add_delay(self, name: str, settings: Sections | None = None) -> ServerProcess:
        """Start one more delay server and wait until it serves, and meta servers know it."""
        told = settings or {}
        metas = [meta.url.removeprefix("pulque://") for meta in self.metas.values()]
        sections = {
            **told,
            "name": name,
            "storage": {
                "directory": str(self.folder / name),
                "reserve": "1MiB",
                **told.get("storage", {}),
            },
            "cluster": {"meta": metas, **told.get("cluster", {})},
        }
        process = self._process("delay", name, sections)
        self.delays[name] = process
        process.restart()
        self.wait_until_known()
        return process

    def wait_until_known(self) -> None:
        """Wait until every meta server that runs has all others that run in its routes.

        Brokers that follow need only be known as such: their leader is in the routes.

        Raises:
            BrokerProcessError: That takes too long.
        """
        deadline = time.monotonic() + self._timeout
        servers = {**self.brokers, **self.delays}
        wanted = {name for name, server in servers.items() if server.is_running}
        for name, meta in self.metas.items():
            while meta.is_running and (missing := wanted - _serving(meta)):
                if time.monotonic() > deadline:
                    raise BrokerProcessError(f"{name} does not know {', '.join(sorted(missing))}")
                time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Stop all of them: meta servers last, so that each can say that it leaves."""
        with ExitStack() as stack:
            servers = (self.metas, self.brokers, self.delays)
            for process in [each for some in servers for each in some.values()]:
                stack.callback(process.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _process(self, kind: str, name: str, sections: Mapping[str, Any]) -> ServerProcess:
        if name in self:
            raise UsageError(f"there is a server {name} already")
        path = self.folder / f"{name}.toml"
        path.write_text(_toml(sections), encoding="utf-8")
        return ServerProcess(
            [kind, "--config", str(path)],
            log=self.folder / f"{name}.stderr",
            environ=self._environ,
            timeout=self._timeout,
        )


def _with_copies(settings: Sections, broker_group: str, copies: int) -> Sections:
    """Return the settings of a broker that has, or may have, followers."""
    if copies == 1:
        return settings
    told = {name: dict(section) for name, section in settings.items()}
    told["cluster"] = {"group": broker_group, **told.get("cluster", {})}
    told["replication"] = {"copies": copies, **told.get("replication", {})}
    return told


def _serving(meta: ServerProcess) -> set[str]:
    """Return the servers that a meta server has in its routes, or knows to follow."""
    with connect(meta.url) as client:
        servers: list[dict[str, Any]] = client.status()["servers"]
    led = {each["broker_group"] for each in servers if each["is_serving"]}
    return {
        str(each["name"])
        for each in servers
        if each["is_serving"] or (each["state"] == "following" and each["broker_group"] in led)
    }


def _joined(servers: Mapping[str, ServerProcess]) -> str:
    hosts = ",".join(server.url.removeprefix("pulque://") for server in servers.values())
    return f"pulque://{hosts}"


def _toml(sections: Mapping[str, Any]) -> str:
    """Write settings as a file of theirs: texts, numbers, flags and lists of texts."""
    lines = [f"{key} = {_value(value)}" for key, value in sections.items() if _is_plain(value)]
    for name, section in sections.items():
        if not _is_plain(section):
            lines.append(f"[{name}]")
            lines += [f"{key} = {_value(value)}" for key, value in section.items()]
    return "\n".join(lines) + "\n"


def _is_plain(value: object) -> bool:
    return not isinstance(value, Mapping)


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case int() | float():
            return str(value)
        case _:
            quoted = str(value).replace("\\", "\\\\").replace('"', '\\"')
            return f'"{quoted}"'

"""What a meta server knew last, in a file of its own: for a start while the database is away.

The database is the truth, always: the file is only read when that does not answer, and what it
says is replaced as soon as it does.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pulque.meta.database.store import Changes
from pulque.meta.directory import Directory
from pulque.model.cluster import GroupMarks, Placement, Server, ServerState
from pulque.model.leadership import Leadership
from pulque.model.names import PartitionName, Subject
from pulque.model.ordered import OrderStrategy
from pulque.model.routes import Role, Slots

__all__ = ["FILE", "Recollection", "read_recollection", "recollect", "write_recollection"]

FILE = "last-known.json"
_VERSION = 1


class Recollection(NamedTuple):
    """What was known at some time."""

    cluster: str
    """The id of the cluster."""
    at_ms: int
    """When that was."""
    known: Changes


def recollect(cluster: str, directory: Directory, now_ms: int) -> Recollection:
    """Return what is known now."""
    known = Changes(directory.revision)
    known.servers = list(directory.servers.values())
    known.groups = dict(directory.marks)
    known.subjects = dict(directory.subjects)
    known.read_only = dict.fromkeys(directory.read_only, True)
    known.policies = dict(directory.policies)
    known.orders = dict.fromkeys(directory.strict, OrderStrategy.STRICT)
    known.leaderships = dict(directory.leaderships)
    return Recollection(cluster, now_ms, known)


def write_recollection(path: Path, found: Recollection) -> None:
    """Write down what is known, in the place of what was.

    Raises:
        OSError: It cannot be written; what was there is there still.
    """
    known = found.known
    content = {
        "version": _VERSION,
        "cluster": found.cluster,
        "at_ms": found.at_ms,
        "revision": known.revision,
        "servers": [each._asdict() for each in known.servers],
        "groups": {name: marks._asdict() for name, marks in known.groups.items()},
        "subjects": {
            name: [
                [each.partition, each.broker_group, *each.slots, each.is_closed, each.parents]
                for each in placed
            ]
            for name, placed in known.subjects.items()
        },
        "read_only": sorted(known.read_only),
        "policies": known.policies,
        "strict": sorted(known.orders),
        "leaderships": [each._asdict() for each in known.leaderships.values()],
    }
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_recollection(path: Path) -> Recollection | None:
    """Return what was written down; None if nothing was.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not what was written.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    try:
        return _parse(content)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not what was written: {error!r}") from None


def _parse(content: Mapping[str, Any]) -> Recollection:
    if content["version"] != _VERSION:
        raise ValueError(f"version {content['version']!r}; {_VERSION} is known")
    known = Changes(int(content["revision"]))
    known.servers = [_server(each) for each in content["servers"]]
    known.groups = {name: GroupMarks(**marks) for name, marks in content["groups"].items()}
    known.subjects = {
        Subject(subject): tuple(
            Placement(PartitionName(name), group, Slots(start, end), is_closed, tuple(parents))
            for name, group, start, end, is_closed, parents in placed
        )
        for subject, placed in content["subjects"].items()
    }
    known.orders = {Subject(each): OrderStrategy.STRICT for each in content["strict"]}
    known.read_only = dict.fromkeys(content["read_only"], True)
    known.policies = dict(content["policies"])
    # What was written before there were followers has none.
    leaderships = map(_leadership, content.get("leaderships", ()))
    known.leaderships = {each.broker_group: each for each in leaderships}
    return Recollection(str(content["cluster"]), int(content["at_ms"]), known)


def _leadership(fields: Mapping[str, Any]) -> Leadership:
    known = dict(fields)
    return Leadership(**known | {"in_sync": tuple(known["in_sync"])})


def _server(fields: Mapping[str, Any]) -> Server:
    known = dict(fields)
    return Server(**known | {"role": Role(known["role"]), "state": ServerState(known["state"])})

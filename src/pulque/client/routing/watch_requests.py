"""How clients watch routes: how long and how often they ask, and what they are told; no I/O."""

import secrets

from pulque.errors import RemoteProtocolError
from pulque.wire.responses import Response, Watched
from pulque.wire.routes import ChangedRoute

__all__ = ["ASK_EVERY", "PATIENCE", "PAUSE", "WAIT", "changed_of", "watcher_name"]

WAIT = 30.0
"""How long a server is asked to wait for a change, in seconds."""
ASK_EVERY = 30.0
"""How often routes are asked for where they cannot be watched."""
PAUSE = 0.2
"""Between one watch and the next, so that many new routes cost few."""
PATIENCE = 5.0


def watcher_name(application: str) -> str:
    """Return a name for the watches of one client, which no other has."""
    return f"{application}/{secrets.token_hex(4)}"


def changed_of(response: Response) -> tuple[ChangedRoute, ...]:
    """Return the routes that the answer to a watch brings."""
    if not isinstance(response, Watched):
        raise RemoteProtocolError(f"a watch got {response!r}")
    return response.changed

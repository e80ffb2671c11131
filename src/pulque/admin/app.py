"""The API as one ASGI application."""

from collections.abc import Collection
from typing import Any, cast

from fastapi import FastAPI

import pulque
from pulque.admin.api.broker import BrokersApi
from pulque.admin.api.client import ClientsApi
from pulque.admin.api.cluster import ClusterApi, HealthApi
from pulque.admin.api.dead import DeadApi
from pulque.admin.api.delay import DelayedApi
from pulque.admin.api.group import GroupsApi
from pulque.admin.api.message import MessagesApi
from pulque.admin.api.ordered import OrderedApi
from pulque.admin.api.subject import SubjectsApi
from pulque.admin.broker_requests import BrokerRequests
from pulque.admin.cluster import Cluster
from pulque.admin.context import Context
from pulque.admin.http.guard import RequestGuard
from pulque.admin.http.problems import PROBLEMS, install
from pulque.clock import SystemClock

__all__ = ["PREFIX", "create_app", "openapi"]

PREFIX = "/api/v1"
_NOUNS = (
    SubjectsApi,
    OrderedApi,
    GroupsApi,
    BrokersApi,
    ClientsApi,
    DeadApi,
    DelayedApi,
    MessagesApi,
    ClusterApi,
)
"""In the order of the published description."""
_ABOUT = (
    "Administration of a Pulque cluster. Every list is paged: give `next` of a page as `cursor` "
    "to get the next one. Every error has one shape. Whatever changes something takes "
    "`application/json` only."
)


def create_app(context: Context, hosts: Collection[str] = ()) -> FastAPI:
    """Return the application.

    Args:
        context: What it works with.
        hosts: Names of this server beside loopback ones.
    """
    app = FastAPI(
        title="Pulque administration",
        version=pulque.__version__,
        description=_ABOUT,
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        responses=PROBLEMS,
        generate_unique_id_function=_name_of,
    )
    for noun in _NOUNS:
        app.include_router(noun(context).router, prefix=PREFIX)
    app.include_router(HealthApi(context).router)
    install(app)
    app.add_middleware(RequestGuard, hosts=hosts)
    return app


def openapi() -> dict[str, Any]:
    """Return the API as it is published."""
    # Nothing of it is asked while it is described.
    return create_app(Context(cast("Cluster", None), BrokerRequests(), SystemClock())).openapi()


def _name_of(route: Any) -> str:
    return f"{route.tags[-1].replace(' ', '_')}_{route.name}"

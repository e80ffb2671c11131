"""Pulque, a durable message queue: consumers pull, and any number of them share the work.

::

    import pulque

    with pulque.connect() as client:
        client.send("orders", b"two teas")
        with client.consumer("orders", group="kitchen") as consumer:
            for message in consumer:
                print(message.body)
                message.ack()

``pulque.aio`` has the same names for asyncio. ``pulque.App`` calls functions with messages.
"""

import logging
from typing import TYPE_CHECKING, Any

from pulque.app.outcomes import BatchFailed, Reject, Retry, RetryAt
from pulque.client.blocking.client import Client, connect
from pulque.client.blocking.consumer import Consumer
from pulque.client.blocking.dead_letters import DeadLetters
from pulque.client.blocking.delayed_messages import DelayedMessages
from pulque.client.blocking.messages import Messages
from pulque.client.blocking.pending_sends import PendingSend, PendingSends
from pulque.client.blocking.producer import Producer
from pulque.client.inspecting.dead_letters import ResentLetters
from pulque.client.inspecting.delayed_messages import DelayedMessage, DueCount, Fate, Moved
from pulque.client.inspecting.groups import ConsumerState, GroupState, PartitionReset
from pulque.client.inspecting.search import MessagesFound
from pulque.client.inspecting.stored_messages import PartitionPositions
from pulque.client.options.group_options import RetryPolicy
from pulque.client.receiving.received_message import ReceivedMessage
from pulque.client.sending.outgoing_message import Outgoing, Receipt
from pulque.errors import (
    ConfigError,
    CorruptionError,
    DisconnectedError,
    ErrorCode,
    FencedError,
    ForkedError,
    InvalidBatchError,
    InvalidNameError,
    InvalidRequestError,
    LocalProtocolError,
    LockLostError,
    MessageTooLargeError,
    NoDelayServerError,
    NotAllowedError,
    NotLeaderError,
    OverloadedError,
    PositionLostError,
    ProtocolError,
    PulqueError,
    ReadOnlyError,
    RejectedError,
    RemoteProtocolError,
    RequestTimeoutError,
    SpoolFullError,
    StaleEpochError,
    StaleRouteError,
    StaleSettleError,
    StorageError,
    StorageFullError,
    UnavailableError,
    UnknownGroupError,
    UnknownMessageError,
    UnknownServerError,
    UnknownSubjectError,
    UnsupportedError,
    UsageError,
)
from pulque.model.message import Message
from pulque.model.positions import ConsumeSequence, Position

if TYPE_CHECKING:
    from pulque.app.app import App
    from pulque.app.payload import PayloadError

__all__ = [
    "App",
    "BatchFailed",
    "Client",
    "ConfigError",
    "ConsumeSequence",
    "Consumer",
    "ConsumerState",
    "CorruptionError",
    "DeadLetters",
    "DelayedMessage",
    "DelayedMessages",
    "DisconnectedError",
    "DueCount",
    "ErrorCode",
    "Fate",
    "FencedError",
    "ForkedError",
    "GroupState",
    "InvalidBatchError",
    "InvalidNameError",
    "InvalidRequestError",
    "LocalProtocolError",
    "LockLostError",
    "Message",
    "MessageTooLargeError",
    "Messages",
    "MessagesFound",
    "Moved",
    "NoDelayServerError",
    "NotAllowedError",
    "NotLeaderError",
    "Outgoing",
    "OverloadedError",
    "PartitionPositions",
    "PartitionReset",
    "PayloadError",
    "PendingSend",
    "PendingSends",
    "Position",
    "PositionLostError",
    "Producer",
    "ProtocolError",
    "PulqueError",
    "ReadOnlyError",
    "Receipt",
    "ReceivedMessage",
    "Reject",
    "RejectedError",
    "RemoteProtocolError",
    "RequestTimeoutError",
    "ResentLetters",
    "Retry",
    "RetryAt",
    "RetryPolicy",
    "SpoolFullError",
    "StaleEpochError",
    "StaleRouteError",
    "StaleSettleError",
    "StorageError",
    "StorageFullError",
    "UnavailableError",
    "UnknownGroupError",
    "UnknownMessageError",
    "UnknownServerError",
    "UnknownSubjectError",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "connect",
]

__version__ = "0.1.0"

logging.getLogger("pulque").addHandler(logging.NullHandler())

_LATER = {"App": "pulque.app.app", "PayloadError": "pulque.app.payload"}


def __getattr__(name: str) -> Any:
    """Import what stands on asyncio when it is used: most who send never do."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LATER[name]), name)

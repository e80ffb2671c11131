"""Every error of Pulque: its code, whose fault it is, and whether to try again.

The branches say *whose fault* it is and *what to do*: fix your code (``UsageError``), fix the
settings (``ConfigError``), close the connection (``ProtocolError``), listen to the broker's no
(``RejectedError``), try again (``UnavailableError``), look at the disk (``StorageError``).

A code goes over the wire and is never reused. A text says what was found, what is allowed, and
where. ``error_from_wire`` turns a code and its text back into the class that was raised.
"""

from enum import IntEnum
from typing import ClassVar

__all__ = [
    "ConfigError",
    "CorruptionError",
    "DataDirectoryError",
    "DisconnectedError",
    "ErrorCode",
    "FencedError",
    "ForkedError",
    "InvalidBatchError",
    "InvalidNameError",
    "InvalidRequestError",
    "LocalProtocolError",
    "LockLostError",
    "MessageTooLargeError",
    "NoDelayServerError",
    "NotAllowedError",
    "NotLeaderError",
    "OverloadedError",
    "PositionLostError",
    "ProtocolError",
    "PulqueError",
    "ReadOnlyError",
    "RejectedError",
    "RemoteProtocolError",
    "RequestTimeoutError",
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
    "error_from_wire",
]


class ErrorCode(IntEnum):
    """The number of an error on the wire; 0 means that there was none."""

    NONE = 0
    UNKNOWN = 1
    USAGE = 2
    CONFIG = 3
    PROTOCOL = 10
    UNSUPPORTED = 11
    INVALID_REQUEST = 20
    INVALID_NAME = 21
    INVALID_BATCH = 22
    MESSAGE_TOO_LARGE = 23
    NOT_ALLOWED = 24
    UNKNOWN_SUBJECT = 25
    UNKNOWN_GROUP = 26
    UNKNOWN_SERVER = 27
    NO_DELAY_SERVER = 28
    UNKNOWN_MESSAGE = 29
    NOT_LEADER = 30
    STALE_EPOCH = 31
    STALE_SETTLE = 32
    FENCED = 33
    POSITION_LOST = 34
    STALE_ROUTE = 35
    READ_ONLY = 36
    LOCK_LOST = 37
    UNAVAILABLE = 40
    DISCONNECTED = 41
    REQUEST_TIMEOUT = 42
    OVERLOADED = 43
    SPOOL_FULL = 44
    STORAGE = 50
    CORRUPTION = 51
    STORAGE_FULL = 52
    DATA_DIRECTORY = 53


class PulqueError(Exception):
    """The base of all errors that Pulque raises on purpose.

    Attributes:
        code: The number of this error on the wire.
        retryable: Whether the same call may succeed later, unchanged.
        outcome_known: Whether it is certain that nothing was changed: a message whose send
            failed is not stored. An error of one call may differ from its class.
    """

    code: ClassVar[ErrorCode] = ErrorCode.UNKNOWN
    retryable: ClassVar[bool] = False
    outcome_known: bool = False


class UsageError(PulqueError):
    """The caller broke a rule of the API; the code must be fixed."""

    code = ErrorCode.USAGE
    outcome_known = True


class ForkedError(UsageError):
    """A child of fork used what its parent made; the child must make its own."""


class ConfigError(PulqueError):
    """The settings are wrong; the text names the setting."""

    code = ErrorCode.CONFIG
    outcome_known = True


class ProtocolError(PulqueError):
    """Bytes on a connection make no sense; the connection is closed."""

    code = ErrorCode.PROTOCOL


class LocalProtocolError(ProtocolError):
    """We were asked to send what the protocol does not allow."""

    outcome_known = True


class RemoteProtocolError(ProtocolError):
    """The peer sent what the protocol does not allow."""


class RejectedError(PulqueError):
    """The broker said no; the connection lives on."""

    code = ErrorCode.INVALID_REQUEST
    outcome_known = True


class InvalidRequestError(RejectedError):
    """A field of a request is outside of what is allowed."""

    code = ErrorCode.INVALID_REQUEST


class UnsupportedError(RejectedError):
    """The peer does not know this opcode or this version of it."""

    code = ErrorCode.UNSUPPORTED


class InvalidNameError(RejectedError):
    """A subject, group or consumer id is not a valid name."""

    code = ErrorCode.INVALID_NAME


class InvalidBatchError(RejectedError):
    """A batch is damaged, or its parts contradict each other."""

    code = ErrorCode.INVALID_BATCH


class MessageTooLargeError(RejectedError):
    """One message, or one batch, is over the limit."""

    code = ErrorCode.MESSAGE_TOO_LARGE


class NotAllowedError(RejectedError):
    """The request is well formed, but not for this caller."""

    code = ErrorCode.NOT_ALLOWED


class UnknownSubjectError(RejectedError):
    """No message was ever sent to this subject here."""

    code = ErrorCode.UNKNOWN_SUBJECT


class UnknownGroupError(RejectedError):
    """No consumer of this group ever pulled from this subject here."""

    code = ErrorCode.UNKNOWN_GROUP


class UnknownServerError(RejectedError):
    """No broker or delay server of this name ever registered, or it was removed."""

    code = ErrorCode.UNKNOWN_SERVER


class UnknownMessageError(RejectedError):
    """There is no such message: it was never stored, or retention removed it."""

    code = ErrorCode.UNKNOWN_MESSAGE


class NoDelayServerError(RejectedError):
    """Nobody here takes messages that are due later; ``pulque up`` and ``pulque delay`` do."""

    code = ErrorCode.NO_DELAY_SERVER


class NotLeaderError(RejectedError):
    """Another broker leads this partition; refresh the route and go there."""

    code = ErrorCode.NOT_LEADER
    retryable = True
    outcome_known = False


class StaleEpochError(RejectedError):
    """The request belongs to an older leadership; it must not be repeated as it is."""

    code = ErrorCode.STALE_EPOCH


class StaleSettleError(RejectedError):
    """The settle does not name deliveries that this consumer holds now."""

    code = ErrorCode.STALE_SETTLE


class FencedError(RejectedError):
    """Another consumer took over this consumer id; this one must stop."""

    code = ErrorCode.FENCED


class PositionLostError(RejectedError):
    """The broker does not know the deliveries that this consumer expects to follow.

    It lost them with its power, or gave them to others after the lease ran out. What the
    consumer still holds must be abandoned; it pulls again from its settled position.
    """

    code = ErrorCode.POSITION_LOST


class StaleRouteError(RejectedError):
    """This broker does not serve that subject; refresh the route and go where it says."""

    code = ErrorCode.STALE_ROUTE
    retryable = True


class ReadOnlyError(RejectedError):
    """The broker takes no sends now, or none to this subject; nothing was stored.

    What it has can still be pulled and settled, and other brokers may take the send.
    """

    code = ErrorCode.READ_ONLY
    retryable = True


class LockLostError(RejectedError):
    """The partition is not this consumer's, or not any more: it may settle nothing of it.

    What the consumer still holds must be abandoned. If the partition is allotted to it, it asks
    for the lock again, and then pulls from what its group has settled.
    """

    code = ErrorCode.LOCK_LOST


class UnavailableError(PulqueError):
    """There was no answer, so the outcome is unknown; trying again is safe where deduplicated."""

    code = ErrorCode.UNAVAILABLE
    retryable = True


class DisconnectedError(UnavailableError):
    """The connection was lost, or could not be made."""

    code = ErrorCode.DISCONNECTED


class RequestTimeoutError(UnavailableError):
    """The answer did not come in time."""

    code = ErrorCode.REQUEST_TIMEOUT


class OverloadedError(UnavailableError):
    """The broker has more to do than it may buffer; nothing was stored."""

    code = ErrorCode.OVERLOADED
    outcome_known = True


class SpoolFullError(UnavailableError):
    """A producer's spool keeps as much as it may; the message was not taken in."""

    code = ErrorCode.SPOOL_FULL
    outcome_known = True


class StorageError(PulqueError):
    """The disk said no; the broker stops taking writes."""

    code = ErrorCode.STORAGE


class StorageFullError(StorageError):
    """There is no room for new messages; what is stored can still be pulled and settled."""

    code = ErrorCode.STORAGE_FULL
    retryable = True
    outcome_known = True


class DataDirectoryError(StorageError):
    """The data directory cannot be used as it is; the text says what to do."""

    code = ErrorCode.DATA_DIRECTORY


class CorruptionError(StorageError):
    """Bytes on disk are not what was written.

    Attributes:
        path: The file.
        offset: Where in the log the damage begins.
        reason: What is wrong there.
    """

    code = ErrorCode.CORRUPTION

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(f"{path} at offset {offset}: {reason}")
        self.path = path
        self.offset = offset
        self.reason = reason


def _by_code() -> dict[int, type[PulqueError]]:
    classes: dict[int, type[PulqueError]] = {}
    todo: list[type[PulqueError]] = [PulqueError]
    while todo:
        kind = todo.pop(0)
        # The first class with a code is the most general one, as the walk is breadth first.
        classes.setdefault(int(kind.code), kind)
        todo.extend(kind.__subclasses__())
    classes[ErrorCode.INVALID_REQUEST] = InvalidRequestError
    classes[ErrorCode.PROTOCOL] = RemoteProtocolError
    return classes


_CLASSES = _by_code()


def error_from_wire(code: int, text: str) -> PulqueError:
    """Make the error that the peer raised out of its code and text."""
    kind = _CLASSES.get(code, PulqueError)
    if kind is CorruptionError:
        return StorageError(text)
    return kind(text)

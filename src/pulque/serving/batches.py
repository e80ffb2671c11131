"""What a batch that somebody sends has to be like, to be stored."""

from dataclasses import dataclass
from typing import NoReturn

from pulque.errors import InvalidBatchError, MessageTooLargeError, UnsupportedError
from pulque.model.batch import BatchHeader, Flag, layout_of, read_header
from pulque.model.checksum import is_crc_of_rest
from pulque.serving.columns import total_and_largest

__all__ = ["SendLimits", "check_batch"]

_DUE = int(Flag.DUE)  # an operation on the enum itself costs more than all else in the check


@dataclass(frozen=True, slots=True)
class SendLimits:
    """What a send may hold."""

    max_batch: int
    max_message: int
    max_waiting: int
    """Bytes of all batches that are not confirmed yet."""


def check_batch(
    batch: bytes, seed: int, limits: SendLimits, *, is_delayed: bool = False
) -> BatchHeader:
    """Return the header of a batch that may be stored.

    Args:
        batch: As it came.
        seed: Of its partition's name.
        limits: How large it may be.
        is_delayed: Whether every message has to have a due time; else none may have one.

    Raises:
        RejectedError: It may not.
    """
    if len(batch) > limits.max_batch:
        raise MessageTooLargeError(
            f"a batch of {len(batch)} bytes; at most {limits.max_batch} are allowed"
        )
    header = read_header(batch)
    if not is_crc_of_rest(header.crc, batch, seed):
        raise InvalidBatchError("the batch's crc does not match its bytes and its partition")
    if bool(header.flags & _DUE) is not is_delayed:
        _refuse_due(is_delayed=is_delayed)
    total, largest = total_and_largest(batch, header.count)
    if largest > limits.max_message:
        raise MessageTooLargeError(
            f"a message of {largest} bytes; at most {limits.max_message} are allowed"
        )
    columns = header.count * layout_of(header.flags).record_width
    if columns + total != header.records_size:
        raise InvalidBatchError(
            f"messages of {total} bytes and columns of {columns} do not make records of "
            f"{header.records_size} bytes"
        )
    return header


def _refuse_due(*, is_delayed: bool) -> NoReturn:
    if is_delayed:
        raise InvalidBatchError("a delay server takes only messages with a due time each")
    raise UnsupportedError("this broker holds no delayed messages: a due time is not allowed")

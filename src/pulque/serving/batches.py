"""What a batch that somebody sends has to be like, to be stored."""

from dataclasses import dataclass
from typing import NoReturn

from pulque.errors import (
    InvalidBatchError,
    MessageTooLargeError,
    NotAllowedError,
    UnsupportedError,
)
from pulque.model.batch import BatchHeader, Flag, layout_of, read_header
from pulque.model.checksum import is_crc_of_rest
from pulque.model.compression import check_compressed
from pulque.model.message import StoredBatch, check_messages
from pulque.model.names import PartitionName
from pulque.model.pack import ONCE_HEADER, SYSTEM_PREFIX
from pulque.model.positions import ConsumeSequence
from pulque.serving.columns import do_parts_fit, total_and_largest

__all__ = ["SendLimits", "check_batch", "check_headers"]

_PARTS = int(Flag.KEYS | Flag.ORDER_KEYS | Flag.TAGS | Flag.HEADERS)
_HEADERS, _NAMED = int(Flag.HEADERS), int(Flag.NAMED_PRODUCER)
_SYSTEM = SYSTEM_PREFIX.encode()
_ONCE = ONCE_HEADER.encode() + b"\0"
_DUE = int(Flag.DUE)  # an operation on the enum itself costs more than all else in the check


@dataclass(frozen=True, slots=True)
class SendLimits:
    """What a send may hold."""

    max_batch: int
    max_message: int
    max_waiting: int
    """Bytes of all batches that are not confirmed yet."""
    opens_records: bool = False
    """Whether batches are decompressed and every message is decoded before it is stored."""


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
    if header.codec or header.flags & _PARTS:
        _check_records(batch, header)
    if limits.opens_records:
        check_messages(_opened(batch))
    return header


def check_headers(batch: bytes, header: BatchHeader, limits: SendLimits) -> None:
    """Refuse messages with a header that only the system may set.

    Records are opened only if the name of such a header is found somewhere in the batch; those of
    a compressed batch only if all are. A delay server has a name, and sends what it confirmed.

    Raises:
        NotAllowedError: A message has one.
    """
    flags = header.flags
    if not flags & _HEADERS or flags & _NAMED:
        return
    if header.codec:
        if not limits.opens_records:
            return
    elif _SYSTEM not in batch or batch.count(_SYSTEM) == batch.count(_ONCE):
        return
    found = _opened(batch)
    for encoded in {found.part(index, _HEADERS) for index in range(header.count)}:
        for name in encoded.split(b"\0")[::2] if _SYSTEM in encoded else ():
            if name.startswith(_SYSTEM) and name + b"\0" != _ONCE:
                raise NotAllowedError(
                    f"header {name.decode(errors='replace')!r}: names that begin with "
                    f"{SYSTEM_PREFIX} belong to the system"
                )


def _check_records(batch: bytes, header: BatchHeader) -> None:
    """Refuse records that cannot be decoded, as far as that is seen without opening them."""
    if header.codec:
        start = layout_of(header.flags).records_start(header.count)
        check_compressed(memoryview(batch)[start:], header.codec, header.records_size)
    elif not do_parts_fit(batch, header.flags, header.count):
        raise InvalidBatchError(
            "key, order key, tags and headers of a message are longer than the message"
        )


def _opened(batch: bytes) -> StoredBatch:
    return StoredBatch(
        batch,
        partition=PartitionName(""),
        first_sequence=ConsumeSequence(0),
        stored_at_ms=0,
    )


def _refuse_due(*, is_delayed: bool) -> NoReturn:
    if is_delayed:
        raise InvalidBatchError("a delay server takes only messages with a due time each")
    raise UnsupportedError("this broker holds no delayed messages: a due time is not allowed")

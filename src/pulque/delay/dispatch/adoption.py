"""Deliver messages to one group only: a broker adopts each of them, once."""

from hashlib import blake2b

from pulque.errors import RejectedError
from pulque.model.batch import seed_of
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName, owner_of
from pulque.model.pack import BatchPacker, encode_headers, encode_tags
from pulque.model.positions import ConsumeSequence
from pulque.model.returning import REASON_HEADER, RETURN_HEADER, parse_return
from pulque.wire.adopt import Adopt, Origin

__all__ = ["adoption_of"]

_REASON = "it was to be retried at this time"


def adoption_of(batch: bytes, partition: PartitionName, due_ms: int, server: str) -> Adopt:
    """Return the request that adds a message to the retries of its group.

    Args:
        batch: A batch of the message alone.
        partition: The retry partition of its group.
        due_ms: When it was due.
        server: The delay server's name, as the origin if the message has none.
    """
    stored = StoredBatch(
        batch, partition=partition, first_sequence=ConsumeSequence(0), stored_at_ms=0
    )
    message = Message(stored, 0)
    headers = message.headers
    try:
        told = parse_return(headers)
        origin = Origin(told.broker_group, told.partition, told.sequence)
        consumer = str(told.consumer)
    except RejectedError:
        origin = Origin(server, partition, _sequence_of(message, due_ms))
        consumer = server
    reason = headers.pop(REASON_HEADER, _REASON)
    headers.pop(RETURN_HEADER, None)
    packed = _packed(message, headers, origin.partition)
    group = str(owner_of(partition))
    return Adopt(group, consumer, reason, 0, message.attempt, origin, packed)


def _sequence_of(message: Message, due_ms: int) -> ConsumeSequence:
    """Return a number that is unique among the messages of this server."""
    named = f"{message.id} {due_ms}".encode()
    return ConsumeSequence(int.from_bytes(blake2b(named, digest_size=7).digest(), "little"))


def _packed(message: Message, headers: dict[str, str], partition: PartitionName) -> bytes:
    packer = BatchPacker()
    packer.add_encoded(
        message.body,
        key=(message.key or "").encode(),
        order_key=(message.order_key or "").encode(),
        tags=encode_tags(message.tags),
        headers=encode_headers(headers, is_system=True),
        expires_at_ms=message.expires_at_ms,
        created_at_ms=message.created_at_ms,
        attempt=message.attempt,
    )
    return packer.encode(
        seed=seed_of(partition),
        ids=bytes.fromhex(message.id.replace("-", "")),
        created_at_ms=message.created_at_ms,
        priority=message.priority,
    )

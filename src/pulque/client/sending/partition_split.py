"""What becomes of batches whose partition was split: each message goes where its key is now.

A partition that was split takes no messages any more. What waits for it is dealt out anew, in
order and before all that comes later; what is on its way is waited for first, as nobody knows
yet whether it is stored.
"""

from collections.abc import Callable

from pulque.client.routing.targets import Target, Targets
from pulque.client.sending.outgoing_batch import OutgoingBatch, Stream
from pulque.model.batch import Flag
from pulque.model.message import StoredBatch
from pulque.model.positions import ConsumeSequence

__all__ = ["divide", "is_moved", "is_quiet"]

_PARTS = (Flag.KEYS, Flag.ORDER_KEYS, Flag.TAGS, Flag.HEADERS)


def is_moved(stream: Stream, targets: Targets) -> bool:
    """Say whether a route gives the order keys of a stream's partition to others.

    One whose broker is away is not in the route at all: that is no split.
    """
    own = stream.target
    return any(
        each.key == own.key and each.slots != own.slots for each in targets.of_level(own.level)
    )


def is_quiet(stream: Stream) -> bool:
    """Say whether nothing of a stream may be stored without our knowing."""
    return not stream.in_flight and not any(
        each.is_unanswered and not each.is_done for each in stream.ready
    )


def divide(
    batch: OutgoingBatch, targets: Targets, stream_of: Callable[[Target], Stream], now: float
) -> list[OutgoingBatch]:
    """Return the batches that the messages of a packed batch go in, in order.

    Args:
        batch: It; it has its outcome when all of them have one.
        targets: The partitions by now.
        stream_of: Returns what leads to one of them.
        now: The monotonic clock's.
    """
    level = batch.stream.target.level
    stored = StoredBatch(
        batch.data,
        partition=batch.stream.target.partition,
        first_sequence=ConsumeSequence(0),
        stored_at_ms=0,
    )
    spare: Target | None = None
    pieces: dict[Target, OutgoingBatch] = {}
    for index in range(len(stored)):
        key, order_key, tags, headers = (stored.part(index, int(flag)) for flag in _PARTS)
        if order_key:
            target = targets.pick(order_key.decode(), level, now)
        else:
            target = spare = spare or targets.pick(None, level, now)
        piece = pieces.get(target)
        if piece is None:
            piece = pieces[target] = _empty_like(batch, stream_of(target))
        batch.pieces.append((piece, len(piece.bodies)))
        piece.packer.add_encoded(
            stored.data[stored.body_starts()[index] : stored.starts[index + 1]],
            key=key,
            order_key=order_key,
            tags=tags,
            headers=headers,
            expires_at_ms=_number(stored, index, Flag.EXPIRES, "expires_at_ms"),
            due_at_ms=_number(stored, index, Flag.DUE, "due_at_ms"),
            message_id=stored.id_of(index),
        )
        piece.ids += stored.id_of(index)
        if batch.kept is not None and piece.kept is not None:
            piece.kept.append(batch.kept[index])
    batch.pieces_left = len(pieces)
    return list(pieces.values())


def _empty_like(batch: OutgoingBatch, stream: Stream) -> OutgoingBatch:
    piece = OutgoingBatch(
        batch.way, stream, batch.lock, due_at=batch.due_at, deadline=batch.deadline
    )
    piece.timeout = batch.timeout
    piece.whole = batch
    piece.is_ordered = batch.is_ordered
    piece.may_be_doubled = batch.may_be_doubled
    piece.may_be_stored = batch.may_be_stored
    piece.refusal = batch.refusal
    piece.opened_at_ms = batch.opened_at_ms
    piece.kept = None if batch.kept is None else []
    return piece


def _number(stored: StoredBatch, index: int, flag: Flag, name: str) -> int:
    return stored.column(name)[index] if stored.header.flags & flag else 0

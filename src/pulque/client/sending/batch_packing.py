"""How the batch of a producer is packed, for its partition and with its number."""

from pulque.client.sending.outgoing_batch import OutgoingBatch
from pulque.model.batch import Codec
from pulque.model.names import DEFAULT_LEVEL
from pulque.model.pack import ProducedBy
from pulque.model.single import pack_single

__all__ = ["packed"]


def packed(batch: OutgoingBatch, producer_id: int, codec: Codec) -> bytes:
    """Return a batch as it is sent, with the next number of its stream."""
    stream = batch.stream
    target = stream.target
    if batch.is_plain and batch.count == 1 and not codec and target.level == DEFAULT_LEVEL:
        return pack_single(
            batch.bodies[0],
            seed=target.seed,
            message_id=batch.ids,
            created_at_ms=batch.opened_at_ms,
            producer_id=producer_id,
            producer_sequence=stream.next_number,
        )
    return batch.packer.encode(
        seed=target.seed,
        ids=batch.ids,
        created_at_ms=batch.opened_at_ms,
        produced_by=ProducedBy(producer_id, 0, stream.next_number),
        priority=target.level,
        codec=codec,
    )

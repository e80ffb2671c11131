"""Any message that a batch can hold, and how to pack and to read it."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from pulque.model.batch import Codec, seed_of
from pulque.model.message import Message, StoredBatch
from pulque.model.names import parse_partition
from pulque.model.pack import NOBODY, BatchPacker, ProducedBy, encode_headers, encode_tags
from pulque.model.positions import ConsumeSequence

__all__ = [
    "CREATED_AT_MS",
    "FIRST_SEQUENCE",
    "PARTITION",
    "SEED",
    "STORED_AT_MS",
    "Draft",
    "drafts",
    "ids_for",
    "messages_of",
    "opened",
    "packed",
    "read_all",
]

PARTITION = parse_partition("orders#3")
SEED = seed_of(PARTITION)
CREATED_AT_MS = 1_700_000_000_000
STORED_AT_MS = 1_700_000_000_777
FIRST_SEQUENCE = ConsumeSequence(41)


@dataclass(frozen=True, slots=True)
class Draft:
    """What goes into a message; empty, 0 or 1 stand for not given."""

    body: bytes = b""
    key: str = ""
    order_key: str = ""
    tags: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    expires_at_ms: int = 0
    created_at_ms: int = 0
    attempt: int = 1
    id: bytes = b""

    @property
    def is_new(self) -> bool:
        """Whether a producer could make it: the rest is for brokers, who pass messages on."""
        return not self.created_at_ms and self.attempt == 1 and not self.id


def ids_for(count: int) -> bytes:
    return b"".join(b"made-here-%06d" % i for i in range(count))


def packed(
    messages: Sequence[Draft],
    *,
    codec: Codec = Codec.NONE,
    seed: int = SEED,
    priority: int = 4,
    produced_by: ProducedBy = NOBODY,
) -> bytes:
    """Pack messages, each in the way that it would be."""
    packer = BatchPacker()
    for message in messages:
        if message.is_new:
            packer.add(
                message.body,
                key=message.key or None,
                order_key=message.order_key or None,
                tags=message.tags,
                headers=dict(message.headers),
                expires_at_ms=message.expires_at_ms,
            )
        else:
            packer.add_encoded(
                message.body,
                key=message.key.encode(),
                order_key=message.order_key.encode(),
                tags=encode_tags(message.tags),
                headers=encode_headers(dict(message.headers)),
                expires_at_ms=message.expires_at_ms,
                created_at_ms=message.created_at_ms,
                attempt=message.attempt,
                message_id=message.id,
            )
    return packer.encode(
        seed=seed,
        ids=ids_for(len(messages)),
        created_at_ms=CREATED_AT_MS,
        produced_by=produced_by,
        priority=priority,
        codec=codec,
    )


def opened(batch: bytes) -> StoredBatch:
    return StoredBatch(
        batch, partition=PARTITION, first_sequence=FIRST_SEQUENCE, stored_at_ms=STORED_AT_MS
    )


def messages_of(batch: bytes) -> list[Message]:
    stored = opened(batch)
    return [Message(stored, i) for i in range(len(stored))]


def read_all(messages: Sequence[Message]) -> list[Draft]:
    """Read every field, as far as it can be known what went in: ids and times are always there."""
    return [
        Draft(
            body=message.body,
            key=message.key or "",
            order_key=message.order_key or "",
            tags=message.tags,
            headers=tuple(message.headers.items()),
            expires_at_ms=message.expires_at_ms,
            created_at_ms=message.created_at_ms,
            attempt=message.attempt,
            id=bytes.fromhex(message.id),
        )
        for message in messages
    ]


_ANY_TEXT = st.characters(codec="utf-8")
_NO_NUL = st.characters(codec="utf-8", exclude_characters="\0")
_instants = st.one_of(st.just(0), st.integers(1, 2**63 - 1))
_tags = st.lists(st.text(_NO_NUL, min_size=1, max_size=8), max_size=4).map(tuple)
_headers = st.dictionaries(
    st.text(_NO_NUL, min_size=1, max_size=8), st.text(_NO_NUL, max_size=8), max_size=3
).map(lambda headers: tuple(headers.items()))

drafts: st.SearchStrategy[Draft] = st.builds(
    Draft,
    body=st.binary(max_size=40),
    key=st.text(_ANY_TEXT, max_size=10),
    order_key=st.text(_ANY_TEXT, max_size=10),
    tags=_tags,
    headers=_headers,
    expires_at_ms=_instants,
    created_at_ms=_instants,
    attempt=st.integers(1, 0xFFFF),
    id=st.one_of(st.just(b""), st.binary(min_size=16, max_size=16)),
)
"""With everything; ``st.builds(Draft, body=…)`` gives plain ones."""

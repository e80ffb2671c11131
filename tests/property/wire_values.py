"""Any request and any answer, and how to take them through a connection."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

from hypothesis import strategies as st

from pulque.model.routes import ALONE, PartitionRoute
from pulque.wire.frame import Frame, FrameReader
from pulque.wire.kinds import TEXT, Field, FieldKind, FieldsOf, Id, ListOf, Records, kind_of
from pulque.wire.packet import ANSWERS
from pulque.wire.requests import Replicate, Request
from pulque.wire.responses import Pulled, ReadBack, Response

__all__ = [
    "REQUESTS",
    "RESPONSES",
    "copied",
    "epochs",
    "feed",
    "frame_of",
    "request_ids",
    "requests",
    "responses",
    "values_of",
]

NUMBERS = {
    "u8": st.integers(0, 2**8 - 1),
    "u16": st.integers(0, 2**16 - 1),
    "u32": st.integers(0, 2**32 - 1),
    "u64": st.integers(0, 2**64 - 1),
    "i64": st.integers(-(2**63), 2**63 - 1),
    "bool": st.booleans(),
}
request_ids = epochs = NUMBERS["u32"]
text = st.text(st.characters(codec="utf-8"), max_size=12)
blob = st.binary(max_size=60)
USUAL: dict[tuple[type, str], st.SearchStrategy[Any]] = {
    (PartitionRoute, "sends"): st.sampled_from([0, 1, ALONE]),
    (Replicate, "ready"): st.sampled_from([0, 1, 3]),
}
"""Numbers of which only some mean anything."""


def values_of(kind: FieldKind) -> st.SearchStrategy[Any]:
    """Return any value of a kind, as it is declared."""
    if isinstance(kind, FieldsOf):
        return _records_of(kind)
    if isinstance(kind, ListOf):
        return _few(values_of(kind.of))
    if kind.choices:
        return st.sampled_from(kind.choices)
    if kind.code:
        return NUMBERS[kind.name]
    return OTHERS.get(kind, blob)


def _records_of(declared: FieldsOf) -> st.SearchStrategy[Any]:
    fields = {field.name: _field_of(declared, field) for field in declared.fields}
    if declared.of is tuple:
        return st.tuples(*fields.values())
    return st.builds(declared.of, **fields)


def _field_of(declared: FieldsOf, field: Field) -> st.SearchStrategy[Any]:
    usual = USUAL.get((declared.of, field.name))
    return values_of(field.kind) if usual is None else usual


def _few(of: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=4).map(tuple)


OTHERS: dict[FieldKind, st.SearchStrategy[Any]] = {
    TEXT: text,
    kind_of(Id): st.binary(min_size=16, max_size=16),
    kind_of(Records): st.one_of(blob, _few(blob)),
}
REQUESTS: dict[type[Request], st.SearchStrategy[Request]] = {
    kind: values_of(kind.declared) for kind in get_args(Request)
}
RESPONSES: dict[type[Response], st.SearchStrategy[Response]] = {
    kind: values_of(kind.declared) for kind in ANSWERS.values()
}
requests: st.SearchStrategy[Request] = st.one_of(*REQUESTS.values())
responses: st.SearchStrategy[Response] = st.one_of(*RESPONSES.values())


def feed(reader: FrameReader, data: bytes) -> None:
    """Put bytes into a reader as a socket does: as many at a time as there is room for."""
    while data:
        room = reader.buffer()
        count = min(len(room), len(data))
        room[:count] = data[:count]
        reader.received(count)
        data = data[count:]


def frame_of(buffers: Iterable[bytes | memoryview]) -> Frame:
    """Return the one frame that these buffers are."""
    reader = FrameReader()
    feed(reader, b"".join(buffers))
    frame = reader.next_frame()
    assert frame is not None
    assert not reader.is_inside_frame
    return frame


def copied(response: Response) -> Response:
    """Return an answer with records in one piece, to compare what was sent with what came."""
    if isinstance(response, ReadBack):
        return replace(response, records=_joined(response.records))
    if isinstance(response, Pulled):
        deliveries = (replace(d, records=_joined(d.records)) for d in response.deliveries)
        return replace(response, deliveries=tuple(deliveries))
    return response


def _joined(records: bytes | memoryview | tuple[bytes | memoryview, ...]) -> bytes:
    return b"".join(records) if isinstance(records, tuple) else bytes(records)

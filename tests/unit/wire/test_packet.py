"""A message declares its fields once: how it is written and read follows, for every version."""

import sys
from struct import pack
from typing import Annotated, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.errors import (
    InvalidRequestError,
    LocalProtocolError,
    RemoteProtocolError,
    UnsupportedError,
)
from pulque.model.ordered import OrderStrategy
from pulque.model.positions import Epoch, StartCount, Tenure
from pulque.wire.codec import Reader, Writer
from pulque.wire.kinds import I64, U8, U16, U32, many, row, since
from pulque.wire.opcodes import Opcode
from pulque.wire.packet import Packet, Response, coder_of, packet
from pulque.wire.requests import Pull, Send, Settle
from pulque.wire.responses import Pulled, Sent
from tests.property.wire_values import copied, values_of


@row(first="held")
class Shelf(NamedTuple):
    """A row whose last field came later."""

    name: str
    held: U16
    limit: Annotated[I64, since(2)] = -1


@packet(Opcode.STATUS, first="tenure number")
class Grown(Packet):
    """Made up: ``reason`` came with version 2 in the middle of the class, ``mood`` with 3."""

    name: str
    tenure: Tenure
    number: U32
    reason: Annotated[str, since(2)] = "none given"
    order: OrderStrategy = OrderStrategy.BEST_EFFORT
    shelves: Annotated[tuple[Shelf, ...], many("shelves", most=3)] = ()
    mood: Annotated[U8, since(3)] = 7


TENURE = Tenure(Epoch(5), StartCount(2))
WHOLE = Grown("a", TENURE, 41, "late", OrderStrategy.STRICT, (Shelf("s", 3, 9),), 8)
OLD = pack("<III", 5, 2, 41) + b"\1\0a" + b"\1" + b"\1\0" + b"\3\0" + b"\1\0s"
NEW = OLD + b"\x09\0\0\0\0\0\0\0" + b"\4\0late"


def written(value: Packet, version: int) -> bytes:
    writer = Writer()
    value.write(writer, version)
    return writer.join()


def heard(data: bytes, version: int) -> Grown:
    reader = Reader(memoryview(data))
    found = Grown.read(reader, version)
    reader.end()
    return found


@pytest.mark.parametrize(
    ("version", "data"), [(1, OLD), (2, NEW), (3, NEW + b"\x08"), (9, NEW + b"\x08")]
)
def test_a_peer_gets_the_fields_of_its_version(version: int, data: bytes) -> None:
    assert written(WHOLE, version) == data


def test_a_field_that_a_peer_does_not_send_has_its_default() -> None:
    old = Grown("a", TENURE, 41, order=OrderStrategy.STRICT, shelves=(Shelf("s", 3),))

    assert heard(OLD, 1) == old
    assert (old.reason, old.shelves[0].limit, old.mood) == ("none given", -1, 7)
    assert heard(NEW + b"\x08", 3) == WHOLE


def test_a_version_has_no_fields_of_a_later_one() -> None:
    with pytest.raises(RemoteProtocolError, match="6 bytes too many"):
        heard(OLD + b"\4\0late", 1)
    with pytest.raises(RemoteProtocolError):
        heard(OLD, 2)


@pytest.mark.parametrize(("version", "layout"), [(1, 1), (2, 2), (3, 3), (200, 3)])
def test_a_frame_names_the_version_that_last_changed_its_message(
    version: int, layout: int
) -> None:
    assert Grown.declared.versions == (1, 2, 3)
    assert Grown.layout(version) == layout
    assert Send.layout(version) == 1


@packet(Opcode.STATUS)
class Holder(Packet):
    """Made up: only what it holds grew."""

    shelves: tuple[Shelf, ...]


def test_a_message_grows_with_what_it_holds() -> None:
    assert Holder.declared.versions == (1, 2)
    assert written(Holder((Shelf("s", 3, 9),)), 1) == b"\1\0\3\0\1\0s"
    assert written(Holder((Shelf("s", 3, 9),)), 2) == b"\1\0\3\0\1\0s" + pack("<q", 9)
    reader = Reader(memoryview(b"\1\0\3\0\1\0s"))
    assert Holder.read(reader, 1) == Holder((Shelf("s", 3, -1),))


def test_a_tuple_holds_no_records() -> None:
    with pytest.raises(TypeError, match="a part of a tuple has fields"):

        @packet(Opcode.STATUS)
        class Bad(Packet):
            pairs: Annotated[tuple[tuple[str, Shelf], ...], many(each="name shelf")]


def test_a_field_that_came_later_needs_a_default() -> None:
    with pytest.raises(TypeError, match=r"Bad\.late came later: it needs a default"):

        @packet(Opcode.STATUS)
        class Bad(Packet):
            late: Annotated[U8, since(2)]


def test_a_number_needs_a_width() -> None:
    with pytest.raises(TypeError, match="does not say how it travels"):

        @packet(Opcode.STATUS)
        class Bad(Packet):
            number: int


def test_a_list_that_is_too_long_is_refused_before_it_is_built() -> None:
    data = pack("<III", 5, 2, 41) + b"\1\0a" + b"\1" + b"\4\0"

    with pytest.raises(InvalidRequestError, match="4 shelves; at most 3 are allowed"):
        heard(data + bytes(16), 1)
    with pytest.raises(RemoteProtocolError, match=r"4 shelves announced .* at least 4 bytes"):
        heard(data + bytes(15), 1)


def test_a_number_that_stands_for_nothing_is_refused() -> None:
    data = bytearray(OLD)
    data[15] = 9

    with pytest.raises(UnsupportedError, match="strategy of order 9 is unknown; known are 0"):
        heard(bytes(data), 1)


def test_a_number_that_does_not_fit_is_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError, match="do not fit <III"):
        written(Grown("a", TENURE, 2**32), 1)


HAND_WRITTEN: list[type[Packet]] = [Send, Sent, Pull, Pulled, Settle]


def test_no_other_message_is_written_by_hand() -> None:
    modules = [sys.modules[name] for name in sys.modules if name.startswith("pulque.wire.")]
    kinds = {
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Packet) and "declared" in vars(kind)
    }
    own = {kind for kind in kinds if vars(kind)["write"].__module__ != "pulque.wire.packet"}

    assert own == set(HAND_WRITTEN)


@pytest.mark.parametrize("kind", HAND_WRITTEN)
@given(data=st.data())
def test_a_codec_by_hand_does_what_its_declaration_says(
    kind: type[Packet], data: st.DataObject
) -> None:
    value = data.draw(values_of(kind.declared))
    version = data.draw(st.sampled_from(kind.declared.versions))
    coder = coder_of(kind.declared, version)
    ours, theirs = Writer(), Writer()
    value.write(ours, version)
    coder.write(value, theirs)

    assert ours.join() == theirs.join()
    payload = memoryview(ours.join())
    one, other = Reader(payload), Reader(payload)
    found = kind.read(one, version)
    assert in_one_piece(found) == in_one_piece(coder.read(other))
    assert [type(part) for part in vars_of(found)] == [type(part) for part in vars_of(value)]
    one.end()
    other.end()


def in_one_piece(value: Packet) -> Packet:
    return copied(value) if isinstance(value, Response) else value


def vars_of(value: Packet) -> list[object]:
    return [getattr(value, name) for name in value.declared.names]


@pytest.mark.parametrize("kind", HAND_WRITTEN)
@given(data=st.data())
def test_both_refuse_what_was_cut(kind: type[Packet], data: st.DataObject) -> None:
    writer = Writer()
    data.draw(values_of(kind.declared)).write(writer)
    payload = writer.join()
    cut = payload[: data.draw(st.integers(0, max(len(payload) - 1, 0)))]

    for read in (kind.read, coder_of(kind.declared).read):
        with pytest.raises((RemoteProtocolError, ValueError)):
            read(Reader(memoryview(cut)))

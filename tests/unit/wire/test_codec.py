"""Numbers, strings and lists come back, and lengths that lie are refused."""

from struct import Struct

import pytest

from pulque.errors import LocalProtocolError, RemoteProtocolError
from pulque.wire.codec import Reader, Writer


def reader_of(data: bytes) -> Reader:
    return Reader(memoryview(data))


def test_parts_are_these_bytes() -> None:
    writer = Writer()
    writer.pack(Struct("<BI"), 1, 2)
    writer.text("é")
    writer.count(3)
    writer.blob(memoryview(b"abc"))

    assert writer.join() == b"\x01\x02\0\0\0" + b"\x02\0\xc3\xa9" + b"\x03\0" + b"\x03\0\0\0abc"
    assert writer.size() == len(writer.join())


def test_parts_come_back() -> None:
    writer = Writer()
    writer.text("日本")
    writer.count(65_535)
    writer.blob(b"")
    writer.text("t" * 65_535)
    reader = reader_of(writer.join())

    assert reader.text() == "日本"
    assert reader.count() == 65_535
    assert bytes(reader.blob()) == b""
    assert reader.text() == "t" * 65_535
    reader.end()


@pytest.mark.parametrize("values", [(-1,), (2**32,), ("x",), ()])
def test_numbers_that_do_not_fit_are_refused(values: tuple[object, ...]) -> None:
    with pytest.raises(LocalProtocolError, match="do not fit <I"):
        Writer().pack(Struct("<I"), *values)


def test_a_list_that_is_too_long_is_refused() -> None:
    with pytest.raises(LocalProtocolError):
        Writer().count(65_536)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("t" * 65_536, "65536 bytes"), ("\ud800", "cannot be written as UTF-8")],
)
def test_a_text_that_cannot_be_written_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(LocalProtocolError, match=complaint):
        Writer().text(text)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "2 bytes expected at 0 of a payload of 0"),
        (b"\x01", "2 bytes expected"),
        (b"\x01\0", "1 bytes announced at 2 of a payload of 2"),
        (b"\xff\xffabc", "65535 bytes announced"),
        (b"\x01\0\xff", "not UTF-8"),
        (b"\x03\0\xed\xa0\x80", "not UTF-8"),  # a lone surrogate
    ],
)
def test_a_text_that_lies_is_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(RemoteProtocolError, match=complaint):
        reader_of(data).text()


@pytest.mark.parametrize("data", [b"", b"\0\0\0", b"\x01\0\0\0", b"\xff\xff\xff\xffabc"])
def test_a_blob_that_lies_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        reader_of(data).blob()


def test_a_rest_is_refused() -> None:
    reader = reader_of(b"\0\0ab")
    reader.count()

    with pytest.raises(RemoteProtocolError, match="2 bytes too many in a payload of 4"):
        reader.end()

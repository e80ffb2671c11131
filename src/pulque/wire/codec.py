"""Integers, strings and lists to bytes and back.

A reader checks every length against what is there before it takes it, and that nothing is left
at the end: a payload that lies is refused as a whole. A list that is longer than allowed is
refused before any of its entries is built.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from struct import Struct, error
from types import MappingProxyType
from typing import Any

from pulque.errors import InvalidRequestError, LocalProtocolError, RemoteProtocolError

__all__ = ["SHORT", "LimitedReader", "Reader", "Writer", "encode_name", "encode_text"]

_U16 = Struct("<H")
_U32 = Struct("<I")
_unpack_u16 = _U16.unpack_from
_MAX_TEXT = 0xFFFF
_ANY_COUNT = 0xFFFF
SHORT = 256
"""Texts of fewer characters are encoded once and kept: names come again and again."""


def encode_text(text: str) -> bytes:
    """Return a string of at most 65,535 bytes after its length."""
    try:
        data = text.encode()
    except UnicodeEncodeError as problem:
        raise LocalProtocolError(f"{text!r} cannot be written as UTF-8: {problem}") from None
    if len(data) > _MAX_TEXT:
        raise LocalProtocolError(f"a text of {len(data)} bytes; at most {_MAX_TEXT} are allowed")
    return _U16.pack(len(data)) + data


encode_name = lru_cache(maxsize=4096)(encode_text)
"""Does the same for strings that come again and again."""


class Writer:
    """Builds a payload out of small parts and buffers."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []

    def pack(self, form: Struct, *values: Any) -> None:
        """Append fixed-width numbers."""
        try:
            self.parts.append(form.pack(*values))
        except error as problem:
            raise LocalProtocolError(f"{values!r} do not fit {form.format}: {problem}") from None

    def texts(self, texts: Iterable[str]) -> None:
        """Append strings, without their number."""
        self.parts += [
            encode_name(each) if len(each) < SHORT else encode_text(each) for each in texts
        ]

    def text(self, text: str) -> None:
        """Append a string of at most 65,535 bytes."""
        self.parts.append(encode_text(text))

    def count(self, count: int) -> None:
        """Append the length of a list."""
        self.pack(_U16, count)

    def blob(self, data: bytes | memoryview) -> None:
        """Append bytes after their length."""
        self.pack(_U32, len(data))
        self.parts.append(data)

    def buffers(self, buffers: tuple[bytes | memoryview, ...]) -> None:
        """Append bytes that lie in several buffers, after the length of them all."""
        self.pack(_U32, sum(map(len, buffers)))
        self.parts += buffers

    def named_blobs(self, pairs: Iterable[tuple[str, bytes | memoryview]]) -> None:
        """Append strings, each with bytes: ``text``, then ``blob``."""
        parts = self.parts
        for name, data in pairs:
            parts += (encode_name(name), _U32.pack(len(data)), data)

    def names_numbers(self, rows: Iterable[Sequence[Any]], form: Struct) -> None:
        """Append strings, each with numbers behind it."""
        append, pack = self.parts.append, form.pack
        for name, *numbers in rows:
            try:
                append(encode_name(name) + pack(*numbers))
            except error:
                self.pack(form, *numbers)  # which says what does not fit

    def size(self) -> int:
        """Return how many bytes there are."""
        return sum(map(len, self.parts))

    def join(self) -> bytes:
        """Return everything in one piece."""
        return b"".join(self.parts)


class Reader:
    """Takes a payload apart."""

    __slots__ = ("_at", "_data")
    limits: Mapping[str, int] = MappingProxyType({})
    """How long lists may be, by what is in them, where a server allows more or fewer."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def unpack(self, form: Struct) -> tuple[Any, ...]:
        """Take fixed-width numbers."""
        at = self._at
        end = at + form.size
        if end > len(self._data):
            raise RemoteProtocolError(
                f"{form.size} bytes expected at {at} of a payload of {len(self._data)}"
            )
        self._at = end
        return form.unpack_from(self._data, at)

    def text(self) -> str:
        """Take a string."""
        at, data = self._at + 2, self._data
        if at > len(data):
            self.unpack(_U16)
        end = at + _U16.unpack_from(data, self._at)[0]
        self._at = at
        if end > len(data):
            self.take(end - at)
        try:
            text = str(data[at:end], "utf-8")
        except UnicodeDecodeError as problem:
            raise RemoteProtocolError(f"a text is not UTF-8: {problem}") from None
        self._at = end
        return text

    def texts(self, count: int) -> list[Any]:
        """Take so many strings."""
        data, at, length = self._data, self._at, len(self._data)
        found: list[Any] = []
        try:
            for _ in range(count):
                begin = at + 2
                end = begin + _unpack_u16(data, at)[0]
                if end > length:
                    break
                found.append(str(data[begin:end], "utf-8"))
                at = end
        except (error, UnicodeDecodeError):
            pass  # said below what is wrong
        self._at = at
        while len(found) < count:
            found.append(self.text())
        return found

    def count(self, what: str = "entries", *, most: int = _ANY_COUNT, least_size: int = 0) -> int:
        """Take the length of a list, and check it before anything of the list is built.

        Args:
            what: What the entries are, for people.
            most: How many are allowed.
            least_size: How many bytes an entry has at least.

        Raises:
            InvalidRequestError: There are more than are allowed; the connection may go on.
            RemoteProtocolError: There are more than there are bytes for.
        """
        count: int = self.unpack(_U16)[0]
        self.check_count(count, what, most=most, least_size=least_size)
        return count

    def check_count(self, count: int, what: str, *, most: int, least_size: int) -> None:
        """Check the length of a list whose entries come next, as ``count`` does."""
        if count * least_size > len(self._data) - self._at:
            raise RemoteProtocolError(
                f"{count} {what} announced at {self._at} of a payload of {len(self._data)}, and "
                f"each has at least {least_size} bytes"
            )
        if count > most:
            raise InvalidRequestError(f"{count} {what}; at most {most} are allowed")

    def blob(self) -> memoryview:
        """Take bytes after their length, as a view."""
        (size,) = self.unpack(_U32)
        return self.take(size)

    def named_blobs(self, count: int) -> list[tuple[str, bytes]]:
        """Take so many pairs of a string and bytes, which are copied: ``text``, then ``blob``."""
        data, at, length = self._data, self._at, len(self._data)
        found: list[tuple[str, bytes]] = []
        try:
            for _ in range(count):
                middle = at + 2 + _U16.unpack_from(data, at)[0]
                end = middle + 4 + _U32.unpack_from(data, middle)[0]
                if end > length:
                    break
                found.append((str(data[at + 2 : middle], "utf-8"), bytes(data[middle + 4 : end])))
                self._at = at = end
        except (error, UnicodeDecodeError):
            pass  # said below what is wrong
        return found + [(self.text(), bytes(self.blob())) for _ in range(count - len(found))]

    def named_numbers(self, count: int, form: Struct) -> list[tuple[Any, ...]]:
        """Take so many strings, each with numbers behind it: ``text``, then ``unpack``."""
        data, at, size = self._data, self._at, form.size
        found: list[tuple[Any, ...]] = []
        try:
            for _ in range(count):
                end = at + 2 + _U16.unpack_from(data, at)[0]
                numbers = form.unpack_from(data, end)
                found.append((str(data[at + 2 : end], "utf-8"), *numbers))
                self._at = at = end + size
        except (error, UnicodeDecodeError):
            pass  # said below what is wrong
        return found + [(self.text(), *self.unpack(form)) for _ in range(count - len(found))]

    def numbers_named(self, count: int, form: Struct) -> list[tuple[Any, ...]]:
        """Take so many times numbers with a string behind them: ``unpack``, then ``text``."""
        data, at, size, length = self._data, self._at, form.size, len(self._data)
        found: list[tuple[Any, ...]] = []
        try:
            for _ in range(count):
                numbers = form.unpack_from(data, at)
                begin = at + size + 2
                end = begin + _U16.unpack_from(data, at + size)[0]
                if end > length:
                    break
                found.append((*numbers, str(data[begin:end], "utf-8")))
                self._at = at = end
        except (error, UnicodeDecodeError):
            pass  # said below what is wrong
        return found + [(*self.unpack(form), self.text()) for _ in range(count - len(found))]

    def names_between(self, count: int, first: Struct, last: Struct) -> list[tuple[Any, ...]]:
        """Take so many times numbers, two strings, and numbers again."""
        data, at, before, behind = self._data, self._at, first.size, last.size
        found: list[tuple[Any, ...]] = []
        try:
            for _ in range(count):
                begin = at + before + 2
                middle = begin + _U16.unpack_from(data, begin - 2)[0]
                end = middle + 2 + _U16.unpack_from(data, middle)[0]
                numbers = last.unpack_from(data, end)
                names = str(data[begin:middle], "utf-8"), str(data[middle + 2 : end], "utf-8")
                found.append((*first.unpack_from(data, at), *names, *numbers))
                self._at = at = end + behind
        except (error, UnicodeDecodeError):
            pass  # said below what is wrong
        return found + [
            (*self.unpack(first), self.text(), self.text(), *self.unpack(last))
            for _ in range(count - len(found))
        ]

    def end(self) -> None:
        """Check that nothing is left."""
        if self._at != len(self._data):
            raise RemoteProtocolError(
                f"{len(self._data) - self._at} bytes too many in a payload of {len(self._data)}"
            )

    def take(self, size: int) -> memoryview:
        """Take ``size`` bytes, as a view."""
        end = self._at + size
        if end > len(self._data):
            raise RemoteProtocolError(
                f"{size} bytes announced at {self._at} of a payload of {len(self._data)}"
            )
        view = self._data[self._at : end]
        self._at = end
        return view


class LimitedReader(Reader):
    """Takes a payload apart whose lists have limits of the server."""

    __slots__ = ("limits",)

    def __init__(self, data: memoryview, limits: Mapping[str, int]) -> None:
        super().__init__(data)
        self.limits = limits

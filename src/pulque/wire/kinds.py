"""Kinds of fields: how each value is written and read, and the annotations that name them.

A message annotates its fields with these names, as in ``incarnation: U64``; type checkers see
plain ``int``. Types with only one layout are used as they are: ``str``, ``bool``, ``bytes``,
sequences, epochs, enumerations, named tuples, and tuples, which are lists.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from enum import IntEnum
from struct import calcsize
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin

from pulque.errors import ErrorCode, RemoteProtocolError, UnsupportedError
from pulque.model.cluster import ServerState
from pulque.model.groups import FilterKind
from pulque.model.ids import ID_SIZE
from pulque.model.ordered import ConsumeStrategy, OrderStrategy
from pulque.model.positions import (
    ActionOffset,
    ConsumeSequence,
    Epoch,
    MessageOffset,
    PullSequence,
    StartCount,
    Tenure,
)
from pulque.model.routes import RouteKind
from pulque.wire.codec import Reader, Writer

__all__ = [
    "BLOB",
    "I64",
    "NO_DEFAULT",
    "TEXT",
    "U8",
    "U16",
    "U32",
    "U64",
    "Blob",
    "Code",
    "Field",
    "FieldKind",
    "FieldsOf",
    "Id",
    "ListOf",
    "ReadValue",
    "Records",
    "View",
    "WriteValue",
    "choice",
    "code_of",
    "describe",
    "in_wire_order",
    "kind_of",
    "known",
    "many",
    "row",
    "since",
]

T = TypeVar("T")
KnownT = TypeVar("KnownT", bound=IntEnum)
WriteValue = Callable[..., None]
"""Takes a value and the writer."""
ReadValue = Callable[..., Any]
"""Takes the reader, and returns a value."""
NO_DEFAULT = object()
"""As the default of a field: it has none."""
_ANY_COUNT = 0xFFFF
_CODES: dict[int, ErrorCode] = {each.value: each for each in ErrorCode}


class FieldKind:
    """Describes how one value is written and read."""

    def __init__(
        self, name: str, least: int, write: WriteValue | None, read: ReadValue | None
    ) -> None:
        """Describe a kind.

        Args:
            name: What the reference calls it.
            least: How many bytes it has at least.
            write: Appends a value, where it is no number of fixed width.
            read: Takes one.
        """
        self.name, self.least, self.write, self.read = name, least, write, read
        self.code = ""
        """The letter of a number of fixed width in a ``Struct``."""
        self.convert: Callable[[int], Any] | None = None
        """Returns what such a number stands for, or refuses it."""
        self.choices: tuple[IntEnum, ...] = ()
        """What it may stand for."""
        self.versions: tuple[int, ...] = (1,)
        """Which versions gave it another layout."""


class Field(NamedTuple):
    """One field of a class."""

    name: str
    kind: FieldKind
    since: int = 1
    """The version that it came with."""
    default: Any = NO_DEFAULT


class FieldsOf(FieldKind):
    """The fields of a class, one after the other; those of later versions come last."""

    def __init__(
        self, of: Any, fields: tuple[Field, ...], names: tuple[str, ...] | None = None
    ) -> None:
        """Describe a class.

        Args:
            of: A dataclass, a named tuple or ``tuple``.
            fields: In the order of the wire.
            names: In the order of the class, where that differs.
        """
        late = [field for field in fields if field.since > 1]
        for field in late:
            if field.default is NO_DEFAULT:
                raise TypeError(f"{of.__name__}.{field.name} came later: it needs a default")
        if of is tuple and any(isinstance(field.kind, FieldsOf) for field in fields):
            raise TypeError("a part of a tuple has fields: use a named tuple")
        least = sum(field.kind.least for field in fields if field.since == 1)
        super().__init__("fields", least, None, None)
        self.of = of
        self.fields = tuple(sorted(fields, key=lambda field: field.since))
        self.names = names or tuple(field.name for field in fields)
        inner = (version for field in fields for version in field.kind.versions)
        self.versions = tuple(sorted({*inner, *(field.since for field in late)} | {1}))
        self.build: Callable[[Any], Any] = (
            of if of is tuple else getattr(of, "_make", None) or (lambda values: of(*values))
        )


class ListOf(FieldKind):
    """A list of values of one kind."""

    def __init__(self, of: FieldKind, what: str, most: int, each: str) -> None:
        super().__init__("list", 2, None, None)
        self.versions = of.versions
        self.of, self.what, self.most, self.each = of, what, most, each


class _Many(NamedTuple):
    what: str
    most: int
    each: str


class _Since(NamedTuple):
    version: int


def many(what: str = "entries", *, most: int = _ANY_COUNT, each: str = "") -> _Many:
    """Annotate a list with its limit and with what its entries are called.

    Args:
        what: What the entries are, for whoever sent too many.
        most: How many are allowed; more are refused before any of them is built.
        each: What the reference calls an entry, or the parts of one that is a tuple.
    """
    return _Many(what, most, each)


def since(version: int) -> _Since:
    """Annotate a field that a later version added; from older peers, it has its default."""
    return _Since(version)


def known(kinds: type[KnownT], value: int, what: str) -> KnownT:
    """Return one of several kinds.

    Raises:
        UnsupportedError: There is none of this number.
    """
    try:
        return kinds(value)
    except ValueError:
        names = ", ".join(f"{each.value} ({each.name.lower()})" for each in kinds)
        raise UnsupportedError(f"{what} {value} is unknown; known are {names}") from None


def choice(kinds: type[KnownT], what: str) -> FieldKind:
    """Return the kind of an enumeration whose unknown numbers are refused.

    Args:
        kinds: The enumeration.
        what: What its numbers are, for whoever sent an unknown one.
    """
    numbers: dict[int, KnownT] = {each.value: each for each in kinds}

    def convert(number: int) -> KnownT:
        found = numbers.get(number)
        return known(kinds, number, what) if found is None else found

    return _number("u8", "B", convert, tuple(kinds))


def code_of(number: int) -> ErrorCode:
    """Return a code; one of a newer broker counts as unknown, as in ``error_from_wire``."""
    return _CODES.get(number, ErrorCode.UNKNOWN)


def _number(
    name: str,
    code: str,
    convert: Callable[[int], Any] | None = None,
    choices: tuple[IntEnum, ...] = (),
) -> FieldKind:
    kind = FieldKind(name, calcsize("<" + code), None, None)
    kind.code, kind.convert, kind.choices = code, convert, choices
    return kind


def _write_records(
    records: bytes | memoryview | tuple[bytes | memoryview, ...], to: Writer
) -> None:
    to.buffers(records if isinstance(records, tuple) else (records,))


def _write_blob(data: bytes | memoryview, to: Writer) -> None:
    to.blob(data)


def _read_blob(source: Reader) -> bytes:
    return bytes(source.blob())


def _read_id(source: Reader) -> bytes:
    found = bytes(source.blob())
    if len(found) != ID_SIZE:
        raise RemoteProtocolError(f"an id of {len(found)} bytes; all have {ID_SIZE}")
    return found


TEXT = FieldKind("text", 2, lambda text, to: to.text(text), Reader.text)
BLOB = FieldKind("blob", 4, _write_blob, _read_blob)
_U32, _U64 = _number("u32", "I"), _number("u64", "Q")
U8 = Annotated[int, _number("u8", "B")]
U16 = Annotated[int, _number("u16", "H")]
U32 = Annotated[int, _U32]
U64 = Annotated[int, _U64]
I64 = Annotated[int, _number("i64", "q")]
Code = Annotated[ErrorCode, _number("u16", "H", code_of, tuple(ErrorCode))]
Blob = Annotated[bytes | memoryview, BLOB]
"""Read, a copy that may be kept."""
View = Annotated[bytes | memoryview, FieldKind("blob", 4, _write_blob, Reader.blob)]
"""Read, a view that is valid as long as its frame."""
Records = Annotated[
    bytes | memoryview | tuple[bytes | memoryview, ...],
    FieldKind("blob", 4, _write_records, Reader.blob),
]
"""Written, maybe several buffers; read, a view."""
Id = Annotated[bytes, FieldKind("blob", 4, _write_blob, _read_id)]
"""The id of a message."""

_WHAT: dict[Any, str] = {
    FilterKind: "a filter of kind",
    RouteKind: "a route of kind",
    ServerState: "state",
    OrderStrategy: "strategy of order",
    ConsumeStrategy: "strategy of consumption",
}
"""What the numbers of these are, where the name of the class does not say it."""
_KINDS: dict[Any, FieldKind] = {
    str: TEXT,
    bytes: BLOB,
    bool: _number("bool", "?"),
    **dict.fromkeys((ConsumeSequence, PullSequence, MessageOffset, ActionOffset), _U64),
    **dict.fromkeys((Epoch, StartCount), _U32),
}


def kind_of(annotation: Any) -> FieldKind:
    """Return the kind of an annotated type.

    Raises:
        TypeError: The annotation leaves the layout open, as a plain ``int`` does.
    """
    found = _KINDS.get(annotation)
    if found is None:
        found = _KINDS[annotation] = _derived(annotation)
    return found


def describe(of: Any, **fields: Any) -> None:
    """Declare the fields of a named tuple of the model, in the order of the wire."""
    described = tuple(Field(name, kind_of(annotation)) for name, annotation in fields.items())
    _KINDS[of] = FieldsOf(of, described, of._fields)


def row(*, first: str) -> Callable[[type[T]], type[T]]:
    """Declare which fields of a named tuple come first on the wire; the others follow."""

    def described(of: type[T]) -> type[T]:
        _KINDS[of] = _fields_of(of, first)
        return of

    return described


def in_wire_order(
    annotations: Mapping[str, Any], defaults: Mapping[str, Any], first: str
) -> tuple[Field, ...]:
    """Return the fields of a class in the order of the wire."""
    leading = first.split()
    return tuple(
        Field(
            name,
            kind_of(annotations[name]),
            _since_of(annotations[name]),
            defaults.get(name, NO_DEFAULT),
        )
        for name in [*leading, *(name for name in annotations if name not in leading)]
    )


def _derived(annotation: Any) -> FieldKind:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _marked(*get_args(annotation))
    if origin is tuple:
        return _list_of(annotation, many())
    if hasattr(annotation, "__supertype__"):
        return kind_of(annotation.__supertype__)
    if hasattr(annotation, "_fields") or is_dataclass(annotation):
        return _fields_of(annotation, "")
    if isinstance(annotation, type) and issubclass(annotation, IntEnum):
        return choice(annotation, _WHAT.get(annotation, annotation.__name__.lower()))
    raise TypeError(f"{annotation!r} does not say how it travels")


def _marked(annotation: Any, *marks: object) -> FieldKind:
    for mark in marks:
        if isinstance(mark, FieldKind):
            return mark
        if isinstance(mark, _Many):
            return _list_of(annotation, mark)
    return kind_of(annotation)


def _list_of(annotation: Any, said: _Many) -> ListOf:
    entry = get_args(annotation)[0]
    if get_origin(entry) is not tuple:
        return ListOf(kind_of(entry), *said)
    parts = zip(said.each.split(), get_args(entry), strict=True)
    return ListOf(
        FieldsOf(tuple, tuple(Field(name, kind_of(part)) for name, part in parts)), *said
    )


def _fields_of(of: Any, first: str) -> FieldsOf:
    if is_dataclass(of):
        names, defaults = {field.name: field.type for field in dataclass_fields(of)}, {}
    else:
        names, defaults = of.__annotations__, of._field_defaults
    return FieldsOf(of, in_wire_order(names, defaults, first), tuple(names))


def _since_of(annotation: Any) -> int:
    marks = getattr(annotation, "__metadata__", ())
    return next((mark.version for mark in marks if isinstance(mark, _Since)), 1)


describe(Tenure, epoch=Epoch, start=StartCount)

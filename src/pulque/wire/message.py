"""Messages that declare their fields once: how they are written and read follows from that.

::

    @message(Opcode.LOCK, first="token")
    class Locked(Response):
        holder: str
        token: U64
        waiters: Annotated[U32, since(2)] = 0

A codec is put together once for each class and version: texts and the numbers behind them are one
step, and neighbouring numbers one ``Struct``. A class that has a ``write`` and a ``read`` of its
own keeps them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import pairwise
from operator import attrgetter, itemgetter
from struct import Struct, error
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, dataclass_transform

from pulque.wire.codec import SHORT, Reader, Writer, encode_name, encode_text
from pulque.wire.kinds import BLOB, TEXT, Kind, ListOf, Read, Record, Write, record_fields
from pulque.wire.opcodes import Opcode
from pulque.wire.versions import OLDEST

__all__ = ["ANSWER", "ANSWERS", "Codec", "Message", "Response", "codec_of", "message"]

ANSWER = 0x80
"""Set in the opcode of every answer."""
MessageT = TypeVar("MessageT", bound="Message")


class Message:
    """A request or an answer."""

    __slots__ = ()
    opcode: ClassVar[Opcode]
    record: ClassVar[Record]
    """Its fields."""

    def write(self, to: Writer, version: int = OLDEST) -> None:
        """Append the fields that a version has."""
        raise NotImplementedError

    @classmethod
    def read(cls, source: Reader, version: int = OLDEST) -> Self:
        """Take the fields that a version has; the others get their defaults."""
        raise NotImplementedError

    @classmethod
    def layout(cls, version: int) -> int:
        """Return the newest version of this message that a peer of ``version`` knows."""
        return max(each for each in cls.record.versions if each <= version)


class Response(Message):
    """An answer."""

    __slots__ = ()


ANSWERS: dict[int, type[Response]] = {}
"""By the opcode of their frames."""


@dataclass_transform(frozen_default=True)
def message(opcode: Opcode, *, first: str = "") -> Callable[[type[MessageT]], type[MessageT]]:
    """Make a frozen dataclass a message.

    Args:
        opcode: What it asks, or answers.
        first: Which fields come first on the wire; the others follow as declared.
    """

    def declared(of: type[MessageT]) -> type[MessageT]:
        made: Any = dataclass(frozen=True, slots=True)(of)
        names = {field.name: field.type for field in fields(made)}
        defaults = {
            each.name: each.default for each in fields(made) if each.default is not MISSING
        }
        made.opcode = opcode
        made.record = Record(made, record_fields(names, defaults, first), tuple(names))
        codec = _of_any_version(made.record)
        if "write" not in vars(of):
            made.write = codec.write
        if "read" not in vars(of):
            made.read = staticmethod(codec.read)
        if issubclass(made, Response):
            ANSWERS[opcode | ANSWER] = made
        return made  # type: ignore[no-any-return]  # it has what it did not have before

    return declared


class Codec(NamedTuple):
    """How values of one kind are written and read. Both take the version, and need it not."""

    write: Write
    read: Read


def codec_of(kind: Kind, version: int = OLDEST) -> Codec:
    """Return how a version of the protocol writes and reads a kind."""
    if isinstance(kind, Record):
        leaves = list(_leaves(kind, version))
        runs = list(_runs(leaves))
        return Codec(_writer(kind, leaves, runs, version), _reader(kind, leaves, runs, version))
    if isinstance(kind, ListOf):
        return _list_codec(kind, version)
    if kind.write is None or kind.read is None:
        raise TypeError(f"{kind.name} is written and read among its neighbours")
    return Codec(kind.write, kind.read)


def _of_any_version(record: Record) -> Codec:
    codecs = {version: codec_of(record, version) for version in record.versions}
    if len(codecs) == 1:
        return codecs[OLDEST]

    def write(value: Any, to: Writer, version: int = OLDEST) -> None:
        codecs[value.layout(version)].write(value, to)

    def read(source: Reader, version: int = OLDEST) -> Any:
        return codecs[record.of.layout(version)].read(source)

    return Codec(write, read)


# -- records ------------------------------------------------------------------------------------


class _Leaf(NamedTuple):
    """A value that is not a record, and where it is found."""

    path: str
    kind: Kind


class _Run(NamedTuple):
    """Neighbours that are one step: texts, and numbers behind them; or one value of its own."""

    start: int
    middle: int
    """Where the numbers begin."""
    end: int
    form: Struct | None
    """Of the numbers."""
    other: Kind | None
    """Of a value that is neither text nor number."""


def _leaves(record: Record, version: int, prefix: str = "") -> Iterator[_Leaf]:
    """Yield what a record is made of in wire order, with the parts of the records in it."""
    for name, kind, since, _ in record.fields:
        if since > version:
            continue
        if isinstance(kind, Record):
            yield from _leaves(kind, version, f"{prefix}{name}.")
        else:
            yield _Leaf(prefix + name, kind)


def _runs(leaves: list[_Leaf]) -> Iterator[_Run]:
    """Yield the steps: a new one begins at a text behind a number, and around other values."""
    ranks = [0 if kind is TEXT else 1 if kind.code else 2 for _, kind in leaves]
    starts = [i for i, rank in enumerate(ranks) if not i or rank == 2 or rank < ranks[i - 1]]
    for start, end in pairwise([*starts, len(leaves)]):
        codes = "".join(leaf.kind.code for leaf in leaves[start:end])
        other = leaves[start].kind if ranks[start] == 2 else None
        middle = start + ranks[start:end].count(0)
        yield _Run(start, middle, end, Struct("<" + codes) if codes else None, other)


def _writer(record: Record, leaves: list[_Leaf], runs: list[_Run], version: int) -> Write:
    puts = [_put(record, leaves, run, version) for run in runs]
    if len(puts) == 1:
        return puts[0]

    def write(value: Any, to: Writer, _version: int = OLDEST) -> None:
        for put in puts:
            put(value, to)

    return write


def _put(record: Record, leaves: list[_Leaf], run: _Run, version: int) -> Write:
    """Return what writes one run of a record."""
    start, middle, end, form, other = run
    if other is not None:
        return _put_other(_getter(record, leaves, start, end), codec_of(other, version).write)
    if form is None:
        return _put_texts(_getter(record, leaves, start, middle))
    if end - start == 1 and record.of is not tuple:
        return _put_number(attrgetter(leaves[start].path), form)
    get_texts = _getter(record, leaves, start, middle) if middle > start else None
    return _put_run(get_texts, _getter(record, leaves, middle, end), form)


def _put_other(get: Callable[[Any], Sequence[Any]], write_one: Write) -> Write:
    def write(value: Any, to: Writer, _version: int = OLDEST) -> None:
        write_one(get(value)[0], to)

    return write


def _put_texts(get: Callable[[Any], Sequence[str]]) -> Write:
    def write(value: Any, to: Writer, _version: int = OLDEST) -> None:
        to.texts(get(value))

    return write


def _put_number(get: Callable[[Any], Any], form: Struct) -> Write:
    pack = form.pack

    def write(value: Any, to: Writer, _version: int = OLDEST) -> None:
        try:
            to.parts.append(pack(get(value)))
        except error:
            to.pack(form, get(value))  # says what does not fit

    return write


def _put_run(
    get_texts: Callable[[Any], Sequence[str]] | None,
    get_numbers: Callable[[Any], Sequence[Any]],
    form: Struct,
) -> Write:
    pack = form.pack

    def write(value: Any, to: Writer, _version: int = OLDEST) -> None:
        append = to.parts.append
        if get_texts is not None:
            for text in get_texts(value):
                append(encode_name(text) if len(text) < SHORT else encode_text(text))
        try:
            append(pack(*get_numbers(value)))
        except error:
            to.pack(form, *get_numbers(value))  # says what does not fit

    return write


def _getter(
    record: Record, leaves: list[_Leaf], start: int, end: int
) -> Callable[[Any], Sequence[Any]]:
    """Return what takes some neighbours out of a record."""
    get: Callable[[Any], Any] = (
        itemgetter(*range(start, end))
        if record.of is tuple
        else attrgetter(*(leaf.path for leaf in leaves[start:end]))
    )
    return get if end - start > 1 else lambda value: (get(value),)


def _reader(record: Record, leaves: list[_Leaf], runs: list[_Run], version: int) -> Read:
    build = _builder(record, leaves, version)
    if build is record.build and is_dataclass(record.of) and len(runs) == 1 and runs[0].form:
        return _run_reader(record.of, runs[0].middle, runs[0].form)
    takes = [_taker(run, version) for run in runs]

    def read(source: Reader, _version: int = OLDEST) -> Any:
        values: list[Any] = []
        for take, how in takes:
            values += take(source, how)
        return build(values)

    return read


def _run_reader(make: Any, texts: int, form: Struct) -> Read:
    """Return what reads a message of one run whose fields are in the order of its class."""
    if texts:
        return lambda source, _version=OLDEST: make(*source.texts(texts), *source.unpack(form))
    return lambda source, _version=OLDEST: make(*source.unpack(form))


def _taker(run: _Run, version: int) -> tuple[Callable[[Reader, Any], Sequence[Any]], Any]:
    """Return what reads one run, and what it needs for that."""
    texts = run.middle - run.start
    if run.other is not None:
        return _take, codec_of(run.other, version).read
    if run.form is None:
        return Reader.texts, texts
    return (_take_run, (texts, run.form)) if texts else (Reader.unpack, run.form)


def _take_run(source: Reader, how: tuple[int, Struct]) -> list[Any]:
    texts, form = how
    return [*source.texts(texts), *source.unpack(form)]


def _take(source: Reader, read: Read) -> tuple[Any]:
    return (read(source),)


def _builder(record: Record, leaves: list[_Leaf], version: int) -> Callable[[Sequence[Any]], Any]:
    """Return what makes a record out of its values in wire order.

    What numbers stand for is judged here, when the whole record was there to be read.
    """
    converts = [(i, leaf.kind.convert) for i, leaf in enumerate(leaves) if leaf.kind.convert]
    later = _Later(len(leaves), version)
    places = later.places_of(record)
    build, inner = record.build, later.values
    if not converts and places == tuple(range(len(leaves))):
        return build
    pick = _items(places)

    def finish(taken: Sequence[Any]) -> Any:
        values = list(taken)
        for i, convert in converts:
            values[i] = convert(values[i])
        for pick_some, build_one in inner:
            values.append(build_one(pick_some(values)))
        return build(pick(values))

    return finish


class _Later:
    """Places for what is made of the values that were read: the records in a record, and defaults.

    They follow the values, in the order in which they are made.
    """

    def __init__(self, leaves: int, version: int) -> None:
        self.values: list[tuple[Callable[[Any], Sequence[Any]], Callable[[Any], Any]]] = []
        """How each is made: which values it needs, and what becomes of them."""
        self._leaves = leaves
        self._next_leaf = iter(range(leaves))
        self._version = version

    def places_of(self, record: Record) -> tuple[int, ...]:
        """Return where the fields of a record are, in the order of its class."""
        places = {field.name: self._place(*field[1:]) for field in record.fields}
        return tuple(places[name] for name in record.declared)

    def _place(self, kind: Kind, since: int, default: object) -> int:
        if since > self._version:
            self.values.append((_items(()), lambda _: default))
        elif isinstance(kind, Record):
            self.values.append((_items(self.places_of(kind)), kind.build))
        else:
            return next(self._next_leaf)
        return self._leaves + len(self.values) - 1


def _items(places: tuple[int, ...]) -> Callable[[Any], Sequence[Any]]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)


# -- lists --------------------------------------------------------------------------------------


def _list_codec(kind: ListOf, version: int) -> Codec:
    what, most, least = kind.what, kind.most, kind.of.least
    write_all, read_all = _entries(kind.of, version)

    def write(values: Sequence[Any], to: Writer) -> None:
        to.count(len(values))
        write_all(values, to)

    def read(source: Reader) -> tuple[Any, ...]:
        limit = source.limits.get(what, most)
        return tuple(read_all(source, source.count(what, most=limit, least_size=least)))

    return Codec(write, read)


def _entries(of: Kind, version: int) -> Codec:
    """Return how the entries of a list are written and read, after their number."""
    if of is TEXT:
        return Codec(lambda values, to: to.texts(values), Reader.texts)
    if of.code:
        return _numbers(of)
    write_one, read_one = codec_of(of, version)

    def write(values: Sequence[Any], to: Writer) -> None:
        for value in values:
            write_one(value, to)

    def read(source: Reader, count: int) -> list[Any]:
        return [read_one(source) for _ in range(count)]

    return Codec(write, (isinstance(of, Record) and _rows(of, version)) or read)


def _numbers(of: Kind) -> Codec:
    form, convert = Struct("<" + of.code), of.convert

    def write(values: Sequence[int], to: Writer) -> None:
        to.pack(Struct(f"<{len(values)}{of.code}"), *values)

    def read(source: Reader, count: int) -> list[Any]:
        found = [number for (number,) in form.iter_unpack(source.take(count * form.size))]
        return [convert(number) for number in found] if convert else found

    return Codec(write, read)


def _rows(of: Record, version: int) -> Read | None:
    """Return what reads usual records in one loop, or None if these are others."""
    leaves = list(_leaves(of, version))
    runs = list(_runs(leaves))
    forms = [run.form for run in runs if run.form]
    rows: Callable[..., Any]
    match [(run.middle - run.start, run.end - run.middle > 0, run.other) for run in runs]:
        case [(0, True, None)]:
            rows = _unpack_rows
        case [(1, True, None)]:
            rows = Reader.named_numbers
        case [(0, True, None), (1, False, None)]:
            rows = Reader.numbers_named
        case [(0, True, None), (2, True, None)]:
            rows = Reader.names_between
        case [(1, False, None), (0, _, other)] if other is BLOB:
            rows = Reader.named_blobs
        case _:
            return None
    build = _builder(of, leaves, version)
    return lambda source, count: map(build, rows(source, count, *forms))


def _unpack_rows(source: Reader, count: int, form: Struct) -> Iterator[tuple[Any, ...]]:
    return form.iter_unpack(source.take(count * form.size))

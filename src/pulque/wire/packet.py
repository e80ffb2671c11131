"""Declares a message's fields once, and derives from that how it is written and read.

::

    @packet(Opcode.LOCK, first="token")
    class Locked(Response):
        holder: str
        token: U64
        waiters: Annotated[U32, since(2)] = 0

Each class gets one coder for each version, at its first use. Texts with the numbers behind them
are written in one step, and neighbouring numbers by one ``Struct``. A class that defines ``write``
and ``read`` itself keeps them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import pairwise
from operator import attrgetter, itemgetter
from struct import Struct, error
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, dataclass_transform

from pulque.wire.codec import SHORT, Reader, Writer, encode_name, encode_text
from pulque.wire.kinds import (
    BLOB,
    TEXT,
    FieldKind,
    FieldsOf,
    ListOf,
    ReadValue,
    WriteValue,
    in_wire_order,
)
from pulque.wire.opcodes import Opcode
from pulque.wire.versions import OLDEST

__all__ = ["ANSWER", "ANSWERS", "Coder", "Packet", "Response", "coder_of", "packet"]

ANSWER = 0x80
"""Set in the opcode of every answer."""
PacketT = TypeVar("PacketT", bound="Packet")


class Packet:
    """A request or an answer: what the payload of a frame holds."""

    __slots__ = ()
    opcode: ClassVar[Opcode]
    declared: ClassVar[FieldsOf]
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
        return max(each for each in cls.declared.versions if each <= version)


class Response(Packet):
    """An answer."""

    __slots__ = ()


ANSWERS: dict[int, type[Response]] = {}
"""By the opcode of their frames."""


@dataclass_transform(frozen_default=True)
def packet(opcode: Opcode, *, first: str = "") -> Callable[[type[PacketT]], type[PacketT]]:
    """Turn a class into a frozen dataclass that can be written and read.

    Args:
        opcode: What it asks, or answers.
        first: Which fields come first on the wire; the others follow as declared.
    """

    def packed(of: type[PacketT]) -> type[PacketT]:
        made: Any = dataclass(frozen=True, slots=True)(of)
        names = {field.name: field.type for field in fields(made)}
        defaults = {
            each.name: each.default for each in fields(made) if each.default is not MISSING
        }
        made.opcode = opcode
        made.declared = FieldsOf(made, in_wire_order(names, defaults, first), tuple(names))
        if "write" not in vars(of):
            _derive(made)
        if issubclass(made, Response):
            ANSWERS[opcode | ANSWER] = made
        return made  # type: ignore[no-any-return]  # it has what it did not have before

    return packed


def _derive(made: Any) -> None:
    """Give a class a coder that is built at its first use: few processes need every class."""

    def derived() -> Coder:
        coder = _of_any_version(made.declared)
        made.write, made.read = coder.write, staticmethod(coder.read)
        return coder

    def write(value: Any, to: Writer, version: int = OLDEST) -> None:
        derived().write(value, to, version)

    def read(source: Reader, version: int = OLDEST) -> Any:
        return derived().read(source, version)

    made.write, made.read = write, staticmethod(read)


class Coder(NamedTuple):
    """Writes and reads values of one kind."""

    write: WriteValue
    read: ReadValue


def coder_of(kind: FieldKind, version: int = OLDEST) -> Coder:
    """Return how a version of the protocol writes and reads a kind."""
    if isinstance(kind, FieldsOf):
        leaves = list(_leaves(kind, version))
        runs = list(_runs(leaves))
        return Coder(_writer(kind, leaves, runs, version), _reader(kind, leaves, runs, version))
    if isinstance(kind, ListOf):
        return _list_coder(kind, version)
    if kind.write is None or kind.read is None:
        raise TypeError(f"{kind.name} is written and read among its neighbours")
    return Coder(kind.write, kind.read)


def _of_any_version(declared: FieldsOf) -> Coder:
    coders = {version: coder_of(declared, version) for version in declared.versions}
    if len(coders) == 1:
        return coders[OLDEST]

    def write(value: Any, to: Writer, version: int = OLDEST) -> None:
        coders[value.layout(version)].write(value, to)

    def read(source: Reader, version: int = OLDEST) -> Any:
        return coders[declared.of.layout(version)].read(source)

    return Coder(write, read)


# -- fields -------------------------------------------------------------------------------------


class _Leaf(NamedTuple):
    """A value without fields of its own, and where it is found."""

    path: str
    kind: FieldKind


class _Run(NamedTuple):
    """Neighbours that are written in one step: texts, then numbers; or one other value."""

    start: int
    middle: int
    """Where the numbers begin."""
    end: int
    form: Struct | None
    """Of the numbers."""
    other: FieldKind | None
    """A value that is neither text nor number."""


def _leaves(declared: FieldsOf, version: int, prefix: str = "") -> Iterator[_Leaf]:
    """Yield the values in wire order, those inside other values included."""
    for name, kind, since, _ in declared.fields:
        if since > version:
            continue
        if isinstance(kind, FieldsOf):
            yield from _leaves(kind, version, f"{prefix}{name}.")
        else:
            yield _Leaf(prefix + name, kind)


def _runs(leaves: list[_Leaf]) -> Iterator[_Run]:
    """Yield the runs: a text after a number begins a new one, and so does any other value."""
    ranks = [0 if kind is TEXT else 1 if kind.code else 2 for _, kind in leaves]
    starts = [i for i, rank in enumerate(ranks) if not i or rank == 2 or rank < ranks[i - 1]]
    for start, end in pairwise([*starts, len(leaves)]):
        codes = "".join(leaf.kind.code for leaf in leaves[start:end])
        other = leaves[start].kind if ranks[start] == 2 else None
        middle = start + ranks[start:end].count(0)
        yield _Run(start, middle, end, Struct("<" + codes) if codes else None, other)


def _writer(declared: FieldsOf, leaves: list[_Leaf], runs: list[_Run], version: int) -> WriteValue:
    puts = [_put(declared, leaves, run, version) for run in runs]
    if len(puts) == 1:
        return puts[0]

    def write(value: Any, to: Writer, _version: int = OLDEST) -> None:
        for put in puts:
            put(value, to)

    return write


def _put(declared: FieldsOf, leaves: list[_Leaf], run: _Run, version: int) -> WriteValue:
    """Return what writes one run of a declared."""
    start, middle, end, form, other = run
    if other is not None:
        return _put_other(_getter(declared, leaves, start, end), coder_of(other, version).write)
    if form is None:
        return _put_texts(_getter(declared, leaves, start, middle))
    if end - start == 1 and declared.of is not tuple:
        return _put_number(attrgetter(leaves[start].path), form)
    get_texts = _getter(declared, leaves, start, middle) if middle > start else None
    return _put_run(get_texts, _getter(declared, leaves, middle, end), form)


def _put_other(get: Callable[[Any], Sequence[Any]], write_one: WriteValue) -> WriteValue:
    def write(value: Any, to: Writer, _version: int = OLDEST) -> None:
        write_one(get(value)[0], to)

    return write


def _put_texts(get: Callable[[Any], Sequence[str]]) -> WriteValue:
    def write(value: Any, to: Writer, _version: int = OLDEST) -> None:
        to.texts(get(value))

    return write


def _put_number(get: Callable[[Any], Any], form: Struct) -> WriteValue:
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
) -> WriteValue:
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
    declared: FieldsOf, leaves: list[_Leaf], start: int, end: int
) -> Callable[[Any], Sequence[Any]]:
    """Return what takes some neighbours out of a declared."""
    get: Callable[[Any], Any] = (
        itemgetter(*range(start, end))
        if declared.of is tuple
        else attrgetter(*(leaf.path for leaf in leaves[start:end]))
    )
    return get if end - start > 1 else lambda value: (get(value),)


def _reader(declared: FieldsOf, leaves: list[_Leaf], runs: list[_Run], version: int) -> ReadValue:
    build = _builder(declared, leaves, version)
    if build is declared.build and is_dataclass(declared.of) and len(runs) == 1 and runs[0].form:
        return _run_reader(declared.of, runs[0].middle, runs[0].form)
    takes = [_taker(run, version) for run in runs]

    def read(source: Reader, _version: int = OLDEST) -> Any:
        values: list[Any] = []
        for take, how in takes:
            values += take(source, how)
        return build(values)

    return read


def _run_reader(make: Any, texts: int, form: Struct) -> ReadValue:
    """Return what reads a message of one run whose fields are in the order of its class."""
    if texts:
        return lambda source, _version=OLDEST: make(*source.texts(texts), *source.unpack(form))
    return lambda source, _version=OLDEST: make(*source.unpack(form))


def _taker(run: _Run, version: int) -> tuple[Callable[[Reader, Any], Sequence[Any]], Any]:
    """Return what reads one run, and what it needs for that."""
    texts = run.middle - run.start
    if run.other is not None:
        return _take, coder_of(run.other, version).read
    if run.form is None:
        return Reader.texts, texts
    return (_take_run, (texts, run.form)) if texts else (Reader.unpack, run.form)


def _take_run(source: Reader, how: tuple[int, Struct]) -> list[Any]:
    texts, form = how
    return [*source.texts(texts), *source.unpack(form)]


def _take(source: Reader, read: ReadValue) -> tuple[Any]:
    return (read(source),)


def _builder(
    declared: FieldsOf, leaves: list[_Leaf], version: int
) -> Callable[[Sequence[Any]], Any]:
    """Return what makes an object out of its values in wire order.

    It also converts the numbers of enumerations, and refuses unknown ones: after all values were
    read, so that a payload that is damaged as well counts as damaged.
    """
    converts = [(i, leaf.kind.convert) for i, leaf in enumerate(leaves) if leaf.kind.convert]
    later = _Later(len(leaves), version)
    places = later.places_of(declared)
    build, inner = declared.build, later.values
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
    """Assigns places to what is made of the values: inner objects, and defaults.

    These places follow those of the values, in the order in which the objects are made.
    """

    def __init__(self, leaves: int, version: int) -> None:
        self.values: list[tuple[Callable[[Any], Sequence[Any]], Callable[[Any], Any]]] = []
        """How each is made: which values it needs, and what becomes of them."""
        self._leaves = leaves
        self._next_leaf = iter(range(leaves))
        self._version = version

    def places_of(self, declared: FieldsOf) -> tuple[int, ...]:
        """Return where the values of fields are, in the order of the class."""
        places = {field.name: self._place(*field[1:]) for field in declared.fields}
        return tuple(places[name] for name in declared.names)

    def _place(self, kind: FieldKind, since: int, default: object) -> int:
        if since > self._version:
            self.values.append((_items(()), lambda _: default))
        elif isinstance(kind, FieldsOf):
            self.values.append((_items(self.places_of(kind)), kind.build))
        else:
            return next(self._next_leaf)
        return self._leaves + len(self.values) - 1


def _items(places: tuple[int, ...]) -> Callable[[Any], Sequence[Any]]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)


# -- lists --------------------------------------------------------------------------------------


def _list_coder(kind: ListOf, version: int) -> Coder:
    what, most, least = kind.what, kind.most, kind.of.least
    write_all, read_all = _entries(kind.of, version)

    def write(values: Sequence[Any], to: Writer) -> None:
        to.count(len(values))
        write_all(values, to)

    def read(source: Reader) -> tuple[Any, ...]:
        limit = source.limits.get(what, most)
        return tuple(read_all(source, source.count(what, most=limit, least_size=least)))

    return Coder(write, read)


def _entries(of: FieldKind, version: int) -> Coder:
    """Return how the entries of a list are written and read, after their number."""
    if of is TEXT:
        return Coder(lambda values, to: to.texts(values), Reader.texts)
    if of.code:
        return _numbers(of)
    write_one, read_one = coder_of(of, version)

    def write(values: Sequence[Any], to: Writer) -> None:
        for value in values:
            write_one(value, to)

    def read(source: Reader, count: int) -> list[Any]:
        return [read_one(source) for _ in range(count)]

    return Coder(write, (isinstance(of, FieldsOf) and _rows(of, version)) or read)


def _numbers(of: FieldKind) -> Coder:
    form, convert = Struct("<" + of.code), of.convert

    def write(values: Sequence[int], to: Writer) -> None:
        to.pack(Struct(f"<{len(values)}{of.code}"), *values)

    def read(source: Reader, count: int) -> list[Any]:
        found = [number for (number,) in form.iter_unpack(source.take(count * form.size))]
        return [convert(number) for number in found] if convert else found

    return Coder(write, read)


def _rows(of: FieldsOf, version: int) -> ReadValue | None:
    """Return what reads entries of usual layouts in one loop, or None for other layouts."""
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

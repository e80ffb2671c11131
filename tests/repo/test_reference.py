"""The reference pages say what the code does: frames and batches are read here by their tables.

Nothing but the tables tells these readers where a field lies, so that a page that drifts from the
code, or the code from the page, reads nonsense.
"""

import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from itertools import accumulate, pairwise
from struct import pack
from typing import Any

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulque import errors
from pulque.errors import ErrorCode, PulqueError
from pulque.model.batch import COLUMNS, HEADER, BatchHeader, Codec, Flag, read_header
from pulque.model.gathered import pack_gathered
from pulque.model.record import Envelope, RecordType, pack_envelope
from pulque.model.tags import bits_of_tag
from pulque.wire.requests import Opcode, encode_request
from pulque.wire.responses import ANSWER, ERROR, encode_error, encode_response
from tests.property.batch_values import Draft, drafts, ids_for, packed
from tests.property.wire_values import REQUESTS, RESPONSES, copied
from tests.repo.tables import Table, bare, tables
from tests.repo.tree import DOCS, ROOT

PAGES = {
    name: (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("batch-format", "wire-protocol", "errors")
}
TABLES = {name: tables(page) for name, page in PAGES.items()}
FEW = 50
"""A page that is wrong is wrong at once: more examples would show nothing new."""
LAYOUT = ("Offset", "Width", "Type", "Name", "Meaning")
PAYLOAD = ("Type", "Name", "Meaning")
WIDTHS = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "i64": 8, "bool": 1}


def table(page: str, heading: str, *columns: str) -> Table:
    found = [
        each
        for each in TABLES[page]
        if each.heading == heading and each.columns[: len(columns)] == columns
    ]
    assert len(found) == 1, f"{page} has {len(found)} tables of {columns} under {heading}"
    return found[0]


def number(kind: str, data: bytes) -> int:
    assert len(data) == WIDTHS[kind]
    return int.from_bytes(data, "little", signed=kind.startswith("i"))


def fields_by(layout: Table, data: bytes) -> dict[str, int]:
    """Read a structure of fixed width as its table says."""
    found = {}
    end = 0
    for row in layout.rows:
        offset, width, kind = int(row["Offset"]), int(row["Width"]), bare(row["Type"])
        assert offset == end, f"{row['Name']} does not follow what is before it"
        end = offset + width
        found[bare(row["Name"])] = number(kind, data[offset:end])
    return found


class Payload:
    """Reads a payload of variable width as its table says."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def read_all(self, rows: list[dict[str, str]]) -> dict[str, Any]:
        found = self._read(rows)
        assert self._at == len(self._data), "the table ends before the payload"
        return found

    def _read(self, rows: list[dict[str, str]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for row, below in grouped(rows):
            kind, name = bare(row["Type"]), bare(row["Name"])
            if kind == "list":
                found[name] = [self._read(below) for _ in range(self._number("u16"))]
            elif kind == "text":
                found[name] = self._take(self._number("u16")).decode()
            elif kind == "blob":
                found[name] = self._take(self._number("u32"))
            else:
                found[name] = self._number(kind)
        return found

    def _number(self, kind: str) -> int:
        return number(kind, self._take(WIDTHS[kind]))

    def _take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        assert len(taken) == size, "the payload ends before the table"
        self._at += size
        return taken


def grouped(rows: list[dict[str, str]]) -> Iterator[tuple[dict[str, str], list[dict[str, str]]]]:
    """Yield each row with those below it that begin with a dot, without their dot."""
    tops = [i for i, row in enumerate(rows) if not row["Type"].startswith("·")]
    for start, end in pairwise([*tops, len(rows)]):
        below = [row | {"Type": row["Type"].removeprefix("·")} for row in rows[start + 1 : end]]
        yield rows[start], below


def names_of(value: Any) -> list[str]:
    """Name the fields of a value, those of values inside it with a dot."""
    own = [f.name for f in fields(value)] if is_dataclass(value) else list(value._fields)
    names: list[str] = []
    for name in own:
        inner = getattr(value, name)
        if hasattr(inner, "_fields"):
            names += [f"{name}.{each}" for each in names_of(inner)]
        else:
            names.append(name)
    return names


def assert_same(found: dict[str, Any], value: Any) -> None:
    """Compare what was read by a table with what was written: every field, and no other."""
    if type(value) is tuple:
        assert tuple(found.values()) == value
        return
    if isinstance(value, str | int):
        assert list(found.values()) == [value]
        return
    assert set(found) == set(names_of(value))
    for name, seen in found.items():
        expected = value
        for part in name.split("."):
            expected = getattr(expected, part)
        if isinstance(seen, list):
            assert len(seen) == len(expected)
            for one, other in zip(seen, expected, strict=True):
                assert_same(one, other)
        else:
            assert seen == expected, name


def payload_rows(heading: str) -> list[dict[str, str]]:
    found = [
        each
        for each in TABLES["wire-protocol"]
        if each.heading == heading and each.columns == PAYLOAD
    ]
    assert len(found) <= 1
    return list(found[0].rows) if found else []


def check_frame(frame: bytes, heading: str) -> dict[str, Any]:
    """Read a frame by the page; return its payload."""
    header = fields_by(table("wire-protocol", "Frames", *LAYOUT), frame[:16])
    assert header["magic"] == int.from_bytes(b"PQ", "little")
    assert (header["version"], header["request_id"], header["epoch"]) == (1, 77, 88)
    assert header["size"] == len(frame) - 16
    found = Payload(frame[16:]).read_all(payload_rows(heading))
    return found | {"opcode": header["opcode"]}


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
@settings(max_examples=FEW)
@given(data=st.data())
def test_requests_are_read_by_the_page(kind: type[Any], data: st.DataObject) -> None:
    request = data.draw(REQUESTS[kind])
    found = check_frame(b"".join(encode_request(request, 77, 88)), kind.__name__)

    assert found.pop("opcode") == kind.opcode
    assert_same(found, request)


@pytest.mark.parametrize("kind", RESPONSES, ids=lambda kind: kind.__name__)
@settings(max_examples=FEW)
@given(data=st.data())
def test_answers_are_read_by_the_page(kind: type[Any], data: st.DataObject) -> None:
    response = data.draw(RESPONSES[kind])
    found = check_frame(b"".join(encode_response(response, 77, 88)), kind.__name__)

    assert found.pop("opcode") == kind.opcode | ANSWER
    assert_same(found, copied(response))


def test_the_error_answer_is_read_by_the_page() -> None:
    frame = encode_error(errors.FencedError("no — not you"), 77, 88)

    assert check_frame(frame, "The error answer") == {
        "code": 33,
        "text": "no — not you",
        "opcode": ERROR,
    }


def test_the_opcodes_of_the_page_are_those_of_the_code() -> None:
    rows = table("wire-protocol", "Opcodes", "Opcode", "Request", "Answer").rows
    found = {int(row["Opcode"]): (bare(row["Request"]), bare(row["Answer"])) for row in rows}

    requests = {kind.opcode: kind.__name__ for kind in REQUESTS}
    answers = {kind.opcode: kind.__name__ for kind in RESPONSES}
    assert found == {code: (requests[code], answers[code]) for code in Opcode}


@settings(max_examples=FEW)
@given(
    envelope=st.builds(
        Envelope,
        type=st.sampled_from(RecordType),
        size=st.integers(56, 2**32 - 1),
        offset=st.integers(0, 2**64 - 1),
        synced=st.integers(0, 2**64 - 1),
        epoch=st.integers(0, 2**32 - 1),
        partition=st.integers(0, 2**32 - 1),
        first_sequence=st.integers(0, 2**64 - 1),
        stored_at_ms=st.integers(-(2**63), 2**63 - 1),
        count=st.integers(0, 2**32 - 1),
    )
)
def test_envelopes_are_read_by_the_page(envelope: Envelope) -> None:
    data = pack_envelope(envelope)
    layout = table("batch-format", "The envelope", *LAYOUT)
    found = fields_by(layout, data)

    assert found.pop("magic") == int.from_bytes(b"PL", "little")
    assert found.pop("version") == 1
    assert found.pop("crc") == number("u32", data[-4:])
    assert found == envelope._asdict()
    assert sum(int(row["Width"]) for row in layout.rows) == len(data)


@settings(max_examples=FEW)
@given(
    first=st.integers(0, 2**64 - 1),
    places=st.lists(st.integers(1, 2**32 - 1), max_size=4, unique=True).map(sorted),
)
def test_gathered_records_are_read_by_the_page(first: int, places: list[int]) -> None:
    places = [0, *places]
    count = len(places)
    batch = packed([Draft(b"body")] * count)
    columns = pack(f"<{count}I", *places), pack(f"<{count}q", *range(count))
    data = pack_gathered(first, count, *columns, batch)
    layout = table("batch-format", "The gathered record", *LAYOUT)
    width = sum(int(row["Width"]) for row in layout.rows)
    found = fields_by(layout, data[:width])

    assert found.pop("magic") == int.from_bytes(b"PG", "little")
    assert (found.pop("version"), found.pop("zero")) == (1, 0)
    assert found.pop("crc") == google_crc32c.value(data[: width - 4] + b"".join(columns))
    assert found == {"size": len(data), "count": count, "first_sequence": first}
    assert data[width:] == b"".join(columns) + batch


@settings(max_examples=FEW)
@given(messages=st.lists(drafts, min_size=1, max_size=4), priority=st.integers(0, 9))
def test_batches_are_read_by_the_page(messages: list[Draft], priority: int) -> None:
    batch = packed(messages, priority=priority)
    found = fields_by(table("batch-format", "The header", *LAYOUT), batch[:52])
    columns, data = columns_by_page(batch, found["flags"], found["count"])

    assert found == read_header(batch)._asdict()
    assert list(found) == list(BatchHeader._fields)
    ids = ids_for(len(messages))
    ends = list(accumulate(columns["size"]))
    for i, message in enumerate(messages):
        own = data[ends[i] - columns["size"][i] : ends[i]]
        row = {name: column[i] for name, column in columns.items()}
        assert parts_by_page(row, own) == {
            "key": message.key.encode(),
            "order key": message.order_key.encode(),
            "tags": "\0".join(message.tags).encode(),
            "headers": "\0".join(text for pair in message.headers for text in pair).encode(),
            "body": message.body,
        }
        assert row["id"] == int.from_bytes(message.id or ids[16 * i : 16 * i + 16], "little")
        assert row.get("created_at_ms", 0) == message.created_at_ms
        assert row.get("expires_at_ms", 0) == message.expires_at_ms
        assert row.get("attempt", 1) == message.attempt
    assert ends[-1] == len(data)


def test_the_types_of_the_header_are_those_of_the_code() -> None:
    codes = {"B": "u8", "H": "u16", "I": "u32", "Q": "u64", "q": "i64"}
    rows = table("batch-format", "The header", *LAYOUT).rows

    assert [bare(row["Type"]) for row in rows] == [codes[code] for code in HEADER.format[1:]]


def columns_by_page(batch: bytes, flags: int, count: int) -> tuple[dict[str, list[int]], bytes]:
    """Read the columns of an uncompressed batch, and return what is left."""
    values = {
        bare(row["Flag"]): int(row["Value"])
        for row in table("batch-format", "Flags", "Value").rows
    }
    columns = {}
    at = 52
    for row in table("batch-format", "Columns", "Column").rows:
        flag, width = bare(row["Flag"]), int(row["Width"])
        if flag != "–" and not flags & values[flag]:
            continue
        signed = bare(row["Type"]).startswith("i")
        columns[bare(row["Column"])] = [
            int.from_bytes(batch[at + i * width : at + (i + 1) * width], "little", signed=signed)
            for i in range(count)
        ]
        at += count * width
    return columns, batch[at:]


def parts_by_page(row: dict[str, int], message: bytes) -> dict[str, bytes]:
    parts = {}
    for part in table("batch-format", "The data", "Part").rows:
        size = row.get(bare(part["Bytes"]), 0) if part["Part"] != "body" else len(message)
        parts[part["Part"]], message = message[:size], message[size:]
    return parts


def test_the_columns_of_the_page_are_those_of_the_code() -> None:
    codes = {"I": "u32", "Q": "u64", "q": "i64", "H": "u16", "16s": "16 bytes"}

    assert [
        tuple(bare(row[name]) for name in ("Column", "Type", "Width", "Flag", "Part of"))
        for row in table("batch-format", "Columns", "Column").rows
    ] == [
        (
            column.name,
            codes[column.code],
            str(column.width),
            Flag(column.flag).name if column.flag else "–",
            "columns" if column.visible else "records",
        )
        for column in COLUMNS
    ]


def test_every_flag_and_codec_is_on_the_page() -> None:
    flags = table("batch-format", "Flags", "Value", "Flag", "What it adds").rows
    codecs = table("batch-format", "Codecs", "Value", "Codec").rows

    assert {bare(row["Flag"]): int(row["Value"]) for row in flags} == {
        flag.name: flag.value for flag in Flag
    }
    assert {bare(row["Codec"]): int(row["Value"]) for row in codecs} == {
        codec.name: codec.value for codec in Codec
    }
    for row in flags:
        added = [column.name for column in COLUMNS if column.flag == int(row["Value"])]
        assert re.findall(r"`(\w+)`", row["What it adds"]) == added


def test_the_tag_bits_of_the_page_are_those_of_the_code() -> None:
    rows = table("batch-format", "Tag bits", "Tag", "Bits").rows

    assert rows
    for row in rows:
        assert int(row["Bits"], 16) == bits_of_tag(bare(row["Tag"]))


def test_the_bits_of_an_id_make_sixteen_bytes() -> None:
    rows = table("batch-format", "Message ids", "Bits", "What").rows

    assert sum(int(row["Bits"]) for row in rows) == 128


@pytest.mark.parametrize("page", ["batch-format", "wire-protocol"])
def test_the_limits_of_the_page_are_those_of_the_code(page: str) -> None:
    rows = [
        row
        for each in TABLES[page]
        if each.columns == ("Limit", "Value", "Where", "Meaning")
        for row in each.rows
    ]

    assert rows
    for row in rows:
        module = importlib.import_module(bare(row["Where"]))
        assert getattr(module, bare(row["Limit"])) == int(row["Value"]), row["Limit"]


def test_the_example_is_the_file() -> None:
    rows = table("batch-format", "An example", "Offset", "Bytes", "What").rows
    data = (ROOT / "tests/compat/v1/record-batch.bin").read_bytes()

    assert b"".join(bytes.fromhex(bare(row["Bytes"])) for row in rows) == data
    sizes = [len(bytes.fromhex(bare(row["Bytes"]))) for row in rows]
    assert [int(row["Offset"]) for row in rows] == list(accumulate(sizes, initial=0))[:-1]


def test_every_error_is_on_the_page() -> None:
    rows = table("errors", "Codes", "Code", "Name", "Class", "Retry").rows
    found = {
        int(row["Code"]): (bare(row["Name"]), bare(row["Class"]), row["Retry"]) for row in rows
    }
    classes = {kind.code: kind for kind in told_classes()}

    assert found == {
        code.value: (
            (code.name, classes[code].__name__, "yes" if classes[code].retryable else "no")
            if code
            else ("NONE", "–", "–")
        )
        for code in ErrorCode
    }
    assert [
        code for code, row in zip(found, rows, strict=True) if code and not all(row.values())
    ] == []


def told_classes() -> Iterator[type[PulqueError]]:
    """Yield the class that stands for each code: those of general use are left out."""
    general = {
        errors.ForkedError,
        errors.LocalProtocolError,
        errors.ProtocolError,
        errors.RejectedError,
    }
    for name in errors.__all__:
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, PulqueError) and kind not in general:
            yield kind


def test_every_class_of_error_is_named_on_the_page() -> None:
    named = set(re.findall(r"`(?:pulque\.errors\.)?(\w+Error)`", PAGES["errors"]))
    kinds = {name for name in errors.__all__ if name.endswith("Error")}

    assert named == kinds


def test_every_field_on_a_page_has_a_meaning() -> None:
    for page in TABLES.values():
        for each in page:
            if "Meaning" in each.columns:
                assert all(row["Meaning"] for row in each.rows), each.heading


PAGE = """
# One

| Type | Name |
|---|---|
| `u8` | `a` |

```
| not | a table |
```

## Two `x`

| A |
|---|
| 1 |
| 2 |
"""


def test_tables_are_read_with_their_headings() -> None:
    assert tables(PAGE) == [
        Table("One", ("Type", "Name"), ({"Type": "`u8`", "Name": "`a`"},)),
        Table("Two x", ("A",), ({"A": "1"}, {"A": "2"})),
    ]


ROWS = [
    {"Type": "`u8`", "Name": "`a`"},
    {"Type": "`list`", "Name": "`b`"},
    {"Type": "· `text`", "Name": "`c`"},
    {"Type": "· `bool`", "Name": "`d`"},
    {"Type": "`blob`", "Name": "`e`"},
]


def test_a_payload_is_read_as_its_table_says() -> None:
    payload = Payload(b"\x07" + b"\x02\0" + b"\x02\0hi\x01" + b"\0\0\0" + b"\x03\0\0\0abc")

    assert payload.read_all(ROWS) == {
        "a": 7,
        "b": [{"c": "hi", "d": 1}, {"c": "", "d": 0}],
        "e": b"abc",
    }


@pytest.mark.parametrize(
    "drift",
    [
        lambda rows: rows[:-1],
        lambda rows: [*rows, {"Type": "u8", "Name": "f"}],
        lambda rows: [{"Type": "u16", "Name": "a"}, *rows[1:]],
        lambda rows: [rows[0], *rows[2:], rows[1]],
    ],
    ids=["missing", "too many", "wider", "moved"],
)
def test_a_table_that_drifted_is_found(
    drift: Callable[[list[dict[str, str]]], list[dict[str, str]]],
) -> None:
    payload = Payload(b"\x07" + b"\x01\0" + b"\x02\0hi\x01" + b"\x03\0\0\0abc")

    with pytest.raises((AssertionError, KeyError)):
        payload.read_all(drift(ROWS))

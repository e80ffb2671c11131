"""Makes the tables of the wire protocol's page from what the messages declare.

The page keeps its prose and its meanings of fields. A field that is not on the page yet gets the
docstring below it in its class as its meaning, and a message that is not there gets a section.
"""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from textwrap import dedent
from typing import Any, NamedTuple, get_args

from pulque.wire.kinds import FieldKind, FieldsOf, ListOf
from pulque.wire.packet import ANSWERS, Packet
from pulque.wire.requests import Request

__all__ = ["with_tables"]

_FIELDS = ("| Type | Name | Meaning |", "|---|---|---|")
_OPCODES = ("| Opcode | Request | Answer |", "|---|---|---|")
_LISTS = ("| Message | List | At most |", "|---|---|---|")
_ROW = re.compile(r"\| (·*) ?`(\w+)` \| `([\w.]+)` \| (.*) \|")
_HEADING = re.compile(r"#+ `?(.+?)`?")
_ENDS = ("## Answers", "### The error answer")
"""Before which a request or an answer is put that has no section yet."""
_USUAL = {
    "partition": "the name of the partition",
    "group": "the group",
    "consumer": "the consumer's id",
    "incarnation": "which run of this consumer",
}
"""What fields of these names mean, where neither page nor class says it."""


class Row(NamedTuple):
    """One row of a table of fields."""

    depth: int
    """In how many lists it is."""
    kind: str
    name: str
    words: str
    """What its class says about it."""
    since: int

    def as_line(self, meaning: str) -> str:
        """Return the row as it stands on the page."""
        dots = "·" * self.depth + " " if self.depth else ""
        return f"| {dots}`{self.kind}` | `{self.name}` | {meaning} |"


def with_tables(page: str, messages: tuple[type[Packet], ...] = ()) -> str:
    """Return a page whose tables say what the messages declare.

    Args:
        page: As it is now.
        messages: Others than those of the protocol.
    """
    requests = messages or get_args(Request)
    answers = () if messages else tuple(ANSWERS.values())
    lines = page.splitlines()
    for end, kinds in zip(_ENDS, (requests, answers), strict=True):
        for kind in kinds:
            if f"### `{kind.__name__}`" not in lines:
                at = lines.index(end)
                lines[at:at] = [f"### `{kind.__name__}`", "", *_words_of(kind), ""]
    tables = {kind.__name__: kind for kind in (*requests, *answers)}
    made: list[str] = []
    for heading, section in _sections(lines):
        if heading in tables:
            made += _section(section, tables[heading])
        elif heading == "Opcodes" and not messages:
            made += _replaced(section, _OPCODES, _opcodes(requests))
        elif heading == "Limits of lists" and not messages:
            made += _replaced(section, _LISTS, _limits(requests))
        else:
            made += section
    return "\n".join(made) + "\n"


def _sections(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the parts of a page with their headings, the first part without one."""
    heading, section = "", list[str]()
    for line in lines:
        if line.startswith("#"):
            yield heading, section
            match = _HEADING.fullmatch(line)
            heading, section = match[1] if match else "", []
        section.append(line)
    yield heading, section


def _section(section: list[str], kind: type[Packet]) -> list[str]:
    """Return a section with the table of a message's fields."""
    rows = list(_rows(kind.declared))
    said = _meanings(section)
    lines = []
    for path, row in _with_paths(rows):
        meaning = said.get(path) or row.words or _USUAL.get(row.name, "")
        if row.since > 1 and not meaning.startswith("from version"):
            meaning = f"from version {row.since} on: {meaning}"
        lines.append(row.as_line(meaning))
    return _replaced(section, _FIELDS, lines)


def _replaced(section: list[str], header: tuple[str, str], rows: list[str]) -> list[str]:
    """Return a section with the rows of its table, which is its only one, in place of the old."""
    text = [line for line in section if not line.startswith("|")]
    while text and not text[-1]:
        text.pop()
    if not rows:
        return [*text, ""]
    at = section.index(header[0]) if header[0] in section else len(text)
    before, behind = section[:at] if at < len(text) else text, text[at:]
    while before and not before[-1]:
        before = before[:-1]
    return [*before, "", *header, *rows, *(behind and ["", *_stripped(behind)]), ""]


def _stripped(lines: list[str]) -> list[str]:
    return lines[next((i for i, line in enumerate(lines) if line), len(lines)) :]


def _meanings(section: list[str]) -> dict[str, str]:
    """Return what a section says about its fields, by where they are."""
    found = [match for line in section if (match := _ROW.fullmatch(line))]
    rows = [Row(len(each[1]), each[2], each[3], each[4], 1) for each in found]
    return {path: row.words for path, row in _with_paths(rows)}


def _with_paths(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    """Yield rows with their names, behind those of the lists that they are in."""
    above: list[str] = []
    for row in rows:
        above[row.depth :] = [row.name]
        yield "/".join(above), row


def _rows(declared: FieldsOf, depth: int = 0, prefix: str = "") -> Iterator[Row]:
    words = _fields_of(declared.of)
    for name, kind, since, _ in declared.fields:
        if isinstance(kind, FieldsOf):
            yield from _rows(kind, depth, f"{prefix}{name}.")
            continue
        said = words.get(name, "")
        if kind.choices and kind.name == "u8":
            said = "; ".join(filter(None, (said, _choices(kind))))
        yield Row(depth, kind.name, prefix + name, said, since)
        if isinstance(kind, ListOf):
            if isinstance(kind.of, FieldsOf):
                yield from _rows(kind.of, depth + 1)
            else:
                yield Row(depth + 1, kind.of.name, kind.each, _choices(kind.of), 1)


def _choices(kind: FieldKind) -> str:
    return ", ".join(
        f"{each.value} {each.name.lower().replace('_', ' ')}" for each in kind.choices
    )


def _fields_of(of: Any) -> Mapping[str, str]:
    """Return what a class says below its fields, as a cell of a table."""
    if of is tuple:
        return {}
    (body,) = ast.parse(dedent(inspect.getsource(of))).body
    assert isinstance(body, ast.ClassDef)  # noqa: S101  # a class
    found = {}
    for field, words in pairwise(body.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(words, ast.Expr)
            and isinstance(words.value, ast.Constant)
        ):
            said = " ".join(str(words.value.value).replace("``", "`").split()).removesuffix(".")
            found[field.target.id] = said[:1].lower() + said[1:]
    return found


def _words_of(kind: type[Packet]) -> list[str]:
    return (inspect.getdoc(kind) or "").replace("``", "`").splitlines()


def _opcodes(requests: tuple[type[Packet], ...]) -> list[str]:
    answers = {kind.opcode: kind for kind in ANSWERS.values()}
    return [
        f"| {kind.opcode.value} | `{kind.__name__}` | `{answers[kind.opcode].__name__}` |"
        for kind in sorted(requests, key=lambda kind: kind.opcode)
    ]


def _limits(requests: tuple[type[Packet], ...]) -> list[str]:
    return [
        f"| `{kind.__name__}` | `{path}` | {most:,} |"
        for kind in sorted(requests, key=lambda kind: kind.opcode)
        for path, most in _limited(kind.declared)
    ]


def _limited(declared: FieldsOf, prefix: str = "") -> Iterator[tuple[str, int]]:
    for name, kind, *_ in declared.fields:
        if isinstance(kind, FieldsOf):
            yield from _limited(kind, f"{prefix}{name}.")
        elif isinstance(kind, ListOf) and kind.most < 0xFFFF:
            yield prefix + name, kind.most

"""The tables of the wire protocol's page are made from what the messages declare."""

from typing import Annotated

import pytest

from pulque.model.groups import Mode
from pulque.wire.kinds import U16, U64, many, since
from pulque.wire.opcodes import Opcode
from pulque.wire.packet import Packet, packet
from tests.repo.tree import DOCS
from tools.wire_page import with_tables

PAGE = (DOCS / "reference" / "wire-protocol.md").read_text(encoding="utf-8")


@packet(Opcode.STATUS, first="count")
class Brewed(Packet):
    """Made up: what was brewed?

    On two lines.
    """

    group: str
    count: U64
    """How much.

    In litres."""
    mode: Mode
    """How it is drunk."""
    tags: Annotated[tuple[str, ...], many("tags", most=3, each="tag")] = ()
    foam: Annotated[U16, since(2)] = 0
    """Its height."""


NEW = """### `Brewed`

Made up: what was brewed?

On two lines.

| Type | Name | Meaning |
|---|---|---|
| `u64` | `count` | how much. In litres |
| `text` | `group` | the group |
| `u8` | `mode` | how it is drunk; 0 shared, 1 broadcast, 2 once, 3 ordered |
| `list` | `tags` |  |
| · `text` | `tag` |  |
| `u16` | `foam` | from version 2 on: its height |

"""


def test_a_message_that_the_page_does_not_know_gets_a_section() -> None:
    page = with_tables("# A page\n\n## Answers\n\n### The error answer\n", (Brewed,))

    assert page == f"# A page\n\n{NEW}## Answers\n\n### The error answer\n"


def test_what_the_page_says_stays() -> None:
    own = NEW.replace("| `tags` |  |", "| `tags` | what it tastes of |").replace(
        "On two lines.", "Prose."
    )
    rest = "## Answers\n\n### The error answer\n"

    assert with_tables(own + rest, (Brewed,)) == own + rest


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("| `u64` | `first` | must follow", "| `u32` | `first` | must follow"),
        ("| `u8` | `acks` |", "| `u8` | `acknowledgement` |"),
        ("| · `i64` | `expected` |", "| `i64` | `expected` |"),
        ("| 54 | `Find` |", "| 53 | `Find` |"),
        ("| `Send` | `batches` | 1,024 |", "| `Send` | `batches` | 1,000 |"),
    ],
)
def test_a_table_that_drifted_is_put_right(line: str, other: str) -> None:
    drifted = PAGE.replace(line, other)

    assert drifted != PAGE
    assert with_tables(drifted) != drifted


def test_rows_that_were_lost_or_made_up_are_put_right() -> None:
    row = "| `u32` | `lease_ms` | how long the consumer may be silent from now on |\n"

    lost = with_tables(PAGE.replace(row, ""))
    assert "| `u32` | `lease_ms` | how long the consumer may be silent from now on |" in lost
    assert with_tables(PAGE.replace(row, row + "| `u8` | `more` | made up |\n")) == PAGE

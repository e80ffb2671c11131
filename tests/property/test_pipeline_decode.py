"""Columns decoded for many batches at once, against the messages decoded one by one."""

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.errors import InvalidBatchError
from pulque.model.batch import HEADER_SIZE, seed_of
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName, subject_of
from pulque.model.positions import ConsumeSequence
from tests.property.batch_values import Draft, drafts, packed

pytest.importorskip("pyarrow")
from pulque.pipeline.columns import ALL_COLUMNS
from pulque.pipeline.reading.batch_decoder import PLACE, BatchPlace, decode

NAMES = tuple(map(PartitionName, ("orders", "orders#p7", "%retry%orders%billing", "pay")))
LATEST_MS = 253_402_300_799_999


def instant(ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=min(ms, LATEST_MS))


def row(message: Message) -> dict[str, Any]:
    """The oracle: one message as a row."""
    return {
        "message_id": message.id,
        "subject": subject_of(message.partition),
        "partition": message.partition,
        "sequence": message.sequence,
        "key": message.key,
        "order_key": message.order_key,
        "tags": list(message.tags) or None,
        "headers": list(message.headers.items()) or None,
        "body": message.body,
        "created_at": instant(message.created_at_ms),
        "stored_at": instant(message.stored_at_ms),
        "expires_at": instant(message.expires_at_ms) if message.expires_at_ms else None,
        "attempt": message.attempt,
        "priority": message.priority,
    }


@st.composite
def placed(draw: st.DrawFn) -> tuple[BatchPlace, list[dict[str, Any]]]:
    """Some batches in a buffer, with bytes of others in between, and the rows they hold."""
    data = bytearray()
    places, rows = [], []
    for messages in draw(st.lists(st.lists(drafts, min_size=1, max_size=4), max_size=5)):
        data += draw(st.binary(max_size=20))
        name = draw(st.integers(0, len(NAMES) - 1))
        batch = packed(messages, seed=seed_of(NAMES[name]), priority=draw(st.integers(0, 9)))
        begin = draw(st.integers(0, len(messages) - 1))
        end = draw(st.integers(begin, len(messages)))
        first, stored_at_ms = draw(st.integers(0, 2**40)), draw(st.integers(0, 2**41))
        places.append((len(data), name, begin, end, first, stored_at_ms))
        data += batch
        stored = StoredBatch(
            batch,
            partition=NAMES[name],
            first_sequence=ConsumeSequence(first),
            stored_at_ms=stored_at_ms,
        )
        rows += [row(Message(stored, index)) for index in range(begin, end)]
    data += draw(st.binary(max_size=20))
    return BatchPlace(bytes(data), np.array(places, PLACE), NAMES), rows


@given(placed())
def test_columns_hold_what_the_messages_hold(
    case: tuple[BatchPlace, list[dict[str, Any]]],
) -> None:
    batches, rows = case

    assert decode(batches, ALL_COLUMNS).to_pylist() == rows


@given(placed(), st.lists(st.sampled_from(ALL_COLUMNS), unique=True, min_size=1))
def test_some_columns_are_these_columns(
    case: tuple[BatchPlace, list[dict[str, Any]]], columns: list[str]
) -> None:
    batches, rows = case
    found = decode(batches, columns)

    assert found.schema.names == columns
    assert found.to_pylist() == [{name: each[name] for name in columns} for each in rows]


@pytest.mark.parametrize("column", ["key", "order_key", "tags", "headers"])
def test_text_that_is_not_utf_8_is_refused(column: str) -> None:
    """What a consumer rejects is not altered to make a row of it."""
    draft = Draft(b"one", key="key", order_key="order", tags=("tag",), headers=(("name", "text"),))
    batch = packed([draft, Draft(b"two", key="ok")])
    places = np.array([(0, 0, 0, 2, 0, 0)], PLACE)
    at = batch.index({"order_key": b"order", "headers": b"text"}.get(column, column[:3].encode()))
    broken = batch[:at] + b"\xff" + batch[at + 1 :]

    with pytest.raises(InvalidBatchError, match="is not UTF-8"):
        decode(BatchPlace(broken, places, NAMES), [column])
    assert decode(BatchPlace(broken, places, NAMES), ["body"]).num_rows == 2


@pytest.mark.parametrize("size", [0, 2, 400])
def test_sizes_that_do_not_add_up_are_refused(size: int) -> None:
    batch = packed([Draft(b"one"), Draft(b"two")])
    wrong = batch[:HEADER_SIZE] + size.to_bytes(4, "little") + batch[HEADER_SIZE + 4 :]
    places = np.array([(0, 0, 0, 2, 0, 0)], PLACE)

    with pytest.raises(InvalidBatchError, match="do not add up"):
        decode(BatchPlace(wrong, places, NAMES), ["body"])


@pytest.mark.parametrize("encoded", [b"name_value", b"\0ame_value", b"name\0a\0\0b"])
def test_a_header_without_a_name_or_a_value_is_refused(encoded: bytes) -> None:
    batch = packed([Draft(b"body", headers=(("name", "value"),))])
    broken = batch.replace(b"name\0value"[: len(encoded)], encoded)
    places = np.array([(0, 0, 0, 1, 0, 0)], PLACE)

    with pytest.raises(InvalidBatchError, match="no name, or no value"):
        decode(BatchPlace(broken, places, NAMES), ["headers"])

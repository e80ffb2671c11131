"""A packer refuses what no batch can hold, and is none the worse for it."""

import pytest

from pulque.errors import UsageError
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker, encode_headers, encode_tags
from pulque.model.positions import ConsumeSequence


def read(packer: BatchPacker) -> list[Message]:
    batch = packer.encode(seed=0, ids=bytes(16 * len(packer)), created_at_ms=1)
    stored = StoredBatch(
        batch, partition=PartitionName("p"), first_sequence=ConsumeSequence(0), stored_at_ms=0
    )
    return [Message(stored, i) for i in range(len(stored))]


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({"key": "k" * 65_536}, "a key of 65536 bytes"),
        ({"key": "\ud800"}, "a key cannot be written as UTF-8"),
        ({"order_key": "é" * 32_768}, "an? order key of 65536 bytes"),
        ({"order_key": "\udfff"}, "order key cannot be written"),
        ({"tags": ["ok", ""]}, "neither empty"),
        ({"tags": ["a\0b"]}, "NUL"),
        ({"tags": ["\ud800"]}, "tag cannot be written"),
        ({"tags": ["t"] * 65}, "65 tags"),
        ({"tags": ["t" * 65_535, "t"]}, "tags of 65537 bytes"),
        ({"headers": {"": "v"}}, "must not be empty"),
        ({"headers": {"n\0": "v"}}, "NUL"),
        ({"headers": {"n": "\0"}}, "NUL"),
        ({"headers": {"n": "\ud800"}}, "header cannot be written"),
        ({"headers": {str(i): "" for i in range(129)}}, "129 headers"),
        ({"headers": {"n": "v" * 65_536}}, "headers of 65538 bytes"),
        ({"expires_at_ms": -1}, "-1 is not an instant"),
        ({"expires_at_ms": 2**63}, "is not an instant"),
    ],
)
def test_a_part_that_is_not_allowed_leaves_the_packer_as_it_was(
    parts: dict[str, object], complaint: str
) -> None:
    packer = BatchPacker()
    packer.add(b"before", key="k")

    with pytest.raises(UsageError, match=complaint):
        packer.add(b"refused", **parts)  # type: ignore[arg-type]

    packer.add(b"after", tags=["t"])
    assert [(m.body, m.key, m.tags) for m in read(packer)] == [
        (b"before", "k", ()),
        (b"after", None, ("t",)),
    ]


def test_the_largest_parts_fit() -> None:
    packer = BatchPacker()
    packer.add(
        b"body",
        key="k" * 65_535,
        order_key="é" * 32_767,
        tags=["t" * 65_535],
        headers={"n": "v" * 65_534},
        expires_at_ms=2**63 - 1,
    )
    (message,) = read(packer)

    assert message.key == "k" * 65_535
    assert message.order_key == "é" * 32_767
    assert message.tags == ("t" * 65_535,)
    assert message.headers == {"n": "v" * 65_534}
    assert message.expires_at_ms == 2**63 - 1
    assert message.body == b"body"


def test_one_tag_may_be_given_as_a_string() -> None:
    assert encode_tags("blue") == b"blue"
    assert encode_tags(tag for tag in ("a", "b")) == b"a\0b"


def test_headers_are_names_and_values_in_order() -> None:
    assert encode_headers({"b": "1", "a": ""}) == b"b\x001\0a\0"


@pytest.mark.parametrize("count", [0, 10_001])
def test_a_batch_has_one_to_ten_thousand_messages(count: int) -> None:
    packer = BatchPacker()
    packer.bodies += [b""] * count

    with pytest.raises(UsageError, match=f"a batch of {count} messages"):
        packer.encode(seed=0, ids=bytes(16 * count), created_at_ms=0)


@pytest.mark.parametrize("size", [0, 15, 31, 33])
def test_every_message_has_an_id(size: int) -> None:
    packer = BatchPacker()
    packer.bodies += [b"", b""]

    with pytest.raises(UsageError, match=f"{size} bytes of ids"):
        packer.encode(seed=0, ids=bytes(size), created_at_ms=0)


def test_messages_that_brought_their_ids_need_no_others() -> None:
    packer = BatchPacker()
    packer.add_encoded(b"", message_id=b"0123456789abcdef")

    assert packer.encode(seed=0, ids=b"", created_at_ms=0).endswith(b"0123456789abcdef")


@pytest.mark.parametrize("priority", [-1, 10])
def test_a_priority_is_one_digit(priority: int) -> None:
    packer = BatchPacker()
    packer.bodies.append(b"")

    with pytest.raises(UsageError, match=f"priority {priority}"):
        packer.encode(seed=0, ids=bytes(16), created_at_ms=0, priority=priority)


def test_attempts_stop_counting_where_their_column_ends() -> None:
    packer = BatchPacker()
    packer.add_encoded(b"", attempt=70_000)

    assert read(packer)[0].attempt == 65_535


def test_tags_that_are_no_text_are_passed_on() -> None:
    """A broker re-queues what somebody else packed, whatever it is."""
    packer = BatchPacker()
    packer.add_encoded(b"body", tags=b"\xff\xfe")

    assert read(packer)[0].body == b"body"

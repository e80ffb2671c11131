"""What is allowed as a name, and what is not: the same for everybody, for ever."""

from collections.abc import Callable

import pytest

from pulque.errors import InvalidNameError
from pulque.model.names import (
    Group,
    PartitionName,
    Subject,
    owner_of,
    parse_consumer_id,
    parse_group,
    parse_partition,
    parse_subject,
    retry_partition,
    subject_of,
)

GOOD = [
    "a",
    "7",
    "orders",
    "Orders",
    "ORDERS.eu-west_1",
    "a.b.c",
    "a--b",
    "a_",
    "a" * 255,
]
BAD = [
    "",
    " ",
    ".",
    "..",
    "../x",
    "a/../b",
    "a..b",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "-a",
    "_a",
    ".a",
    "a.",
    "a-",
    "a b",
    "a\n",
    "\na",
    "a\0",
    "a\x1b[31m",
    "a\x7f",
    "%retry%x",
    "%retry%x%y",
    "a%b",
    "a#b",
    "a*",
    "a:b",
    "café",
    "订单",
    "🍺",
    "\u202eabc",
    "abc\u200b",
    "аbc",  # noqa: RUF001  # a Cyrillic letter
    "１２",  # noqa: RUF001  # digits, but wide ones
    "\ud800",
    "a" * 256,
    "a" * 10_240,
]
PARSERS: list[Callable[[str], str]] = [parse_subject, parse_group]


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("text", GOOD)
def test_a_good_name_is_kept_as_it_is(parse: Callable[[str], str], text: str) -> None:
    assert parse(text) == text


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("text", BAD, ids=lambda text: ascii(text[:12]))
def test_a_bad_name_is_refused(parse: Callable[[str], str], text: str) -> None:
    with pytest.raises(InvalidNameError, match="is not allowed: 1 to 255 characters"):
        parse(text)


@pytest.mark.parametrize("text", BAD, ids=lambda text: ascii(text[:12]))
def test_the_text_of_a_refusal_is_short_and_safe_to_print(text: str) -> None:
    with pytest.raises(InvalidNameError) as caught:
        parse_subject(text)

    shown = str(caught.value)
    assert len(shown) < 300
    assert shown.isascii()
    assert shown.isprintable()


def test_mixed_case_gives_different_names() -> None:
    assert parse_subject("Orders") != parse_subject("orders")


@pytest.mark.parametrize("text", [*GOOD, "host:app@3", "host/app/0", "h.example.org:/a_b"])
def test_a_good_consumer_id_is_kept_as_it_is(text: str) -> None:
    assert parse_consumer_id(text) == text


@pytest.mark.parametrize(
    "text", ["", "a/../b", "../x", "/a", "@a", "a/", "a b", "a%b", "a#b", "a\n", "é", "a" * 256]
)
def test_a_bad_consumer_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidNameError, match="consumer id"):
        parse_consumer_id(text)


@pytest.mark.parametrize(
    ("text", "subject", "owner"),
    [
        ("orders", "orders", None),
        ("orders#0", "orders", None),
        ("a.b#left-2", "a.b", None),
        ("%retry%orders%billing", "orders", "billing"),
        ("%dead%orders%billing", "orders", "billing"),
        ("%wait%orders%billing", "orders", "billing"),
        (f"%retry%{'s' * 255}%{'g' * 255}", "s" * 255, "g" * 255),
    ],
)
def test_a_partition_knows_its_subject_and_its_group(
    text: str, subject: str, owner: str | None
) -> None:
    partition = parse_partition(text)

    assert partition == text
    assert subject_of(partition) == subject
    assert owner_of(partition) == owner


@pytest.mark.parametrize(
    "text",
    [
        *[bad for bad in BAD if bad not in {"a#b", "%retry%x%y"}],
        "#",
        "a#",
        "#a",
        "a##b",
        "a#b#c",
        "a#../b",
        "..#1",
        "a#" + "n" * 65,
        "%retry%",
        "%retry%%",
        "%retry%a%",
        "%retry%%b",
        "%retry%a%b%c",
        "%other%a%b",
        "%RETRY%a%b",
        "%retry%a#1%b",
        "%retry%../x%b",
        "%retry%a%../x",
        "%retry%a%b\n",
        f"%retry%{'s' * 256}%g",
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_a_bad_partition_is_refused(text: str) -> None:
    with pytest.raises(InvalidNameError):
        parse_partition(text)


def test_a_retry_partition_is_a_partition_of_both() -> None:
    partition = retry_partition(Subject("orders"), Group("billing"))

    assert parse_partition(partition) == partition == PartitionName("%retry%orders%billing")
    assert (subject_of(partition), owner_of(partition)) == ("orders", "billing")

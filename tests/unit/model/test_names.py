"""What is allowed as a name, and what is not: the same for everybody, for ever."""

from collections.abc import Callable

import pytest

from pulque.errors import InvalidNameError
from pulque.model.names import (
    Group,
    PartitionName,
    Pattern,
    Subject,
    dead_partition,
    is_pattern,
    is_retry,
    level_of,
    level_partition,
    owner_of,
    parse_consumer_id,
    parse_group,
    parse_owner,
    parse_partition,
    parse_pattern,
    parse_subject,
    patterns_of,
    retry_partition,
    subject_of,
    wait_partition,
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
        ("orders#p7", "orders", None),
        ("%retry%orders#p0%billing", "orders", "billing"),
        ("%retry%orders%#host:app/0", "orders", "#host:app/0"),
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
        "%retry%a#p4%b",
        "%retry%a#p10%b",
        "%retry%a%#",
        "%retry%a%##b",
        "%retry%a%#a b",
        "a#p4",
        "a#p10",
        "a#p77",
        "a.*",
        "*",
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


@pytest.mark.parametrize("level", range(10))
def test_each_level_of_priority_has_partitions_of_its_own(level: int) -> None:
    subject, group = Subject("orders.eu"), Group("billing")
    made = [
        level_partition(subject, level),
        retry_partition(subject, group, level),
        wait_partition(subject, group, level),
        dead_partition(subject, group, level),
    ]

    for partition in made:
        assert parse_partition(partition) == partition
        assert level_of(partition) == level
        assert subject_of(partition) == subject
    assert [owner_of(partition) for partition in made] == [None, group, group, group]
    assert [is_retry(partition) for partition in made] == [False, True, False, False]


def test_the_usual_level_is_the_plain_partition() -> None:
    assert level_partition(Subject("orders"), 4) == "orders"
    assert retry_partition(Subject("orders"), Group("g"), 4) == "%retry%orders%g"


@pytest.mark.parametrize("level", [-1, 10, 77])
def test_there_are_ten_levels(level: int) -> None:
    with pytest.raises(InvalidNameError, match="0 to 9"):
        level_partition(Subject("orders"), level)


@pytest.mark.parametrize("text", ["orders#2", "orders#p", "orders#px", "%retry%orders%g"])
def test_what_names_no_level_has_the_usual_one(text: str) -> None:
    assert level_of(PartitionName(text)) == 4


@pytest.mark.parametrize("text", [*GOOD, "*", "order.*", "a.b.c.*", "a" * 253 + ".*"])
def test_a_subscription_covers_a_subject_or_a_pattern(text: str) -> None:
    assert parse_pattern(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "**",
        "a*",
        "*.a",
        "a.*.b",
        "a.*.*",
        ".*",
        "..*",
        "a..*",
        "#*",
        "%retry%a%*",
        "a" * 254 + ".*",
        "a.**",
    ],
)
def test_a_bad_pattern_is_refused(text: str) -> None:
    with pytest.raises(InvalidNameError, match="is not allowed"):
        parse_pattern(text)


@pytest.mark.parametrize("text", ["order.*", "*"])
def test_a_message_is_not_sent_to_a_pattern(text: str) -> None:
    assert is_pattern(text)
    with pytest.raises(InvalidNameError, match="a message goes to one subject"):
        parse_subject(text)


def test_a_subject_is_found_by_itself_and_by_every_prefix() -> None:
    assert patterns_of(Subject("order.paid.eu")) == [
        Pattern("order.paid.eu"),
        Pattern("order.paid.*"),
        Pattern("order.*"),
        Pattern("*"),
    ]


def test_a_group_may_be_one_consumer() -> None:
    assert parse_owner("billing") == "billing"
    assert parse_owner("#host:app/0") == "#host:app/0"
    with pytest.raises(InvalidNameError, match="consumer id"):
        parse_owner("#a b")

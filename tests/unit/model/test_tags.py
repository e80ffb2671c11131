"""The bits of a tag are part of the format: they are these, for ever."""

import pytest

from pulque.model.tags import bits_of_tag, bits_of_tags


@pytest.mark.parametrize(
    ("tag", "bits"),
    [
        ("a", 0x0001_0000_0000_1010),
        ("b", 0x0000_0000_0000_0818),
        ("blue", 0x0040_0402_0000_0000),
        ("vip", 0x0000_4080_0000_0080),
        ("é", 0x0180_0000_1000_0000),
        ("日本", 0x0000_0000_0002_1200),
        ("x" * 1000, 0x0000_0000_0028_0200),
        ("2371", 0x0000_0200_0000_0000),
    ],
)
def test_a_tag_has_the_bits_it_always_had(tag: str, bits: int) -> None:
    assert bits_of_tag(tag) == bits


def test_the_bits_of_a_come_from_its_crc() -> None:
    crc = 0xC1D04330  # CRC-32C of "a"

    assert bits_of_tag("a") == 1 << (crc & 63) | 1 << (crc >> 6 & 63) | 1 << (crc >> 12 & 63)


def test_tags_are_joined_by_or() -> None:
    assert bits_of_tags(["a", "b"]) == 0x0001_0000_0000_1818
    assert bits_of_tags([]) == 0


def test_different_tags_may_share_all_bits() -> None:
    """So that whoever filters by bits must compare the strings afterwards."""
    assert bits_of_tag("260") == bits_of_tag("481")

"""URLs are understood as people write them, and refused with the setting's name."""

import pytest

from pulque.client.connection.url import Address, addresses_of, parse_url
from pulque.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("pulque://127.0.0.1:7450", [("127.0.0.1", 7450)]),
        ("pulque://example.org", [("example.org", 7450)]),
        ("pulque://a:1,b:2/", [("a", 1), ("b", 2)]),
        ("pulque://[::1]:99", [("::1", 99)]),
        ("pulque://[::1]", [("::1", 7450)]),
    ],
)
def test_a_url_names_addresses(url: str, addresses: list[tuple[str, int]]) -> None:
    assert list(parse_url(url)) == addresses


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:7450",
        "http://127.0.0.1",
        "pulque://",
        "pulque://:7450",
        "pulque://a:b",
        "pulque://a:0",
        "pulque://a:65536",
        "pulque://a:1,",
        "pulque://a b:1",
        "pulque://user@a:1",
        "pulque://a:1/path",
        "pulque://::1:99",
        "pulque://a:\N{ARABIC-INDIC DIGIT ONE}",
    ],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="PULQUE_URL"):
        parse_url(url, setting="PULQUE_URL")


def test_the_caller_comes_before_the_environment_and_that_before_the_default() -> None:
    environ = {"PULQUE_URL": "pulque://b:2"}

    assert addresses_of("pulque://a:1", environ) == (("a", 1),)
    assert addresses_of(None, environ) == (("b", 2),)
    assert addresses_of(None, {}) == (("127.0.0.1", 7450),)


def test_an_address_is_shown_as_it_is_written() -> None:
    assert str(Address("a", 1)) == "a:1"
    assert str(Address("::1", 1)) == "[::1]:1"

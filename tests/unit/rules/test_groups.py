"""Who may say what about a group, and which of several words counts."""

import pytest

from pulque.errors import NotAllowedError, UsageError
from pulque.model.actions import GroupConfigured
from pulque.model.groups import (
    EVERYTHING,
    GroupSettings,
    Mode,
    RetrySettings,
    decode_settings,
    encode_settings,
    tag_filter,
)
from pulque.model.names import Group, Pattern, Subject
from pulque.rules.groups import UNCONFIGURED, GroupsSettings, agreed, changed

G = Group("g")
ORDERS = Pattern("orders")
RED = GroupSettings(Mode.SHARED, tag_filter(["red"]))


def test_the_first_word_is_recorded_and_the_same_word_is_not() -> None:
    assert agreed(None, RED, G, ORDERS) == GroupConfigured(G, ORDERS, RED)
    assert agreed(RED, RED, G, ORDERS) is None


@pytest.mark.parametrize(
    ("asked", "way_out"),
    [
        (GroupSettings(Mode.ONCE, RED.filter), "in mode shared, not once.*--mode once"),
        (GroupSettings(Mode.SHARED, EVERYTHING), "tags 'red', not no filter.*--tags"),
        (GroupSettings(Mode.SHARED, tag_filter([], ["red", "big"])), "not tags 'big && red'"),
    ],
)
def test_another_word_is_refused_with_the_way_out(asked: GroupSettings, way_out: str) -> None:
    with pytest.raises(NotAllowedError, match=way_out):
        agreed(RED, asked, G, ORDERS)


def test_of_retries_what_is_not_said_stays() -> None:
    before = RED._replace(retry=RetrySettings((5, 6), 20, 7))
    wanted = RED._replace(retry=RetrySettings(max_attempts=3))

    fact = agreed(before, wanted, G, ORDERS)

    assert fact is not None
    assert fact.settings.retry == RetrySettings((5, 6), 20, 3)
    assert changed(before, before, G, ORDERS) is None


def test_the_narrowest_pattern_counts() -> None:
    settings = GroupsSettings()
    for pattern, tag in [("*", "any"), ("order.*", "wide"), ("order.paid.*", "narrow")]:
        settings.put(G, Pattern(pattern), GroupSettings(filter=tag_filter([tag])))
    settings.put(G, Pattern("order.paid.now"), GroupSettings(Mode.ONCE))

    def tags(subject: str) -> tuple[str, ...]:
        return settings.of(G, Subject(subject)).filter.any_of

    assert tags("order.sent") == ("wide",)
    assert tags("order.paid.late") == ("narrow",)
    assert tags("news") == ("any",)
    assert settings.of(G, Subject("order.paid.now")).mode is Mode.ONCE
    assert settings.of(Group("other"), Subject("order.sent")) == UNCONFIGURED


def test_the_order_of_tags_does_not_matter() -> None:
    assert tag_filter(["b", "a", "b"]) == tag_filter(["a", "b"])
    assert tag_filter("red") == tag_filter(["red"])
    assert tag_filter() == EVERYTHING


@pytest.mark.parametrize("tags", [[""], ["a\0b"], ["t"] * 65, [1]])
def test_tags_that_cannot_be_are_refused(tags: list[str]) -> None:
    with pytest.raises(UsageError):
        tag_filter(tags)


def test_settings_that_are_cut_off_are_refused() -> None:
    data = encode_settings(RED._replace(retry=RetrySettings((1, 2))))

    assert decode_settings(data).retry.delays_ms == (1, 2)
    for size in range(len(data)):
        with pytest.raises(ValueError, match=r".*"):
            decode_settings(data[:size])

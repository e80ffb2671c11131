"""The settings of groups: which consumer may set what, and which settings apply to a subject.

Settings are stored for a group and a subject, or a pattern of subjects. A consumer that asks for
another mode or filter than the group's is refused: a misconfigured consumer must
not take messages away from the others. A deliberate change goes through ``changed``.
"""

from collections.abc import Iterator

from pulque.errors import InvalidRequestError, NotAllowedError
from pulque.model.actions import GroupConfigured
from pulque.model.groups import GroupSettings, Mode
from pulque.model.names import Group, Pattern, Subject, is_pattern, overlap, patterns_of

__all__ = ["UNCONFIGURED", "GroupsSettings", "agreed", "changed", "check_order"]

UNCONFIGURED = GroupSettings()
"""The settings of a group without recorded ones: shared, without a filter."""


class GroupsSettings:
    """The settings of all groups of one broker. Changed only through ``Consumption.handle``."""

    def __init__(self) -> None:
        self._by_subject: dict[tuple[Group, Pattern], GroupSettings] = {}
        self.filtering: set[Group] = set()
        """Groups that have, or had, a filter on something."""
        self.once: set[Group] = set()
        """Groups that have, or had, the mode once for something."""
        self.ordered: set[Group] = set()
        """Groups that have, or had, the mode ordered for something."""
        self.version = 0
        """Grows with every change."""
        self.changed: set[tuple[Group, Pattern]] = set()
        """Settings that differ from the last checkpoint."""

    def __iter__(self) -> Iterator[tuple[Group, Pattern]]:
        return iter(self._by_subject)

    def of(self, group: Group, subject: Subject) -> GroupSettings:
        """Return the settings of a group for a subject: the narrowest pattern counts."""
        found = self._by_subject.get((group, Pattern(subject)))
        if found is not None:
            return found
        for pattern in patterns_of(subject):
            found = self._by_subject.get((group, pattern))
            if found is not None:
                return found
        return UNCONFIGURED

    def recorded(self, group: Group, subject: Pattern) -> GroupSettings | None:
        """Return the settings recorded for exactly this subject or pattern."""
        return self._by_subject.get((group, subject))

    def put(self, group: Group, subject: Pattern, settings: GroupSettings) -> None:
        """Store the settings of a group."""
        self._by_subject[group, subject] = settings
        if settings.filter.kind:
            self.filtering.add(group)
        if settings.mode is Mode.ONCE:
            self.once.add(group)
        if settings.mode is Mode.ORDERED:
            self.ordered.add(group)
        self.version += 1
        self.changed.add((group, subject))


def agreed(
    recorded: GroupSettings | None, asked: GroupSettings, group: Group, subject: Pattern
) -> GroupConfigured | None:
    """Return the fact to be recorded before a consumer may join its group, if any.

    Raises:
        NotAllowedError: The group has another mode or another filter.
    """
    if recorded is None:
        return GroupConfigured(group, subject, asked)
    if asked.mode != recorded.mode:
        raise NotAllowedError(
            f"group {group} consumes {subject} in mode {recorded.mode.name.lower()}, not "
            f"{asked.mode.name.lower()}: join with that mode, use another group, or switch it "
            f"for all its consumers with: pulque group change {subject} --group {group} "
            f"--mode {asked.mode.name.lower()}"
        )
    if asked.filter != recorded.filter:
        raise NotAllowedError(
            f"group {group} consumes {subject} with {recorded.filter}, not {asked.filter}: join "
            "with that filter, use another group, or change it for all its consumers with: "
            f"pulque group change {subject} --group {group} --tags …"
        )
    return changed(recorded, recorded._replace(retry=asked.retry), group, subject)


def check_order(settings: GroupsSettings, mode: Mode, group: Group, subject: Pattern) -> None:
    """Check that a group consumes overlapping subjects either all in order or all without.

    Raises:
        InvalidRequestError: A pattern is to be consumed in order.
        NotAllowedError: The group has a subject or pattern that overlaps, with the opposite mode.
    """
    is_ordered = mode is Mode.ORDERED
    if is_ordered and is_pattern(subject):
        raise InvalidRequestError(
            f"{subject} cannot be consumed in order: a group is ordered for one subject at a time"
        )
    if not is_ordered and group not in settings.ordered:
        return
    for whose, other in settings:
        told = settings.recorded(whose, other)
        if whose != group or told is None or other == subject or not overlap(subject, other):
            continue
        if (told.mode is Mode.ORDERED) != is_ordered:
            raise NotAllowedError(
                f"group {group} consumes {other} in mode {told.mode.name.lower()}, so it cannot "
                f"consume {subject} in mode {mode.name.lower()}: use another group for one of them"
            )


def changed(
    recorded: GroupSettings, wanted: GroupSettings, group: Group, subject: Pattern
) -> GroupConfigured | None:
    """Return the fact that changes settings on purpose, or None if nothing changes.

    Retry settings that are not given stay as they are.
    """
    settings = wanted._replace(retry=wanted.retry.over(recorded.retry))
    return None if settings == recorded else GroupConfigured(group, subject, settings)

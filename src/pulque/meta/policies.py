"""What holds for the whole cluster: as the settings say, unless it was changed while it runs.

A change is written to the database, so that it holds at every meta server, after every restart.
"""

import json

from pulque.admin.cluster import ClusterPolicies, Creation
from pulque.meta.config import SubjectsSection
from pulque.meta.directory import Directory
from pulque.model.names import Pattern

__all__ = ["PoliciesInForce", "written"]

_CREATIONS: tuple[Creation, ...] = ("first-send", "beforehand")


class PoliciesInForce:
    """Answers with what holds now."""

    def __init__(self, settings: SubjectsSection, directory: Directory) -> None:
        self._settings = settings
        self._directory = directory

    @property
    def now(self) -> ClusterPolicies:
        """What holds now."""
        changed = self._directory.policies
        settings = self._settings
        return ClusterPolicies(
            _creation(changed.get("create")) or settings.create,
            tuple(map(Pattern, json.loads(changed["allowed"])))
            if "allowed" in changed
            else tuple(map(Pattern, settings.allowed)),
            int(json.loads(changed["spread"])) if "spread" in changed else int(settings.spread),
        )

    @property
    def is_first_send(self) -> bool:
        """Whether a first send creates its subject."""
        return self.now.create == "first-send"


def written(policies: ClusterPolicies) -> dict[str, str]:
    """Return policies as the database keeps them: JSON by key."""
    return {key: json.dumps(value) for key, value in policies._asdict().items()}


def _creation(text: str | None) -> Creation | None:
    found = None if text is None else json.loads(text)
    return next((each for each in _CREATIONS if each == found), None)

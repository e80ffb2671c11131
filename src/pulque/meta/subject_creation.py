"""Creating subjects: at the first send, or beforehand, as the settings say.

Many may be wanted at once, so they are written together: one transaction for all that came while
the one before was under way.
"""

from collections.abc import Callable, Sequence

from pulque.errors import NotAllowedError, PulqueError, UnknownSubjectError
from pulque.meta.components import Background, MetaParts
from pulque.meta.config import MetaSettings
from pulque.meta.directory_refresh import Refresher
from pulque.meta.policies import PoliciesInForce
from pulque.model.names import Subject, patterns_of

__all__ = ["Created", "Subjects"]

Created = Callable[[PulqueError | None], None]
"""Told that a subject is there, or why not."""

_AT_ONCE = 2000
_NAMED = 10


class Subjects:
    """Creates subjects that somebody wants to send to."""

    def __init__(
        self,
        parts: MetaParts,
        refresher: Refresher,
        background: Background,
        settings: MetaSettings,
    ) -> None:
        self._store = parts.store
        self._directory = parts.directory
        self._refresher = refresher
        self._background = background
        self.policies = PoliciesInForce(settings.subjects, parts.directory)
        self._most = settings.limits.max_subjects
        self._wanted: dict[Subject, list[Created]] = {}
        self._is_writing = False

    def create(self, subject: Subject, created: Created) -> None:
        """Create a subject because somebody wants to send to it.

        Raises:
            UnknownSubjectError: Subjects are created beforehand.
            NotAllowedError: This one may not exist, or there are too many.
        """
        if not self.policies.is_first_send:
            raise UnknownSubjectError(
                f"subject {subject} does not exist, and subjects are created beforehand here "
                "(subjects.create)"
            )
        self.check(subject)
        self._wanted.setdefault(subject, []).append(created)
        if not self._is_writing:
            self._is_writing = True
            self._background.start(self._write())

    def check(self, subject: Subject) -> None:
        """Refuse a subject that may not be created.

        Raises:
            NotAllowedError: It may not exist, or there are too many.
        """
        allowed = frozenset(self.policies.now.allowed)
        if allowed and allowed.isdisjoint(patterns_of(subject)):
            raise NotAllowedError(
                f"subject {subject} may not be created; subjects.allowed allows "
                f"{', '.join(sorted(allowed)[:_NAMED])}"
            )
        if len(self._directory.subjects) + len(self._wanted) >= self._most:
            raise NotAllowedError(
                f"subject {subject} would be one more than the {self._most} that "
                "limits.max_subjects allows"
            )

    async def _write(self) -> None:
        try:
            while self._wanted:
                some = list(self._wanted)[:_AT_ONCE]
                waiting = [self._wanted.pop(subject) for subject in some]
                error = await self._write_some(some)
                for created in (each for listed in waiting for each in listed):
                    created(error)
        finally:
            self._is_writing = False

    async def _write_some(self, subjects: Sequence[Subject]) -> PulqueError | None:
        try:
            placed = self._directory.place_all(subjects, spread=self.policies.now.spread)
            await self._store.create_subjects(placed)
            await self._refresher.refresh()
        except PulqueError as error:
            return error
        return None

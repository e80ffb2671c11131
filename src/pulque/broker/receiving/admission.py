"""What may be sent here now: by the broker's settings, and by the word of its cluster."""

from collections.abc import Callable, Iterable

from pulque.errors import PulqueError, ReadOnlyError
from pulque.model.names import PartitionName, subject_of
from pulque.model.standing import ALONE, Standing
from pulque.rules.admission import broker_refusal, is_restricted, subject_refusal

__all__ = ["Gate"]


class Gate:
    """Refuses sends; asked for every batch.

    Args:
        broker: The broker's name, for texts.
        allowed: The subjects and patterns that the settings allow; empty for all.
        standing: What the cluster said before this start.
        changed: Called with what it says now, whenever that differs.
    """

    def __init__(
        self,
        broker: str,
        allowed: Iterable[str] = (),
        standing: Standing = ALONE,
        changed: Callable[[Standing], None] | None = None,
    ) -> None:
        self._broker = broker
        self._allowed = frozenset(allowed)
        self._changed = changed
        self.standing = standing
        """What the cluster said last."""
        self._obstacle = ""
        self.is_open = not is_restricted(standing, self._allowed)
        """Whether all may be sent; then nobody need ask further."""

    def update(self, standing: Standing) -> None:
        """Take in what the cluster says now."""
        if standing == self.standing:
            return
        if self._changed is not None:
            # First, so that what is said here is never less than what a restart remembers.
            self._changed(standing)
        self.standing = standing
        self._look()

    def obstruct(self, obstacle: str) -> None:
        """Take no sends for a reason that the broker has itself; empty for none any more."""
        self._obstacle = obstacle
        self._look()

    def check(self, partition: PartitionName) -> None:
        """Refuse what may not be sent to a partition now.

        Raises:
            ReadOnlyError: The broker, or the subject, takes no sends now.
            NotAllowedError: The settings do not allow the subject.
        """
        self.check_broker()
        refusal = subject_refusal(subject_of(partition), self.standing, self._allowed)
        if refusal is not None:
            raise refusal

    def takes(self, partition: PartitionName) -> bool:
        """Say whether messages may be sent to a partition now."""
        try:
            self.check(partition)
        except PulqueError:
            return False
        return True

    def check_broker(self) -> None:
        """Refuse new messages if the broker takes none at all.

        Raises:
            ReadOnlyError: It takes none.
        """
        refusal = broker_refusal(self._broker, self.standing)
        if refusal is not None:
            raise refusal
        self.check_obstacle()

    def check_obstacle(self) -> None:
        """Refuse new messages, and to vouch for old ones, for a reason of the broker's own.

        Raises:
            ReadOnlyError: There is one.
        """
        if self._obstacle:
            raise ReadOnlyError(f"{self._broker} takes no messages now: {self._obstacle}")

    def _look(self) -> None:
        self.is_open = not (self._obstacle or is_restricted(self.standing, self._allowed))

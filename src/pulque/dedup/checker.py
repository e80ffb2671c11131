"""What a checker does: one message, one answer."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from pulque.model.message import Message

__all__ = ["Checker"]


class Checker(ABC):
    """Remembers which messages of a group were handled. Thread-safe.

    A message is *begun*, then *finished* or *given up*. What is begun and neither, as its process
    died, may be begun by another after a while: a checker never makes a message go missing.
    """

    @contextmanager
    def once(self, message: Message) -> Iterator[bool]:
        """Begin a message, and finish it at the end of the block; an exception gives it up.

        Yields:
            Whether the message is to be handled; False if it was before.

        Raises:
            UnavailableError: Another handles it right now: nack it, it comes again.
        """
        is_first = self.begin(message)
        try:
            yield is_first
        except BaseException:
            if is_first:
                self.give_up(message)
            raise
        if is_first:
            self.finish(message)

    @abstractmethod
    def begin(self, message: Message) -> bool:
        """Say whether a message is to be handled; False if it was before.

        Raises:
            UnavailableError: Another handles it right now.
        """

    @abstractmethod
    def finish(self, message: Message) -> None:
        """Remember that a message was handled."""

    @abstractmethod
    def give_up(self, message: Message) -> None:
        """Let a message that was begun be begun again."""

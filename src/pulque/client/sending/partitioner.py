"""The streams of batches that lead to the partitions of one way, and which one a message takes."""

from collections.abc import Callable

from pulque.client.routing.targets import Target, Targets
from pulque.client.sending.outgoing_batch import Stream
from pulque.client.sending.partition_split import is_moved, is_quiet
from pulque.model.names import DEFAULT_LEVEL
from pulque.model.pack import encode_order_key

__all__ = ["WayStreams"]

_MOST_KEYS = 100_000
"""So many order keys are remembered with where they go."""


class WayStreams:
    """The streams of one way: a batch to one partition, the next batch to the next."""

    __slots__ = (
        "_by_name",
        "_by_target",
        "_current",
        "_monotonic",
        "_new_stream",
        "keyed",
        "pending",
        "targets",
    )

    def __init__(
        self,
        targets: Targets,
        new_stream: Callable[[Target], Stream],
        monotonic: Callable[[], float],
    ) -> None:
        self.targets = targets
        self._new_stream = new_stream
        self._monotonic = monotonic
        self._by_name: dict[tuple[str, str], Stream] = {}
        """By place and partition."""
        self._by_target: dict[Target, Stream] = {}
        self._current: dict[int, Stream] = {}
        """By priority: where the next batch goes."""
        self.keyed: dict[str, tuple[Stream, bytes, int]] = {}
        """By order key: where its messages go in any case, the key as it is packed, its length."""
        self.pending: Targets | None = None
        """A newer route, which has to wait for what is on its way."""

    def change(self, targets: Targets) -> list[Stream]:
        """Take in another route; what is on its way goes on.

        If partitions were split, new messages have to stay behind those that wait for an answer
        of one: the route counts when these have it. Return the streams that lead to such
        partitions, and nowhere any more; what waits there is to be dealt out anew.
        """
        for stream in self._by_name.values():
            stream.is_closing = stream.has_keys and is_moved(stream, targets)
            stream.dispatch.activate(stream)  # another route may have closed it before
        closing = [each for each in self._by_name.values() if each.is_closing]
        if not all(map(is_quiet, closing)):
            self.pending = targets
            return []
        self.pending = None
        self.targets = targets
        self.keyed.clear()
        self._by_target.clear()
        self._current.clear()
        for stream in closing:
            stream.is_closing = False
        return closing

    def pick(self, order_key: str | None, level: int) -> Stream:
        """Return the stream for a message."""
        if order_key:
            targets = self.targets
            now = 0.0 if targets.is_single else self._monotonic()
            return self.stream(targets.pick(order_key, level, now))
        return self._current.get(level) or self.turn(level)

    def remember(self, order_key: str) -> tuple[Stream, bytes, int] | None:
        """Keep in mind where a key's messages go, and return it; None if it depends on more.

        Raises:
            UsageError: It is no order key.
        """
        if not self.targets.is_strict and not self.targets.is_single:
            return None
        if len(self.keyed) >= _MOST_KEYS:
            self.keyed.clear()
        encoded = encode_order_key(order_key)
        found = self.pick(order_key, DEFAULT_LEVEL), encoded, len(encoded)
        self.keyed[order_key] = found
        return found

    def turn(self, level: int) -> Stream:
        """Have the next batch of a priority go to the next partition; return its stream."""
        target = self.targets.pick(None, level, self._monotonic())
        self._current[level] = found = self.stream(target)
        return found

    def stream(self, target: Target) -> Stream:
        """Return the stream that leads to a partition."""
        found = self._by_target.get(target)
        if found is None:
            name = target.place, target.partition
            found = self._by_name.get(name)
            if found is None:
                found = self._by_name[name] = self._new_stream(target)
            found.target = target
            found.is_strict = self.targets.is_strict
            self._by_target[target] = found
        return found

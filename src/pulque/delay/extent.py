"""What a checkpoint says about the schedule: how far it goes, and how large its logs were."""

from collections.abc import Mapping
from struct import Struct
from typing import NamedTuple

__all__ = ["Extent"]

_TICK_KEY = Struct("<6sq")
_TICK = Struct("<QQ")
_PREFIX = b"tick. "
_REPLAYED_KEY = b"replayed"
_REPLAYED = Struct("<QI")


class Extent(NamedTuple):
    """What a checkpoint says about the schedule."""

    replayed: int
    """The message log is replayed up to here."""
    tick_ms: int
    """How long ticks were; 0 if nothing is known."""
    sizes: dict[int, tuple[int, int]]
    """Bytes and messages, by tick."""

    def changes(self, before: Mapping[int, tuple[int, int]]) -> dict[bytes, bytes | None]:
        """Return what differs from the last checkpoint."""
        position = _REPLAYED.pack(self.replayed, self.tick_ms)
        changed: dict[bytes, bytes | None] = {_REPLAYED_KEY: position}
        for tick, found in self.sizes.items():
            if before.get(tick) != found:
                changed[_TICK_KEY.pack(_PREFIX, tick)] = _TICK.pack(*found)
        for tick in before.keys() - self.sizes.keys():
            changed[_TICK_KEY.pack(_PREFIX, tick)] = None
        return changed

    @classmethod
    def load(cls, state: Mapping[bytes, bytes]) -> "Extent":
        """Return what a checkpoint holds."""
        replayed = tick_ms = 0
        sizes: dict[int, tuple[int, int]] = {}
        for key, value in state.items():
            if key == _REPLAYED_KEY:
                replayed, tick_ms = _REPLAYED.unpack(value)
            elif key[:6] == _PREFIX and len(key) == _TICK_KEY.size:
                size, messages = _TICK.unpack(value)
                sizes[_TICK_KEY.unpack(key)[1]] = (size, messages)
        return cls(replayed, tick_ms, sizes)

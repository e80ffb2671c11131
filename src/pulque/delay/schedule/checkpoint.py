"""The schedule in a checkpoint: its replayed end, and the sizes of its logs."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from struct import Struct
from typing import NamedTuple

__all__ = ["Extent"]

_TICK_KEY = Struct("<6sq")
_TICK = Struct("<QQ")
_PREFIX = b"tick. "
_NOTED_PREFIX = b"noted."
_OVER_PREFIX = b"over. "
_NOTED = Struct("<Q")
_REPLAYED_KEY = b"replayed"
_REPLAYED = Struct("<QI")


class Extent(NamedTuple):
    """The state of the schedule in a checkpoint."""

    replayed: int
    """The message log is replayed up to here."""
    tick_ms: int
    """The length of ticks; 0 if unknown."""
    sizes: dict[int, tuple[int, int]]
    """Bytes and messages, by tick."""
    noted: dict[int, int]
    """The durable size of each dispatch log, by tick."""
    over: AbstractSet[int]
    """Finished ticks: their files are removed after the next checkpoint."""

    def changes(self, before: "Extent") -> dict[bytes, bytes | None]:
        """Return the changes since the last checkpoint."""
        position = _REPLAYED.pack(self.replayed, self.tick_ms)
        changed: dict[bytes, bytes | None] = {_REPLAYED_KEY: position}
        for tick, found in self.sizes.items():
            if before.sizes.get(tick) != found:
                changed[_TICK_KEY.pack(_PREFIX, tick)] = _TICK.pack(*found)
        for tick in before.sizes.keys() - self.sizes.keys():
            changed[_TICK_KEY.pack(_PREFIX, tick)] = None
        for tick, end in self.noted.items():
            if before.noted.get(tick) != end:
                changed[_TICK_KEY.pack(_NOTED_PREFIX, tick)] = _NOTED.pack(end)
        for tick in before.noted.keys() - self.noted.keys():
            changed[_TICK_KEY.pack(_NOTED_PREFIX, tick)] = None
        for tick in self.over ^ before.over:
            is_over = tick in self.over
            changed[_TICK_KEY.pack(_OVER_PREFIX, tick)] = b"" if is_over else None
        return changed

    @classmethod
    def load(cls, state: Mapping[bytes, bytes]) -> "Extent":
        """Decode the state of a checkpoint."""
        replayed = tick_ms = 0
        sizes: dict[int, tuple[int, int]] = {}
        noted: dict[int, int] = {}
        over: set[int] = set()
        for key, value in state.items():
            if key == _REPLAYED_KEY:
                replayed, tick_ms = _REPLAYED.unpack(value)
            elif key[:6] == _PREFIX and len(key) == _TICK_KEY.size:
                size, messages = _TICK.unpack(value)
                sizes[_TICK_KEY.unpack(key)[1]] = (size, messages)
            elif key[:6] == _NOTED_PREFIX and len(key) == _TICK_KEY.size:
                (noted[_TICK_KEY.unpack(key)[1]],) = _NOTED.unpack(value)
            elif key[:6] == _OVER_PREFIX and len(key) == _TICK_KEY.size:
                over.add(_TICK_KEY.unpack(key)[1])
        return cls(replayed, tick_ms, sizes, noted, over)

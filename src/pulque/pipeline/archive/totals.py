"""Counting messages so that two heaps of them can be compared, in whatever order they lie.

All numbers are sums, so that parts add up to the whole.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["COLUMNS", "Tally", "tally_of", "tally_of_entries"]

COLUMNS = ("message_id", "sequence", "body")
"""What a tally looks at."""

_MASK = (1 << 64) - 1
_ID_DIGITS = 32
_FACTORS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64
)
_OF_SEQUENCE = np.uint64(0xD6E8FEB86659FD93)
_OF_LENGTH = np.uint64(0xA0761D6478BD642F)
_LAST = np.uint64(0xE7037ED1A0B428DB)


@dataclass(frozen=True, slots=True)
class Tally:
    """What messages add up to.

    Attributes:
        count: How many.
        sequences: The sum of their sequences, which an index knows too.
        marks: The sum of a hash of id, sequence and length of each.
        content: The sum of all bytes of their bodies.
    """

    count: int = 0
    sequences: int = 0
    marks: int = 0
    content: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.count + other.count,
            (self.sequences + other.sequences) & _MASK,
            (self.marks + other.marks) & _MASK,
            self.content + other.content,
        )


def tally_of(batch: pa.RecordBatch) -> Tally:
    """Return what the messages of a batch add up to."""
    if not batch.num_rows:
        return Tally()
    _, digits = _bytes_of(batch.column("message_id"))
    lengths, content = _bytes_of(batch.column("body"))
    sequences = batch.column("sequence").to_numpy().astype(np.uint64)
    marks = sequences * _OF_SEQUENCE + lengths.astype(np.uint64) * _OF_LENGTH
    if len(digits) == _ID_DIGITS * batch.num_rows:
        marks += (digits.view("<u8").reshape(-1, 4) * _FACTORS).sum(axis=1, dtype=np.uint64)
    marks ^= marks >> np.uint64(29)
    marks *= _LAST
    marks ^= marks >> np.uint64(32)
    return Tally(
        batch.num_rows, int(sequences.sum()), int(marks.sum()), int(content.sum(dtype=np.uint64))
    )


def tally_of_entries(entries: npt.NDArray[np.void]) -> tuple[int, int]:
    """Return count and sum of sequences that an index says there are."""
    counts = entries["count"].astype(np.uint64)
    firsts = entries["first_sequence"].astype(np.uint64)
    ones = np.maximum(counts, np.uint64(1)) - np.uint64(1)
    sums = firsts * counts + counts * ones // np.uint64(2)
    return int(counts.sum()), int(sums.sum(dtype=np.uint64))


def _bytes_of(array: Any) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Return the lengths of values, and all their bytes in a row."""
    _, offsets, data = array.buffers()
    borders = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    everything = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return np.diff(borders), everything[borders[0] : borders[-1]]

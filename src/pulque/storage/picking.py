"""Single messages, cut out of many batches at once, each as a record of its own.

A filter that wants few of many finds one message in a batch, and the next one in another. Their
fixed-size parts, envelope, header and columns, are gathered in one step for all of them.
"""

from functools import lru_cache
from struct import Struct

import google_crc32c
import numpy as np

from pulque.model.batch import layout_of
from pulque.model.record import ENVELOPE_SIZE
from pulque.storage.runs import HEAD_SIZE, Numbers, Rows, Run

__all__ = ["pick"]

_CRC_AT = ENVELOPE_SIZE - 4
_REST_AT = ENVELOPE_SIZE + 4
_CRCS = Struct("<II")
"""Of the envelope and of the batch: they stand beside each other, between what they cover."""
_SIZES = np.dtype("<u4")
_HEAD_TYPE = np.dtype(
    {
        "names": ["size", "first_sequence", "count", "batch_count", "records_size"],
        "formats": ["<u4", "<u8", "<u4", "<u4", "<u4"],
        "offsets": [4, 32, 48, ENVELOPE_SIZE + 8, ENVELOPE_SIZE + 12],
        "itemsize": HEAD_SIZE,
    }
)
"""What is different for one message of a batch than for the whole."""


def pick(run: Run, which: Numbers, index: Numbers, seed: int) -> list[bytes]:
    """Return records of one message each.

    Args:
        run: Has their batches.
        which: For each message the number of its batch, which is not compressed.
        index: For each message its place in there.
        seed: Of the partition.
    """
    flags = run.flags[which]
    if (flags == flags[0]).all():
        return _pick(run, which, index, int(flags[0]), seed)
    records = [b""] * len(which)
    for each in np.unique(flags).tolist():
        chosen = np.flatnonzero(flags == each)
        found = _pick(run, which[chosen], index[chosen], each, seed)
        for place, record in zip(chosen.tolist(), found, strict=True):
            records[place] = record
    return records


def _pick(run: Run, which: Numbers, index: Numbers, flags: int, seed: int) -> list[bytes]:
    """Return the records of messages whose batches have the same columns."""
    starts = run.starts[which]
    counts = run.counts[which]
    fixed, by_count, by_index = _columns_of(flags)
    places = starts[:, None] + fixed
    places += counts[:, None] * by_count
    places += index[:, None] * by_index
    rows = np.empty((len(which), HEAD_SIZE + len(fixed)), np.uint8)
    rows[:, :HEAD_SIZE] = run.heads.view(np.uint8).reshape(-1, HEAD_SIZE)[which]
    rows[:, HEAD_SIZE:] = np.frombuffer(run.data, np.uint8)[places]
    heads = np.ndarray(len(rows), _HEAD_TYPE, rows, strides=rows.strides[:1])
    sizes, skipped = _sizes(run.data, starts, index)
    heads["size"] = rows.shape[1] + sizes
    heads["first_sequence"] += index.astype(np.uint64)
    heads["count"] = heads["batch_count"] = 1
    layout = layout_of(flags)
    heads["records_size"] = layout.record_width + sizes
    begins = starts + ENVELOPE_SIZE + layout.data_start(0) + skipped
    begins += counts * (layout.visible_width + layout.record_width)
    return _sealed(rows, run.data, begins, begins + sizes, seed)


def _sealed(rows: Rows, data: bytes, begins: Numbers, ends: Numbers, seed: int) -> list[bytes]:
    """Put the data of each message behind its row, and the checksums in."""
    fixed, width = rows.tobytes(), rows.shape[1]
    value, extend, pack = google_crc32c.value, google_crc32c.extend, _CRCS.pack
    records = []
    at = 0
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        head = fixed[at : at + _CRC_AT]
        rest = fixed[at + _REST_AT : at + width] + data[begin:end]
        records.append(head + pack(value(head), extend(seed, rest)) + rest)
        at += width
    return records


def _sizes(data: bytes, starts: Numbers, index: Numbers) -> tuple[Numbers, Numbers]:
    """Return the size of each message, and of all that come before it in its batch."""
    ends = np.cumsum(index + 1)
    begins = starts + HEAD_SIZE
    columns = [
        data[begin:end]
        for begin, end in zip(begins.tolist(), (begins + 4 * (index + 1)).tolist(), strict=True)
    ]
    column = np.frombuffer(b"".join(columns), _SIZES)
    totals = np.zeros(len(column) + 1, np.int64)
    np.cumsum(column, out=totals[1:])
    return column[ends - 1].astype(np.int64), totals[ends - 1] - totals[ends - 1 - index]


@lru_cache(maxsize=1024)
def _columns_of(flags: int) -> tuple[Numbers, Numbers, Numbers]:
    """Say where the bytes of a message's columns are.

    Returns:
        For each byte where it would be in the record if the batch were of no messages, and how
        far it moves with each that the batch has, and with each that comes before this one.
    """
    layout = layout_of(flags)
    widths = [column.width for column in layout.columns]
    fixed = HEAD_SIZE + np.concatenate([np.arange(width) for width in widths])
    by_count = np.repeat([layout.before[column.name] for column in layout.columns], widths)
    return fixed, by_count, np.repeat(widths, widths)

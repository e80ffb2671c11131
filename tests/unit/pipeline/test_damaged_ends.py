"""A read that must have all messages notices damage at the ends of a segment, too."""

from pathlib import Path

import pytest

import pulque
from pulque.errors import CorruptionError
from pulque.model.names import PartitionName
from pulque.testing.broker import InProcessBroker

pytest.importorskip("pyarrow")

from pulque.pipeline.reading.ranges import Range
from pulque.pipeline.reading.stored_log import StoredLog, read_stretch

COUNT = 30
MAGIC = 0x4C50.to_bytes(2, "little")
ORDERS = PartitionName("orders")


@pytest.mark.parametrize("victim", [0, 15, COUNT - 1])
def test_a_damaged_record_that_no_index_names_fails_the_read(tmp_path: Path, victim: int) -> None:
    with InProcessBroker(tmp_path / "data") as broker, pulque.connect(broker.url) as client:
        for number in range(COUNT):
            client.send("orders", b"body-%02d" % number)
        client.seal()
        client.send("orders", b"of the next segment")
    path = min((tmp_path / "data" / "messages").glob("*.log"))
    body = path.read_bytes().index(b"body-%02d" % victim)
    offset = path.read_bytes().rindex(MAGIC, 0, body)
    path.with_suffix(".index").unlink(missing_ok=True)
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)

    log = StoredLog(str(tmp_path / "data"))
    bounds = log.bounds(ORDERS)
    wanted = Range(ORDERS, bounds.start, bounds.end)
    stretches = log.plan([wanted], least=1, most_rows=10**6, must_be_whole=True)
    with pytest.raises(CorruptionError, match=path.name):
        _ = [list(read_stretch(each, must_be_whole=True)) for each in stretches]

"""Headers of a message that waits at a delay server for one group only.

Its handler wants it again at a certain time. When it is due, a broker of its subject adopts it for
that group, as if it had just failed there: these headers name the original delivery.
"""

from collections.abc import Mapping
from typing import NamedTuple

from pulque.errors import InvalidBatchError
from pulque.model.names import (
    ConsumerId,
    PartitionName,
    parse_consumer_id,
    parse_group,
    parse_partition,
)
from pulque.model.positions import ConsumeSequence

__all__ = ["REASON_HEADER", "RETURN_HEADER", "Returning", "parse_return"]

RETURN_HEADER = "pulque.return"
"""Broker group, partition, sequence and consumer of the delivery that is to be repeated."""
REASON_HEADER = "pulque.return.reason"
"""The reason of the failure, for people."""
_FIELDS = 4


class Returning(NamedTuple):
    """The original delivery of a message: its position and its consumer."""

    broker_group: str
    partition: PartitionName
    sequence: ConsumeSequence
    consumer: ConsumerId

    def header(self) -> str:
        """Return the header value; no name in it contains a space."""
        return f"{self.broker_group} {self.partition} {self.sequence} {self.consumer}"


def parse_return(headers: Mapping[str, str]) -> Returning:
    """Return the original delivery of a message.

    Raises:
        InvalidBatchError: The headers are missing or invalid.
        InvalidNameError: A name in them is invalid.
    """
    told = headers.get(RETURN_HEADER, "")
    fields = told.split(" ")
    if len(fields) != _FIELDS or not (fields[2].isascii() and fields[2].isdecimal()):
        raise InvalidBatchError(
            f"a message for one group has a header {RETURN_HEADER} of {told!r}; broker group, "
            "partition, sequence and consumer are allowed"
        )
    broker_group, partition, sequence, consumer = fields
    return Returning(
        parse_group(broker_group),
        parse_partition(partition),
        ConsumeSequence(int(sequence)),
        parse_consumer_id(consumer),
    )

"""Names of partitions of a cluster, as offsets and manifests have them."""

import pytest

pytest.importorskip("pyarrow")
from pulque.errors import InvalidNameError
from pulque.pipeline.brokers import held_name, split_held
from pulque.pipeline.options import ReadOptions


@pytest.mark.parametrize("broker", ["", "broker-1", "eu.west_2"])
@pytest.mark.parametrize(
    "partition",
    ["orders", "order.paid#p7", "orders#3", "%dead%orders%billing", "%retry%orders%#host/app/1"],
)
def test_a_name_is_parted_into_what_it_was_made_of(broker: str, partition: str) -> None:
    assert split_held(held_name(broker, partition)) == (broker, partition)


def test_partitions_of_a_broker_may_be_named_in_options() -> None:
    options = ReadOptions.parse(
        {"assign": "b1/orders, %dead%orders%g", "startingOffsets": '{"b1/orders": 7}'}
    )

    assert options.selection.partitions == ("b1/orders", "%dead%orders%g")
    assert options.starting.sequences == {"b1/orders": 7}


@pytest.mark.parametrize("name", ["/orders", "b 1/orders", "b1/", "b1/or ders"])
def test_what_is_no_partition_of_a_broker_is_refused(name: str) -> None:
    with pytest.raises(InvalidNameError):
        ReadOptions.parse({"assign": name})

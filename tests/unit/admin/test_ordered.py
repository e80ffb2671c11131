"""Ordered groups by way of the API and the commands: who has what, and skipping what is stuck."""

import asyncio

from pulque.model.groups import Mode
from pulque.model.ordered import OrderStrategy
from pulque.testing.raw import RawConnection
from pulque.wire.groups import Subscribe, Subscribed
from pulque.wire.ordered import Lock, Locked
from tests.unit.admin.conftest import Api
from tests.unit.admin.fakes import FakeCluster
from tests.unit.admin.test_commands import Command, rows

# The fixtures of the commands are theirs.
from tests.unit.admin.test_commands import cluster as cluster  # noqa: PLC0414
from tests.unit.admin.test_commands import command as command  # noqa: PLC0414


async def get_stuck(url: str, subject: str) -> None:
    """Have a consumer of an ordered group settle one message of three, and hold the others."""
    async with await RawConnection.open(url) as raw:
        await raw.send(subject, [b"0", b"1", b"2"])
        await raw.ask(Subscribe("billing", "c1", 1, subject, Mode.ORDERED), Subscribed)
        asked = Lock(subject, "billing", "c1", 1, OrderStrategy.STRICT)
        token = (await raw.ask(asked, Locked)).token
        got = await raw.pull(subject, group="billing", consumer="c1", token=token)
        await raw.settle(got.runs[0], group="billing", consumer="c1", last=0, token=token)


async def test_the_api_shows_what_a_group_waits_for_and_skips_it(api: Api) -> None:
    await get_stuck(api.brokers["b1"].url, "stuck.api")
    path = "/subjects/stuck.api/ordered"

    (row,) = (await api.get(path))["items"]

    assert (row["broker_group"], row["partition"], row["group"]) == ("b1", "stuck.api", "billing")
    assert (row["holder"], row["token"], row["closed"]) == ("c1", 1, False)
    assert (row["settled"], row["end"], row["lag"], row["held"]) == (1, 3, 2, 2)
    assert row["stuck_since"] is not None
    assert 0 < row["lock_seconds"] <= 10
    one = {"broker_group": "b1", "partition": "stuck.api", "sequence": 2}
    await api.ask("POST", f"{path}/billing/skip", one, status=409)
    await api.ask("POST", f"{path}/billing/skip", {**one, "sequence": -1}, status=422)
    await api.ask("POST", f"{path}/billing/skip", {**one, "broker_group": "b9"}, status=404)
    await api.ask("POST", f"{path}/nobody/skip", {**one, "sequence": 1}, status=404)
    await api.ask("POST", "/subjects/other/ordered/billing/skip", one, status=422)
    done = await api.ask("POST", f"{path}/billing/skip", {**one, "sequence": 1, "reason": "no"})

    assert done == {"next_sequence": 2}
    (row,) = (await api.get(path, group="billing"))["items"][:1]
    assert (row["settled"], row["holder"], row["held"]) == (2, None, 0)
    assert row["stuck_since"] is None
    assert (await api.get("/groups/billing"))["mode"] == "ordered"
    assert (await api.get("/subjects/nothing/ordered"))["items"] == []
    assert (await api.get(path, group="nobody"))["items"] == []


def test_the_commands(command: Command, cluster: FakeCluster) -> None:
    url = f"pulque://127.0.0.1:{cluster.known['b2'].port}"
    asyncio.run(get_stuck(url, "stuck.cli"))

    (row,) = rows(command("group", "ordered", "stuck.cli", "-o", "json"))
    code, out, _ = command("group", "ordered", "stuck.cli", "--group", "billing")

    assert (row["holder"], row["settled"]) == ("c1", 1)
    assert code == 0
    assert out.splitlines()[0].split() == [
        "broker_group", "partition", "group", "holder", "settled", "end", "held", "stuck", "since",
    ]  # fmt: skip
    skipped = command(
        "group", "skip", "stuck.cli", "--group", "billing", "--broker-group", "b2",
        "--sequence", "1",
    )  # fmt: skip
    assert skipped[:2] == (0, "billing goes on with 2\n")
    assert command("group", "ordered", "nothing")[0] == 4
    assert command("group", "ordered", "stuck.cli", "--group", "nobody")[:2] == (4, "")


def test_subjects_are_merged_and_ordered_by_command(command: Command) -> None:
    command("subject", "create", "orders", "--partitions", "4")

    assert command("subject", "merge", "orders", "--partitions", "2")[1] == (
        "orders has 2 partitions\n"
    )
    assert command("subject", "order", "orders", "strict")[1] == "orders keeps order: strict\n"
    assert "order: strict" in command("subject", "show", "orders")[1]
    assert command("subject", "order", "orders", "sometimes")[0] == 2

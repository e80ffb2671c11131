"""What docs/guide/handlers.md shows is one program, and it works."""

import asyncio
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pulque
from pulque.testing.broker import InProcessBroker
from tests.nothing import what_comes
from tests.repo.tree import DOCS
from tests.unit.app.conftest import until

PAGE = DOCS / "guide" / "handlers.md"


def program(folder: Path) -> ModuleType:
    """Put all the code of the page into one module, and import it."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    path = folder / "shop.py"
    path.write_text("\n".join(blocks), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("shop", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_the_program_of_the_page_handles_what_is_paid(
    pulque_broker: InProcessBroker, tmp_path: Path
) -> None:
    shop = program(tmp_path)
    app: pulque.App = shop.app
    stored: list[tuple[int, float]] = []
    app.on_shutdown(
        lambda: stored.extend(shop.database.execute("select number, amount from orders"))
    )
    # One is a broadcast, which has no group, and the other has a filter.
    groups = {handler.group for handler in app.handlers} - {None, "fraud"}
    assert len(groups) == 6

    async with app:
        await app.send("order.paid", {"number": 1, "amount": 9.5})
        await app.send("order.paid", {"number": 2, "amount": -1})
        consumer = app.client.consumer("ticket.issued", "test")
        tickets: list[bytes] = []
        async with asyncio.timeout(10):
            while len(tickets) < 2:
                tickets += [message.body for message in await consumer.pull()]
        await until(lambda: shop.database.execute("select count(*) from orders").fetchone()[0])
        await asyncio.sleep(0.5)

    assert sorted(tickets) == [b'{"order": 1}', b'{"order": 2}']
    assert stored == [(1, 9.5), (2, -1.0)]
    left = {group: await asyncio.to_thread(still_there, pulque_broker, group) for group in groups}
    mailing = left.pop("mailing")
    assert not any(left.values())
    assert mailing in ([], [b'{"number": 2, "amount": -1}'])


def still_there(broker: InProcessBroker, group: str | None) -> list[bytes]:
    with (
        pulque.connect(broker.url, name="looks") as client,
        client.consumer("order.paid", group) as consumer,
    ):
        return what_comes(client, consumer)

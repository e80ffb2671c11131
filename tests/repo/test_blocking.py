"""The blocking client is generated from the asyncio one; the modules that are not say why."""

import ast

import pytest

from tests.repo.tree import SOURCE, modules, parse
from tools.blocking import GENERATED, expected, translate

CLIENT = SOURCE / "pulque" / "client"
BY_HAND = {
    "arrivals",
    "broker_puller",
    "client_life",
    "concurrency",
    "connection",
    "connection_pool",
    "direct_send",
    "failover",
    "guard",
    "lease_keeper",
    "pending_sends",
    "producer",
    "producer_connections",
}


def names(shell: str) -> set[str]:
    return {path.stem for path in modules(CLIENT / shell)} - {"__init__"}


def test_generated_modules_are_what_their_sources_say() -> None:
    stale = [p.name for p, text in expected() if p.read_text(encoding="utf-8") != text]
    assert not stale, "run: make blocking"


def test_whatever_is_not_generated_is_listed() -> None:
    assert names("blocking") - set(GENERATED) == BY_HAND
    assert names("aio") - set(GENERATED) == BY_HAND - {"failover", "lease_keeper"}


@pytest.mark.parametrize("shell", ["aio", "blocking"])
def test_what_is_written_by_hand_says_why(shell: str) -> None:
    for name in BY_HAND & names(shell):
        said = ast.get_docstring(parse(CLIENT / shell / f"{name}.py"))
        assert said is not None
        assert "by hand" in said.splitlines()[0], f"{shell}/{name}"


@pytest.mark.parametrize(
    ("source", "made"),
    [
        ("x = (await f(y)).z", "x = f(y).z"),
        ("x = g(await f(y)).z", "x = g(f(y)).z"),
        ("x = [(await f(y))[0]]", "x = [f(y)[0]]"),
        ("async def f() -> Awaitable[list[int]]: ...", "def f() -> list[int]: ..."),
        ("Callable[[float], Awaitable[AsyncConnection]]", "Callable[[float], Connection]"),
        ("async with a as b: pass", "with a as b: pass"),
        ("[x async for x in y]", "[x for x in y]"),
        ("from pulque.client.aio.reader import A", "from pulque.client.blocking.reader import A"),
        ("a = 1\nb = 2  # asyncio only\nc = 3", "a = 1\nc = 3"),
        ("__all__ = ['AsyncConnection']", "__all__ = ['Connection']"),
        ("# Any task may; async for, for asyncio", "# Any thread may; for"),
    ],
)
def test_code_is_translated(source: str, made: str) -> None:
    assert translate(f"{source}\n") == f"{made}\n"


@pytest.mark.parametrize("source", ["asyncio.sleep(1)", "import asyncio"])
def test_what_has_no_counterpart_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="line 1 names asyncio"):
        translate(f"{source}\n")

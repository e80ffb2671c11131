"""A consumer may be closed while another thread of it connects."""

import threading
from types import SimpleNamespace
from typing import cast

import pytest

from pulque.client.blocking.deferral import NoDeferrals
from pulque.client.blocking.lease_keeper import Keeper
from pulque.client.receiving.consumer_core import IncomingCore

LIMIT = 20.0


def test_a_keeper_may_be_left_while_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = make_keeper()
    problems: list[BaseException] = []

    def leave() -> None:
        try:
            keeper.leave(LIMIT)
        except RuntimeError as error:
            problems.append(error)

    leaver = threading.Thread(target=leave)

    class StartedLate(threading.Thread):
        def start(self) -> None:
            leaver.start()
            leaver.join(0.2)  # long enough to run into what is half done, if anything is
            super().start()

    with monkeypatch.context() as patch:
        patch.setattr("pulque.client.blocking.lease_keeper.threading.Thread", StartedLate)
        keeper.start(LIMIT)
    leaver.join(LIMIT)
    assert not leaver.is_alive()
    assert not problems


def test_a_keeper_that_was_left_is_not_started() -> None:
    keeper = make_keeper()
    keeper.leave(LIMIT)
    before = threading.active_count()
    keeper.start(LIMIT)
    assert threading.active_count() == before


def make_keeper() -> Keeper:
    core = SimpleNamespace(repeat_settles=list, next_settles=list, farewell=lambda: None)
    return Keeper(
        cast(IncomingCore, core),
        threading.Lock(),
        connect=lambda timeout: pytest.fail("there is nothing to tell"),
        drain=lambda: None,
        save=lambda: None,
        deferrals=NoDeferrals(),
        interrupt=lambda: None,
    )

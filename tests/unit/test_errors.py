"""Every error has a code of its own on the wire, and comes back from it as what it was."""

import pytest

from pulque import errors
from pulque.errors import (
    CorruptionError,
    ErrorCode,
    ForkedError,
    InvalidRequestError,
    LocalProtocolError,
    ProtocolError,
    PulqueError,
    RejectedError,
    RemoteProtocolError,
    StorageError,
    UsageError,
    error_from_wire,
)

CLASSES = [
    found
    for name in errors.__all__
    if isinstance(found := getattr(errors, name), type) and issubclass(found, PulqueError)
]
SHARED = {
    RejectedError: InvalidRequestError,
    ProtocolError: RemoteProtocolError,
    LocalProtocolError: RemoteProtocolError,
    CorruptionError: StorageError,
    ForkedError: UsageError,
}
"""What cannot be told on the wire, and what it arrives as."""


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_comes_back_from_the_wire(kind: type[PulqueError]) -> None:
    found = error_from_wire(kind.code, "what was found, and where")

    assert type(found) is SHARED.get(kind, kind)
    assert str(found) == "what was found, and where"
    assert found.retryable is kind.retryable


def test_each_code_belongs_to_one_error() -> None:
    told = [kind.code for kind in CLASSES if SHARED.get(kind, kind) is kind]

    assert len(set(told)) == len(told)
    assert set(ErrorCode) == {*told, ErrorCode.NONE, ErrorCode.CORRUPTION}


@pytest.mark.parametrize("code", [0, 9, 999, 65_535])
def test_a_code_that_nobody_knows_is_still_an_error(code: int) -> None:
    found = error_from_wire(code, "from the future")

    assert type(found) is PulqueError
    assert not found.retryable


def test_corruption_says_where() -> None:
    error = CorruptionError("log/0001", 42, "the crc does not match")

    assert str(error) == "log/0001 at offset 42: the crc does not match"
    assert (error.path, error.offset, error.reason) == ("log/0001", 42, "the crc does not match")


def test_only_what_may_succeed_unchanged_is_retryable() -> None:
    assert {kind.__name__ for kind in CLASSES if kind.retryable} == {
        "DisconnectedError",
        "NotLeaderError",
        "OverloadedError",
        "ReadOnlyError",
        "RequestTimeoutError",
        "SpoolFullError",
        "StaleRouteError",
        "StorageFullError",
        "UnavailableError",
    }

"""Finding stored messages by key, by id, or by when they were stored.

A thread of its own looks, one request after the other and each for a limited time: whoever sends
or pulls does not wait for those who look. An answer says where to go on if there may be more.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pulque.broker.search.message_lookup import Looking
from pulque.errors import (
    InvalidRequestError,
    OverloadedError,
    PulqueError,
    RequestTimeoutError,
    UnavailableError,
)
from pulque.model.ids import ID_SIZE
from pulque.model.names import parse_subject
from pulque.storage.engine import Engine
from pulque.storage.indexes.key_index import KeyIndex
from pulque.wire.find import MAX_FOUND, Find, FoundMessages

__all__ = ["Finder"]

_MOST_WAITING = 64
_SHORTEST_S, _LONGEST_S = 0.1, 5.0


class Finder:
    """Answers requests to find messages.

    Args:
        engine: Has them.
        index: Says where they are.
        max_bytes: How many bytes one answer may have, or a single message.
    """

    def __init__(self, engine: Engine, index: KeyIndex, max_bytes: int) -> None:
        self._engine = engine
        self._index = index
        self._max_bytes = max_bytes
        self._executor = ThreadPoolExecutor(1, "pulque-find")
        self._waiting = 0
        self._is_closed = False

    def find(
        self,
        request: Find,
        answer: Callable[[FoundMessages], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Look for messages.

        Raises:
            RejectedError: The request makes no sense.
            OverloadedError: Too many look already.
        """
        _check(request)
        if self._waiting >= _MOST_WAITING:
            raise OverloadedError(f"{self._waiting} requests to find messages wait already")
        limit_s = min(max(request.timeout_ms / 1000, _SHORTEST_S), _LONGEST_S)
        until = time.monotonic() + limit_s

        def done(future: "asyncio.Future[FoundMessages]") -> None:
            self._waiting -= 1
            if future.cancelled():
                refuse(UnavailableError("the broker stops"))
                return
            problem = future.exception()
            if problem is None:
                answer(future.result())
            elif isinstance(problem, PulqueError):
                refuse(problem)
            else:
                raise problem

        self._waiting += 1
        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._executor, self._look, request, until).add_done_callback(done)

    def _look(self, request: Find, until: float) -> FoundMessages:
        if time.monotonic() >= until:
            raise RequestTimeoutError(
                f"a request with a limit of {request.timeout_ms} ms to find messages waited that "
                "long for others"
            )

        def is_over() -> bool:
            return self._is_closed or time.monotonic() >= until

        return Looking(self._engine, self._index, request, self._max_bytes, is_over).look()

    async def close(self) -> None:
        """Give up what is under way."""
        self._is_closed = True
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, lambda: self._executor.shutdown(cancel_futures=True))


def _check(request: Find) -> None:
    """Refuse what makes no sense.

    Raises:
        RejectedError: It does not.
    """
    if request.subject or not request.id:
        parse_subject(request.subject)
    if request.key and request.id:
        raise InvalidRequestError("a key and an id; messages are looked for by one of them")
    if request.id and len(request.id) != ID_SIZE:
        raise InvalidRequestError(f"an id of {len(request.id)} bytes; all have {ID_SIZE}")
    if not 1 <= request.max_messages <= MAX_FOUND:
        raise InvalidRequestError(
            f"{request.max_messages} messages at once; 1 to {MAX_FOUND} are allowed"
        )
    if request.since_ms >= request.until_ms:
        raise InvalidRequestError(
            f"messages stored from {request.since_ms} on and before {request.until_ms}: there is "
            "no time between"
        )

"""A producer that batches underneath: messages go in one by one, and travel together."""

import atexit
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Self

from pulque.client.connection import Connection
from pulque.client.outgoing import NoRouteError, OutgoingCore, SendOptions
from pulque.client.pending import PendingSend, PendingSends, Span, wait_for
from pulque.client.receipt import Outgoing, as_body
from pulque.client.routes import Targets
from pulque.client.sending import SendLink
from pulque.errors import DisconnectedError, OverloadedError, RequestTimeoutError
from pulque.model.ids import IdSource

__all__ = ["Producer"]

_LAST_WORDS = 5.0
"""How long the end of the process waits for outcomes, in seconds."""


class Producer:
    """Sends messages in batches, and finds an outcome for each of them.

    Made by ``Client.producer``. Any number of threads may send through one producer. Messages
    that one thread sends to one subject arrive in that order, unless a batch has to be sent
    again after the broker refused it for a while (``max_in_flight=1`` keeps it even then).
    """

    def __init__(
        self,
        options: SendOptions,
        *,
        connect: Callable[[float], Connection],
        find_targets: Callable[[str], Targets],
        producer_id: int,
        ids: IdSource,
        draw: Callable[[], float],
    ) -> None:
        self._core = OutgoingCore(
            options,
            producer_id=producer_id,
            ids=ids,
            promise=PendingSend,
            monotonic=time.monotonic,
            now_ms=_now_ms,
            draw=draw,
        )
        self._limit = options.max_buffered_bytes
        self._find_targets = find_targets
        self._link = SendLink(self._core, connect, draw)
        self._is_closed = False
        atexit.register(self.close, _LAST_WORDS)

    def send(  # noqa: PLR0913  # a message has many parts, all by keyword
        self,
        subject: str,
        body: bytes,
        *,
        key: str | None = None,
        order_key: str | None = None,
        tags: Iterable[str] = (),
        headers: Mapping[str, str] | None = None,
        expires_at: datetime | None = None,
    ) -> PendingSend:
        """Take in one message and return the promise of its receipt.

        Blocks while too much is buffered, for at most the producer's timeout.

        Raises:
            OverloadedError: It is still too much then; the message was not taken in.
            MessageTooLargeError: The broker would refuse it; it was not taken in.
            UsageError: It is no message, or the producer is closed.
        """
        core = self._core
        if core.buffered >= self._limit:
            self._wait_for_room()
        try:
            if key or order_key or tags or headers or expires_at:
                message = Outgoing(body, key, order_key, tags, headers, expires_at)
                pending = core.add_message(subject, message)
            else:
                pending = core.add(subject, body)
        except NoRouteError:
            self._learn(subject)
            return self.send(
                subject,
                body,
                key=key,
                order_key=order_key,
                tags=tags,
                headers=headers,
                expires_at=expires_at,
            )
        if core.has_work:
            self._link.pump()
        return pending

    def send_many(self, subject: str, messages: Iterable[bytes | Outgoing]) -> PendingSends:
        """Take in many messages, and return the promises of their receipts in order.

        The cheapest way to send bodies that are at hand. Blocks and raises as ``send`` does; if
        it raises ``OverloadedError`` in the middle, a note says how many were taken in.
        """
        items = messages if isinstance(messages, list) else list(messages)
        if not self._core.knows(subject):
            self._learn(subject)
        kinds = set(map(type, items))
        if kinds - {bytes, Outgoing}:
            items = [m if isinstance(m, Outgoing) else as_body(m) for m in items]
        if kinds == {bytes}:
            self._core.check_size(max(map(len, items)))
        step = self._core.options.max_batch
        spans: list[Span] = []
        for at in range(0, len(items), step):
            try:
                if self._core.buffered >= self._limit:
                    self._wait_for_room()
            except OverloadedError as error:
                error.add_note(f"{at} of {len(items)} messages were taken in")
                raise
            spans += self._add_some(subject, items[at : at + step])
            if self._core.has_work:
                self._link.pump()
        return PendingSends(spans)

    def flush(self, timeout: float | None = None) -> None:
        """Send what lingers, and wait until every message so far has an outcome.

        The outcome may be an error: ask the promises, which know it by then.

        Raises:
            RequestTimeoutError: Some have none within ``timeout`` seconds.
        """
        with self._core.lock:
            batches = self._core.flush()
        self._link.pump()
        wait_for(batches, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Flush, and end. Messages without an outcome by then get ``DisconnectedError``."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        with self._core.lock:
            batches = self._core.close()
            self._link.changed.notify_all()
        self._link.pump()
        try:
            wait_for(batches, timeout)
        except RequestTimeoutError:
            with self._core.lock:
                self._core.fail_all(
                    DisconnectedError("the producer was closed before the outcome was known")
                )
                finished = self._core.take_finished()
            self._link.tell(finished)
        finally:
            self._link.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _add_some(self, subject: str, items: Sequence[bytes | Outgoing]) -> list[Span]:
        if set(map(type, items)) == {bytes}:
            return self._core.add_many(subject, items)  # type: ignore[arg-type]  # just checked
        spans: list[Span] = []
        for item in items:
            message = item if isinstance(item, Outgoing) else Outgoing(item)
            pending = self._core.add_message(subject, message)
            spans.append(pending.span)
        return spans

    def _learn(self, subject: str) -> None:
        targets = self._find_targets(subject)
        with self._core.lock:
            self._core.add_subject(subject, targets)

    def _wait_for_room(self) -> None:
        core = self._core
        timeout = core.options.timeout
        self._link.pump()
        with core.lock:
            has_room = self._link.changed.wait_for(
                lambda: core.buffered < self._limit or self._is_closed, timeout
            )
        if not has_room:
            raise OverloadedError(
                f"{core.buffered} bytes wait to be sent, and none went in {timeout:g} s; "
                f"at most {self._limit} may wait"
            )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

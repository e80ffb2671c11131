"""A well-behaved client that works all the time while others attack."""

import threading
import time
from types import TracebackType
from typing import Self

from tests.robustness.raw import RawClient, bodies_of

__all__ = ["Bystander"]

_PAUSE = 0.01


class Bystander:
    """Sends, pulls and settles in a thread of its own, and notes how long that takes."""

    def __init__(self, url: str, *, partition: str = "bystander") -> None:
        self._url = url
        self._partition = partition
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.rounds = 0
        self.waits: list[float] = []
        self.problem: BaseException | None = None

    def check(self, *, slowest: float = 1.0) -> None:
        """Check that it works, and that nothing took long since the last check."""
        rounds = self.rounds
        deadline = time.monotonic() + 5
        while self.rounds <= rounds and self.problem is None:
            assert time.monotonic() < deadline, "the bystander does not get on"
            time.sleep(_PAUSE)
        waits, self.waits = self.waits, []
        assert self.problem is None, f"the bystander failed: {self.problem!r}"
        assert max(waits) < slowest, f"the bystander waited for {max(waits):.3f} s"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        try:
            with RawClient(self._url) as client:
                while not self._stop.wait(_PAUSE):
                    began = time.monotonic()
                    self._round(client)
                    self.waits.append(time.monotonic() - began)
                    self.rounds += 1
        except BaseException as error:  # noqa: BLE001  # told by check()
            self.problem = error

    def _round(self, client: RawClient) -> None:
        body = f"round {self.rounds}".encode()
        client.send(self._partition, [body])
        (delivered,) = client.pull(self._partition, group="bystanders").deliveries
        assert bodies_of(self._partition, delivered) == [body]
        client.settle(self._partition, delivered, group="bystanders")

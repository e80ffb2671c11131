"""Where answers go: over the connection that a request came on, when there is something to say."""

from pulque.broker.pulling.pull_validation import to_retry
from pulque.errors import PulqueError
from pulque.net.server import Connection
from pulque.wire.codec import Writer
from pulque.wire.opcodes import Opcode
from pulque.wire.responses import (
    Outcome,
    Response,
    Sent,
    encode_error,
    encode_response,
    frame_of,
)
from pulque.wire.single import encode_single_stored

__all__ = ["Answerer"]


class Answerer:
    """Where the answer to one request goes."""

    __slots__ = ("_connection", "_epoch", "_request_id")

    def __init__(self, connection: Connection, request_id: int, epoch: int) -> None:
        self._connection = connection
        self._request_id = request_id
        self._epoch = epoch

    def answer(self, response: Response) -> None:
        """Send the answer."""
        connection = self._connection
        connection.send(
            encode_response(response, self._request_id, self._epoch, connection.version)
        )

    def answer_written(self, opcode: Opcode, payload: Writer) -> None:
        """Send an answer that was written a part at a time."""
        self._connection.send(frame_of(opcode, payload, self._request_id, self._epoch))

    def refuse(self, error: PulqueError) -> None:
        """Send an error; of what is damaged here, one that has the client try again."""
        self._connection.send([encode_error(to_retry(error), self._request_id, self._epoch)])

    def put(self, index: int, outcome: Outcome) -> None:
        """Send the outcome of a send that has one batch."""
        del index
        code, is_duplicate, first_sequence, stored_at_ms, _ = outcome
        if code:
            self.answer(Sent((outcome,)))
            return
        answer = encode_single_stored(
            is_duplicate=is_duplicate,
            first_sequence=first_sequence,
            stored_at_ms=stored_at_ms,
            request_id=self._request_id,
            epoch=self._epoch,
        )
        self._connection.send([answer])

    def answer_held(self, response: Response) -> None:
        """Send the answer to a request that was held."""
        self._connection.waiting -= 1
        self.answer(response)

    def refuse_held(self, error: PulqueError) -> None:
        """Send an error to a request that was held."""
        self._connection.waiting -= 1
        self.refuse(error)

"""The answer to one request: sent over the connection that the request came on, now or later."""

from pulque.errors import PulqueError
from pulque.net.server import AcceptedConnection
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

__all__ = ["Responder"]


class Responder:
    """Sends the answer to one request.

    Args:
        connection: The connection that the request came on.
        request_id: The number that the client gave to the request.
        epoch: The epoch that the server answers in; 0 for a server without one.
    """

    __slots__ = ("_connection", "_epoch", "_is_held", "_request_id")

    def __init__(self, connection: AcceptedConnection, request_id: int, epoch: int) -> None:
        self._connection = connection
        self._request_id = request_id
        self._epoch = epoch
        self._is_held = False

    def hold(self) -> None:
        """Count the request among those that wait, until it is answered."""
        self._is_held = True
        self._connection.waiting += 1

    def release(self) -> None:
        """Stop counting the request among those that wait."""
        if self._is_held:
            self._is_held = False
            self._connection.waiting -= 1

    def answer(self, response: Response) -> None:
        """Send the answer."""
        if self._is_held:
            self.release()
        connection = self._connection
        connection.send(
            encode_response(response, self._request_id, self._epoch, connection.version)
        )

    def answer_written(self, opcode: Opcode, payload: Writer) -> None:
        """Send an answer that was written a part at a time."""
        if self._is_held:
            self.release()
        self._connection.send(frame_of(opcode, payload, self._request_id, self._epoch))

    def refuse(self, error: PulqueError) -> None:
        """Send an error."""
        if self._is_held:
            self.release()
        self._connection.send([encode_error(error, self._request_id, self._epoch)])

    def put(self, index: int, outcome: Outcome) -> None:
        """Send the outcome of a send of one batch."""
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

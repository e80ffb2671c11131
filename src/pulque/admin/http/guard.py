"""What is refused before anything is looked at: foreign pages, huge and deep bodies, crowds.

The API listens on a loopback address, and any web page that a browser on this machine shows may
try to talk to it. A page cannot read answers of another origin, but it may cause requests, and
with a name that it lets point here (DNS rebinding) it would be of the same origin. So the Host
has to be ours; what changes anything needs our Origin, if it has one, and ``application/json``,
which no form can send.

One request goes on per round of the event loop. Only so many are answered at once, and only so
many may send their bodies. ``/healthz`` is answered beside them and without a look at its body:
whoever watches this process is to learn that it lives, also in a crowd.
"""

import asyncio
import re
from collections.abc import Collection
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pulque.admin.http.problems import problem_response
from pulque.admin.http.round_robin import RoundRobin
from pulque.errors import (
    InvalidRequestError,
    MessageTooLargeError,
    NotAllowedError,
    OverloadedError,
    PulqueError,
    RequestTimeoutError,
)

__all__ = [
    "ALIVE",
    "MAX_AT_ONCE",
    "MAX_BODY",
    "MAX_BRACKETS",
    "MAX_DEPTH",
    "RequestGuard",
    "check_json",
]

ALIVE = "/healthz"
MAX_AT_ONCE = 200
MAX_BODY = 1024 * 1024
MAX_DEPTH = 32
MAX_BRACKETS = 25_000
"""Parsing and checking as many takes some 50 ms, in which nobody else is answered."""
_BODY_TIME = 30.0
_SAFE = {"GET", "HEAD", "OPTIONS"}
_NOT_BRACKETS = re.compile(rb'(?:[^\[\]{}"]++|"(?:[^"\\]++|\\.)*+"?)++', re.DOTALL)
"""Strings and what stands between brackets. A string that does not end reaches to the end of the
body, so that no byte is looked at twice."""
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::(?P<port>[0-9]{1,5}))?", re.ASCII)


class Refusal(Exception):  # noqa: N818  # an answer, not a fault
    """A request is answered without being looked at."""

    def __init__(self, status: int, error: PulqueError) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error


class RequestGuard:
    """Stands before the application.

    Args:
        app: What it guards.
        hosts: Names of this server beside loopback ones.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] = ()) -> None:
        self._app = app
        self._hosts = frozenset(hosts)
        self._turns = RoundRobin()
        self._busy = 0
        self._reading = 0
        """How many requests wait for the rest of their bodies."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on with its whole body read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await self._turns.take()
        await self._turns.run(self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_head(scope["method"], Headers(scope=scope))
            if scope["path"] == ALIVE:
                await self._app(scope, _ReplayedBody(b"", receive), send)
                return
            body = await self._read_body(Headers(scope=scope), receive)
            check_json(body)
            _check_room(self._busy, "are answered")
        except Refusal as refusal:
            await problem_response(refusal.error, refusal.status)(scope, receive, send)
            return
        self._busy += 1
        try:
            await self._app(scope, _ReplayedBody(body, receive), send)
        finally:
            self._busy -= 1

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
        """Return the body; those who send theirs slowly take no place from who has none."""
        if not _has_body(headers):
            return b""
        _check_room(self._reading, "send their bodies")
        self._reading += 1
        try:
            return await _read(headers, receive)
        finally:
            self._reading -= 1

    def _check_head(self, method: str, headers: Headers) -> None:
        host = headers.get("host", "")
        if not self._is_own(host):
            raise Refusal(403, NotAllowedError(f"Host {host[:100]!a} is not this server"))
        if method in _SAFE:
            return
        origin = headers.get("origin")
        if origin is not None and origin not in {f"http://{host}", f"https://{host}"}:
            raise Refusal(403, NotAllowedError(f"Origin {origin[:100]!a} is not this server"))
        if headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
            raise Refusal(403, NotAllowedError("the request comes from a page of another site"))
        # Only a POST can be sent by a form or without asking first; browsers ask before the rest.
        kind = headers.get("content-type")
        if (kind is not None or _has_body(headers) or method == "POST") and not _is_json(
            kind or ""
        ):
            wanted = "Content-Type must be application/json"
            raise Refusal(415, InvalidRequestError(f"{wanted}, not {(kind or '')[:100]!a}"))
        if headers.get("content-encoding", "identity") != "identity":
            raise Refusal(415, InvalidRequestError("a body must not be compressed"))

    def _is_own(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found["host"].strip("[]").lower()
        if name == "localhost" or name in self._hosts:
            return True
        try:
            return ip_address(name).is_loopback
        except ValueError:
            return False


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _check_room(count: int, do_what: str) -> None:
    if count >= MAX_AT_ONCE:
        text = f"{count} requests {do_what} already, and no more at once; try again"
        raise Refusal(503, OverloadedError(text))


def check_json(body: bytes) -> None:
    """Refuse a body with more brackets, or deeper ones, than anything here needs.

    JSON parsers also read UTF-16 and UTF-32, in which brackets are not single bytes: a body must
    be UTF-8, without the zero bytes that each of the others has.

    Raises:
        Refusal: The body is not UTF-8, or has too many brackets or too deep ones.
    """
    _check_encoding(body)
    structure = _NOT_BRACKETS.sub(b"", body)
    brackets = structure.count(b"[") + structure.count(b"{")
    if brackets > MAX_BRACKETS or _depth(structure) > MAX_DEPTH:
        raise Refusal(
            413,
            MessageTooLargeError(
                f"the body is nested deeper than {MAX_DEPTH}, or has more than "
                f"{MAX_BRACKETS} lists and objects"
            ),
        )


def _check_encoding(body: bytes) -> None:
    try:
        text = body.decode()
    except UnicodeDecodeError as problem:
        raise Refusal(400, InvalidRequestError(f"the body is not UTF-8: {problem}")) from None
    if "\0" in text:
        found = f"the body has a zero byte at {text.index(chr(0))}"
        raise Refusal(400, InvalidRequestError(f"{found}; JSON in UTF-8 has none"))


def _depth(structure: bytes) -> int:
    """Return how deep brackets are nested, up to the first that closes what was never opened.

    No parser reads beyond that one.
    """
    depth = deepest = 0
    for bracket in structure:
        if bracket in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif depth:
            depth -= 1
        else:
            break
    return deepest


def _is_json(kind: str) -> bool:
    return kind.partition(";")[0].strip().lower() == "application/json"


async def _read(headers: Headers, receive: Receive) -> bytes:
    """Return the whole body, or refuse it before it is in memory."""
    told = headers.get("content-length", "0")
    if not (told.isascii() and told.isdigit()):
        raise Refusal(400, InvalidRequestError("Content-Length is not a number"))
    if len(told) > 18 or int(told) > MAX_BODY:
        raise _too_large()
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(_BODY_TIME):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise Refusal(400, InvalidRequestError("the client left within its request"))
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > MAX_BODY:
                    raise _too_large()
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        text = f"the body did not arrive within {_BODY_TIME:.0f} s"
        raise Refusal(408, RequestTimeoutError(text)) from None


def _too_large() -> Refusal:
    return Refusal(413, MessageTooLargeError(f"a body has at most {MAX_BODY} bytes here"))


class _ReplayedBody:
    """Gives the body that was read once more, then what comes after it."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

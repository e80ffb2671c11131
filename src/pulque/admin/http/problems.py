"""Errors over HTTP: one shape for all of them, and which of ours has which status."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pulque.admin.models.names import WrongNameError
from pulque.errors import ErrorCode, InvalidNameError, InvalidRequestError, PulqueError

__all__ = ["PROBLEMS", "Problem", "install", "problem_response", "status_of"]

_STATUS = {
    ErrorCode.USAGE: 422,
    ErrorCode.CONFIG: 422,
    ErrorCode.UNSUPPORTED: 422,
    ErrorCode.INVALID_REQUEST: 422,
    ErrorCode.INVALID_NAME: 422,
    ErrorCode.INVALID_BATCH: 422,
    ErrorCode.MESSAGE_TOO_LARGE: 413,
    ErrorCode.NOT_ALLOWED: 409,
    ErrorCode.UNKNOWN_SUBJECT: 404,
    ErrorCode.UNKNOWN_GROUP: 404,
    ErrorCode.UNKNOWN_SERVER: 404,
    ErrorCode.NO_DELAY_SERVER: 409,
    ErrorCode.UNKNOWN_MESSAGE: 404,
    ErrorCode.NOT_LEADER: 409,
    ErrorCode.STALE_EPOCH: 409,
    ErrorCode.STALE_SETTLE: 409,
    ErrorCode.FENCED: 409,
    ErrorCode.POSITION_LOST: 409,
    ErrorCode.STALE_ROUTE: 409,
    ErrorCode.READ_ONLY: 409,
    ErrorCode.PROTOCOL: 502,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.DISCONNECTED: 503,
    ErrorCode.REQUEST_TIMEOUT: 504,
    ErrorCode.OVERLOADED: 503,
    ErrorCode.STORAGE: 507,
    ErrorCode.CORRUPTION: 507,
    ErrorCode.STORAGE_FULL: 507,
    ErrorCode.DATA_DIRECTORY: 507,
}
_BROKEN = 500
_LONGEST = 2000
_TOLD = 5


class Problem(BaseModel):
    """Why a request was not done."""

    code: int = Field(description="The number of the error, as in the reference of errors.")
    error: str = Field(description="Its name.")
    message: str = Field(description="What was found, and what is allowed.")
    retry: bool = Field(description="Whether the same request may succeed later, unchanged.")


PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": text}
    for status, text in {
        400: "The request cannot be read.",
        403: "It comes from elsewhere: a foreign Host or Origin.",
        404: "There is no such thing.",
        409: "It is not possible as things are.",
        413: "It is too large.",
        415: "It is not application/json.",
        422: "A part of it is outside of what is allowed.",
        431: "Its address and headers are longer than 64 KiB.",
        503: "The database or a broker does not answer; try again.",
    }.items()
}
"""What any request may get instead of an answer."""


def status_of(error: PulqueError) -> int:
    """Return the HTTP status of an error."""
    return _STATUS.get(error.code, _BROKEN)


def problem_response(error: PulqueError, status: int | None = None) -> Response:
    """Return the answer that tells an error."""
    problem = Problem(
        code=error.code, error=type(error).__name__, message=_shown(error), retry=error.retryable
    )
    # All of it in ASCII: whatever a foreign name holds, the answer can be written.
    body = json.dumps(problem.model_dump(), ensure_ascii=True)
    return Response(body, status or status_of(error), media_type="application/json")


def install(app: FastAPI) -> None:
    """Have an application answer every error in the one shape."""

    async def known(_: Request, error: Exception) -> Response:
        assert isinstance(error, PulqueError)  # noqa: S101  # registered for these
        return problem_response(error)

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101  # registered for these
        found = error.errors()
        # Names are checked by the rules of everywhere, and refused by the same error.
        is_name = all(isinstance(_cause(each), WrongNameError) for each in found)
        kind = InvalidNameError if is_name else InvalidRequestError
        return problem_response(kind(_told(found)))

    async def other(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101  # registered for these
        answer = problem_response(InvalidRequestError(str(error.detail)), error.status_code)
        answer.headers.update(error.headers or {})
        return answer

    async def broken(_: Request, error: Exception) -> Response:
        name = type(error).__name__
        return problem_response(PulqueError(f"a bug of ours: {name}; the server's log has more"))

    app.add_exception_handler(PulqueError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, other)
    app.add_exception_handler(Exception, broken)


def _told(errors: Sequence[Any]) -> str:
    """Say what is wrong where; foreign values and names only escaped."""
    parts = [
        f"{'.'.join(str(part) for part in each['loc'])}: {_cause(each) or each['msg']}"
        for each in errors[:_TOLD]
    ]
    if len(errors) > _TOLD:
        parts.append(f"and {len(errors) - _TOLD} more")
    return "; ".join(parts)


def _cause(error: Mapping[str, Any]) -> object:
    """Return what a validator of ours raised; None if another one refused the value."""
    return error.get("ctx", {}).get("error")


def _shown(error: PulqueError) -> str:
    text = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in str(error)
    )
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"

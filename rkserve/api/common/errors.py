"""OpenAI's error object for any exception."""

from __future__ import annotations

from rkserve.api.common import sse
from rkserve.api.json.body import JsonObject
from rkserve.core.errors import NativeError, RkserveError
from rkserve.core.errors.base import without_folders

UNEXPECTED = "The server failed while it worked on the request. Its log says why."


def error_object(exc: BaseException) -> tuple[int, dict[str, str], JsonObject]:
    """Return status, headers and body for an exception.

    An unexpected exception becomes a 500 without its text, which may hold paths, prompts or keys.
    The caller logs it.
    """
    if not isinstance(exc, RkserveError):
        status, kind, code = RkserveError.http_status, RkserveError.kind, "internal_error"
        return status, {}, _body(UNEXPECTED, kind, None, code)
    seconds = exc.retry_after_s
    headers = {} if seconds is None else {"retry-after": str(seconds)}
    return exc.http_status, headers, _body(told(exc), exc.kind, exc.param, exc.code)


def told(exc: RkserveError) -> str:
    """Return an error's message for a client, without the folders in it."""
    return without_folders(exc.message) if isinstance(exc, NativeError) else exc.message


def error_event(exc: BaseException) -> bytes:
    """Return the event that ends a stream after it has begun with status 200."""
    return sse.data(error_object(exc)[2])


def _body(message: str, kind: str, param: str | None, code: str | None) -> JsonObject:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}

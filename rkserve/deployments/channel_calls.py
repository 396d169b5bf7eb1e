"""What crosses the channel besides the events of answers: calls, and how they end.

A call is a request to generate, or for a report. It ends by itself, by an error, or by the report.
All of it is JSON that can only become the dataclasses and errors that are named here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rkserve import errors
from rkserve.deployments.channel_codec import EVENTS, Garbled, Record, seal
from rkserve.errors import BoardFailed, RkserveError
from rkserve.messages import BoardReport, GenerateRequest

# Second in an item, where an event has its number. What a Router sends:
GENERATE, REPORT = 0, 1
# And what a board sends beside events:
FAILED, REPORTED = -1, -2

_REQUEST, _REPORT = Record(GenerateRequest), Record(BoardReport)
_ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, RkserveError)
}
_PLAIN = (str, int, float, bool, type(None))
SEAL = seal((*EVENTS, GenerateRequest, BoardReport))  # of two ends that understand each other


def pack_request(stream: int, request: GenerateRequest) -> list[Any]:
    """Return a call for a generation."""
    return [stream, GENERATE, *_REQUEST.pack(request)]


def unpack_request(item: Sequence[Any]) -> GenerateRequest:
    """Return the request of such a call. Raises ``Garbled``."""
    request: GenerateRequest = _REQUEST.unpack(item[2:])
    return request


def pack_report(stream: int, report: BoardReport) -> list[Any]:
    """Return the answer to a call for a report."""
    return [stream, REPORTED, *_REPORT.pack(report)]


def unpack_report(item: Sequence[Any]) -> BoardReport:
    """Return the report of such an answer. Raises ``Garbled``."""
    report: BoardReport = _REPORT.unpack(item[2:])
    return report


def pack_error(stream: int, exc: RkserveError) -> list[Any]:
    """Return how a call failed. An error is the arguments that it was made of."""
    name = type(exc).__name__
    if _ERRORS.get(name) is not type(exc) or not all(_is_plain(one) for one in exc.args):
        raise TypeError(f"the channel has no form for {exc!r}")
    return [stream, FAILED, name, *exc.args]


def unpack_error(item: Sequence[Any], where: str) -> RkserveError:
    """Return the error of a call to the board ``where``. Raises ``Garbled``."""
    try:
        name, *args = item[2:]
        return _ERRORS[name](*(tuple(one) if isinstance(one, list) else one for one in args))
    except (KeyError, TypeError, ValueError) as exc:
        raise Garbled(f"board {where} says no error of ours: {exc!r}") from exc


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(one, _PLAIN) for one in value)
    return isinstance(value, _PLAIN)


def internal(where: str) -> BoardFailed:
    """Return what a Router hears of a bug."""
    return BoardFailed(where, "an internal error; see the board's log")

"""What crosses the channel besides the events of answers: calls, and how they end.

A call is a request to generate or for vectors, or names a method. It ends by itself, by an error,
or by an answer. All of it is JSON that can only become the dataclasses and errors that are named
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rkserve.core import errors
from rkserve.core.board_report import BoardReport, Emitted
from rkserve.core.desired_state import Adoption, Desired
from rkserve.core.errors import BoardFailed, RkserveError
from rkserve.core.messages import EmbedRequest, GenerateRequest
from rkserve.transport.codec import EVENTS, Garbled, Record, seal

# Second in an item, where an event has its number. What a Router sends, beside names of methods:
GENERATE, EMBED = 0, 1
# And what a board sends beside events:
FAILED, ANSWERED = -1, -2

# What is asked often, or must be quick: a pause waits for two of them. By name: the arguments'
# types, and the answer's.
METHODS: dict[str, tuple[tuple[type[Any], ...], type[Any]]] = {
    "report": ((), BoardReport),
    "emitted": ((), Emitted),
    "adopt": ((Desired,), Adoption),
}
_ARGS = {name: tuple(Record(kind) for kind in kinds) for name, (kinds, _) in METHODS.items()}
_ANSWERS = {name: Record(kind) for name, (_, kind) in METHODS.items()}
_REQUESTS = {GENERATE: Record(GenerateRequest), EMBED: Record(EmbedRequest)}
_ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, RkserveError)
}
_PLAIN = (str, int, float, bool, type(None))
_KINDS = [kind for args, answer in METHODS.values() for kind in (*args, answer)]
# Of two ends that understand each other.
SEAL = seal((*EVENTS, GenerateRequest, EmbedRequest, *_KINDS))


def pack_request(stream: int, request: GenerateRequest) -> list[Any]:
    """Return a call for a generation, or for vectors."""
    kind = EMBED if isinstance(request, EmbedRequest) else GENERATE
    return [stream, kind, *_REQUESTS[kind].pack(request)]


def unpack_request(item: Sequence[Any]) -> GenerateRequest:
    """Return the request of such a call. Raises ``Garbled``."""
    request: GenerateRequest = _REQUESTS[item[1]].unpack(item[2:])
    return request


def pack_call(stream: int, method: str, args: Sequence[Any]) -> list[Any]:
    """Return a call of one of ``METHODS``."""
    packed = [kind.pack(one) for kind, one in zip(_ARGS[method], args, strict=True)]
    return [stream, method, *packed]


def unpack_call(item: Sequence[Any]) -> tuple[str, list[Any]]:
    """Return the method and the arguments of such a call. Raises ``Garbled``."""
    try:
        method = item[1]
        args = zip(_ARGS[method], item[2:], strict=True)
        return method, [kind.unpack(one) for kind, one in args]
    except (KeyError, TypeError, ValueError) as exc:
        raise Garbled(f"not a call: {exc!r}") from exc


def pack_answer(stream: int, method: str, answer: Any) -> list[Any]:
    """Return how a method was answered."""
    return [stream, ANSWERED, *_ANSWERS[method].pack(answer)]


def unpack_answer(item: Sequence[Any], method: str) -> Any:
    """Return such an answer. Raises ``Garbled``."""
    if item[1] != ANSWERED:
        raise Garbled(f"not an answer to '{method}'")
    return _ANSWERS[method].unpack(item[2:])


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

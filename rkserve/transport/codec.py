"""The messages of the channel between Router and board: events, calls, answers and errors as JSON.

One codec derives the encoding of every message from its dataclass, so that a new field needs no
change here. Decoding creates those dataclasses and the errors of ``core.errors`` only; nothing in
the input is executed. There is no input or output here.

It is not a ``pydantic.TypeAdapter`` because every token passes through it: a delta with one token
takes 6.9 us of CPU time there and back and 23 bytes, with a ``TypeAdapter`` of the tagged union 8.0
us and 137 bytes; and that rejects text with a lone surrogate, which a token may hold.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import sys
import types
from array import array
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any, Union, get_args, get_origin, get_type_hints

from rkserve.core import errors
from rkserve.core.board_report import BoardReport, Emitted
from rkserve.core.desired_state import Adoption, Desired
from rkserve.core.errors import BoardFailed, RkserveError
from rkserve.core.logs import LogPage, LogQuery
from rkserve.core.messages import (
    Accepted,
    CacheOffer,
    CacheQuery,
    Delta,
    Embedded,
    EmbedRequest,
    Event,
    Finished,
    GenerateRequest,
    Paused,
    QueueChange,
)

EVENTS: tuple[type[Any], ...] = (Delta, Accepted, Paused, Embedded, Finished, QueueChange)
MANY_IDS = 64  # from here on packed: a prompt in digits would delay the tokens of other streams
_PLAIN = (str, int, float, bool, type(None))
_Turn = Callable[[Any], Any]
_Coder = tuple[_Turn, _Turn]  # encoder and decoder


class MalformedMessage(ValueError):
    """The input is not an encoded message."""


def _same(value: Any) -> Any:
    return value


def _text_of(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _bytes_of(value: str) -> bytes:
    return base64.b64decode(value, validate=True)


def _ids_of(value: tuple[int, ...]) -> Sequence[int] | str:
    if len(value) < MANY_IDS:
        return value
    try:
        packed = array("i", value)
    except OverflowError:  # not a valid token ID, but JSON can carry it
        return value
    return base64.b64encode(packed).decode("ascii")


def _ids_from(value: Sequence[int] | str) -> tuple[int, ...]:
    if not isinstance(value, str):
        return tuple(value)
    packed = array("i")
    packed.frombytes(base64.b64decode(value, validate=True))
    return tuple(packed)


def _coder(kind: Any) -> _Coder:
    """Return the encoder and the decoder for values of a type hint."""
    if kind in _PLAIN:
        return _same, _same
    if kind is bytes:
        return _text_of, _bytes_of
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _optional(*(one for one in inner if one is not type(None)))
    if origin is tuple:
        return _sequence(inner)
    if _is_enum(kind):
        return attrgetter("value"), kind
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        record = DataclassCodec(kind)
        return record.pack, record.unpack
    raise TypeError(f"a message may not hold {kind!r}: the channel has no form for it")


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _optional(kind: Any, *others: Any) -> _Coder:
    if others:
        raise TypeError(f"a message may not hold one of several types: {kind!r}, {others!r}")
    pack, unpack = _coder(kind)
    if unpack is _same:
        return _same, _same
    return (
        lambda value: None if value is None else pack(value),
        lambda value: None if value is None else unpack(value),
    )


def _sequence(kinds: Sequence[Any]) -> _Coder:
    if len(kinds) == 2 and kinds[1] is Ellipsis:  # noqa: PLR2004 # tuple[X, ...]
        if kinds[0] is int:
            return _ids_of, _ids_from
        pack, unpack = _coder(kinds[0])
        if unpack is _same:
            return _same, tuple
        return (
            lambda value: [pack(one) for one in value],
            lambda value: tuple(unpack(one) for one in value),
        )
    coders = [_coder(kind) for kind in kinds]
    return (
        lambda value: [pack(one) for (pack, _), one in zip(coders, value, strict=True)],
        lambda value: tuple(unpack(one) for (_, unpack), one in zip(coders, value, strict=True)),
    )


class DataclassCodec:
    """The codec of one dataclass: a list of its fields, without trailing defaults."""

    def __init__(self, kind: type[Any]) -> None:
        hints = get_type_hints(kind)
        self._kind = kind
        self._coders = [(one.name, *_coder(hints[one.name])) for one in dataclasses.fields(kind)]
        self._defaults = [_default(one) for one in dataclasses.fields(kind)]

    def pack(self, value: Any) -> list[Any]:
        """Return the fields as a list."""
        found = [getattr(value, name) for name, _, _ in self._coders]
        count = len(found)
        while count and found[count - 1] == self._defaults[count - 1]:
            count -= 1
        return [
            pack(one) for (_, pack, _), one in zip(self._coders[:count], found[:count], strict=True)
        ]

    def unpack(self, fields: Sequence[Any]) -> Any:
        """Return the dataclass. Raises ``MalformedMessage``."""
        if len(fields) > len(self._coders):
            raise MalformedMessage(f"{self._kind.__name__} with {len(fields)} fields")
        named = zip(self._coders, fields, strict=False)
        try:
            return self._kind(*[unpack(one) for (_, _, unpack), one in named])
        except (TypeError, ValueError) as exc:
            raise MalformedMessage(f"not a {self._kind.__name__}: {exc}") from exc


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default  # MISSING equals nothing


def _plain_fields() -> tuple[Callable[[Delta], tuple[Any, ...]], tuple[Any, ...]]:
    """Return a getter for a delta's fields beyond text and IDs, and their defaults."""
    rest = dataclasses.fields(Delta)[2:]
    values = tuple(_default(one) for one in rest)
    # The first name is repeated because an attrgetter of a single name returns no tuple.
    names = [one.name for one in rest]
    return attrgetter(*names, names[0]), (*values, values[0])


_RECORDS = [DataclassCodec(kind) for kind in EVENTS]
_TAGS = {kind: tag for tag, kind in enumerate(EVENTS)}
_DELTA = _TAGS[Delta]
_PLAIN_LENGTH = 4  # of an item: stream, tag, text, ids
_rest_of, _NOTHING_MORE = _plain_fields()
_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().decode


def pack(stream: int, event: Event) -> list[Any]:
    """Return an event of a stream as a JSON value."""
    if event.__class__ is Delta and _rest_of(event) == _NOTHING_MORE:
        return [stream, _DELTA, event.text, event.token_ids]
    tag = _TAGS[event.__class__]
    return [stream, tag, *_RECORDS[tag].pack(event)]


def unpack(item: Sequence[Any]) -> Event:
    """Return the event that ``pack`` encoded, without its stream.

    Raises:
        MalformedMessage: the input is not an encoded event.
    """
    try:
        tag = item[1]
        if tag == _DELTA and len(item) == _PLAIN_LENGTH:
            return Delta(item[2], tuple(item[3]))
        event: Event = _RECORDS[tag].unpack(item[2:])
    except (TypeError, ValueError, IndexError, KeyError) as exc:
        raise MalformedMessage(f"not an event: {exc}") from exc
    return event


def to_bytes(items: Sequence[Sequence[Any]]) -> bytes:
    """Return items as bytes. Lone surrogates are preserved, because they are escaped."""
    return _encode(items).encode("ascii")


def from_bytes(payload: bytes) -> list[list[Any]]:
    """Return the items of ``to_bytes``. Raises ``MalformedMessage``."""
    try:
        items = _decode(payload.decode("ascii"))
    except (ValueError, RecursionError) as exc:
        raise MalformedMessage(f"not JSON: {exc}") from exc
    if items.__class__ is not list:
        raise MalformedMessage("not a list of items")
    for item in items:
        if item.__class__ is not list or not item or item[0].__class__ is not int:
            raise MalformedMessage("not a list of items that begin with a stream's number")
    found: list[list[Any]] = items
    return found


def _described(kind: Any, seen: set[Any]) -> str:
    """Return a textual description of a type with all of its fields."""
    inner = get_args(kind)
    if inner:
        return f"{get_origin(kind)}[{','.join(_described(one, seen) for one in inner)}]"
    if not dataclasses.is_dataclass(kind) or kind in seen:
        values = [str(one.value) for one in kind] if _is_enum(kind) else []
        return f"{getattr(kind, '__name__', kind)}({','.join(values)})"
    seen.add(kind)
    hints = get_type_hints(kind)
    fields = (f"{one.name}:{_described(hints[one.name], seen)}" for one in dataclasses.fields(kind))
    return f"{getattr(kind, '__name__', kind)}({','.join(fields)})"


def seal(kinds: Iterable[Any]) -> bytes:
    """Return a 16-byte hash of the message types; equal on two ends with the same encoding."""
    seen: set[Any] = set()
    words = ";".join(_described(kind, seen) for kind in kinds)
    return hashlib.sha256(f"{sys.byteorder};{words}".encode()).digest()[:16]


# The second field of an item, where an event has its tag. Sent by a Router, beside method names:
GENERATE, EMBED = 0, 1
# Sent by a board, beside events:
FAILED, ANSWERED = -1, -2
# Sent by a board that fetches a prompt cache file from another one, and by that one:
QUERY, OFFER = "query", "offer"

# Methods that are called often or must be quick, such as those that a pause waits for. By name:
# the types of the arguments, and the type of the answer.
METHODS: dict[str, tuple[tuple[type[Any], ...], type[Any]]] = {
    "report": ((), BoardReport),
    "emitted": ((), Emitted),
    "adopt": ((Desired,), Adoption),
    "logs": ((LogQuery,), LogPage),
}
_ARGS = {
    name: tuple(DataclassCodec(kind) for kind in kinds) for name, (kinds, _) in METHODS.items()
}
_ANSWERS = {name: DataclassCodec(kind) for name, (_, kind) in METHODS.items()}
_REQUESTS = {GENERATE: DataclassCodec(GenerateRequest), EMBED: DataclassCodec(EmbedRequest)}
_ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, RkserveError)
}
_QUERY, _OFFER = DataclassCodec(CacheQuery), DataclassCodec(CacheOffer)
_KINDS = [kind for args, answer in METHODS.values() for kind in (*args, answer)]
# Compared in the handshake: ends with different message types do not connect.
SEAL = seal((*EVENTS, GenerateRequest, EmbedRequest, *_KINDS, CacheQuery, CacheOffer))


def pack_request(stream: int, request: GenerateRequest) -> list[Any]:
    """Return a request to generate or embed."""
    kind = EMBED if isinstance(request, EmbedRequest) else GENERATE
    return [stream, kind, *_REQUESTS[kind].pack(request)]


def unpack_request(item: Sequence[Any]) -> GenerateRequest:
    """Return such a request. Raises ``MalformedMessage``."""
    request: GenerateRequest = _REQUESTS[item[1]].unpack(item[2:])
    return request


def pack_call(stream: int, method: str, args: Sequence[Any]) -> list[Any]:
    """Return a call of one of ``METHODS``."""
    packed = [kind.pack(one) for kind, one in zip(_ARGS[method], args, strict=True)]
    return [stream, method, *packed]


def unpack_call(item: Sequence[Any]) -> tuple[str, list[Any]]:
    """Return method and arguments of such a call. Raises ``MalformedMessage``."""
    try:
        method = item[1]
        args = zip(_ARGS[method], item[2:], strict=True)
        return method, [kind.unpack(one) for kind, one in args]
    except (KeyError, TypeError, ValueError) as exc:
        raise MalformedMessage(f"not a call: {exc!r}") from exc


def pack_answer(stream: int, method: str, answer: Any) -> list[Any]:
    """Return the answer to a method call."""
    return [stream, ANSWERED, *_ANSWERS[method].pack(answer)]


def unpack_answer(item: Sequence[Any], method: str) -> Any:
    """Return the value of such an answer. Raises ``MalformedMessage``."""
    if item[1] != ANSWERED:
        raise MalformedMessage(f"not an answer to '{method}'")
    return _ANSWERS[method].unpack(item[2:])


def pack_query(stream: int, query: CacheQuery) -> list[Any]:
    """Return a query for a prompt cache file."""
    return [stream, QUERY, *_QUERY.pack(query)]


def unpack_query(item: Sequence[Any]) -> CacheQuery:
    """Return such a query. Raises ``MalformedMessage``."""
    if item[1:2] != [QUERY]:
        raise MalformedMessage("not a query for a prompt cache file")
    query: CacheQuery = _QUERY.unpack(item[2:])
    return query


def pack_offer(stream: int, offer: CacheOffer) -> list[Any]:
    """Return the offer of a prompt cache file."""
    return [stream, OFFER, *_OFFER.pack(offer)]


def unpack_offer(item: Sequence[Any]) -> CacheOffer:
    """Return such an offer. Raises ``MalformedMessage``."""
    if item[1:2] != [OFFER]:
        raise MalformedMessage("not an offer of a prompt cache file")
    offer: CacheOffer = _OFFER.unpack(item[2:])
    return offer


def pack_error(stream: int, exc: RkserveError) -> list[Any]:
    """Return an error that ended a call, as its class name and constructor arguments."""
    name = type(exc).__name__
    if _ERRORS.get(name) is not type(exc) or not all(_is_plain_argument(one) for one in exc.args):
        raise TypeError(f"the channel has no form for {exc!r}")
    return [stream, FAILED, name, *exc.args]


def unpack_error(item: Sequence[Any], where: str) -> RkserveError:
    """Return the error of a call to the board ``where``. Raises ``MalformedMessage``."""
    try:
        name, *args = item[2:]
        return _ERRORS[name](*(tuple(one) if isinstance(one, list) else one for one in args))
    except (KeyError, TypeError, ValueError) as exc:
        raise MalformedMessage(f"board {where} sent an unknown error type: {exc!r}") from exc


def _is_plain_argument(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(one, _PLAIN) for one in value)
    return isinstance(value, _PLAIN)


def internal(where: str) -> BoardFailed:
    """Return the error that a Router gets for a bug in the board."""
    return BoardFailed(where, "an internal error; see the board's log")

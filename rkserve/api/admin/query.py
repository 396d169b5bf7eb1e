"""What a client asks of the cluster, from a query string and a JSON body alike.

It knows how values of a query become JSON, by the kind of each name, and no single call. Unknown
names are refused: these calls change something, and a mistyped name must not be taken for one that
was left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from pydantic_core import from_json

from rkserve.api.json.body import JsonObject, parse_object
from rkserve.api.json.fields import Fields, quoted
from rkserve.api.json.limits import MAX_KEY_CHARS
from rkserve.core.errors import RequestError

_KEY = re.compile(rf"[\x21-\x7e]{{1,{MAX_KEY_CHARS}}}")
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


class ParameterKind(Enum):
    """What a parameter is, which decides how its text in a query is read."""

    TEXT = auto()
    TEXTS = auto()
    FLAG = auto()
    NUMBER = auto()
    JSON = auto()


ParameterKinds = Mapping[str, ParameterKind]


@dataclass(frozen=True)
class ControlRequest:
    """One call as it came. ``key`` is its idempotency key, ``who`` names the caller in the audit.

    ``query`` are the pairs of the query string, decoded, in their order.
    """

    query: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    key: str | None = None
    who: str = ""

    def fields(self, kinds: ParameterKinds) -> Fields:
        """Return what was asked, query and body together.

        Raises:
            RequestError: an unknown name, one in both places, or a text that is not of its kind.
        """
        body = parse_object(self.body) if self.body.strip() else {}
        Fields(body).only(kinds)
        asked = _from_query(self.query, kinds)
        for name in asked:
            if name in body:
                raise RequestError(f"'{name}' is in the query and in the body.", name)
        return Fields({**asked, **body})


def read_key(header: str | None) -> str | None:
    """Return the value of an Idempotency-Key header. Raises ``RequestError``."""
    if header is None or _KEY.fullmatch(header):
        return header
    raise RequestError(
        f"Invalid 'Idempotency-Key': it has 1 to {MAX_KEY_CHARS} printable ASCII characters "
        "without spaces.",
        "Idempotency-Key",
    )


def _from_query(pairs: tuple[tuple[str, str], ...], kinds: ParameterKinds) -> JsonObject:
    texts: dict[str, list[str]] = {}
    for name, text in pairs:
        texts.setdefault(name, []).append(text)
    Fields(texts).only(kinds)
    return {name: _value(name, given, kinds[name]) for name, given in texts.items()}


def _value(name: str, given: list[str], kind: ParameterKind) -> Any:
    if kind is ParameterKind.TEXTS:
        return [one for text in given for one in text.split(",")]
    if len(given) > 1:
        raise RequestError(f"'{name}' is in the query {len(given)} times.", name)
    (text,) = given
    if kind is ParameterKind.TEXT:
        return text
    if kind is ParameterKind.JSON:
        return _json(name, text)
    if kind is ParameterKind.FLAG:
        if text.lower() not in _FLAGS:
            raise RequestError(
                f"Invalid '{name}': expected true or false, got {quoted(text)}.", name
            )
        return _FLAGS[text.lower()]
    return _number(name, text)


def _json(name: str, text: str) -> Any:
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        raise RequestError(
            f"Invalid '{name}': in a query it is JSON, got {quoted(text)}.", name
        ) from None


def _number(name: str, text: str) -> int | float:
    try:
        found = from_json(text, allow_inf_nan=False)
    except ValueError:
        found = None
    if isinstance(found, int | float) and not isinstance(found, bool):
        return found
    raise RequestError(f"Invalid '{name}': expected a number, got {quoted(text)}.", name)

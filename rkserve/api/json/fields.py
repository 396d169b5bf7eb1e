"""A reader of JSON objects with strict types and ranges.

``null`` counts as absent. A wrong value raises ``RequestError`` with the path of the key from the
top of the body, in the wording of OpenAI's messages.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from rkserve.api.json.body import JsonObject, kind_of
from rkserve.api.json.limits import MAX_QUOTED_CHARS
from rkserve.core.errors import RequestError
from rkserve.core.files import check_cache_name


@dataclass(frozen=True, slots=True)
class Range:
    """A closed interval, open at its lower end with ``above``."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False

    def complaint(self, value: float) -> str | None:
        """Return the complaint about a value out of range, else None."""
        if value < self.low or (self.above and value == self.low):
            sign = ">" if self.above else ">="
            return f"below minimum value. Expected a value {sign} {self.low:g}"
        if value > self.high:
            return f"above maximum value. Expected a value <= {self.high:g}"
        return None


ANY = Range()


class Fields:
    """One JSON object of a request. ``at`` is its path, empty for the body itself."""

    def __init__(self, values: JsonObject, at: str = "") -> None:
        self._values = values
        self._at = at

    def path(self, name: str) -> str:
        """Return the path of a key of this object, as error messages name it."""
        return f"{self._at}.{name}" if self._at else name

    def get(self, name: str) -> Any:
        """Return the raw value; None if it is absent or null."""
        return self._values.get(name)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong_type(self.path(name), "a string", value)
        return value

    def required_text(self, name: str) -> str:
        """A required string that is not empty."""
        value = self.text(name)
        if value is None:
            raise missing(self.path(name))
        if not value:
            raise RequestError(f"Invalid '{self.path(name)}': empty string.", self.path(name))
        return value

    def cache_name(self, name: str) -> str | None:
        """The name of a prompt cache."""
        value = self.text(name)
        return None if value is None else check_cache_name(value, self.path(name))

    def choice(self, name: str, *choices: str) -> str | None:
        """One of a few strings."""
        value = self.text(name)
        if value is not None and value not in choices:
            path = self.path(name)
            raise RequestError(
                f"Invalid '{path}': {quoted(value)}. Supported values are: "
                f"{', '.join(repr(choice) for choice in choices)}.",
                path,
            )
        return value

    def flag(self, name: str) -> bool:
        """A boolean, False if it is absent."""
        return bool(self.maybe_flag(name))

    def maybe_flag(self, name: str) -> bool | None:
        """A boolean, None if it is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise wrong_type(self.path(name), "a boolean", value)
        return value

    def integer(self, name: str, within: Range = ANY) -> int | None:
        """An integer; booleans and decimals such as 1.0 are refused."""
        value = self.get(name)
        return None if value is None else as_integer(value, self.path(name), within)

    def integers(self, name: str, within: Range = ANY) -> tuple[int, ...] | None:
        """A list of integers, which may be empty."""
        value = self.get(name)
        if value is None:
            return None
        path = self.path(name)
        if not isinstance(value, list):
            raise wrong_type(path, "an array of integers", value)
        return tuple(as_integer(one, f"{path}[{at}]", within) for at, one in enumerate(value))

    def number(self, name: str, within: Range = ANY) -> float | None:
        """An integer or a decimal, as a float."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong_type(self.path(name), "a number", value)
        path = self.path(name)
        _check(value, path, within)
        try:
            return float(value)
        except OverflowError:  # an integer of hundreds of digits, where no bound refuses it
            raise RequestError(f"Invalid '{path}': too large for a number.", path) from None

    def items(self, name: str, most: int | None = None) -> list[Any]:
        """Return a required list of at least one and at most ``most`` items."""
        value = self.get(name)
        if value is None:
            raise missing(self.path(name))
        if not isinstance(value, list):
            raise wrong_type(self.path(name), "an array", value)
        if not value:
            raise RequestError(f"Invalid '{self.path(name)}': empty array.", self.path(name))
        if most is not None and len(value) > most:
            raise RequestError(
                f"Invalid '{self.path(name)}': array too long. Expected {most} items at most, but "
                f"got {len(value)}.",
                self.path(name),
            )
        return value

    def child(self, name: str) -> Fields | None:
        """A nested object."""
        value = self.get(name)
        return None if value is None else as_fields(value, self.path(name))

    def only(self, known: Collection[str]) -> None:
        """Refuse unknown keys.

        Calls that change the cluster use it: a mistyped key must not be taken for one left out.
        """
        for name in self._values:
            if name not in known:
                listed = f"Known are: {', '.join(sorted(known))}." if known else "None is known."
                raise RequestError(
                    f"Unknown parameter: {quoted(self.path(name))}. {listed}",
                    self.path(name)[:MAX_QUOTED_CHARS],
                )


def as_integer(value: object, path: str, within: Range = ANY) -> int:
    """Take a value as an integer."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong_type(path, "an integer", value)
    _check(value, path, within)
    return value


def _check(value: float, path: str, within: Range) -> None:
    complaint = within.complaint(value)
    if complaint is not None:
        raise RequestError(f"Invalid '{path}': {complaint}, but got {quoted(value)}.", path)


def as_fields(value: object, path: str) -> Fields:
    """Take a value as an object."""
    if not isinstance(value, dict):
        raise wrong_type(path, "an object", value)
    return Fields(value, path)


def quoted(value: object) -> str:
    """Return a client's value for an error message, cut to ``MAX_QUOTED_CHARS``."""
    shown = repr(value)
    return shown if len(shown) <= MAX_QUOTED_CHARS else f"{shown[:MAX_QUOTED_CHARS]}..."


def wrong_type(path: str, expected: str, value: object) -> RequestError:
    """The error for a value of another type."""
    return RequestError(
        f"Invalid type for '{path}': expected {expected}, but got {kind_of(value)} instead.", path
    )


def missing(path: str) -> RequestError:
    """The error for a required key that is absent or null."""
    return RequestError(f"Missing required parameter: '{path}'.", path)

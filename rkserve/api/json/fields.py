"""Readers of request bodies: bytes to one JSON object, its values by strict types and ranges.

``null`` counts as absent. A wrong value raises ``RequestError`` with the path of the key from the
top of the body, in the wording of OpenAI's messages. The limits of one request are here as well;
body size and time are limited before a body is parsed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, KeysView
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from rkserve.core.errors import RequestError

JsonObject = dict[str, Any]

# No template writes a message with less than four tokens, and no context is longer than 16,384.
MAX_MESSAGES = 4096  # or items of a conversation, or parts of one message
MAX_CHOICES = 16  # n times the number of prompts: each keeps a board busy for a while
MAX_INPUTS = 2048  # texts of one call for vectors, as OpenAI
MAX_DIMENSIONS = 65536  # of a vector; no model has so many
MAX_STOP = 4  # as OpenAI
MAX_STOP_SEQUENCES = 16  # in dialects that know no limit of their own
MAX_STOP_CHARS = 512  # every token of the answer is compared with them
MAX_STOP_IDS = 256  # token ids
MAX_PAUSE_ON = 16  # entries of pause_on; each may have as many characters as a stop string
MAX_CLEAR_RANGES = 64  # of one edit: each is a call into the runtime
MAX_TOOLS = 128  # as OpenAI
MAX_TOOL_NAME_CHARS = 128
MAX_TYPES_NAMED = 8  # of tools that were left out, in a response header
MAX_MODEL_CHARS = 256  # the name comes back in the answer and in errors
MAX_QUOTED_CHARS = 80  # of a client's value in an error message
MAX_SALT_CHARS = 512
MAX_REPEAT_PENALTY = 10.0  # as in rkserve.yaml
MAX_MIROSTAT_TAU = 20.0  # target surprise in nats, of which the usual one is 5
MAX_TOP_LOGPROBS = 20  # as OpenAI of chats
MAX_LOGIT_BIAS = 1024  # entries; OpenAI takes 300
MAX_GUIDE_CHOICES = 1024
MAX_REFERENCES = 1024  # items of earlier responses in one input; each is looked up on a disk
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's legacy completions

# No vocabulary in use has longer tokens. A text beyond this many characters per position cannot
# fit, and is refused before minutes are spent on tokenizing it.
CHARS_PER_TOKEN = 256
# Characters that /tokenize takes for each position of the context: many times what fits, for
# programs that count before they cut.
COUNTED_CHARS_PER_POSITION = 32

# A runtime that is asked for an absurd top_k allocates for it, and dies. With a tokenizer, top_k is
# cut to the size of the vocabulary; without one that size is unknown.
TEXT_MODE_MAX_TOP_K = 1024

# Of calls that change the cluster.
MAX_KEY_CHARS = 200  # an Idempotency-Key; it is kept with its operation
MAX_NAMED = 256  # boards, models or requests that one call may name
MAX_LABEL_CHARS = 128  # of weights; it comes back in a header of every answer
MAX_SESSION_CHARS = 256
MAX_TIMEOUT_S = 3600
MAX_LEASE_S = 7 * 24 * 3600
MAX_OBSERVE_S = 24 * 3600
MAX_LISTED = 1000  # operations or lines of the audit log
MAX_PATH_CHARS = 4096  # of a path or a URL


class JsonText(JsonObject):
    """A JSON object with the text that it was read from."""

    def __init__(self, found: JsonObject, text: str) -> None:
        super().__init__(found)
        self.text = text


def parse_object(body: bytes) -> JsonObject:
    """Read a request body.

    The parser behind it (jiter) counts its own depth and stops near 200 levels, refuses NaN,
    Infinity, unpaired surrogates, bytes that are not UTF-8 and integers beyond 4,300 digits, and
    never recurses in Python. Raises ``RequestError``: the body is anything but one JSON object.
    """
    if not body.strip():
        raise RequestError("The body is empty. Send a JSON object.")
    try:
        found = from_json(body, allow_inf_nan=False)
    except ValueError as exc:
        raise RequestError(f"The body is not valid JSON: {exc}.") from exc
    if not isinstance(found, dict):
        raise RequestError(f"The body must be a JSON object, but is {kind_of(found)}.")
    return found


def kind_of(value: object) -> str:
    """Name a JSON value's type with its article, as OpenAI's messages do."""
    for types, name in (
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a decimal"),
        (str, "a string"),
        (list, "an array"),
        (dict, "an object"),
    ):
        if isinstance(value, types):
            return name
    return "null"


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

    def keys(self) -> KeysView[str]:
        """Return the keys of this object, also those whose value is null."""
        return self._values.keys()

    def get(self, name: str) -> Any:
        """Return the raw value; None if it is absent or null."""
        return self._values.get(name)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong_type(self.path(name), "a string", value)
        return value

    def any_text(self, name: str) -> str:
        """A required string, which may be empty."""
        value = self.text(name)
        if value is None:
            raise missing(self.path(name))
        return value

    def required_text(self, name: str) -> str:
        """A required string that is not empty."""
        value = self._values.get(name)
        if isinstance(value, str) and value:
            return value
        self.any_text(name)
        raise RequestError(f"Invalid '{self.path(name)}': empty string.", self.path(name))

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

    def required_choice(self, name: str, *choices: str) -> str:
        """A required string, one of a few."""
        value = self.choice(name, *choices)
        if value is None:
            raise missing(self.path(name))
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

    def objects(self, name: str, most: int | None = None) -> list[Fields]:
        """Return a required list of at least one and at most ``most`` objects."""
        path = self.path(name)
        found = self.items(name, most)
        return [as_fields(value, f"{path}[{index}]") for index, value in enumerate(found)]

    def child(self, name: str) -> Fields | None:
        """A nested object."""
        value = self.get(name)
        return None if value is None else as_fields(value, self.path(name))

    def required_child(self, name: str) -> Fields:
        """A required nested object."""
        found = self.child(name)
        if found is None:
            raise missing(self.path(name))
        return found

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

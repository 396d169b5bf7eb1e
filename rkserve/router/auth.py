"""API keys, callers, and the limits of each caller.

Keys are kept as digests and compared in constant time, so that no log, error or memory dump of a
Router contains one. Each limit per minute is a token bucket that holds one minute's worth. A
prompt's tokens are counted on admission; generated tokens and board time are counted as they occur,
which may take a bucket below zero. The clock is passed in to ``Meter``.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rkserve.api.json.fields import quoted
from rkserve.config.router import RouterConfig
from rkserve.core.errors import ConfigError, RateLimited, RequestError
from rkserve.router.queue.admission import ANONYMOUS, QueueTerms

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """The limits of one key; None is unlimited. ``weight`` is its share of scarce boards.

    Its requests must not be more urgent than ``min_priority``; a lower number is more urgent.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    weight: float = 1.0
    min_priority: int | None = None
    board_seconds_per_minute: int | None = None


@dataclass(slots=True)
class _Bucket:
    per_minute: int
    level: float
    seen_s: float

    @classmethod
    def full(cls, per_minute: int | None, now_s: float) -> _Bucket | None:
        return None if per_minute is None else cls(per_minute, per_minute, now_s)

    def fill(self, now_s: float) -> None:
        gained = (now_s - self.seen_s) * self.per_minute / MINUTE_S
        self.level = min(float(self.per_minute), self.level + max(0.0, gained))
        self.seen_s = now_s

    def wait_s(self, level: float) -> int:
        """Return the seconds until the bucket reaches a level."""
        return max(1, math.ceil((level - self.level) * MINUTE_S / self.per_minute))


class Meter:
    """The usage of one key."""

    def __init__(self, limits: CallerLimits, now_s: float) -> None:
        self.limits = limits
        self.running = 0
        self._requests = _Bucket.full(limits.requests_per_minute, now_s)
        self._tokens = _Bucket.full(limits.tokens_per_minute, now_s)
        self._board = _Bucket.full(limits.board_seconds_per_minute, now_s)

    def enter(self, now_s: float) -> None:
        """Admit a call. Raises ``RateLimited``; then nothing was counted."""
        concurrent = self.limits.concurrent
        if concurrent is not None and self.running >= concurrent:
            raise RateLimited(f"{concurrent} calls at once", 1)
        if self._tokens is not None:
            self._tokens.fill(now_s)
            if self._tokens.level <= 0:
                what = f"{self._tokens.per_minute} tokens per minute"
                raise RateLimited(what, self._tokens.wait_s(1.0))
        if self._board is not None:
            self._board.fill(now_s)
            if self._board.level <= 0:
                what = f"{self._board.per_minute} s of board time per minute"
                raise RateLimited(what, self._board.wait_s(1.0))
        if self._requests is not None:
            self._requests.fill(now_s)
            if self._requests.level < 1:
                what = f"{self._requests.per_minute} requests per minute"
                raise RateLimited(what, self._requests.wait_s(1.0))
            self._requests.level -= 1
        self.running += 1

    def spend(self, tokens: int, now_s: float) -> None:
        """Count tokens read or generated."""
        if self._tokens is not None:
            self._tokens.fill(now_s)
            self._tokens.level -= tokens

    def use_board(self, seconds: float, now_s: float) -> None:
        """Count board time of a request, including pauses on the board."""
        if self._board is not None:
            self._board.fill(now_s)
            self._board.level -= seconds

    def leave(self) -> None:
        """End an admitted call."""
        self.running -= 1


_COMMENT = b"#"
_FIRST_PRINTABLE, _DELETE = 0x20, 0x7F


@dataclass(frozen=True, slots=True)
class ClientKey:
    """One API key: its digest, its owner's name, and the owner's limits."""

    digest: bytes
    name: str
    limits: CallerLimits


@dataclass(frozen=True, slots=True)
class Keys:
    """Digests of the keys. ``admin`` is None without an admin key, ``clients`` without API keys."""

    admin: bytes | None = None
    clients: tuple[ClientKey, ...] | None = None

    def is_admin(self, key: bytes) -> bool:
        """Return whether it is the admin key."""
        return self.admin is not None and hmac.compare_digest(_digest(key), self.admin)

    def is_client(self, key: bytes) -> bool:
        """Return whether it opens the inference routes: any API key or the admin key."""
        return self.client(key) is not None or self.is_admin(key)

    def client(self, key: bytes) -> ClientKey | None:
        """Return the matching API key, if any."""
        sent = _digest(key)
        # All keys are compared, so that the time does not depend on the match.
        fits = [one for one in self.clients or () if hmac.compare_digest(sent, one.digest)]
        return fits[0] if fits else None


def open_keys(config: RouterConfig) -> Keys:
    """Read the keys of the configuration and of its key files.

    Raises:
        ConfigError: a file cannot be read or has no key, or a key cannot be sent in a header. The
            service would be open to nobody, or to everybody.
    """
    admin = clients = None
    if config.admin_key is not None:
        given = config.admin_key.get_secret_value().strip()
        if not given:
            raise ConfigError("router.admin_key is empty: give a key, or leave it out.")
        admin = _key(given.encode(), "admin_key")
    elif config.admin_key_file is not None:
        admin = _key(_lines(config.admin_key_file, "admin_key_file")[0], "admin_key_file")
    if config.api_keys_file is not None:
        lines = _lines(config.api_keys_file, "api_keys_file")
        usual = {"board_seconds_per_minute": config.board_seconds_per_minute}
        clients = tuple(_client(line, number, usual) for number, line in enumerate(lines, start=1))
        names = [one.name for one in clients]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"router.api_keys_file: several keys are called {', '.join(twice)}; names must "
                "differ, because each owner has limits of its own."
            )
    return Keys(admin, clients)


def _client(line: bytes, number: int, usual: Mapping[str, Any]) -> ClientKey:
    """Parse a line: the key, then its owner's settings. Errors contain neither.

    ``usual`` are the limits of keys without their own.
    """
    key, *words = line.split()
    where = f"router.api_keys_file: key number {number}"
    said: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.decode("utf-8", "replace").partition("=")
        if not sign or name not in _SETTINGS:
            raise ConfigError(
                f"{where} is followed by something that is no setting. After a key there may be "
                f"{', '.join(f'{known}=...' for known in _SETTINGS)}, with spaces between."
            )
        if name in said:
            raise ConfigError(f"{where} says {name} twice.")
        value = _SETTINGS[name](text)
        if value is None:
            raise ConfigError(f"{where} has a value for {name} that cannot be used.")
        said[name] = value
    name = said.pop("name", f"key-{number}")
    return ClientKey(_key(key, "api_keys_file"), name, CallerLimits(**{**usual, **said}))


def _count(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


def _priority(text: str) -> int | None:
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() else None


def _weight(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


_SETTINGS: Mapping[str, Callable[[str], Any]] = {
    "name": lambda text: text if text.isprintable() and text else None,
    "weight": _weight,
    "requests_per_minute": _count,
    "tokens_per_minute": _count,
    "concurrent": _count,
    "board_seconds_per_minute": _count,
    "min_priority": _priority,
}


def _key(given: bytes, setting: str) -> bytes:
    """Return the digest of a key. The error does not show it."""
    if any(byte < _FIRST_PRINTABLE or byte == _DELETE for byte in given):
        raise ConfigError(f"router.{setting}: a key has a character that cannot be printed.")
    return _digest(given)


def _lines(file: Path, setting: str) -> list[bytes]:
    try:
        content = file.expanduser().read_bytes()
    except OSError as exc:
        raise ConfigError(f"router.{setting}: {file} cannot be read: {exc.strerror}") from exc
    stripped = (line.strip() for line in content.splitlines())
    found = [line for line in stripped if line and not line.startswith(_COMMENT)]
    if not found:
        raise ConfigError(f"router.{setting}: there is no key in {file}.")
    return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a call. All calls without an API key have one owner, without limits."""

    name: str
    meter: Meter

    def enter(self) -> None:
        """Admit a call until ``leave``. Raises ``RateLimited``; then it is not admitted."""
        self.meter.enter(time.monotonic())

    def spend(self, tokens: int) -> None:
        """Count tokens read or generated for the caller."""
        self.meter.spend(tokens, time.monotonic())

    def use_board(self, seconds: float) -> None:
        """Count board time of one of the caller's requests."""
        self.meter.use_board(seconds, time.monotonic())

    def leave(self) -> None:
        """End a call."""
        self.meter.leave()


class Callers:
    """The owners of all keys, with their usage at one Router."""

    def __init__(self, keys: Keys) -> None:
        now_s = time.monotonic()
        self.anybody = Caller(ANONYMOUS, Meter(CallerLimits(), now_s))
        self._known = {
            key.name: Caller(key.name, Meter(key.limits, now_s)) for key in keys.clients or ()
        }

    def of(self, key: ClientKey | None) -> Caller:
        """Return the owner of a key; None is the anonymous one."""
        return self.anybody if key is None else self._known[key.name]


class Urgency(Protocol):
    """The urgency of a call."""

    @property
    def priority(self) -> int | None:
        """The priority; lower goes first."""

    @property
    def timeout_s(self) -> float | None:
        """The time after which the answer is useless."""


def queue_terms(
    call: Urgency,
    caller: Caller,
    timeout_s: float | None,
    config: RouterConfig,
    arrived_s: float,
) -> QueueTerms:
    """Return the queue terms of a call's requests; ``timeout_s`` is from its headers.

    The shortest of several timeouts counts. Without a priority, a call gets the usual one, or the
    most urgent that its key allows.

    Raises:
        RequestError: the priority is outside of the allowed range.
    """
    limits = caller.meter.limits
    least = config.priority_min
    if limits.min_priority is not None:
        least = max(least, limits.min_priority)
    priority = max(0, least) if call.priority is None else call.priority
    if not least <= priority <= config.priority_max:
        raise RequestError(
            f"Invalid 'priority': expected a value from {least} to {config.priority_max}, "
            f"but got {quoted(priority)}.",
            "priority",
        )
    given = [one for one in (timeout_s, call.timeout_s) if one is not None]
    limit_s = min(given, default=config.request_timeout_s)
    return QueueTerms(
        flow=caller.name,
        weight=limits.weight,
        priority=priority,
        deadline_s=None if limit_s is None else arrived_s + limit_s,
        timeout_s=limit_s or 0.0,
        use=lambda _, seconds: caller.use_board(seconds),
        came_s=arrived_s,
    )

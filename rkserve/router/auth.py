"""API keys, callers, and the limits of each caller.

Keys are kept as digests and compared in constant time, so that no log, error or memory dump of a
Router contains one. Each limit per minute is a token bucket that holds one minute's worth. A
prompt's tokens are counted on admission; generated tokens and board time are counted as they occur,
which may take a bucket below zero.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rkserve.api.json.fields import quoted
from rkserve.config.router import RouterConfig
from rkserve.core.block_hashes import owned
from rkserve.core.errors import ConfigError, RateLimited, RequestError
from rkserve.core.key_usage import KeyUsage
from rkserve.core.metrics import NO_KEY, OTHER_KEYS, RouterMetrics
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


class Caller:
    """The owner of a key, with its usage at one Router. All calls without a key have one owner."""

    def __init__(
        self,
        name: str,
        limits: CallerLimits,
        clock: Callable[[], float] | None = None,
        usage: KeyUsage | None = None,
    ) -> None:
        """``clock`` returns the time in seconds; None is the monotonic clock. ``usage`` are the
        metrics of its key.
        """
        self.name, self.limits = name, limits
        self._usage = usage
        self._clock = clock
        self.running = 0
        now_s = self._now_s()
        self._requests = _Bucket.full(limits.requests_per_minute, now_s)
        self._tokens = _Bucket.full(limits.tokens_per_minute, now_s)
        self._board = _Bucket.full(limits.board_seconds_per_minute, now_s)

    def enter(self) -> None:
        """Admit a call until ``leave``. Raises ``RateLimited``; then nothing was counted."""
        concurrent = self.limits.concurrent
        if concurrent is not None and self.running >= concurrent:
            raise RateLimited(f"{concurrent} calls at once", 1)
        for bucket, unit in ((self._tokens, "tokens"), (self._board, "s of board time")):
            if bucket is not None:
                bucket.fill(self._now_s())
                if bucket.level <= 0:
                    raise RateLimited(f"{bucket.per_minute} {unit} per minute", bucket.wait_s(1.0))
        if (bucket := self._requests) is not None:
            bucket.fill(self._now_s())
            if bucket.level < 1:
                raise RateLimited(f"{bucket.per_minute} requests per minute", bucket.wait_s(1.0))
            bucket.level -= 1
        self.running += 1
        if self._usage is not None:
            self._usage.called()

    def spend(self, prompt: int = 0, completion: int = 0) -> None:
        """Count tokens read and generated."""
        if self._tokens is not None:
            self._tokens.fill(self._now_s())
            self._tokens.level -= prompt + completion
        if self._usage is not None:
            self._usage.spent(prompt=prompt, completion=completion)

    def use_board(self, seconds: float) -> None:
        """Count board time of a request, including pauses on the board."""
        if self._board is not None:
            self._board.fill(self._now_s())
            self._board.level -= seconds
        if self._usage is not None:
            self._usage.used_board(seconds)

    def salt(self, salt: str) -> str:
        """Return the salt of its calls, of which ``salt`` is the one in the call.

        Keys share no KV cache: the time to the first token would tell one what another has sent.
        """
        return salt if self.name == ANONYMOUS else owned(self.name, salt)

    def leave(self) -> None:
        """End an admitted call."""
        self.running -= 1

    def _now_s(self) -> float:
        return time.monotonic() if self._clock is None else self._clock()


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
            service would be closed to all clients, or open to all.
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
    settings: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.decode("utf-8", "replace").partition("=")
        if not sign or name not in _SETTINGS:
            raise ConfigError(
                f"{where} is followed by something that is no setting. After a key there may be "
                f"{', '.join(f'{known}=...' for known in _SETTINGS)}, with spaces between."
            )
        if name in settings:
            raise ConfigError(f"{where} says {name} twice.")
        value = _SETTINGS[name](text)
        if value is None:
            raise ConfigError(f"{where} has a value for {name} that cannot be used.")
        settings[name] = value
    name = settings.pop("name", f"key-{number}")
    return ClientKey(_key(key, "api_keys_file"), name, CallerLimits(**{**usual, **settings}))


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


class Callers:
    """The owners of all keys, with their usage at one Router."""

    def __init__(self, keys: Keys, metrics: RouterMetrics, counted_keys: int) -> None:
        """The first ``counted_keys`` keys of the file have metrics of their own."""
        usage = metrics.key_usage(NO_KEY)
        self.anybody = Caller(ANONYMOUS, CallerLimits(), usage=usage)
        self._known: dict[str, Caller] = {}
        for number, key in enumerate(keys.clients or ()):
            usage = metrics.key_usage(key.name if number < counted_keys else OTHER_KEYS)
            self._known[key.name] = Caller(key.name, key.limits, usage=usage)

    def of(self, key: ClientKey | None) -> Caller:
        """Return the owner of a key; None is the anonymous one."""
        return self.anybody if key is None else self._known[key.name]


def queue_terms(
    caller: Caller,
    config: RouterConfig,
    arrived_s: float,
    *,
    priority: int | None,
    timeouts_s: Iterable[float | None],
) -> QueueTerms:
    """Return the queue terms of a call's requests.

    The shortest of several timeouts counts, which its headers and its body give. Without a
    priority, a call gets the usual one, or the most urgent that its key allows.

    Raises:
        RequestError: the priority is outside of the allowed range.
    """
    limits = caller.limits
    least = config.priority_min
    if limits.min_priority is not None:
        least = max(least, limits.min_priority)
    if priority is None:
        priority = max(0, least)
    if not least <= priority <= config.priority_max:
        raise RequestError(
            f"Invalid 'priority': expected a value from {least} to {config.priority_max}, "
            f"but got {quoted(priority)}.",
            "priority",
        )
    limit_s = min((one for one in timeouts_s if one is not None), default=config.request_timeout_s)
    return QueueTerms(
        flow=caller.name,
        weight=limits.weight,
        priority=priority,
        deadline_s=None if limit_s is None else arrived_s + limit_s,
        timeout_s=limit_s or 0.0,
        use=lambda _, seconds: caller.use_board(seconds),
        came_s=arrived_s,
    )

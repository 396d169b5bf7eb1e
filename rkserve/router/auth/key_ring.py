"""The keys that a Router takes: those of its configuration and of its files, and the cluster's.

Keys are kept as digests, so that no log, error or memory dump of a Router contains one. A secret is
looked up by its digest: digests cannot be chosen, so the time of a lookup reveals no other key.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rkserve.config.router import RouterConfig
from rkserve.core.api_keys import (
    NO_KEYS,
    ApiKey,
    CallerLimits,
    KeyScope,
    KeyTable,
    digest_of,
    granted,
)
from rkserve.core.errors import ConfigError, KeysUnknown, TooManyWrongKeys

# As all keys had them before there were scopes.
FILE_SCOPES = frozenset({KeyScope.INFER, KeyScope.READ})
LONGEST_KEY = 4096  # a longer one is not hashed

_COMMENT = b"#"
_FIRST_PRINTABLE, _DELETE = 0x20, 0x7F


@dataclass(frozen=True, slots=True)
class ClientKey:
    """One API key: its digest, its owner's name, limits and permissions.

    Keys of a file have no ``id``. ``models`` are the allowed models and adapters; empty allows all.
    """

    digest: bytes
    name: str
    limits: CallerLimits
    scopes: frozenset[KeyScope] = FILE_SCOPES
    id: str = ""
    models: frozenset[str] = frozenset()

    @property
    def owner(self) -> str:
        """The identity of the key, which outlives its secret; another key may get its name."""
        return self.id or self.name


@dataclass(frozen=True, slots=True)
class Keys:
    """The configured keys. ``admin`` is the digest of the admin key, None without one; ``clients``
    is None without a file of API keys.
    """

    admin: bytes | None = None
    clients: tuple[ClientKey, ...] | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """The permissions of a caller, who has a name for the audit log.

    ``key`` is None for the admin key of the configuration, and for callers without a key.
    """

    scopes: frozenset[KeyScope]
    who: str
    key: ClientKey | None = None
    expires_s: float | None = None


class KeyRing:
    """The keys in force at one Router. Use it from one event loop."""

    def __init__(
        self,
        keys: Keys,
        *,
        open_to_all: bool = False,
        local_only: bool = True,
        table: KeyTable | None = NO_KEYS,
        usual: int | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """``open_to_all``: clients need no key; without it they need none only where the endpoint
        is ``local_only`` and there never was a key. ``table`` are the cluster's keys, None as long
        as they are unknown; ``usual`` is the board time per minute of those that have no limit of
        it. ``now_s`` reads seconds since 1970.
        """
        self.configured, self._now_s, self._usual = keys, now_s, usual
        self._open_to_all, self._local_only = open_to_all, local_only
        self._used: dict[str, float] = {}
        self._grants: dict[bytes, Grant] = {}
        self.changed: list[Callable[[frozenset[str]], None]] = []
        self.revision = -1
        self.take(table)

    def take(self, table: KeyTable | None) -> None:
        """Put the cluster's keys into force; None is that they are not known."""
        grants: dict[bytes, Grant] = {}
        for one in () if table is None else table.keys:
            key = _client_key(one, self._usual)
            who = f"{one.name} ({one.id})"
            digest = bytes.fromhex(one.digest)
            grants[digest] = Grant(key.scopes, who, key, one.expires_s)
            if one.previous is not None and one.previous_until_s is not None:
                until_s = min(one.previous_until_s, one.expires_s or math.inf)
                grants[bytes.fromhex(one.previous)] = Grant(key.scopes, who, key, until_s)
        for own in self.configured.clients or ():
            grants[own.digest] = Grant(own.scopes, own.name, own)
        if self.configured.admin is not None:
            grants[self.configured.admin] = Grant(granted([KeyScope.ADMIN]), "admin")
        self._grants = grants
        self.revision = -1 if table is None else table.revision
        self._operated = any(KeyScope.OPERATE in grant.scopes for grant in self._grants.values())
        for listener in self.changed:
            listener(frozenset(one.id for one in ([] if table is None else table.keys)))

    @property
    def known(self) -> bool:
        """True once the cluster's keys are known."""
        return self.revision >= 0

    @property
    def anonymous(self) -> bool:
        """True if callers without a key may generate and read."""
        if self._open_to_all:
            return True
        # Once there were keys, the end of the last one must not open the service.
        return self._local_only and self.configured.clients is None and self.revision == 0

    @property
    def trusts_this_machine(self) -> bool:
        """True if programs of the Router's own machine may control it without a key."""
        return self.known and not self._operated

    def find(self, secret: bytes) -> Grant | None:
        """Return the permissions of a secret; None if it is unknown, revoked or expired.

        Raises:
            KeysUnknown: it may be one of the cluster's, which are not known yet.
        """
        if not secret or len(secret) > LONGEST_KEY:
            return None
        grant = self._grants.get(digest_of(secret))
        if grant is None:
            if not self.known and not self._open_to_all:
                raise KeysUnknown
            return None
        now_s = self._now_s()
        if grant.expires_s is not None and grant.expires_s <= now_s:
            return None
        if grant.key is not None and grant.key.id:
            self._used[grant.key.id] = now_s
        return grant

    def require_known(self) -> None:
        """Raise ``KeysUnknown`` before the cluster's keys are known."""
        if not self.known:
            raise KeysUnknown

    def take_used(self) -> dict[str, float]:
        """Return the times of the last use of the cluster's keys since the previous call."""
        used, self._used = self._used, {}
        return used

    def put_back(self, used: Mapping[str, float]) -> None:
        """Keep times that were taken and could not be sent."""
        self._used = {**used, **self._used}


def _client_key(one: ApiKey, usual: int | None) -> ClientKey:
    limits = one.limits
    if limits.board_seconds_per_minute is None:
        limits = replace(limits, board_seconds_per_minute=usual)
    digest = bytes.fromhex(one.digest)
    return ClientKey(digest, one.name, limits, granted(one.scopes), one.id, frozenset(one.models))


WRONG_KEYS = 20  # of one address within a minute
MOST_ADDRESSES = 4096
MINUTE_S = 60.0


@dataclass(slots=True)
class TokenBucket:
    """A limit per minute: a bucket of one minute's worth, which a minute fills."""

    per_minute: int
    level: float
    seen_s: float

    @classmethod
    def full(cls, per_minute: int, now_s: float) -> TokenBucket:
        """Return a full bucket."""
        return cls(per_minute, per_minute, now_s)

    def fill(self, now_s: float) -> None:
        """Add the gain since the last time."""
        gained = (now_s - self.seen_s) * self.per_minute / MINUTE_S
        self.level = min(float(self.per_minute), self.level + max(0.0, gained))
        self.seen_s = now_s

    def wait_s(self, level: float) -> int:
        """Return the seconds until the bucket reaches a level."""
        return max(1, math.ceil((level - self.level) * MINUTE_S / self.per_minute))


class WrongKeys:
    """The wrong keys of each address: a bucket of ``WRONG_KEYS``, which a minute fills.

    Of addresses beyond ``MOST_ADDRESSES`` the one that was idle for longest is forgotten, so that
    the memory is constant. It slows down those who try keys, and fills no log; a secret of 256 bits
    cannot be found by trying.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns the time in seconds."""
        self._clock = clock
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def count(self, address: str) -> None:
        """Count a wrong key. Raises ``TooManyWrongKeys``."""
        now_s = self._clock()
        bucket = self._buckets.pop(address, None) or TokenBucket.full(WRONG_KEYS, now_s)
        self._buckets[address] = bucket  # the latest one
        if len(self._buckets) > MOST_ADDRESSES:
            self._buckets.popitem(last=False)
        bucket.fill(now_s)
        if bucket.level < 1:
            raise TooManyWrongKeys(WRONG_KEYS, bucket.wait_s(1.0))
        bucket.level -= 1


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
    return digest_of(given)


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

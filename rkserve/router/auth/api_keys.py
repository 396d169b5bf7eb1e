"""The keys that let callers in: one for operators, any number for clients, and what each may.

It knows where keys come from and how they are compared, and nothing of routes. Keys are kept as
digests, so that no log, error or dump of a Router can show one, and compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rkserve.config.serve_config import RouterConfig
from rkserve.core.errors import ConfigError
from rkserve.router.auth.rate_limits import Limits

_COMMENT = b"#"
_FIRST_PRINTABLE, _DELETE = 0x20, 0x7F


@dataclass(frozen=True, slots=True)
class ClientKey:
    """One API key: its digest, what logs and limits call its owner, and what that may."""

    digest: bytes
    name: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class Keys:
    """Digests of the keys. ``admin`` is None without an admin key, ``clients`` without API keys."""

    admin: bytes | None = None
    clients: tuple[ClientKey, ...] | None = None

    def is_admin(self, key: bytes) -> bool:
        """Whether it is the admin key."""
        return self.admin is not None and hmac.compare_digest(_digest(key), self.admin)

    def is_client(self, key: bytes) -> bool:
        """Whether it opens the inference routes: any API key does, and the admin key."""
        return self.client(key) is not None or self.is_admin(key)

    def client(self, key: bytes) -> ClientKey | None:
        """Return the API key that it is."""
        sent = _digest(key)
        # All of them are compared, whichever fits: the time says nothing.
        fits = [one for one in self.clients or () if hmac.compare_digest(sent, one.digest)]
        return fits[0] if fits else None


def open_keys(config: RouterConfig) -> Keys:
    """Read the keys of the configuration, and the files that it names.

    Raises:
        ConfigError: a file cannot be read, or there is no key where one should be, or one that no
            header can bring: nobody, or everybody, would get in.
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
    """Read a line: the key, and behind it what its owner may. Errors show neither key nor words.

    ``usual`` are limits of keys that do not set them.
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
    return ClientKey(_key(key, "api_keys_file"), name, Limits(**{**usual, **said}))


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

"""The keys that let callers in: one for operators, any number for clients.

It knows where keys come from and how they are compared, and nothing of routes. Keys are kept as
digests, so that no log, error or dump of a Router can show one, and compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from rkserve.config import RouterConfig
from rkserve.errors import ConfigError

_COMMENT = b"#"
_FIRST_PRINTABLE, _DELETE = 0x20, 0x7F


@dataclass(frozen=True, slots=True)
class Keys:
    """Digests of the keys. ``admin`` is None without an admin key, ``clients`` without API keys."""

    admin: bytes | None = None
    clients: tuple[bytes, ...] | None = None

    def is_admin(self, key: bytes) -> bool:
        """Whether it is the admin key."""
        return self.admin is not None and hmac.compare_digest(_digest(key), self.admin)

    def is_client(self, key: bytes) -> bool:
        """Whether it opens the inference routes: any API key does, and the admin key."""
        sent = _digest(key)
        # All of them are compared, whichever fits: the time says nothing.
        fits = [hmac.compare_digest(sent, known) for known in (self.clients or ())]
        return any([*fits, self.is_admin(key)])


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
        clients = tuple(_key(line, "api_keys_file") for line in lines)
    return Keys(admin, clients)


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

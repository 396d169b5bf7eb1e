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

_COMMENT = "#"


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
        ConfigError: a file cannot be read or has no key in it: nobody, or everybody, would get in.
    """
    admin = None if config.admin_key is None else config.admin_key.get_secret_value().encode()
    if admin is None and config.admin_key_file is not None:
        admin = _lines(config.admin_key_file, "admin_key_file")[0]
    clients = None
    if config.api_keys_file is not None:
        clients = tuple(_digest(key) for key in _lines(config.api_keys_file, "api_keys_file"))
    return Keys(None if admin is None else _digest(admin), clients)


def _lines(file: Path, setting: str) -> list[bytes]:
    try:
        content = file.expanduser().read_bytes()
    except OSError as exc:
        raise ConfigError(f"router.{setting}: {file} cannot be read: {exc.strerror}") from exc
    stripped = (line.strip() for line in content.splitlines())
    found = [line for line in stripped if line and not line.startswith(_COMMENT.encode())]
    if not found:
        raise ConfigError(f"router.{setting}: there is no key in {file}.")
    return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

"""API keys as state of the cluster: scopes, limits, and the table that all Routers have.

A secret has 256 random bits, so that its SHA-256 cannot be inverted by trying secrets: a slow hash
protects passwords, which people choose, and would cost every request milliseconds. Only digests are
stored, sent between processes, and compared.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from rkserve.core.skew import crosses_versions

PREFIX = "rks-"
SECRET_BYTES = 32
MOST_KEYS = 1000
KEY_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._@-]{0,62}[A-Za-z0-9])?")


class KeyScope(str, Enum):
    """A part of the calls. ``infer``: generating, embedding, tokenizing and the list of models;
    ``read``: lists, figures and the cluster's page; ``operate``: control of the cluster, its models
    and all generations; ``admin``: everything, keys included.
    """

    INFER = "infer"
    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"


# An operator has to see what it controls.
_IMPLIED = {KeyScope.OPERATE: {KeyScope.READ}, KeyScope.ADMIN: set(KeyScope)}


def granted(scopes: Iterable[KeyScope]) -> frozenset[KeyScope]:
    """Return the scopes with those that they include."""
    own = frozenset(scopes)
    return own.union(*(_IMPLIED.get(one, set()) for one in own))


@crosses_versions
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


UNLIMITED = CallerLimits()


@crosses_versions
@dataclass(frozen=True, slots=True)
class SpentLimits:
    """The use of one key's limits at one Router since its last report: calls, tokens of prompts and
    answers, and seconds of board time. ``running`` are its calls now.
    """

    calls: int = 0
    tokens: int = 0
    board_s: float = 0.0
    running: int = 0

    def __add__(self, later: SpentLimits) -> SpentLimits:
        """Return the use of both, with the calls that run now."""
        return SpentLimits(
            self.calls + later.calls,
            self.tokens + later.tokens,
            self.board_s + later.board_s,
            later.running,
        )


@crosses_versions
@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key: its owner's name and permissions, and the digest of its secret in hexadecimal.

    ``hint`` are the ends of the secret, for people. ``models`` are the allowed models and adapters;
    empty allows all. After a rotation ``previous`` is the digest of the secret before it, which is
    good until ``previous_until_s``. Times are in seconds since 1970.
    """

    id: str
    name: str
    digest: str
    hint: str
    scopes: tuple[KeyScope, ...]
    models: tuple[str, ...] = ()
    limits: CallerLimits = UNLIMITED
    created_s: float = 0.0
    expires_s: float | None = None
    previous: str | None = None
    previous_until_s: float | None = None


@crosses_versions
@dataclass(frozen=True, slots=True)
class KeyTable:
    """All keys of the cluster. The revision grows with each change; 0 is that of a cluster that
    never had a key.
    """

    revision: int = 0
    keys: tuple[ApiKey, ...] = ()

    def key(self, key_id: str) -> ApiKey | None:
        """Return the key of that ID."""
        return next((one for one in self.keys if one.id == key_id), None)

    def with_key(self, key: ApiKey) -> KeyTable:
        """Return the next revision, with a new or a changed key."""
        if self.key(key.id) is None:
            return replace(self, revision=self.revision + 1, keys=(*self.keys, key))
        keys = tuple(key if one.id == key.id else one for one in self.keys)
        return replace(self, revision=self.revision + 1, keys=keys)

    def without(self, key_id: str) -> KeyTable:
        """Return the next revision, without a key."""
        keys = tuple(one for one in self.keys if one.id != key_id)
        return replace(self, revision=self.revision + 1, keys=keys)


NO_KEYS = KeyTable()


def new_secret() -> str:
    """Return a random secret with the prefix by which people and scanners recognise it."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def new_key_id() -> str:
    """Return a random ID."""
    return f"key_{secrets.token_hex(8)}"


def digest_of(secret: bytes) -> bytes:
    """Return the digest of a secret."""
    return hashlib.sha256(secret).digest()


def hint_of(secret: str) -> str:
    """Return the ends of a secret: 208 of its 256 bits stay unknown."""
    return f"{secret[: len(PREFIX) + 4]}...{secret[-4:]}"

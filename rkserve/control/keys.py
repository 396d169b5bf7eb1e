"""Changes of the cluster's keys, as pure functions on the table of all keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, TypeAlias

from rkserve.core.api_keys import (
    KEY_NAME,
    MOST_KEYS,
    UNLIMITED,
    ApiKey,
    CallerLimits,
    KeyScope,
    KeyTable,
    new_key_id,
)
from rkserve.core.errors import KeyExists, KeyNotFound, RequestError
from rkserve.core.skew import crosses_versions

MAX_GRACE_S = 7 * 24 * 3600.0


@crosses_versions
@dataclass(frozen=True, slots=True)
class SecretDigest:
    """The digest of a new secret, in hexadecimal, and the ends of the secret."""

    digest: str
    hint: str


@crosses_versions
@dataclass(frozen=True, slots=True)
class CreateKey:
    """Add a key; it expires after ``expires_in_s``, or never."""

    kind: ClassVar[str] = "key_create"

    name: str
    scopes: tuple[KeyScope, ...]
    models: tuple[str, ...] = ()
    limits: CallerLimits = UNLIMITED
    expires_in_s: float | None = None

    @property
    def params(self) -> dict[str, Any]:
        """The parameters for the audit log."""
        found = {"name": self.name, "scopes": [one.value for one in self.scopes]}
        more: dict[str, Any] = {"models": list(self.models), "expires_in_s": self.expires_in_s}
        return {**found, **{name: value for name, value in more.items() if value}}


@crosses_versions
@dataclass(frozen=True, slots=True)
class RotateKey:
    """Give a key another secret; the one before it is good for ``grace_s`` seconds more."""

    kind: ClassVar[str] = "key_rotate"

    key_id: str
    grace_s: float = 0.0

    @property
    def params(self) -> dict[str, Any]:
        """The parameters for the audit log."""
        return {"id": self.key_id, **({"grace_s": self.grace_s} if self.grace_s else {})}


@crosses_versions
@dataclass(frozen=True, slots=True)
class RevokeKey:
    """Remove a key; its secrets are good for nothing from then on."""

    kind: ClassVar[str] = "key_revoke"

    key_id: str

    @property
    def params(self) -> dict[str, Any]:
        """The parameters for the audit log."""
        return {"id": self.key_id}


KeyChange: TypeAlias = CreateKey | RotateKey | RevokeKey


@crosses_versions
@dataclass(frozen=True, slots=True)
class KeyRequest:
    """A call that changes the keys.

    ``secret`` is that of a creation or a rotation. ``who`` names the caller; ``key`` is the call's
    idempotency key. ``router`` is the Router that makes the call, and gets the keys itself.
    """

    change: KeyChange
    secret: SecretDigest | None = None
    who: str = ""
    key: str | None = None
    router: str = ""

    @property
    def fingerprint(self) -> str:
        """A digest of the call without the secret, which is another one at each repeat."""
        content = json.dumps([self.change.kind, asdict(self.change)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


@crosses_versions
@dataclass(frozen=True, slots=True)
class KeyOutcome:
    """The key after a change, or as it was before it was revoked; and the table's revision.

    Without ``applied`` the call repeats an earlier one, and its secret is not in force.
    ``routers_behind`` is the number of known Routers that have not confirmed the revision in time.
    """

    key: ApiKey
    revision: int
    applied: bool = True
    routers_behind: int = 0


def changed(
    table: KeyTable, call: KeyRequest, now_s: float, new_id: Callable[[], str] = new_key_id
) -> tuple[KeyTable, ApiKey]:
    """Return the next table, and the key.

    Raises:
        KeyExists, KeyNotFound: the name is taken, or no key has the ID.
        RequestError: a value is not allowed, or there are too many keys.
    """
    if isinstance(call.change, CreateKey):
        key = _created(table, call.change, _secret(call), now_s, new_id())
        return table.with_key(key), key
    key_id = call.change.key_id
    known = table.key(key_id)
    if known is None:
        raise KeyNotFound(key_id)
    if isinstance(call.change, RevokeKey):
        return table.without(key_id), known
    key = _rotated(known, _secret(call), now_s, call.change.grace_s)
    return table.with_key(key), key


def _secret(call: KeyRequest) -> SecretDigest:
    if call.secret is None:
        raise RequestError(f"'{call.change.kind}' needs a secret.")
    return call.secret


def _created(
    table: KeyTable, wanted: CreateKey, secret: SecretDigest, now_s: float, key_id: str
) -> ApiKey:
    if not KEY_NAME.fullmatch(wanted.name):
        raise RequestError(
            "Invalid 'name': it has 1 to 64 letters, digits and ' ._@-', and begins and ends with "
            "a letter or a digit.",
            "name",
        )
    if not wanted.scopes:
        raise RequestError("Invalid 'scopes': a key has at least one.", "scopes")
    if any(one.name == wanted.name for one in table.keys):
        raise KeyExists(wanted.name)
    if len(table.keys) >= MOST_KEYS:
        raise RequestError(f"The cluster has {MOST_KEYS} keys, which is the limit: revoke some.")
    return ApiKey(
        key_id,
        wanted.name,
        secret.digest,
        secret.hint,
        tuple(dict.fromkeys(wanted.scopes)),
        wanted.models,
        wanted.limits,
        now_s,
        None if wanted.expires_in_s is None else now_s + wanted.expires_in_s,
    )


def _rotated(key: ApiKey, secret: SecretDigest, now_s: float, grace_s: float) -> ApiKey:
    if not 0 <= grace_s <= MAX_GRACE_S:
        raise RequestError(
            f"Invalid 'grace_s': expected a value from 0 to {MAX_GRACE_S:g}, got {grace_s:g}.",
            "grace_s",
        )
    kept = key.digest if grace_s else None
    until_s = now_s + grace_s if grace_s else None
    return replace(
        key,
        digest=secret.digest,
        hint=secret.hint,
        previous=kept,
        previous_until_s=until_s,
    )

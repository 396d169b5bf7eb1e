"""API keys over HTTP, in the shape of OpenAI's administration API.

A secret is in the answer of its creation or rotation, as ``value``, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from rkserve.api.admin.query import Name
from rkserve.api.json.schemas import Count, RequestModel, Seconds, one_of
from rkserve.control.keys import MAX_GRACE_S, KeyOutcome
from rkserve.core.api_keys import ApiKey, CallerLimits, KeyScope

MAX_KEY_NAME = 64
MAX_EXPIRY_S = 10 * 365 * 24 * 3600.0
Limit = Annotated[int, Field(ge=1, le=10**9)]
RoutersBehind = Annotated[
    int,
    Field(
        ge=0,
        description="Routers that have not confirmed the change within a second, such as frozen "
        "ones: they may go by the keys before it until the Coordinator reaches them.",
    ),
]
ScopeName = Literal["infer", "read", "operate", "admin"]


class KeyBody(RequestModel):
    """A new key, and what it may do."""

    name: str = Field(
        min_length=1,
        max_length=MAX_KEY_NAME,
        description="Letters, digits and ` ._@-`; keys differ in it. Logs, metrics and usage show "
        "it.",
    )
    scopes: list[ScopeName] = Field(
        ["infer"],
        min_length=1,
        max_length=4,
        description="`infer`: generating, embedding, tokenizing and the list of models. `read`: "
        "lists, figures and the cluster's page. `operate`, with `read`: control of the cluster, "
        "its models and all generations. `admin`: everything, keys included.",
    )
    models: list[Name] | None = Field(
        None,
        min_length=1,
        max_length=64,
        description="The models that it is for, each with its adapters, and single adapters; all "
        "without it.",
    )
    expires_in_s: float | None = Field(
        None, gt=0, le=MAX_EXPIRY_S, description="Seconds after which it expires; never without it."
    )
    requests_per_minute: Limit | None = Field(None, description="Its calls.")
    tokens_per_minute: Limit | None = Field(None, description="Its tokens, of prompts and answers.")
    concurrent: Limit | None = Field(None, description="Its calls at once.")
    board_seconds_per_minute: Limit | None = Field(
        None, description="Its board time; without it that of the configuration."
    )
    weight: float | None = Field(
        None, gt=0, le=1e6, description="Its share of scarce boards; 1 without it."
    )
    min_priority: int | None = Field(
        None, ge=-1000, le=1000, description="The most urgent priority of its requests."
    )

    def key_scopes(self) -> tuple[KeyScope, ...]:
        """Return the scopes."""
        return tuple(KeyScope(one) for one in self.scopes)

    def limits(self) -> CallerLimits:
        """Return the limits."""
        return CallerLimits(
            self.requests_per_minute,
            self.tokens_per_minute,
            self.concurrent,
            1.0 if self.weight is None else self.weight,
            self.min_priority,
            self.board_seconds_per_minute,
        )


class RotateBody(RequestModel):
    """A new secret for a key."""

    grace_s: float | None = Field(
        None,
        ge=0,
        le=MAX_GRACE_S,
        description="Seconds for which the secret before it stays good; 0 without it.",
    )


class LimitsEntry(TypedDict):
    """The limits of a key; null is none of its own."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent: int | None
    weight: float
    min_priority: int | None
    board_seconds_per_minute: int | None


class KeyEntry(TypedDict):
    """One key. ``redacted_value`` are the ends of its secret. Times are in seconds since 1970;
    the last use is known to a minute.
    """

    id: str
    object: Literal["api_key"]
    name: str
    redacted_value: str
    scopes: list[Annotated[str, one_of(KeyScope)]]
    models: list[str]
    limits: LimitsEntry
    created_at: Count
    expires_at: Count | None
    last_used_at: Count | None
    previous_until: NotRequired[Seconds]


class NewKeyAnswer(KeyEntry):
    """A key with its secret, which is shown this once.

    ``applied`` is false, and ``value`` null, where a call with its Idempotency-Key came before: the
    secret was in that answer. Rotate the key if it is lost.
    """

    value: str | None
    applied: bool
    routers_behind: RoutersBehind


class KeysAnswer(TypedDict):
    """All keys, the oldest first."""

    object: Literal["list"]
    data: list[KeyEntry]


class KeyRevoked(TypedDict):
    """A key that is good for nothing any more, where `routers_behind` is 0."""

    id: str
    object: Literal["api_key.deleted"]
    deleted: Literal[True]
    applied: bool
    routers_behind: RoutersBehind


def key_entry(key: ApiKey, used_s: float | None = None) -> KeyEntry:
    """Return the entry of a key."""
    entry: KeyEntry = {
        "id": key.id,
        "object": "api_key",
        "name": key.name,
        "redacted_value": key.hint,
        "scopes": [one.value for one in key.scopes],
        "models": list(key.models),
        "limits": {
            "requests_per_minute": key.limits.requests_per_minute,
            "tokens_per_minute": key.limits.tokens_per_minute,
            "concurrent": key.limits.concurrent,
            "weight": key.limits.weight,
            "min_priority": key.limits.min_priority,
            "board_seconds_per_minute": key.limits.board_seconds_per_minute,
        },
        "created_at": int(key.created_s),
        "expires_at": None if key.expires_s is None else int(key.expires_s),
        "last_used_at": None if used_s is None else int(used_s),
    }
    if key.previous_until_s is not None:
        entry["previous_until"] = key.previous_until_s
    return entry


def new_key_answer(outcome: KeyOutcome, secret: str) -> NewKeyAnswer:
    """Return the answer of a creation or a rotation; that of a repeat is without the secret."""
    return {
        **key_entry(outcome.key),
        "value": secret if outcome.applied else None,
        "applied": outcome.applied,
        "routers_behind": outcome.routers_behind,
    }


def keys_list(keys: Iterable[tuple[ApiKey, float | None]]) -> KeysAnswer:
    """Return the answer of GET /v1/keys."""
    return {"object": "list", "data": [key_entry(key, used_s) for key, used_s in keys]}


def key_revoked(key_id: str, outcome: KeyOutcome) -> KeyRevoked:
    """Return the answer of a revocation."""
    return {
        "id": key_id,
        "object": "api_key.deleted",
        "deleted": True,
        "applied": outcome.applied,
        "routers_behind": outcome.routers_behind,
    }

"""Changes of the table of keys."""

from __future__ import annotations

from typing import Any

import pytest

from rkserve.control.keys import (
    MAX_GRACE_S,
    CreateKey,
    KeyChange,
    KeyRequest,
    RevokeKey,
    RotateKey,
    SecretDigest,
    changed,
)
from rkserve.core.api_keys import MOST_KEYS, ApiKey, CallerLimits, KeyScope, KeyTable
from rkserve.core.errors import KeyExists, KeyNotFound, RequestError

NOW_S = 1000.0
SECRET = SecretDigest("ab" * 32, "rks-abcd...wxyz")
KNOWN = ApiKey("key_1", "team", "00" * 32, "old", (KeyScope.READ,), created_s=5.0)
TABLE = KeyTable(7, (KNOWN,))


def change(
    what: KeyChange, table: KeyTable = TABLE, secret: SecretDigest | None = SECRET
) -> tuple[KeyTable, ApiKey]:
    return changed(table, KeyRequest(what, secret), NOW_S, lambda: "key_new")


def test_a_new_key_has_what_it_was_given() -> None:
    limits = CallerLimits(concurrent=2)
    wanted = CreateKey("a", (KeyScope.INFER, KeyScope.INFER), ("m",), limits, 60.0)
    table, key = change(wanted)
    assert key == ApiKey(
        *("key_new", "a", SECRET.digest, SECRET.hint, (KeyScope.INFER,), ("m",), limits),
        created_s=NOW_S,
        expires_s=NOW_S + 60,
    )
    assert table == KeyTable(8, (KNOWN, key))


@pytest.mark.parametrize("grace_s", [0.0, 60.0])
def test_a_rotation_changes_the_secret_and_nothing_else(grace_s: float) -> None:
    table, key = change(RotateKey("key_1", grace_s))
    assert (key.digest, key.hint) == (SECRET.digest, SECRET.hint)
    assert (key.id, key.name, key.scopes, key.created_s) == ("key_1", "team", KNOWN.scopes, 5.0)
    kept = (KNOWN.digest, NOW_S + grace_s) if grace_s else (None, None)
    assert (key.previous, key.previous_until_s) == kept
    assert table.keys == (key,)
    again = changed(table, KeyRequest(RotateKey("key_1"), SECRET), NOW_S)[1]
    assert again.previous is None, "a second rotation ends the time of grace"


def test_a_revoked_key_is_gone() -> None:
    table, key = change(RevokeKey("key_1"), secret=None)
    assert (table, key) == (KeyTable(8), KNOWN)


@pytest.mark.parametrize(
    ("what", "error"),
    [
        pytest.param(CreateKey("team", (KeyScope.INFER,)), KeyExists, id="a name that is taken"),
        pytest.param(CreateKey("", (KeyScope.INFER,)), RequestError, id="no name"),
        pytest.param(CreateKey("a" * 65, (KeyScope.INFER,)), RequestError, id="a long name"),
        pytest.param(CreateKey("(other)", (KeyScope.INFER,)), RequestError, id="a name of metrics"),
        pytest.param(CreateKey("a\nb", (KeyScope.INFER,)), RequestError, id="two lines"),
        pytest.param(CreateKey("b", ()), RequestError, id="no scope"),
        pytest.param(RotateKey("key_2"), KeyNotFound, id="rotate an unknown one"),
        pytest.param(RevokeKey("key_2"), KeyNotFound, id="revoke an unknown one"),
        pytest.param(RotateKey("key_1", MAX_GRACE_S + 1), RequestError, id="a long grace"),
        pytest.param(RotateKey("key_1", float("nan")), RequestError, id="no number"),
    ],
)
def test_a_wrong_change_is_refused(what: KeyChange, error: type[RequestError]) -> None:
    with pytest.raises(error):
        change(what)


def test_a_new_secret_is_needed_for_a_key() -> None:
    with pytest.raises(RequestError, match="needs a secret"):
        change(RotateKey("key_1"), secret=None)


def test_the_number_of_keys_is_limited() -> None:
    keys = tuple(ApiKey(f"key_{n}", str(n), "", "", (KeyScope.INFER,)) for n in range(MOST_KEYS))
    with pytest.raises(RequestError, match=f"has {MOST_KEYS} keys"):
        change(CreateKey("more", (KeyScope.INFER,)), KeyTable(1, keys))


def test_the_fingerprint_is_of_the_call_and_not_of_its_secret() -> None:
    def of(what: KeyChange, **rest: Any) -> str:
        return KeyRequest(what, **rest).fingerprint

    rotate = RotateKey("key_1")
    assert of(rotate, secret=SECRET) == of(rotate, secret=SecretDigest("cd", ""), who="x")
    others: list[KeyChange] = [RotateKey("key_1", 1.0), RotateKey("key_2"), RevokeKey("key_1")]
    assert len({of(one) for one in (rotate, *others)}) == 4


def test_the_audit_log_gets_parameters_without_a_digest() -> None:
    found = [one.params for one in (CreateKey("a", (KeyScope.INFER,)), RotateKey("k"))]
    assert found == [{"name": "a", "scopes": ["infer"]}, {"id": "k"}]

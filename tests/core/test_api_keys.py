"""Secrets and the table of keys as values."""

from __future__ import annotations

import base64
import pickle
from dataclasses import replace

from rkserve.core.api_keys import (
    PREFIX,
    SECRET_BYTES,
    ApiKey,
    KeyScope,
    KeyTable,
    digest_of,
    hint_of,
    new_secret,
)


def key(name: str) -> ApiKey:
    return ApiKey(f"key_{name}", name, "00", "", (KeyScope.INFER,))


def test_a_secret_has_256_random_bits_behind_its_prefix() -> None:
    made = {new_secret() for _ in range(100)}
    assert len(made) == 100
    for secret in made:
        assert secret.startswith(PREFIX)
        assert len(base64.urlsafe_b64decode(secret.removeprefix(PREFIX) + "=")) == SECRET_BYTES


def test_a_hint_leaves_most_of_the_secret_unknown() -> None:
    secret = new_secret()
    hint = hint_of(secret)
    shown = hint.replace("...", "").removeprefix(PREFIX)
    assert len(shown) == 8
    assert secret not in hint
    assert digest_of(secret.encode()).hex() not in hint


def test_a_table_grows_by_a_revision_with_each_change() -> None:
    one, two = key("one"), key("two")
    table = KeyTable().with_key(one).with_key(two)
    assert (table.revision, table.keys) == (2, (one, two))
    changed = table.with_key(replace(one, hint="x"))
    assert (changed.revision, changed.keys) == (3, (replace(one, hint="x"), two))
    left = changed.without("key_one")
    assert (left.revision, left.keys) == (4, (two,))
    assert left.key("key_one") is None
    assert pickle.loads(pickle.dumps(left)) == left

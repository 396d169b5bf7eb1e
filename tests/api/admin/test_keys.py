"""API keys over HTTP: the limits of a new key, and what an entry shows."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from rkserve.api.admin.keys import KeyBody, key_entry
from rkserve.api.admin.query import ControlRequest
from rkserve.core.api_keys import ApiKey, KeyScope, digest_of, hint_of, new_secret
from rkserve.core.errors import RequestError

SECRET = new_secret()
KEY = ApiKey("key_1", "team", digest_of(SECRET.encode()).hex(), hint_of(SECRET), (KeyScope.INFER,))


def body(**fields: Any) -> KeyBody:
    return ControlRequest(body=json.dumps({"name": "team", **fields}).encode()).read(KeyBody)


def test_a_key_may_infer_and_no_more_unless_that_is_asked_for() -> None:
    made = body()
    assert made.key_scopes() == (KeyScope.INFER,)
    assert made.limits().weight == 1.0
    assert body(scopes=["read", "operate"]).key_scopes() == (KeyScope.READ, KeyScope.OPERATE)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"name": ""}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"scopes": ["root"]}, "scopes[0]"),
        ({"scopes": []}, "scopes"),
        ({"expires_in_s": 0}, "expires_in_s"),
        ({"expires_in_s": 1e12}, "expires_in_s"),
        ({"weight": -1}, "weight"),
        ({"concurrent": 0}, "concurrent"),
        ({"secret": "mine"}, "secret"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        body(**fields)
    assert refused.value.param == param


def test_an_entry_shows_the_ends_of_the_secret_alone() -> None:
    text = json.dumps(key_entry(replace(KEY, created_s=7.9, expires_s=9.0), 8.5))
    assert SECRET not in text
    assert KEY.digest not in text
    shown = json.loads(text)
    assert shown["redacted_value"] == KEY.hint
    assert (shown["created_at"], shown["expires_at"], shown["last_used_at"]) == (7, 9, 8)

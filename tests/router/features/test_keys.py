"""Changes of keys at a Router: the Coordinator gets digests, and the caller the secret, once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rkserve.api.admin.query import ControlRequest
from rkserve.control.keys import CreateKey, KeyOutcome, KeyRequest
from rkserve.core.api_keys import ApiKey, KeyScope, digest_of
from rkserve.core.errors import KeyExists
from rkserve.router.features.keys import ApiKeys
from rkserve.router.service import Service

KEY = ApiKey("key_1", "team", "d" * 64, "rks-…abcd", (KeyScope.INFER,))


class Cluster:
    """A Coordinator that notes the calls, and has made the key before where ``repeated``."""

    def __init__(self, *, repeated: bool = False) -> None:
        self.calls: list[KeyRequest] = []
        self.behind = 0
        self._repeated = repeated

    async def change_key(self, call: KeyRequest, _keys: object) -> KeyOutcome:
        self.calls.append(call)
        return KeyOutcome(KEY, 1, applied=not self._repeated, routers_behind=self.behind)


def features(cluster: Cluster, names: Sequence[str] = ()) -> ApiKeys:
    configured = SimpleNamespace(clients=[SimpleNamespace(name=name) for name in names])
    service = SimpleNamespace(keys=SimpleNamespace(configured=configured), cluster=cluster)
    return ApiKeys(cast(Service, service))


def asked(key: str | None = None, **fields: Any) -> ControlRequest:
    return ControlRequest(body=json.dumps(fields).encode(), key=key, who="admin")


@pytest.mark.virtual_time
async def test_the_coordinator_never_gets_a_secret() -> None:
    cluster = Cluster()
    made = await features(cluster).create(asked("once", name="team"))
    (call,) = cluster.calls
    secret = made["value"]
    assert secret is not None
    assert secret not in repr(call)
    assert call.secret is not None
    assert call.secret.digest == digest_of(secret.encode()).hex()
    assert isinstance(call.change, CreateKey)
    assert (call.who, call.key) == ("admin", "once")


@pytest.mark.virtual_time
async def test_a_repeated_call_shows_no_secret() -> None:
    made = await features(Cluster(repeated=True)).create(asked("once", name="team"))
    assert (made["value"], made["applied"]) == (None, False)


@pytest.mark.virtual_time
async def test_a_name_of_the_configuration_s_keys_is_taken() -> None:
    cluster = Cluster()
    with pytest.raises(KeyExists):
        await features(cluster, ["team"]).create(asked(name="team"))
    assert cluster.calls == []


@pytest.mark.virtual_time
async def test_the_answer_has_the_number_of_routers_that_did_not_confirm_the_change() -> None:
    cluster = Cluster()
    cluster.behind = 2
    of = features(cluster)
    assert (await of.create(asked(name="team")))["routers_behind"] == 2
    assert (await of.rotate("key_1", asked()))["routers_behind"] == 2
    assert (await of.revoke("key_1", ControlRequest(who="admin")))["routers_behind"] == 2

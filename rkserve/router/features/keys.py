"""Creation, rotation and revocation of the cluster's API keys, from the API's calls to the
Coordinator's.

Secrets are made here: the Coordinator gets their digests, and nothing keeps them.
"""

from __future__ import annotations

from rkserve.api.admin.keys import (
    KeyBody,
    KeyRevoked,
    KeysAnswer,
    NewKeyAnswer,
    RotateBody,
    key_revoked,
    keys_list,
    new_key_answer,
)
from rkserve.api.admin.query import ControlRequest, NoParameters
from rkserve.control.keys import (
    CreateKey,
    KeyChange,
    KeyRequest,
    RevokeKey,
    RotateKey,
    SecretDigest,
)
from rkserve.core.api_keys import digest_of, hint_of, new_secret
from rkserve.core.errors import KeyExists
from rkserve.router.service import Service


class ApiKeys:
    """The keys of the cluster, as one Router changes them."""

    def __init__(self, service: Service) -> None:
        self._keys, self._cluster = service.keys, service.cluster

    async def create(self, asked: ControlRequest) -> NewKeyAnswer:
        """Make a key. Raises ``RkserveError``."""
        body = asked.read(KeyBody)
        # Metrics and usage are counted by name.
        if any(own.name == body.name for own in self._keys.configured.clients or ()):
            raise KeyExists(body.name)
        change = CreateKey(
            body.name,
            body.key_scopes(),
            tuple(body.models or ()),
            body.limits(),
            body.expires_in_s,
        )
        return await self._with_secret(change, asked)

    async def rotate(self, key_id: str, asked: ControlRequest) -> NewKeyAnswer:
        """Give a key another secret. Raises ``RkserveError``."""
        grace_s = asked.read(RotateBody).grace_s or 0.0
        return await self._with_secret(RotateKey(key_id, grace_s), asked)

    async def revoke(self, key_id: str, asked: ControlRequest) -> KeyRevoked:
        """Revoke a key. Raises ``RkserveError``."""
        asked.read(NoParameters)
        call = KeyRequest(RevokeKey(key_id), who=asked.who, key=asked.key)
        outcome = await self._cluster.change_key(call, self._keys)
        return key_revoked(key_id, outcome)

    async def listed(self) -> KeysAnswer:
        """Return the keys of the cluster."""
        return keys_list(await self._cluster.listed_keys())

    async def _with_secret(self, change: KeyChange, asked: ControlRequest) -> NewKeyAnswer:
        secret = new_secret()
        digest = SecretDigest(digest_of(secret.encode()).hex(), hint_of(secret))
        call = KeyRequest(change, digest, asked.who, asked.key)
        outcome = await self._cluster.change_key(call, self._keys)
        return new_key_answer(outcome, secret)

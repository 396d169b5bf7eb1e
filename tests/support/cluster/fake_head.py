"""A scripted Coordinator that obeys ``HeadLink``: it keeps what it was asked, and says what a test
tells it to. By default every operation succeeds on the boards that it is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rkserve.control.calls import (
    AcceptedManifest,
    DeclaredArtifact,
    OperationKind,
    OperationRequest,
)
from rkserve.control.keys import CreateKey, KeyOutcome, KeyRequest, changed
from rkserve.control.operations import (
    BoardOutcome,
    ControlOperation,
    OperationOutcome,
    OperationState,
    ResultStatus,
)
from rkserve.core.api_keys import ApiKey, KeyScope, KeyTable
from rkserve.core.desired_state import AdapterVersion, AdapterVersions, Desired, DesiredCache
from rkserve.core.errors import CoordinatorAway, OperationNotFound
from rkserve.core.messages import AdapterRef
from rkserve.models.incoming import UploadProgress
from rkserve.models.index import ModelIndex
from tests.support.values.control_values import recorded

DIGEST = "d" * 64


def version(name: str = "tone", called: str = "v1", size_bytes: int = 7) -> AdapterVersion:
    """A version whose digest tells its name."""
    digest = (called.encode().hex() + DIGEST)[:64]
    return AdapterVersion(AdapterRef(name, called, digest), size_bytes)


def line(name: str = "tone", active: str | None = "v1", **rest: Any) -> AdapterVersions:
    """A line of the simulated model's."""
    found = None if active is None else version(name, active)
    return AdapterVersions("sim-chat", name, found, **{"epoch": 3, **rest})


@dataclass
class FakeHead:
    """The Coordinator. ``says`` has answers by method: a value, an error, or a function.

    Those about base weights are ``register_model`` and ``upload_end_model``.
    """

    desired: Desired = field(default_factory=Desired)
    keys: KeyTable = field(default_factory=KeyTable)
    says: dict[str, Any] = field(default_factory=dict)
    results: Mapping[str, BoardOutcome] = field(
        default_factory=lambda: {"a": BoardOutcome(ResultStatus.OK, 12.5)}
    )
    away: bool = False
    asked: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        assert timeout_s > 0
        if self.away:
            raise CoordinatorAway("The Coordinator cannot be reached (test).")
        if method not in ("desired", "api_keys"):
            self.asked.append((method, args))
        await asyncio.sleep(0)
        name = f"{method}_model" if self._is_of_model(method, args) else method
        said = self.says[name] if name in self.says else getattr(self, f"_{method}")
        if isinstance(said, Exception):
            raise said
        found = said(*args) if callable(said) else said
        return await found if asyncio.iscoroutine(found) else found

    def _is_of_model(self, method: str, args: tuple[Any, ...]) -> bool:
        if method == "register":
            return bool(args[2].base)
        begun = [args[0] for method, args in self.asked if method == "upload_begin"]
        return method == "upload_end" and begun[-1].base

    @property
    def calls(self) -> list[OperationRequest]:
        """The changes that were asked for."""
        return [args[0] for method, args in self.asked if method == "perform"]

    def outcome(
        self, call: OperationRequest, status: int = 200, **changes: Any
    ) -> OperationOutcome:
        """What a call that went well came to."""
        known: dict[str, Any] = {
            "state": OperationState.SUCCEEDED,
            "who": call.who,
            "key": call.key,
            "epoch": self.desired.epoch,
            "results": self.results,
            "phases": (("stopping", 12.0), ("stopping", 0.5)),
        }
        operation = ControlOperation(f"op-{len(self.calls)}", call.action, **{**known, **changes})
        return OperationOutcome(status, operation)

    async def _desired(self, after_epoch: int, wait_s: float) -> Desired:
        if self.desired.epoch == after_epoch:
            await asyncio.sleep(min(wait_s, 0.01))
        return self.desired

    def _perform(self, call: OperationRequest) -> OperationOutcome:
        if call.background:
            return self.outcome(call, 202, state=OperationState.RUNNING, results={})
        return self.outcome(call)

    def _operations(self, limit: int) -> list[ControlOperation]:
        return [recorded(f"op-{n}", OperationKind.PAUSE) for n in range(min(limit, 2))]

    def _operation(self, name: str) -> ControlOperation:
        raise OperationNotFound(name)

    def _operation_by_key(self, _key: str) -> ControlOperation | None:
        return None

    def _manifests(self, _digests: list[str]) -> dict[str, tuple[AcceptedManifest, ...]]:
        return {}

    def _keep_cache(self, _cache: DesiredCache) -> None:
        pass

    def _drop_cache(self, _model: str, _name: str) -> bool:
        return False

    def _kept_caches(self, _model: str) -> list[dict[str, object]]:
        return []

    async def _api_keys(
        self, _router: str, revision: int, wait_s: float, _used: Mapping[str, float]
    ) -> KeyTable:
        if self.keys.revision == revision:
            await asyncio.sleep(min(wait_s, 0.01))
        return self.keys

    def _change_key(self, call: KeyRequest) -> KeyOutcome:
        if isinstance(call.change, CreateKey):
            self.keys, key = changed(self.keys, call, 1.0)
        else:
            key = ApiKey(call.change.key_id, "team", "00", "rks-0000...0000", (KeyScope.INFER,))
        return KeyOutcome(key, self.keys.revision)

    def _listed_keys(self) -> list[tuple[ApiKey, float | None]]:
        return [(one, 2.0) for one in self.keys.keys]

    def _audit(self, limit: int) -> list[dict[str, Any]]:
        return [{"who": "local", "kind": "pause"}][:limit]

    def _metrics(self) -> bytes:
        return b"rkserve_desired_epoch 3.0\n"

    def _catalog_models(self) -> list[tuple[str, str, int]]:
        return [("chat", DIGEST, 7)]

    def _catalog_target(self, _name: str) -> tuple[str, float | None]:
        return "", None

    def _catalog_upload(
        self, index: ModelIndex, _replace: bool, _claim: DeclaredArtifact
    ) -> UploadProgress:
        return UploadProgress(index.name, index.version, 0, index.total_bytes, complete=False)

    def _catalog_piece(self, _name: str, _version: str, _path: str, _at: int, data: bytes) -> int:
        return len(data)

    def _catalog_end(self, name: str, version: str) -> UploadProgress:
        return UploadProgress(name, version, 7, 7, complete=True)

    def _upload_begin(self, _claim: DeclaredArtifact) -> str:
        return "upload-1"

    def _upload_part(self, _upload: str, offset: int, data: bytes) -> int:
        assert offset == sum(map(len, self.parts)), "a part is missing or came twice"
        self.parts.append(data)
        return offset + len(data)

    def _upload_end(self, _upload: str, _manifest: Mapping[str, Any]) -> AdapterVersion:
        return version("tone", "v2", sum(map(len, self.parts)))

    def _upload_abort(self, _upload: str) -> None:
        self.parts.clear()

    def _register(
        self, _kind: str, _place: str, claim: DeclaredArtifact, _scale: float
    ) -> AdapterVersion:
        return version(claim.name, claim.version or "dddddddddddd")

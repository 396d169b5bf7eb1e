"""Calls from a Router to the Coordinator and their results: values that are sent by pickle.

``params`` by kind; all keys may be absent or null if a default is given:

- ``pause``: ``models``, ``boards`` (lists of IDs, empty = all), ``adapter`` (name, null = the
  boards as a whole), ``mode`` (keep | wait | abort), ``clear_cache``, ``lease_s`` (seconds, null =
  none); ``resume``: ``models``, ``boards``, ``adapter``, none of them = everything.
- ``sleep``: ``models``, ``boards``, ``mode``, ``level`` (0 | 1 | 2, 1), ``lease_s``, ``wakes``
  (whether a request for the model ends it; null = as its boards' group is configured); ``wake``:
  ``models``, ``boards``, ``tags`` (of ``weights``, ``kv_cache``; none = both), ``requested`` (only
  sleeps that a request ends, and without refusing the rest, false).
- ``cache_reset``: ``models``, ``boards``, ``reset_running_requests``; ``abort``: ``request_ids``
  (null = all), ``models``, ``boards``.
- ``adapter_stage``: ``model``, ``name``, ``version``, ``digest`` (sha256, hexadecimal), ``scale``,
  ``size_bytes``: the artifact is in the head's store already.
- ``adapter_rollout``: ``model``, ``name``, ``version``, ``strategy`` (atomic | rolling | canary),
  ``max_unavailable`` (boards, 1), ``weight`` (0 to 1, of sessions), ``in_flight`` (pin | switch |
  abort), ``observe_s`` (seconds), ``auto`` (promote when the verdict is good, true).
- ``adapter_rollback``, ``adapter_promote``: ``model``, ``name``.
- ``adapter_retire``: ``model``, ``name``, ``version`` (null = the whole adapter).
- ``label``: ``model``, ``label``, ``reset_step`` (forget the last step of a trainer, false).
- ``weight_update``: ``model``, ``step`` (a trainer's, later than the last), ``in_flight`` (pin |
  switch | abort, switch), and either ``name`` and ``version`` of a staged adapter, or ``digest``,
  ``size_bytes`` and ``version`` (its label) of base weights in the head's store.
- ``rebase``: ``model``, ``digest`` and ``size_bytes`` of base weights in the head's store (null =
  the file in the model folder), ``label`` (null = of the content), ``max_unavailable`` (boards, 1),
  ``in_flight`` (pin).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from rkserve.control.operations import ControlOperation, OperationKind
from rkserve.control.params import Params


@dataclass(frozen=True, slots=True)
class OperationRequest:
    """A call that changes the cluster.

    ``who`` names the caller without any secret. ``key`` is its idempotency key. Parts not done
    after ``timeout_s`` seconds (None: the Coordinator's own limit) are undone. With
    ``expected_epoch`` the call is refused (``StaleEpoch``) unless that is the current epoch.
    ``background`` answers at once, with a running operation.
    """

    kind: OperationKind
    params: Params = field(default_factory=dict, hash=False)
    who: str = ""
    key: str | None = None
    timeout_s: float | None = None
    expected_epoch: int | None = None
    background: bool = False

    @property
    def fingerprint(self) -> str:
        """A digest of the call: a key that is reused with another one is an error."""
        content = json.dumps(
            {"kind": self.kind.value, "params": self.params, "epoch": self.expected_epoch},
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        )
        return hashlib.sha256(content.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class OperationOutcome:
    """The answer. ``status`` is HTTP's: 200, 202, 207, or that of ``operation.error``.

    ``applied`` is False if this call changed nothing: it repeats an earlier one, or its change was
    already in effect. ``emitted`` has the token counts of stopped generations by request ID.
    """

    status: int
    operation: ControlOperation
    applied: bool = True
    emitted: Mapping[str, int] = field(default_factory=dict, hash=False)

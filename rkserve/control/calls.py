"""What a Router asks of the Coordinator, and the answer: values that cross a process by pickle.

It knows which parameters there are by kind, and nothing of HTTP bodies or of how a call is made.

``params`` by kind; all keys may be absent or null where a default is given:

- ``pause``: ``models``, ``boards`` (lists of ids, empty = all), ``adapter`` (name, null = the
  boards as a whole), ``mode`` (keep | wait | abort), ``clear_cache``, ``lease_s`` (seconds, null =
  none); ``resume``: ``models``, ``boards``, ``adapter``, none of them = everything.
- ``sleep``: ``models``, ``boards``, ``mode``, ``level`` (0 | 1 | 2, 1), ``lease_s``, ``wakes``
  (whether a request for the model ends it; null = as its boards' group is configured); ``wake``:
  ``models``, ``boards``, ``tags`` (of ``weights``, ``kv_cache``; none = both), ``requested`` (only
  what a request ends, and without refusing the rest, false).
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

from rkserve.control.operations import Operation, OperationKind
from rkserve.control.params import Params


@dataclass(frozen=True, slots=True)
class OperationRequest:
    """One call that changes the cluster.

    ``who`` names the caller without any secret. ``key`` is its idempotency key. After ``timeout_s``
    seconds (None: the Coordinator's own) what is not done is undone. With ``expected_epoch`` the
    call is refused (``StaleEpoch``) unless that is the epoch now. ``background`` answers at once,
    with an operation that goes on.
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
        """A digest of what is asked: a key that comes back with another one is a mistake."""
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

    ``applied`` is False where nothing was changed by this call: it repeats an earlier one, or what
    it asks for held already. ``emitted`` says of generations that were stopped, by the request's
    id, how many tokens they have.
    """

    status: int
    operation: Operation
    applied: bool = True
    emitted: Mapping[str, int] = field(default_factory=dict, hash=False)

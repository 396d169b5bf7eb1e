"""Errors of calls on the cluster as a whole, and errors caused by its state."""

from __future__ import annotations

from rkserve.core.errors.boards import BoardFailed
from rkserve.core.errors.requests import RequestError, RkserveError, without_folders


class OperationNotFound(RequestError):
    """No operation of that ID is recorded."""

    http_status = 404
    code = "operation_not_found"
    sentence = "There is no operation '{operation}'; GET /v1/operations lists them."

    def __init__(self, operation: str) -> None:
        RkserveError.__init__(self, operation)
        self.operation = operation


class AdapterExists(RequestError):
    """The name or the version is taken, by another content or by a model."""

    code = "adapter_exists"


class ArtifactRefused(RequestError):
    """A file or its manifest does not fit; nothing was changed anywhere."""

    code = "artifact_refused"


class ArtifactNotFound(ArtifactRefused):
    """There is no such file, or the upload has been removed."""

    http_status = 404
    code = "artifact_not_found"


class OperationConflict(RequestError):
    """A running operation excludes the requested one, or it comes too late."""

    http_status = 409
    code = "operation_conflict"


class StaleEpoch(RequestError):
    """The caller expected an older epoch than the current one, or sent an older version."""

    http_status = 409
    code = "stale_epoch"


class StaleWeights(RequestError):
    """A trainer's step is not later than the last one that was applied."""

    http_status = 409
    code = "stale_weights"


class InvalidApiKey(RequestError):
    """The call needs a key, and the given one is unknown."""

    http_status = 401
    code = "invalid_api_key"


class EnginePaused(RkserveError):
    """The requested part is paused in a mode that accepts no new requests."""

    http_status = 503
    kind = "server_error"
    code = "engine_paused"
    sentence = "Paused: {what}. New requests are not taken until it is resumed."

    def __init__(self, what: str, retry_after_s: int = 5) -> None:
        super().__init__(what, retry_after_s)
        self.what, self.retry_after_s = what, retry_after_s


class CallAborted(RkserveError):
    """The request was aborted by a pause of the cluster; another board would do the same."""

    http_status = 503
    kind = "server_error"
    code = "aborted"
    retry_after_s = 5  # the duration of the pause is unknown
    sentence = "Aborted: {what} was paused, and what ran there was ended with that."

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class EngineAsleep(EnginePaused):
    """The requested part sleeps in a mode that accepts no new requests, and no request wakes it."""

    sentence = "Asleep: {what}. New requests are not taken until it is woken up."


class VersionUnavailable(RkserveError):
    """No present board serves a version that the request's policy allows."""

    http_status = 503
    code = "version_unavailable"
    sentence = "No board serves what x-version-policy '{policy}' asks for: {why}."

    def __init__(self, policy: str, why: str, retry_after_s: int = 1) -> None:
        super().__init__(policy, why, retry_after_s)
        self.policy, self.why, self.retry_after_s = policy, why, retry_after_s


class CoordinatorAway(RkserveError):
    """The Coordinator cannot be reached: the cluster keeps serving, and cannot be changed."""

    http_status = 503
    code = "coordinator_unavailable"
    retry_after_s = 3


class OperationTimeout(RkserveError):
    """An operation was not done in time, and its changes were undone."""

    http_status = 504
    code = "operation_timeout"


class LedgerFailed(RkserveError):
    """The Coordinator cannot read or write its ledger; nothing was changed.

    At the Coordinator's start the message names the folder and the fix.
    """

    http_status = 503
    code = "ledger_failed"


class ResponsesFailed(RkserveError):
    """Stored responses cannot be read now: the disk of a Router's node is full or broken."""

    http_status = 503
    code = "responses_failed"


class BoardBehind(BoardFailed):
    """The board has not adopted the desired state yet; another one may have.

    The Router sends the request to another board; nothing has begun.
    """

    code = "board_behind"

    @property
    def message(self) -> str:
        """The sentence for the user."""
        reason = without_folders(self.reason)
        return f"Board {self.board_id} does not take the request yet: {reason}."


class BoardAsleep(BoardFailed):
    """The board's model is unloaded, or about to be; nothing has begun, and another board may be
    awake.

    The Router sends a request that must not wait to another board.
    """

    code = "board_asleep"

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"Board {self.board_id} is asleep: {without_folders(self.reason)}."


class ModelAsleep(RkserveError):
    """The model is unloaded, and the request could not wake it."""

    http_status = 503
    code = "model_asleep"

    def __init__(self, model: str, reason: str, retry_after_s: int = 5) -> None:
        super().__init__(model, reason, retry_after_s)
        self.model, self.reason, self.retry_after_s = model, reason, retry_after_s

    @property
    def message(self) -> str:
        """The sentence for the user."""
        reason = without_folders(self.reason)
        return f"Model '{self.model}' is asleep and could not be woken: {reason}."


class StageFailed(BoardFailed):
    """A file could not be delivered to the board's disk completely; nothing of it is used."""

    code = "stage_failed"

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"Board {self.board_id} did not get the file: {without_folders(self.reason)}."


class RebaseFailed(BoardFailed):
    """The board could not load other base weights, or they failed their trial.

    It has returned to its previous ones, and serves nothing until these are desired or it can load
    the others.
    """

    code = "rebase_failed"

    @property
    def message(self) -> str:
        """The sentence for the user."""
        reason = without_folders(self.reason)
        return f"Board {self.board_id} did not take the weights: {reason}."

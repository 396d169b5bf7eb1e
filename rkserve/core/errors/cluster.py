"""What is wrong with a call that concerns the cluster as a whole, or comes of its state."""

from __future__ import annotations

from rkserve.core.errors.base import RkserveError, without_folders
from rkserve.core.errors.boards import BoardFailed
from rkserve.core.errors.requests import RequestError


class OperationNotFound(RequestError):
    """No operation of that id is recorded."""

    http_status = 404
    code = "operation_not_found"

    def __init__(self, operation: str) -> None:
        RkserveError.__init__(self, operation)
        self.operation = operation

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"There is no operation '{self.operation}'; GET /v1/operations lists them."


class AdapterExists(RequestError):
    """The name or the version is taken, by another content or by a model."""

    code = "adapter_exists"


class ArtifactRefused(RequestError):
    """A file or its manifest does not fit; nothing was changed anywhere."""

    code = "artifact_refused"


class ArtifactNotFound(ArtifactRefused):
    """There is no such file, or no such upload any more."""

    http_status = 404
    code = "artifact_not_found"


class OperationConflict(RequestError):
    """Another operation is going on that this one must not meet, or it comes too late."""

    http_status = 409
    code = "operation_conflict"


class StaleEpoch(RequestError):
    """The caller expected an epoch, or sent a version, that the cluster is past."""

    http_status = 409
    code = "stale_epoch"


class StaleWeights(RequestError):
    """A trainer's step is not later than the last one that was applied."""

    http_status = 409
    code = "stale_weights"


class InvalidApiKey(RequestError):
    """The call needs a key, and this is none of those that are known."""

    http_status = 401
    code = "invalid_api_key"


class EnginePaused(RkserveError):
    """What the request needs is paused in a way that takes no new requests."""

    http_status = 503
    kind = "server_error"
    code = "engine_paused"

    def __init__(self, what: str, retry_after_s: int = 5) -> None:
        super().__init__(what, retry_after_s)
        self.what, self.retry_after_s = what, retry_after_s

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"Paused: {self.what}. New requests are not taken until it is resumed."


class CallAborted(RkserveError):
    """It was ended with all that ran, by a pause that aborts; another board would do the same."""

    http_status = 503
    kind = "server_error"
    code = "aborted"
    retry_after_s = 5  # nobody knows how long the pause lasts

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"Aborted: {self.what} was paused, and what ran there was ended with that."


class EngineAsleep(EnginePaused):
    """What the request needs sleeps in a way that takes no new requests, and none wakes it."""

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"Asleep: {self.what}. New requests are not taken until it is woken up."


class VersionUnavailable(RkserveError):
    """No board that is there serves a version that the request's policy allows."""

    http_status = 503
    code = "version_unavailable"

    def __init__(self, policy: str, why: str, retry_after_s: int = 1) -> None:
        super().__init__(policy, why, retry_after_s)
        self.policy, self.why, self.retry_after_s = policy, why, retry_after_s

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"No board serves what x-version-policy '{self.policy}' asks for: {self.why}."


class CoordinatorAway(RkserveError):
    """The Coordinator cannot be reached: the cluster serves on, and cannot be changed."""

    http_status = 503
    code = "coordinator_unavailable"
    retry_after_s = 3


class OperationTimeout(RkserveError):
    """An operation was not done in time, and what it had done was undone."""

    http_status = 504
    code = "operation_timeout"


class LedgerFailed(RkserveError):
    """The Coordinator cannot write down, or read, what the cluster shall be; nothing was changed.

    From the Coordinator's start it names the folder and what to do.
    """

    http_status = 503
    code = "ledger_failed"


class ResponsesFailed(RkserveError):
    """Stored responses cannot be read now: the disk of a Router's node is full or broken."""

    http_status = 503
    code = "responses_failed"


class BoardBehind(BoardFailed):
    """The board has not adopted yet what the cluster shall be; another one may have.

    Whoever sends a request goes on to another board; nothing has begun.
    """

    code = "board_behind"

    @property
    def message(self) -> str:
        """The sentence for the user."""
        reason = without_folders(self.reason)
        return f"Board {self.board_id} does not take the request yet: {reason}."


class BoardAsleep(BoardFailed):
    """The board's model is unloaded, or about to be; nothing has begun, and another may be awake.

    Whoever sends a request that was not to wait for it goes on to another board.
    """

    code = "board_asleep"

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"Board {self.board_id} is asleep: {without_folders(self.reason)}."


class ModelAsleep(RkserveError):
    """The model is unloaded, and the request that was to wake it could not."""

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
    """A file could not be brought to the board's disk whole; nothing of it is used."""

    code = "stage_failed"

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"Board {self.board_id} did not get the file: {without_folders(self.reason)}."


class RebaseFailed(BoardFailed):
    """The board could not load other base weights, or they failed their trial.

    It has gone back to those that it had, and serves nothing until it is told to have these, or
    can load the others.
    """

    code = "rebase_failed"

    @property
    def message(self) -> str:
        """The sentence for the user."""
        reason = without_folders(self.reason)
        return f"Board {self.board_id} did not take the weights: {reason}."

"""Errors of boards, their engines and the vendor's library, and of the cluster and calls on it."""

from __future__ import annotations

import re

from rkserve.core.errors.requests import RequestError, RkserveError, without_folders


class HookFailed(RkserveError):
    """An intervention hook raised; only its own generation ended.

    ``reason`` is for the client; ``detail`` is the error of the operator's code, for the log.
    """

    code = "hook_failed"
    sentence = "The intervention hook {hook} failed: {reason}."

    def __init__(self, hook: str, reason: str, detail: str = "") -> None:
        super().__init__(hook, reason, detail)
        self.hook, self.reason, self.detail = hook, reason, detail


class PauseExpired(RkserveError):
    """A paused generation was not resumed in time and was ended."""

    http_status = 504
    code = "pause_expired"
    sentence = "The generation was paused for {paused_s:.0f} s and was not resumed."

    def __init__(self, paused_s: float) -> None:
        super().__init__(paused_s)
        self.paused_s = paused_s


class TooManyPaused(RkserveError):
    """The board has reached its limit of paused generations: resume or abort one of them."""

    http_status = 429
    kind = "rate_limit_error"
    code = "too_many_paused"
    sentence = (
        "Board {board_id} keeps at most {limit} paused generations, and has so many "
        "now. Resume or abort one of them first."
    )

    def __init__(self, board_id: str, limit: int) -> None:
        super().__init__(board_id, limit)
        self.board_id, self.limit = board_id, limit


class QueueFull(RkserveError):
    """Every board that could take the request has a full queue."""

    http_status = 429
    kind = "rate_limit_error"
    code = "queue_full"
    sentence = (
        "All boards are busy and {queued} requests are waiting, which is the limit. "
        "Try again in {retry_after_s} s."
    )

    def __init__(self, queued: int, retry_after_s: int) -> None:
        super().__init__(queued, retry_after_s)
        self.queued, self.retry_after_s = queued, retry_after_s


class QueueTimeout(RkserveError):
    """The request waited for a board longer than the configured limit."""

    http_status = 503
    kind = "overloaded_error"
    code = "queue_timeout"
    sentence = "The request waited {waited_s:.0f} s for a board and was given up."

    def __init__(self, waited_s: float, retry_after_s: int) -> None:
        super().__init__(waited_s, retry_after_s)
        self.waited_s, self.retry_after_s = waited_s, retry_after_s


class DeadlineUnreachable(RkserveError):
    """The answer could not be ready within the request's timeout; it was not begun.

    ``needs_s`` is the expected time, with the wait for a board. Without ``retry_after_s`` it would
    be late on an idle cluster too.
    """

    http_status = 503
    kind = "overloaded_error"
    code = "deadline_unreachable"

    def __init__(self, timeout_s: float, needs_s: float, retry_after_s: int | None = None) -> None:
        super().__init__(timeout_s, needs_s, retry_after_s)
        self.timeout_s, self.needs_s, self.retry_after_s = timeout_s, needs_s, retry_after_s

    @property
    def message(self) -> str:
        """The sentence for the user."""
        busy = " as busy as the boards are" if self.retry_after_s is not None else ""
        return (
            f"The answer would not be ready within {self.timeout_s:g} s: it is expected to take "
            f"about {self.needs_s:.1f} s{busy}. It was not begun."
        )


class DeadlineExceeded(RkserveError):
    """The request's timeout passed during generation, which was stopped."""

    http_status = 504
    code = "deadline_exceeded"
    sentence = "The answer was not ready within {timeout_s:g} s, and was stopped."

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.timeout_s = timeout_s


class BoardTimeExceeded(RkserveError):
    """A request has occupied a board beyond the time limit; it was stopped."""

    http_status = 504
    code = "board_time_exceeded"
    sentence = (
        "The request had a board for {limit_s:g} s, pauses on it included, which is the "
        "limit (router.max_board_s), and was stopped."
    )

    def __init__(self, limit_s: float) -> None:
        super().__init__(limit_s)
        self.limit_s = limit_s


class NoBoard(RkserveError):
    """No board is ready to serve the model now."""

    http_status = 503
    kind = "overloaded_error"
    code = "no_board"
    sentence = "No board can serve '{model}' now: {reason}."

    def __init__(self, model: str, reason: str, retry_after_s: int = 5) -> None:
        super().__init__(model, reason, retry_after_s)
        self.model, self.reason, self.retry_after_s = model, reason, retry_after_s


class ModelDrained(NoBoard):
    """An operator has drained the boards that could serve the model; ``reason`` has the command
    that ends it.
    """

    code = "model_drained"


class ModelFetching(RkserveError):
    """The boards of the model still fetch it.

    ``fetched_bytes`` of ``total_bytes`` are on the board that has most of it.
    """

    http_status = 503
    kind = "overloaded_error"
    code = "model_fetching"

    def __init__(
        self, model: str, fetched_bytes: int, total_bytes: int, retry_after_s: int, reason: str = ""
    ) -> None:
        super().__init__(model, fetched_bytes, total_bytes, retry_after_s, reason)
        self.model, self.fetched_bytes, self.total_bytes = model, fetched_bytes, total_bytes
        self.retry_after_s, self.reason = retry_after_s, reason

    @property
    def message(self) -> str:
        """The sentence for the user."""
        done = ""
        if self.total_bytes:
            percent = 100 * self.fetched_bytes // self.total_bytes
            done = (
                f": {self.fetched_bytes / 1e6:.1f} of {self.total_bytes / 1e6:.1f} MB ({percent} %)"
            )
        why = f" ({without_folders(self.reason)})" if self.reason else ""
        return (
            f"The boards of '{self.model}' still fetch it{done}{why}. Try again in "
            f"{self.retry_after_s} s."
        )


class DiskFull(RkserveError):
    """A disk has no room for a model; no part of it was written, or the part that was is kept."""

    http_status = 507
    code = "disk_full"

    def __init__(
        self, model: str, folder: str, free_bytes: int, needed_bytes: int, reserve_bytes: int
    ) -> None:
        super().__init__(model, folder, free_bytes, needed_bytes, reserve_bytes)
        self.model, self.folder, self.free_bytes = model, folder, free_bytes
        self.needed_bytes, self.reserve_bytes = needed_bytes, reserve_bytes

    @property
    def message(self) -> str:
        """The sentence for the operator."""
        return (
            f"The disk of {self.folder} has {self.free_bytes / 1e6:.1f} MB free, and model "
            f"{self.model} needs {self.needed_bytes / 1e6:.1f} MB besides "
            f"{self.reserve_bytes / 1e6:.1f} MB in reserve: make room there with rkserve model rm "
            f"MODEL --models {self.folder}"
        )


class BoardFailed(RkserveError):
    """A board was lost while it answered.

    ``reason`` may hold the library's own message; ``message`` leaves the folders out.
    """

    http_status = 503
    kind = "server_error"
    code = "board_failed"
    retry_after_s: int | None = 1
    sentence = "Board {board_id} failed while it answered: {reason}."

    def __init__(self, board_id: str, reason: str) -> None:
        super().__init__(board_id, reason)
        self.board_id, self.reason = board_id, reason


class BoardOutOfOrder(BoardFailed):
    """The board takes no requests and has rejected the waiting ones; another board may serve."""

    sentence = "Board {board_id} is out of order: {reason}."


class UpstreamFailed(BoardFailed):
    """An upstream could not be reached, did not take this cluster's key, or broke an answer off.

    ``again``: the same request may succeed there.
    """

    code = "upstream_failed"
    sentence = "The upstream {board_id} failed: {reason}."

    def __init__(self, board_id: str, reason: str, again: bool = False) -> None:
        RkserveError.__init__(self, board_id, reason, again)
        self.board_id, self.reason, self.again = board_id, reason, again


class UpstreamRefused(RequestError):
    """An upstream takes the request for invalid; a board of the model, or another one, may not.

    ``reason`` is its own message.
    """

    code = "upstream_refused"
    sentence = "The upstream {upstream} refused the request: {reason}"

    def __init__(self, upstream: str, reason: str, param: str | None = None) -> None:
        RkserveError.__init__(self, upstream, reason, param)
        self.upstream, self.reason, self.param = upstream, reason, param


class UpstreamUnable(RequestError):
    """A control call for an upstream, over whose generations it has no control."""

    code = "upstream_unable"
    sentence = (
        "{upstream} is an upstream, a server with OpenAI's API, which cannot do this: {action}. "
        "Its generations can be aborted."
    )

    def __init__(self, upstream: str, action: str) -> None:
        RkserveError.__init__(self, upstream, action)
        self.upstream, self.action = upstream, action


class BoardSilent(BoardFailed):
    """The board did not answer in time; ``reason`` is the call's fate, if known."""

    sentence = "Board {board_id} did not answer: {reason}."


class BoardGone(BoardFailed):
    """The board's replica has ended: nothing continues there, and its successor starts empty."""


class EngineDied(BoardFailed):
    """The engine process ended: the library crashed, or something killed it."""


class EngineHung(BoardFailed):
    """The library stopped calling back, or a call into it did not return."""


class RunFailed(BoardFailed):
    """The runtime refused or ended this run with an error; the engine lives on."""

    http_status = 502
    code = "run_failed"
    retry_after_s = None


class PoisonRequest(RkserveError):
    """The request crashed boards one after the other; it is not tried on another one.

    Clients do not retry after its status.
    """

    http_status = 422
    kind = "invalid_request_error"
    code = "poison_request"
    sentence = (
        "{boards} boards failed while they worked on this request, at the same place of it, and no "
        "other one is asked. Last: {reason}."
    )

    def __init__(self, boards: int, reason: str) -> None:
        super().__init__(boards, reason)
        self.boards, self.reason = boards, reason


class ConfigError(RkserveError):
    """A setting is missing or wrong. The message names the key and the fix."""

    code = "config_error"


class BoardStartFailed(RkserveError):
    """A board's replica could not start. ``parse`` finds it again in Ray's status message."""

    code = "board_start_failed"

    _PATTERN = re.compile(r"board '([^'\n]+)' cannot start: (.+)")

    def __init__(self, board_id: str, reason: str) -> None:
        super().__init__(board_id, reason)
        self.board_id, self.reason = board_id, reason

    @property
    def message(self) -> str:
        """The sentence for the operator, on one line."""
        return f"board '{self.board_id}' cannot start: {' '.join(self.reason.split())}"

    @classmethod
    def parse(cls, text: str) -> BoardStartFailed | None:
        """Return the last such error that ``text`` quotes, or None."""
        found = cls._PATTERN.findall(text)
        return cls(*found[-1]) if found else None


class FrameCorrupt(RkserveError):
    """The pipe between a board and its engine process does not hold frames."""


class NativeError(RkserveError):
    """An error of the vendor's library; the message holds the library's own."""


class LibraryMissing(NativeError):
    """The library, or one that it needs, cannot be opened."""


class ReleaseRefused(NativeError):
    """The library's release is not supported."""


class LoadFailed(NativeError):
    """``rkllm_init`` failed: model, memory, driver or parameters."""


class CallFailed(NativeError):
    """A call into the library returned an error; ``logged`` are the lines that it logged."""

    def __init__(self, function: str, code: int, logged: str = "") -> None:
        super().__init__(function, code, logged)
        self.function, self.return_code, self.logged = function, code, logged

    @property
    def message(self) -> str:
        """The sentence for the user."""
        returned = f"{self.function} returned {self.return_code}"
        return f"{returned} (the library logged: {self.logged})" if self.logged else returned


class NothingComputed(NativeError):
    """The library reported success for hidden states or logits, and delivered none."""

    sentence = "the library delivered nothing of {what}: {why}"

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why)
        self.what, self.why = what, why


class StepsRefused(NativeError):
    """A run of single steps cannot do with this model, or its tokenizer, what it was asked for."""


class Misuse(NativeError):
    """A call that the handle's state does not allow; it was not passed on to the library."""


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


class SignatureRequired(ArtifactRefused):
    """The file has no signed manifest, and `security.require_signatures` wants one."""

    http_status = 422
    code = "signature_required"


class ManifestInvalid(ArtifactRefused):
    """The manifest of a file is none, or is not in its canonical form."""

    http_status = 422
    code = "manifest_invalid"


class SignatureInvalid(ArtifactRefused):
    """None of the pinned keys has signed the manifest."""

    http_status = 422
    code = "signature_invalid"


class ManifestMismatch(ArtifactRefused):
    """The manifest is for another file, model or kind of board."""

    http_status = 422
    code = "manifest_mismatch"


class ManifestExpired(ArtifactRefused):
    """The time until which a manifest is good has passed."""

    http_status = 422
    code = "manifest_expired"


class SignedVersionOlder(ArtifactRefused):
    """A later version of that name was signed with the same key, and has been seen."""

    http_status = 409
    code = "signed_version_older"


class SignedVersionTaken(ArtifactRefused):
    """The same key has signed another content as that version."""

    http_status = 409
    code = "signed_version_taken"


class AdapterTrialFailed(ArtifactRefused):
    """One board tried the adapter in an engine that served nothing, and it did not pass.

    No other board has loaded it, and nothing was changed anywhere.
    """

    http_status = 422
    code = "adapter_trial_failed"
    sentence = (
        "Adapter {adapter} did not pass its trial on board {board_id} ({verdict}): {reason}. No "
        "board serves it. Send a file that loads, or try this one again with 'force'."
    )

    def __init__(self, adapter: str, board_id: str, verdict: str, reason: str) -> None:
        RkserveError.__init__(self, adapter, board_id, verdict, reason)
        self.adapter, self.board_id = adapter, board_id
        self.verdict, self.reason = verdict, reason


class ArtifactNotFound(ArtifactRefused):
    """There is no such file, or the upload has been removed."""

    http_status = 404
    code = "artifact_not_found"


class PieceCorrupted(ArtifactRefused):
    """A piece of a model has another sha256 than its index states; it was not written."""

    code = "piece_corrupted"
    sentence = "{title} was corrupted on its way: its sha256 is another one. Send it again."

    def __init__(self, title: str) -> None:
        RkserveError.__init__(self, title)
        self.title = title


class OperationConflict(RequestError):
    """A running operation excludes the requested one, or it comes too late."""

    http_status = 409
    code = "operation_conflict"


class JoinRefused(RequestError):
    """A board cannot join this cluster: its versions differ, or the head takes no boards."""

    http_status = 409
    code = "join_refused"


class JoinDenied(RequestError):
    """The operator has denied this board."""

    http_status = 403
    code = "join_denied"


class StaleEpoch(RequestError):
    """The caller expected an older epoch than the current one, or sent an older version."""

    http_status = 409
    code = "stale_epoch"


class StaleWeights(RequestError):
    """A trainer's step is not later than the last one that was applied."""

    http_status = 409
    code = "stale_weights"


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


class IdempotencyFailed(RkserveError):
    """A request with an Idempotency-Key cannot be recorded: the disk of a Router's node is full or
    broken.
    """

    http_status = 503
    code = "idempotency_failed"


class AnswerGivenUp(RkserveError):
    """The answer to a request with an Idempotency-Key was ended before its end: no client waited
    for it, or its Router ends. A repeat is answered anew.
    """

    http_status = 503
    kind = "server_error"
    code = "answer_given_up"
    retry_after_s = 1
    sentence = (
        "The answer to this request with an Idempotency-Key was given up before its end: all its "
        "clients had left, or its Router ends. Send the request again to have it answered anew."
    )


class BoardBehind(BoardFailed):
    """The board has not adopted the desired state yet; another one may have.

    The Router sends the request to another board; nothing has begun.
    """

    code = "board_behind"
    sentence = "Board {board_id} does not take the request yet: {reason}."


class BoardAsleep(BoardFailed):
    """The board's model is unloaded, or about to be; nothing has begun, and another board may be
    awake.

    The Router sends a request that must not wait to another board.
    """

    code = "board_asleep"
    sentence = "Board {board_id} is asleep: {reason}."


class BoardDrained(BoardFailed):
    """The board is drained: it takes no new request, or hands over one that it has.

    The board is healthy. The Router sends the request to another board, where a begun answer
    continues.
    """

    code = "board_drained"
    sentence = "Board {board_id} is drained: {reason}."


class ModelAsleep(RkserveError):
    """The model is unloaded, and the request could not wake it."""

    http_status = 503
    code = "model_asleep"
    sentence = "Model '{model}' is asleep and could not be woken: {reason}."

    def __init__(self, model: str, reason: str, retry_after_s: int = 5) -> None:
        super().__init__(model, reason, retry_after_s)
        self.model, self.reason, self.retry_after_s = model, reason, retry_after_s


class StageFailed(BoardFailed):
    """A file could not be delivered to the board's disk completely, and is not used."""

    code = "stage_failed"
    sentence = "Board {board_id} did not get the file: {reason}."


class RebaseFailed(BoardFailed):
    """The board could not load other base weights, or they failed their trial.

    It has returned to its previous ones, and serves nothing until these are desired or it can load
    the others.
    """

    code = "rebase_failed"
    sentence = "Board {board_id} did not take the weights: {reason}."

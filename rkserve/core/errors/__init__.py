"""The one error tree of rkserve; it knows HTTP statuses and nothing of HTTP, Ray or C.

::

    RkserveError                     500  server_error
    +-- RequestError                 400  invalid_request_error
    |   +-- UnsupportedParameter     400  unsupported_parameter
    |   +-- ModelNotFound            404  model_not_found
    |   |   +-- AdapterNotFound      404  model_not_found
    |   +-- RouteNotFound            404
    |   +-- MethodNotAllowed         405
    |   +-- BodyTooLarge             413  body_too_large
    |   +-- BodyTooSlow              408  body_too_slow
    |   +-- IdempotencyKeyReused     422  idempotency_key_reused
    |   +-- AnswerNotKept            422  answer_not_kept
    |   +-- UnsupportedMediaType     415  unsupported_media_type
    |   +-- HostNotAllowed           421  host_not_allowed
    |   +-- ContextOverflow          400  context_length_exceeded
    |   +-- InputTooLong             400  context_length_exceeded
    |   +-- SamplingFixed            400  sampling_fixed
    |   +-- AdapterBroken            400  adapter_broken
    |   +-- CacheNotFound            404  cache_not_found
    |   +-- CacheUnsupported         400  cache_unsupported
    |   +-- UpstreamRefused          400  upstream_refused
    |   +-- UpstreamUnable           400  upstream_unable
    |   +-- EmbeddingUnsupported     400  embedding_unsupported
    |   +-- GenerationNotFound       404  generation_not_found
    |   +-- ResponseNotFound         404  response_not_found
    |   |   +-- PreviousResponseNotFound  previous_response_not_found
    |   +-- ItemNotFound             404  item_not_found
    |   +-- BoardNotFound            404  board_not_found
    |   |   +-- MemberNotFound       404  board_not_found
    |   +-- StateConflict            409  state_conflict
    |   +-- Forbidden                403  forbidden
    |   |   +-- OriginNotAllowed     403  origin_not_allowed
    |   |   +-- ModelNotAllowed      403  model_not_allowed
    |   |   +-- ControlPortOnly      403  control_port_only
    |   |   +-- HaproxyBypassed      403  haproxy_bypassed
    |   +-- InvalidApiKey            401  invalid_api_key
    |   +-- KeyNotFound              404  key_not_found
    |   +-- KeyExists                409  key_exists
    |   +-- OperationNotFound        404  operation_not_found
    |   +-- OperationConflict        409  operation_conflict
    |   +-- JoinRefused              409  join_refused
    |   +-- JoinDenied               403  join_denied
    |   +-- StaleEpoch               409  stale_epoch
    |   +-- StaleWeights             409  stale_weights
    |   +-- AdapterExists            400  adapter_exists
    |   +-- ArtifactRefused          400  artifact_refused
    |   |   +-- AdapterTrialFailed   422  adapter_trial_failed
    |   |   +-- SignatureRequired    422  signature_required
    |   |   +-- SignatureInvalid     422  signature_invalid
    |   |   +-- ManifestInvalid      422  manifest_invalid
    |   |   +-- ManifestMismatch     422  manifest_mismatch
    |   |   +-- ManifestExpired      422  manifest_expired
    |   |   +-- SignedVersionOlder   409  signed_version_older
    |   |   +-- SignedVersionTaken   409  signed_version_taken
    |   |   +-- ArtifactNotFound     404  artifact_not_found
    |   |   +-- PieceCorrupted       400  piece_corrupted
    +-- HookFailed                   500  hook_failed
    +-- QueueFull                    429  queue_full
    +-- PauseExpired                 504  pause_expired
    +-- TooManyPaused                429  too_many_paused
    +-- QueueTimeout                 503  queue_timeout
    +-- RateLimited                  429  rate_limit_exceeded
    +-- TooManyViewers               429  too_many_viewers
    +-- TooManyWrongKeys             429  too_many_wrong_keys
    +-- KeysUnknown                  503  keys_unknown
    +-- DeadlineUnreachable          503  deadline_unreachable
    +-- DeadlineExceeded             504  deadline_exceeded
    +-- BoardTimeExceeded            504  board_time_exceeded
    +-- NoBoard                      503  no_board
    |   +-- ModelDrained             503  model_drained
    +-- ModelFetching                503  model_fetching
    +-- DiskFull                     507  disk_full
    +-- EnginePaused                 503  engine_paused
    +-- ModelAsleep                  503  model_asleep
    |   +-- EngineAsleep             503  engine_paused
    +-- CallAborted                  503  aborted
    +-- VersionUnavailable           503  version_unavailable
    +-- CoordinatorAway              503  coordinator_unavailable
    +-- OperationTimeout             504  operation_timeout
    +-- LedgerFailed                 503  ledger_failed
    +-- ResponsesFailed              503  responses_failed
    +-- IdempotencyFailed            503  idempotency_failed
    +-- AnswerGivenUp                503  answer_given_up
    +-- BoardFailed                  503  board_failed
    |   +-- BoardOutOfOrder          503  board_failed
    |   +-- UpstreamFailed           503  upstream_failed
    |   +-- BoardSilent              503  board_failed
    |   +-- BoardGone                503  board_failed
    |   +-- BoardBehind              503  board_behind
    |   +-- BoardAsleep              503  board_asleep
    |   +-- BoardDrained             503  board_drained
    |   +-- StageFailed              503  stage_failed
    |   +-- RebaseFailed             503  rebase_failed
    |   +-- EngineDied               503  board_failed
    |   +-- EngineHung               503  board_failed
    |   +-- RunFailed                502  run_failed
    +-- PoisonRequest                422  poison_request
    +-- ConfigError                       (start-up only)
    +-- BoardStartFailed                  (start-up only; `serve status` shows it)
    +-- FrameCorrupt                      (between a board and its engine process)
    +-- NativeError                       (inside the engine process and at load)
        +-- LibraryMissing
        +-- ReleaseRefused
        +-- LoadFailed
        +-- CallFailed
        +-- NothingComputed
        +-- StepsRefused
        +-- Misuse

Errors cross processes by pickle, which keeps ``args`` only: every class hands all its arguments,
positionally, to ``super().__init__``.
"""

from __future__ import annotations

from rkserve.core.errors.access import *  # noqa: F403 - the tree above names every class
from rkserve.core.errors.boards import *  # noqa: F403 - as above
from rkserve.core.errors.requests import *  # noqa: F403 - as above

"""Endpoints that change the cluster as a whole, and endpoints that show its status."""

from __future__ import annotations

from dataclasses import replace

from rkserve.api.admin import pause, sleep
from rkserve.api.json import limits
from rkserve.api.json.schemas import RequestModel
from rkserve.control.calls import OperationKind
from rkserve.control.operations import OperationState
from rkserve.core.desired_state import PauseMode
from rkserve.reference import failures
from rkserve.reference.asked import (
    KEY,
    body_of,
    query_of,
)
from rkserve.reference.endpoints import (
    Access,
    Endpoint,
    EndpointAnswer,
    Example,
    in_path,
    in_query,
    told,
)
from rkserve.reference.openai import SIM
from rkserve.reference.shapes import (
    ANYTHING,
    COUNT,
    FLAG,
    INTEGER,
    NUMBER,
    SECONDS,
    TEXT,
    Schema,
    array,
    const,
    integer,
    listed,
    mapping,
    maybe,
    obj,
    ref,
    text,
    words,
)

_CLUSTER, _OPERATIONS, _TRAINERS = "Cluster", "Operations", "Trainers"
# Trainers' ways of sending tensors, which a board does not have.
REFUSED = (
    *("/init_weights_update_group", "/destroy_weights_update_group"),
    *("/update_weights_from_distributed", "/update_weights_from_tensor"),
    *("/update_weights_from_ipc", "/init_weight_transfer_engine"),
    *("/start_weight_update", "/finish_weight_update"),
)
_VERSION: dict[str, Schema] = {"weight_version": TEXT, "model": TEXT}
_MODES = words(*(one.value for one in PauseMode))
_STATES = words(*(one.value for one in OperationState))
_KINDS = words(*(one.value for one in OperationKind))
_RESULTS: dict[str, Schema] = {
    "total": COUNT,
    "succeeded": COUNT,
    "results": mapping(
        {**obj({"status": TEXT, "latency_ms": SECONDS}), "additionalProperties": True}
    ),
    "failed": array(obj({"board": TEXT, "error": TEXT, "message": TEXT, "latency_ms": SECONDS})),
    "phases": mapping(SECONDS),
}
ENVELOPE: dict[str, Schema] = {
    "operation_id": TEXT,
    "kind": _KINDS,
    "state": _STATES,
    "epoch": INTEGER,
    "applied": FLAG,
    **_RESULTS,
}
WENT_WRONG: dict[str, Schema] = {"error": ANYTHING}
_TOTAL: dict[str, Schema] = {
    **dict.fromkeys(
        (
            *("boards", "ready", "joining", "paused_boards", "asleep"),
            *("positions", "capacity", "running", "queued", "paused"),
        ),
        COUNT,
    ),
    "bytes": maybe(COUNT),
    "hit_ratio": maybe(NUMBER),
    "prefill_tokens_per_s": NUMBER,
    "decode_tokens_per_s": NUMBER,
    "temperature_c": maybe(NUMBER),
}
_WEIGHTS: dict[str, Schema] = {"weight_version": TEXT, "step": maybe(INTEGER)}

SCHEMAS: dict[str, Schema] = {
    "Envelope": obj(ENVELOPE),
    "Operation": obj(
        {
            "id": TEXT,
            "object": const("operation"),
            "kind": _KINDS,
            "state": _STATES,
            "phase": TEXT,
            "params": ANYTHING,
            "who": TEXT,
            "created_s": NUMBER,
            "finished_s": maybe(NUMBER),
            "epoch": INTEGER,
            "idempotency_key": maybe(TEXT),
            **_RESULTS,
            "error": maybe(obj({"status": INTEGER, "code": TEXT, "message": TEXT})),
        }
    ),
    "Operations": listed(ref("Operation")),
    "Audit": listed(ANYTHING),
    "Paused": obj(
        {
            "is_paused": FLAG,
            "all": FLAG,
            "epoch": INTEGER,
            "boards": mapping(
                obj(
                    {
                        "paused": FLAG,
                        "mode": maybe(_MODES),
                        "level": maybe(INTEGER),
                        "reported": maybe(TEXT),
                        "epoch": maybe(INTEGER),
                    }
                )
            ),
            "adapters": mapping(obj({"mode": _MODES})),
        }
    ),
    "Sleeping": obj(
        {
            "is_sleeping": FLAG,
            "all": FLAG,
            "epoch": INTEGER,
            "boards": mapping(
                obj(
                    {
                        "sleeping": FLAG,
                        "level": maybe(INTEGER),
                        "reported": maybe(INTEGER),
                        "state": TEXT,
                        "epoch": maybe(INTEGER),
                    }
                )
            ),
        }
    ),
    "WeightInfo": obj(
        {
            **_WEIGHTS,
            "model": TEXT,
            "epoch": INTEGER,
            "models": mapping(
                obj(
                    {
                        **_WEIGHTS,
                        "base": obj(
                            {"version": TEXT, "digest": TEXT, "bytes": maybe(COUNT), "own": FLAG}
                        ),
                        "rebase": maybe(
                            obj({"version": TEXT, "digest": TEXT, "switched": array(TEXT)})
                        ),
                        "boards": mapping(
                            obj(
                                {
                                    "weight_version": TEXT,
                                    "base": TEXT,
                                    "own": FLAG,
                                    "adapter_digests": mapping(TEXT),
                                    "epoch": maybe(INTEGER),
                                    "state": TEXT,
                                }
                            )
                        ),
                        "adapters": mapping(maybe(TEXT)),
                        "adapter_digests": mapping(TEXT),
                    }
                )
            ),
        }
    ),
    "Cluster": obj(
        {
            "object": const("cluster"),
            "epoch": INTEGER,
            "coordinator": obj({"reachable": FLAG, "heard_s_ago": maybe(NUMBER)}),
            "total": obj(_TOTAL),
            "models": mapping(obj({**_TOTAL, **_WEIGHTS, "base": TEXT})),
            "boards": array(ANYTHING),
            "pauses": array(ANYTHING),
        }
    ),
}


def changing(done: dict[str, Schema], says: str) -> tuple[EndpointAnswer, ...]:
    """The answers of a change: done, and with ``async`` begun."""
    schema = obj({**done, **ENVELOPE})
    return (told(schema, says=says), told(schema, 202, "It goes on: `/v1/operations` tells how."))


def change(
    path: str,
    summary: str,
    done: dict[str, Schema],
    body: type[RequestModel],
    example: Example,
    *,
    tag: str = _CLUSTER,
    answers: tuple[EndpointAnswer, ...] | None = None,
) -> Endpoint:
    """Return a call of the Coordinator, with the same parameters in query and body."""
    return Endpoint(
        "POST",
        path,
        tag,
        summary,
        Access.OPERATOR,
        answers or changing(done, "It is done."),
        failures.CHANGE,
        (KEY, *query_of(body)),
        body_of(body),
        example,
    )


def look(path: str, tag: str, summary: str, schema: str, says: str) -> Endpoint:
    """Return a query of a client about one model, or about all."""
    model = in_query("model", text(1, limits.MAX_MODEL_CHARS), "Only this model; all without it.")
    return Endpoint(
        "GET",
        path,
        tag,
        summary,
        Access.CLIENT,
        (told(ref(schema), says=says),),
        (400, *failures.CLIENT, 404),
        (model,),
    )


_RECORD = (400, *failures.OPERATOR, 503)
_LIMIT = in_query("limit", integer(1, limits.MAX_LISTED), "How many; 100 unless it is said.")
_SUCCESS = {"success": FLAG}
_STATUS = {"status": TEXT}
_MESSAGE = {"message": TEXT, "status": TEXT}
_MODEL = {"id": TEXT, "object": const("model"), "status": TEXT}
_ONE = Example({"model": SIM})

ENDPOINTS = (
    change(
        "/pause",
        "Pause boards, and answer when they have stopped.",
        {**_STATUS, "mode": _MODES},
        pause.PauseBody,
        Example({"mode": "keep"}),
    ),
    change("/resume", "Let paused boards go on.", _STATUS, pause.ResumeBody, Example()),
    change(
        "/pause_generation",
        "Pause, in SGLang's words.",
        {**_MESSAGE, "mode": _MODES},
        pause.PauseGenerationBody,
        Example({"mode": "retract"}),
    ),
    change(
        "/continue_generation", "Resume, in SGLang's words.", _MESSAGE, pause.ResumeBody, Example()
    ),
    change(
        "/abort_requests",
        "End requests.",
        {**_STATUS, "aborted": COUNT},
        pause.AbortBody,
        Example({"request_ids": ["chatcmpl-1"]}),
    ),
    change(
        "/reset_prefix_cache",
        "Drop KV caches.",
        _SUCCESS,
        pause.ResetBody,
        Example(),
    ),
    *(
        replace(
            change(
                "/flush_cache",
                "Drop KV caches, in SGLang's words.",
                _SUCCESS,
                pause.FlushBody,
                Example(),
            ),
            method=method,
        )
        for method in ("GET", "POST")
    ),
    change(
        "/abort_request",
        "End a request, in SGLang's words.",
        {**_STATUS, "aborted": COUNT},
        pause.AbortOneBody,
        Example({"rid": "chatcmpl-1"}),
        tag=_TRAINERS,
    ),
    change(
        "/release_memory_occupation",
        "Unload models, in SGLang's words.",
        {**_STATUS, "level": COUNT, "mode": _MODES},
        sleep.SleepBody,
        Example({"tags": ["weights", "kv_cache"]}),
        tag=_TRAINERS,
    ),
    change(
        "/resume_memory_occupation",
        "Load models again, in SGLang's words.",
        {**_STATUS, "tags": array(TEXT)},
        sleep.WakeBody,
        Example({"tags": ["weights", "kv_cache"]}),
        tag=_TRAINERS,
    ),
    *(
        Endpoint(
            "GET",
            path,
            _TRAINERS,
            summary,
            Access.CLIENT,
            (told(obj(body), says=summary),),
            (400, *failures.CLIENT, 404),
            (in_query("model", TEXT, "The model; the first one without it."),)
            if "weight" in path
            else (in_query("include_dp", FLAG, "vLLM's."),)
            if "size" in path
            else (),
        )
        for path, summary, body in (
            ("/get_weight_version", "Say which weights a model has.", _VERSION),
            ("/weight_version", "Say which weights a model has.", _VERSION),
            ("/get_world_size", "Say how many boards there are.", {"world_size": COUNT}),
            ("/load", "Say how many requests this Router answers.", {"server_load": COUNT}),
        )
    ),
    *(
        Endpoint(
            "POST",
            path,
            _TRAINERS,
            "Refuse weights that are no file, and say what to use instead.",
            Access.OPERATOR,
            (told(ref("Error"), 400, "Weights come as files."),),
            (*failures.OPERATOR, 408, 413, 415),
            example=Example(
                {}, status=400, needs="nothing: it answers 400 and says what to use instead"
            ),
        )
        for path in REFUSED
    ),
    change(
        "/update_weight_version",
        "Name a model's weights anew.",
        {**_SUCCESS, "new_version": TEXT, "model": TEXT},
        pause.LabelBody,
        Example({"model": SIM, "new_version": "step-7"}),
    ),
    change(
        "/sleep",
        "Put boards to sleep, and answer when their models are unloaded.",
        {**_STATUS, "level": COUNT, "mode": _MODES},
        sleep.SleepBody,
        Example(query={"level": "1", "mode": "wait"}),
    ),
    *(
        change(
            path,
            summary,
            {**_STATUS, "tags": array(TEXT)},
            sleep.WakeBody,
            Example(),
        )
        for path, summary in (
            ("/wake_up", "Wake boards, and answer when their models are loaded."),
            ("/wakeup", "Wake boards, in Ray's words."),
        )
    ),
    change(
        "/v1/models/load",
        "Load a model on all of its boards.",
        _MODEL,
        sleep.LoadBody,
        _ONE,
    ),
    change(
        "/v1/models/unload",
        "Unload a model from all of its boards.",
        {**_MODEL, "level": COUNT},
        sleep.UnloadBody,
        _ONE,
    ),
    look("/is_paused", _CLUSTER, "Say whether boards are paused.", "Paused", "Each board."),
    look("/is_sleeping", _CLUSTER, "Say whether boards sleep.", "Sleeping", "Each board."),
    look("/weight_info", _CLUSTER, "Say which weights are served.", "WeightInfo", "By model."),
    Endpoint(
        "GET",
        "/v1/cluster",
        _CLUSTER,
        "Show totals of the cluster, and every board.",
        Access.CLIENT,
        (told(ref("Cluster"), says="The cluster at a glance."),),
        failures.CLIENT,
    ),
    Endpoint(
        "GET",
        "/v1/operations",
        _OPERATIONS,
        "List the latest operations.",
        Access.OPERATOR,
        (told(ref("Operations"), says="The latest first."),),
        _RECORD,
        (_LIMIT,),
    ),
    Endpoint(
        "GET",
        "/v1/operations/{operation_id}",
        _OPERATIONS,
        "Describe one operation.",
        Access.OPERATOR,
        (told(ref("Operation"), says="The operation."),),
        (*_RECORD, 404),
        (in_path("operation_id", "Its id."),),
        example=Example(path={"operation_id": "op-1"}),
    ),
    Endpoint(
        "GET",
        "/v1/audit",
        _OPERATIONS,
        "List who changed what.",
        Access.OPERATOR,
        (told(ref("Audit"), says="The latest lines of the audit log."),),
        _RECORD,
        (_LIMIT,),
        example=Example(query={"limit": "10"}),
    ),
)

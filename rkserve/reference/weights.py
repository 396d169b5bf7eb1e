"""Endpoints about adapters and base weights: uploads and served versions."""

from __future__ import annotations

from rkserve.api.admin import lora, weights
from rkserve.api.admin.pause import ControlBody
from rkserve.core.desired_state import InFlight
from rkserve.reference import failures
from rkserve.reference.asked import (
    KEY,
    body_of,
    query_of,
)
from rkserve.reference.cluster import (
    ENVELOPE,
    change,
    changing,
    look,
)
from rkserve.reference.endpoints import (
    OCTETS,
    OK,
    PLAIN,
    PUSHED_ADAPTER,
    Access,
    Endpoint,
    EndpointAnswer,
    Example,
    RequestBody,
    in_json,
    in_path,
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
    body,
    const,
    mapping,
    maybe,
    obj,
    ref,
    said,
    words,
)

_ADAPTERS, _WEIGHTS = "Adapters", "Weights"
_VERSION = obj(
    {
        "version": TEXT,
        "label": TEXT,
        "role": words("active", "candidate", "previous", "kept"),
        "sha256": TEXT,
        "bytes": COUNT,
        "scale": NUMBER,
        "key": TEXT,
        "boards": mapping(obj({"staged": FLAG, "loaded": FLAG})),
    }
)

SCHEMAS: dict[str, Schema] = {
    "Adapters": obj(
        {
            "object": const("list"),
            "epoch": INTEGER,
            "data": array(
                obj(
                    {
                        "name": TEXT,
                        "model": TEXT,
                        "epoch": INTEGER,
                        **dict.fromkeys(("active", "candidate", "previous"), maybe(TEXT)),
                        "weight": maybe(NUMBER),
                        "switched": array(TEXT),
                        "in_flight": words(*(one.value for one in InFlight)),
                        "versions": array(_VERSION),
                    }
                )
            ),
        }
    ),
    "WeightsTaken": obj(
        {
            "id": TEXT,
            "object": const("weights"),
            "model": TEXT,
            "own": FLAG,
            "parameters": COUNT,
        },
        {"version": TEXT, "sha256": TEXT, "bytes": COUNT},
    ),
}
_PUSHED: dict[str, Schema] = {
    **dict.fromkeys(("name", "version", "model", "label", "sha256"), TEXT),
    "bytes": COUNT,
    "scale": NUMBER,
    "activated": FLAG,
}
_NAMED: dict[str, Schema] = {"name": TEXT, "model": TEXT, "version": maybe(TEXT)}
_NAME = in_path("name", "The adapter.")
_FILE: Schema = {"type": "string", "format": "binary"}
_TONE = {"name": "tone"}
_HEADS_FILE = "that file on the head node, in a folder of `coordinator.allowed_paths`"
_TAKE = (*failures.CHANGE,)
_TRAINERS = "Trainers"


def _pushed() -> tuple[EndpointAnswer, ...]:
    schema = obj({**_PUSHED, **ENVELOPE}, {"staging": ref("Envelope")})
    return (
        told(schema, says="It is on every board, and served unless `activate` says otherwise."),
        told(schema, 202, "It goes on: `/v1/operations` tells how."),
    )


def _worded() -> tuple[EndpointAnswer, ...]:
    """vLLM's text where all went well."""
    headers = {"x-operation-id": "The operation.", "x-epoch": "The epoch of the cluster."}
    return (
        EndpointAnswer(OK, "A sentence, as vLLM says it.", {PLAIN: TEXT}, headers),
        told(obj({"message": TEXT, **ENVELOPE}), 202, "It goes on."),
    )


def _success() -> tuple[EndpointAnswer, ...]:
    """SGLang's answer where all went well."""
    done = {"success": FLAG, "message": TEXT, "error_message": maybe(TEXT)}
    return (told(obj(done), says="It is done."), _worded()[1])


def _decide(method: str, path: str, summary: str, example: Example, **more: Schema) -> Endpoint:
    model = lora.NamedRolloutBody if path.endswith("/rollout") else ControlBody
    version = (in_path("version", "The version."),) if path.endswith("{version}") else ()
    return Endpoint(
        method,
        path,
        _ADAPTERS,
        summary,
        Access.OPERATOR,
        changing({**_NAMED, **more}, "It is done."),
        failures.CHANGE,
        (KEY, _NAME, *version, *query_of(model)),
        body_of(model),
        example,
    )


def _with_file(asked: RequestBody) -> RequestBody:
    return RequestBody({**asked.content, OCTETS: _FILE})


ENDPOINTS = (
    look(
        "/v1/lora_adapters",
        _ADAPTERS,
        "List adapters, their versions, and which boards have them.",
        "Adapters",
        "Every version.",
    ),
    Endpoint(
        "POST",
        "/v1/lora_adapters",
        _ADAPTERS,
        "Take a new version of an adapter: its bytes, or where they are.",
        Access.OPERATOR,
        _pushed(),
        _TAKE,
        (KEY, *query_of(lora.RegisterBody, lora.UploadBody)),
        _with_file(body_of(lora.RegisterBody)),
        Example(
            query={"name": "tone", "version": "v2", "model": SIM},
            headers={"content-type": OCTETS},
            file="adapter.rkllm",
            needs="an adapter file: `rkserve sim adapter adapter.rkllm` makes a simulated one",
        ),
        "With a file as the body everything else stands in the query; else one of `path` and "
        "`url` says where the file is.",
    ),
    change(
        "/v1/load_lora_adapter",
        "Take and serve an adapter, in vLLM's words.",
        {},
        lora.LoadAdapterBody,
        Example(
            {"lora_name": "calm", "lora_path": "/srv/adapters/calm.rkllm", "base_model_name": SIM},
            needs=_HEADS_FILE,
        ),
        tag=_ADAPTERS,
        answers=_worded(),
    ),
    change(
        "/v1/unload_lora_adapter",
        "Serve an adapter no more, in vLLM's words.",
        {},
        lora.UnloadAdapterBody,
        Example({"lora_name": "tone"}, needs=PUSHED_ADAPTER),
        tag=_ADAPTERS,
        answers=_worded(),
    ),
    change(
        "/load_lora_adapter",
        "Take and serve an adapter, as SGLang answers it.",
        {},
        lora.LoadAdapterBody,
        Example(
            {"lora_name": "calm", "lora_path": "/srv/adapters/calm.rkllm", "base_model_name": SIM},
            needs=_HEADS_FILE,
        ),
        tag=_TRAINERS,
        answers=_success(),
    ),
    change(
        "/unload_lora_adapter",
        "Serve an adapter no more, as SGLang answers it.",
        {},
        lora.UnloadAdapterBody,
        Example({"lora_name": "tone"}, needs=PUSHED_ADAPTER),
        tag=_TRAINERS,
        answers=_success(),
    ),
    Endpoint(
        "POST",
        "/update_weights",
        _TRAINERS,
        "Load base weights from the head's disk, as prime-rl and vLLM ask for them.",
        Access.OPERATOR,
        changing(
            {"success": FLAG, "message": TEXT, "num_paused_requests": COUNT, "untried": FLAG},
            "The weights are served.",
        ),
        failures.CHANGE,
        (KEY,),
        in_json(
            body(
                {},
                {
                    "weight_dir": said(TEXT, "prime-rl's: the path; without it the folder's own."),
                    "update_info": said(ANYTHING, "vLLM's; only with `model_path`."),
                    "model": TEXT,
                    "weight_version": TEXT,
                },
            ),
            required=False,
        ),
        Example({"model": SIM, "weight_dir": "/srv/models/other.rkllm"}, needs=_HEADS_FILE),
    ),
    _decide(
        "POST",
        "/v1/lora_adapters/{name}/rollout",
        "Have a staged version served.",
        Example({"version": "v1", "strategy": "rolling"}, _TONE, needs=PUSHED_ADAPTER),
    ),
    _decide(
        "POST",
        "/v1/lora_adapters/{name}/rollback",
        "Have the previous version served again.",
        Example(path=_TONE, needs="an adapter of which two versions were served in turn"),
    ),
    _decide(
        "POST",
        "/v1/lora_adapters/{name}/promote",
        "Have the version on trial served to everybody.",
        Example(path=_TONE, needs="a canary that goes on: `rkserve lora push --strategy canary`"),
    ),
    _decide(
        "DELETE",
        "/v1/lora_adapters/{name}",
        "Serve an adapter no more.",
        Example(path=_TONE),
        deleted=const(True),
    ),
    _decide(
        "DELETE",
        "/v1/lora_adapters/{name}/{version}",
        "Serve a version no more.",
        Example(path={**_TONE, "version": "v1"}),
        deleted=const(True),
    ),
    change(
        "/receive_weight_update",
        "Serve a trainer's weights everywhere.",
        {
            "status": words("ok", "accepted"),
            "untried": FLAG,
            "timing": obj(
                dict.fromkeys(
                    (
                        *("lock_ms", "broadcast_ms", "verify_ms"),
                        *("pause_ms", "resume_ms", "total_ms"),
                    ),
                    SECONDS,
                )
            ),
        },
        weights.UpdateBody,
        Example(
            {"version": 7, "artifact": f"{SIM}@step-7"},
            needs="weights that were uploaded as `step-7`: `POST /v1/weights`",
        ),
        tag=_WEIGHTS,
    ),
    change(
        "/update_weights_from_disk",
        "Load other base weights, board by board.",
        {"success": FLAG, "message": TEXT, "num_paused_requests": COUNT, "untried": FLAG},
        weights.DiskBody,
        Example({"model": SIM, "model_path": "/srv/models/other.rkllm"}, needs=_HEADS_FILE),
        tag=_WEIGHTS,
    ),
    Endpoint(
        "POST",
        "/v1/weights",
        _WEIGHTS,
        "Take base weights to the head: their bytes, or where they are.",
        Access.OPERATOR,
        (told(ref("WeightsTaken"), says="They are on the head."),),
        _TAKE,
        (KEY, *query_of(weights.NewWeightsBody)),
        _with_file(body_of(weights.NewWeightsBody)),
        Example({"model": SIM, "path": "/srv/models/other.rkllm"}, needs=_HEADS_FILE),
    ),
)

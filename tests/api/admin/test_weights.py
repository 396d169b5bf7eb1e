"""What trainers and SGLang's callers may say of weights, and what they are answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.api.admin.query import ControlRequest
from rkserve.api.admin.weights import (
    DiskBody,
    UpdateBody,
    check_fits,
    disk_body,
    read_weights,
    timing,
    update_body,
    weights_entry,
)
from rkserve.control.calls import OperationKind
from rkserve.control.operations import (
    BoardOutcome,
    ControlError,
    OperationState,
    ResultStatus,
)
from rkserve.core.board_report import HASHING, UNREADABLE, BoardReport, BoardState
from rkserve.core.desired_state import (
    AdapterVersion,
    BaseVersion,
    BaseWeightsChange,
    Desired,
    InFlight,
    Weights,
)
from rkserve.core.errors import ArtifactRefused, RequestError, UnsupportedParameter
from rkserve.core.messages import AdapterRef
from rkserve.models.files import Parameter, difference, read_parameters
from tests.support.values.control_values import recorded

VERSION = AdapterVersion(AdapterRef("tone", "v7", "a" * 64), 1234)

BASE = BaseVersion("m", "step-7", "b" * 64, 5678)

HEAD = {"name": "lm_head", "shape": [4, 8], "dtype": "torch.bfloat16"}

NORM = {"name": "norm", "shape": [8], "dtype": "float32"}

WHOLE = {"name": "tone@v7", "shape": [1234], "dtype": "uint8"}

KNOWN = read_parameters([HEAD, NORM], "parameters")


def asked(body: Any, **query: str) -> ControlRequest:
    return ControlRequest(tuple(query.items()), json.dumps(body).encode())


def update(**body: Any) -> Any:
    return asked({"version": 7, "artifact": "tone@v7", **body}).read(UpdateBody)


def test_pipelinerl_s_own_form_is_read() -> None:
    said = asked(
        {
            "kind": "weight_update_request",
            "version": 7,
            "parameters_info": [WHOLE],
            "timestamp": 1732176000.25,
        }
    ).read(UpdateBody)
    assert (said.version, said.weights) == (7, "tone@v7")
    assert said.in_flight is InFlight.SWITCH  # the run goes on with the new weights, as there
    assert said.parameters_info == (Parameter("tone@v7", (1234,), "uint8"),)


def test_what_more_an_update_may_say_is_read() -> None:
    said = update(
        model="m", in_flight="pin", timeout_s=9, parameters_info=[HEAD], **{"async": True}
    )
    assert (said.terms.models, said.terms.timeout_s, said.terms.background) == (("m",), 9.0, True)
    assert said.in_flight is InFlight.PIN
    assert said.parameters_info == (Parameter("lm_head", (4, 8), "bfloat16"),)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({"artifact": "tone@v7"}, "version", id="no version"),
        pytest.param({"version": -1, "artifact": "tone@v7"}, "version", id="a negative one"),
        pytest.param({"version": 1.5, "artifact": "tone@v7"}, "version", id="half of one"),
        pytest.param({"version": True, "artifact": "tone@v7"}, "version", id="true"),
        pytest.param({"version": 7}, "artifact", id="no artifact"),
        pytest.param({"version": 7, "parameters_info": [HEAD]}, "artifact", id="a tensor's name"),
        pytest.param(
            {"version": 7, "parameters_info": [WHOLE, HEAD]}, "artifact", id="two entries"
        ),
        pytest.param(
            {"version": 7, "artifact": "tone@v7", "kind": "other"}, "kind", id="another kind"
        ),
        pytest.param(
            {"version": 7, "artifact": "tone@v7", "timestamp": "now"}, "timestamp", id="a time"
        ),
        pytest.param(
            {"version": 7, "artifact": "tone@v7", "in_flight": "drop"}, "in_flight", id="drop"
        ),
        pytest.param({"version": 7, "artefact": "tone@v7"}, "artefact", id="a mistyped name"),
    ],
)
def test_what_an_update_may_not_say_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked(body).read(UpdateBody)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "given",
    [
        pytest.param("lm_head", id="a string"),
        pytest.param([["lm_head"]], id="no objects"),
        pytest.param([{"name": "x", "shape": [1]}], id="no dtype"),
        pytest.param([{**HEAD, "more": 1}], id="one key more"),
        pytest.param([{**HEAD, "name": ""}], id="no name"),
        pytest.param([{**HEAD, "shape": [-1]}], id="a negative size"),
        pytest.param([{**HEAD, "shape": [True]}], id="true as a size"),
        pytest.param([{**HEAD, "shape": "4x8"}], id="a shape in words"),
        pytest.param([{**HEAD, "dtype": 16}], id="a dtype in bits"),
        pytest.param([HEAD, HEAD], id="twice the same"),
    ],
)
def test_a_list_of_tensors_is_read_strictly(given: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read_parameters(given, "parameters_info")
    assert caught.value.param == "parameters_info"


@pytest.mark.parametrize(
    ("given", "known", "why"),
    [
        pytest.param([HEAD, NORM], KNOWN, None, id="the same"),
        pytest.param([NORM, HEAD], KNOWN, None, id="in another order"),
        pytest.param([{**HEAD, "dtype": "bfloat16"}, NORM], KNOWN, None, id="a plain dtype"),
        pytest.param([WHOLE], KNOWN, None, id="the file as a whole"),
        pytest.param([WHOLE], (), None, id="the file, and nothing else is known"),
        pytest.param([], (), None, id="nothing is said and nothing known"),
        pytest.param([{**WHOLE, "shape": [1]}], KNOWN, "shape", id="another size"),
        pytest.param([{**WHOLE, "dtype": "int8"}], KNOWN, "dtype", id="another dtype"),
        pytest.param([HEAD], KNOWN, "'norm' of the manifest is missing", id="one less"),
        pytest.param([], KNOWN, "is missing", id="none"),
        pytest.param([HEAD, NORM], (), "without its list", id="nothing to compare with"),
        pytest.param([HEAD, {**NORM, "name": "n"}], KNOWN, "'n' is not in", id="another name"),
        pytest.param([{**HEAD, "shape": [8, 4]}, NORM], KNOWN, "[8, 4]", id="another shape"),
        pytest.param([HEAD, {**NORM, "dtype": "int8"}], KNOWN, "int8", id="another type"),
    ],
)
def test_an_update_fits_what_was_sent_or_is_refused(
    given: list[Any], known: tuple[Parameter, ...], why: str | None
) -> None:
    said = update(parameters_info=given)
    if why is None:
        check_fits(said, VERSION, known)
        return
    with pytest.raises(ArtifactRefused) as caught:
        check_fits(said, VERSION, known)
    assert why in caught.value.message
    assert caught.value.param == "parameters_info"


def test_a_difference_is_found_both_ways() -> None:
    assert difference(KNOWN, KNOWN) is None
    assert difference(KNOWN, KNOWN[:1]) is not None
    assert difference(KNOWN[:1], KNOWN) is not None


def test_sglang_s_own_form_is_read() -> None:
    said = asked({"model_path": "/srv/models/new"}).read(DiskBody)
    assert (said.model_path, said.weight_version) == ("/srv/models/new", None)
    assert (said.handling, said.max_unavailable) == (InFlight.PIN, 1)
    said = asked(
        {
            "model_path": "/srv/new.rkllm",
            "abort_all_requests": True,
            "weight_version": "step-7",
            "flush_cache": True,
            "load_format": "auto",
            "max_unavailable": 2,
        }
    ).read(DiskBody)
    assert (said.weight_version, said.handling, said.max_unavailable) == (
        "step-7",
        InFlight.ABORT,
        2,
    )


@pytest.mark.parametrize(
    ("body", "param", "error"),
    [
        pytest.param({}, "model_path", RequestError, id="no path"),
        pytest.param({"model_path": ""}, "model_path", RequestError, id="an empty one"),
        pytest.param({"model_path": "/x\0y"}, "model_path", RequestError, id="a zero in it"),
        pytest.param(
            {"model_path": "/x", "flush_cache": False},
            "flush_cache",
            UnsupportedParameter,
            id="the KV cache of other weights",
        ),
        pytest.param(
            {"model_path": "/x", "load_format": "safetensors"},
            "load_format",
            UnsupportedParameter,
            id="another format",
        ),
        pytest.param(
            {"model_path": "/x", "keep_pause": True},
            "keep_pause",
            UnsupportedParameter,
            id="keep_pause",
        ),
        pytest.param(
            {"model_path": "/x", "abort_all_requests": True, "in_flight": "pin"},
            "in_flight",
            RequestError,
            id="aborted and pinned",
        ),
        pytest.param(
            {"model_path": "/x", "weight_version": "a b"},
            "weight_version",
            RequestError,
            id="label",
        ),
        pytest.param(
            {"model_path": "/x", "max_unavailable": 0}, "max_unavailable", RequestError, id="none"
        ),
    ],
)
def test_what_a_call_may_not_say_is_named(
    body: dict[str, Any], param: str, error: type[RequestError]
) -> None:
    with pytest.raises(error) as caught:
        asked(body).read(DiskBody)
    assert caught.value.param == param


def test_a_peer_s_defaults_are_taken_and_what_they_would_ask_for_is_refused() -> None:
    mine = {"is_async": False, "torch_empty_cache": False, "token_step": 0}
    assert asked({"model_path": "/x", **mine}).read(DiskBody).model_path == "/x"
    with pytest.raises(UnsupportedParameter) as caught:
        asked({"model_path": "/x", "is_async": True}).read(DiskBody)
    assert caught.value.param == "is_async"


@pytest.mark.parametrize(
    "text", ["[" * 5000, '[{"name":"\\ud800","shape":[1],"dtype":"x"}]', "[NaN]"], ids=str.__len__
)
def test_a_hostile_list_of_tensors_is_a_bad_request(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_weights(asked({"path": "/x", "parameters": text}), from_body=False)
    assert caught.value.param == "parameters"


def test_a_time_beyond_all_numbers_is_a_bad_request() -> None:
    body = b'{"version": 7, "artifact": "sim-chat@step-7", "timestamp": 1' + b"0" * 400 + b"}"
    with pytest.raises(RequestError) as refused:
        ControlRequest(body=body).read(UpdateBody)
    assert refused.value.param == "timestamp"


def test_a_step_is_a_number_that_every_reader_keeps() -> None:
    body = {"version": 10**30, "artifact": "tone@v1", "parameters_info": []}
    with pytest.raises(RequestError) as caught:
        asked(body).read(UpdateBody)
    assert caught.value.param == "version"


def test_base_weights_are_sent_by_path_url_or_as_a_body() -> None:
    said = read_weights(
        asked({"path": "/srv/new.rkllm", "version": "step-7", "parameters": [HEAD]}),
        from_body=False,
    )
    assert (said.path, said.version, len(said.parameters)) == ("/srv/new.rkllm", "step-7", 1)
    assert read_weights(asked({"url": "https://x/y"}), from_body=False).url == "https://x/y"
    sent = ControlRequest((("size", "9"), ("parameters", json.dumps([HEAD]))), b"the file itself")
    said = read_weights(sent, from_body=True)
    assert (said.size, said.parameters[0].name) == (9, "lm_head")


@pytest.mark.parametrize(
    ("body", "from_body"),
    [
        pytest.param({}, False, id="nothing"),
        pytest.param({"path": "/x", "url": "https://x"}, False, id="both"),
        pytest.param({"path": "/x", "version": "a/b"}, False, id="a name that leads elsewhere"),
        pytest.param({"path": "/x", "sha256": "12"}, False, id="no sha256"),
    ],
)
def test_what_may_not_be_said_of_them_is_refused(body: dict[str, Any], from_body: bool) -> None:
    with pytest.raises(RequestError):
        read_weights(asked(body), from_body=from_body)


DONE = recorded(
    "op-1",
    OperationKind.WEIGHT_UPDATE,
    OperationState.SUCCEEDED,
    created_s=100.0,
    finished_s=100.25,
    results={"a": BoardOutcome(ResultStatus.OK)},
    phases=(
        ("locking", 1.0),
        ("staging", 20.0),
        ("loading", 30.0),
        ("stopping", 4.0),
        ("releasing", 5.5),
    ),
)


@pytest.mark.promise("Weights", "The answer has the time of each phase")
def test_a_trainer_hears_how_long_each_phase_took() -> None:
    body = update_body(DONE)
    assert body == {
        "status": "ok",
        "untried": False,
        "timing": {
            "lock_ms": 1.0,
            "broadcast_ms": 20.0,
            "verify_ms": 30.0,
            "pause_ms": 4.0,
            "resume_ms": 5.5,
            "total_ms": 250.0,
        },
    }


@pytest.mark.parametrize(
    ("loaded", "untried"),
    [
        pytest.param({"a": "asleep", "b": "asleep"}, True, id="all boards sleep"),
        pytest.param({"a": "asleep", "b": None}, False, id="one is awake"),
        pytest.param({}, False, id="no board"),
    ],
)
def test_an_update_tells_where_no_board_has_tried_it(
    loaded: dict[str, str | None], untried: bool
) -> None:
    results = {
        board: BoardOutcome(ResultStatus.OK, details={} if said is None else {"loaded": said})
        for board, said in loaded.items()
    }
    one = recorded("op-2", OperationKind.REBASE, OperationState.SUCCEEDED, results=results)
    assert update_body(one)["untried"] is untried
    body = disk_body(one, 200, 0)
    assert (body["success"], body["untried"]) == (True, untried)
    assert ("No board has loaded them yet" in body["message"]) is untried


def test_base_weights_are_verified_while_boards_load_them() -> None:
    told = timing((("checking", 2.0), ("staging", 3.0), ("switching", 9.0)), 5.0, None)
    assert (told["broadcast_ms"], told["verify_ms"], told["total_ms"]) == (5.0, 9.0, 14.0)


@pytest.mark.parametrize(
    ("state", "status", "error", "success", "words"),
    [
        pytest.param(OperationState.SUCCEEDED, 200, None, True, "Succeeded", id="all"),
        pytest.param(OperationState.PARTIAL, 207, None, False, "are still to load", id="some"),
        pytest.param(OperationState.RUNNING, 202, None, False, "op-2", id="in background"),
        pytest.param(
            OperationState.UNDONE,
            503,
            ControlError(503, "rebase_failed", "Board a did not."),
            False,
            "Board a did not.",
            id="undone",
        ),
    ],
)
def test_sglang_hears_whether_it_succeeded(
    state: OperationState, status: int, error: ControlError | None, success: bool, words: str
) -> None:
    one = recorded("op-2", OperationKind.REBASE, state, error=error)
    body = disk_body(one, status, 3)
    assert (body["success"], body["num_paused_requests"]) == (success, 3)
    assert words in body["message"]


OWN = "d" * 64

REST = {"adapter_digests": {}, "epoch": 3, "state": "ready"}


def test_what_each_board_has_loaded_is_told_by_its_label() -> None:
    weights = Weights("m", "step-6", 6, None, BaseWeightsChange(BASE, "step-7", ("b",)))
    boards = [
        BoardReport(name, model, BoardState.READY, base=base, own_digest=OWN, own_bytes=9, epoch=3)
        for name, model, base in (
            ("a", "m", ""),
            ("b", "m", BASE.digest),
            ("c", "m", "c" * 64),
            ("d", "other", ""),
        )
    ]
    told = weights_entry(Desired(weights=(weights,)), "m", boards)
    assert told == {
        "weight_version": "step-6",
        "step": 6,
        "base": {"version": "default", "digest": OWN, "bytes": 9, "own": True},
        "rebase": {"version": "step-7", "digest": BASE.digest, "switched": ["b"]},
        "boards": {
            "a": {"weight_version": "step-6", "base": OWN, "own": True, **REST},
            "b": {"weight_version": "step-7", "base": BASE.digest, "own": False, **REST},
            "c": {"weight_version": "c" * 12, "base": "c" * 64, "own": False, **REST},
        },
    }
    settled = Weights("m", "step-7", 7, BASE)
    told = weights_entry(Desired(weights=(settled,)), "m", boards[:1])
    assert told["base"] == {
        "version": "step-7",
        "digest": BASE.digest,
        "bytes": 5678,
        "own": False,
    }
    assert told["boards"] == {"a": {"weight_version": "default", "base": OWN, "own": True, **REST}}


@pytest.mark.parametrize(
    ("told", "digest"),
    [
        pytest.param((), "unknown", id="no board"),
        pytest.param(("",), "unknown", id="a board without the file"),
        pytest.param((HASHING,), HASHING, id="not computed yet"),
        pytest.param((HASHING, OWN), OWN, id="computed by one board"),
        pytest.param((OWN, OWN), OWN, id="the same on all boards"),
        pytest.param((OWN, "e" * 64), "mixed", id="different files"),
        pytest.param((UNREADABLE, OWN), OWN, id="unreadable on one board"),
    ],
)
def test_the_model_folder_s_file_has_the_digest_that_its_boards_report(
    told: tuple[str, ...], digest: str
) -> None:
    boards = [
        BoardReport(str(n), "m", BoardState.READY, own_digest=one) for n, one in enumerate(told)
    ]
    entry = weights_entry(Desired(), "m", boards)
    assert entry["base"]["digest"] == digest
    assert [board["base"] for board in entry["boards"].values()] == [
        one or "unknown" for one in told
    ]

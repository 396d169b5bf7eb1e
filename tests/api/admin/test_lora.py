"""Bodies of the calls about adapters, and how their versions are listed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.api.admin.lora import (
    LoadAdapterBody,
    NamedRolloutBody,
    RegisterBody,
    UploadBody,
    check_name,
    lines_list,
)
from rkserve.api.admin.query import ControlRequest
from rkserve.control.calls import AcceptedManifest
from rkserve.core.board_report import AdapterTrial, BoardReport, BoardState, TrialVerdict
from rkserve.core.desired_state import AdapterVersion, AdapterVersions, Desired, InFlight
from rkserve.core.errors import RequestError, UnsupportedParameter
from rkserve.core.messages import AdapterRef
from rkserve.models.files import Parameter

TENSOR = {"name": "q", "shape": [4, 8], "dtype": "float16"}


def asked(body: Any) -> ControlRequest:
    return ControlRequest(body=json.dumps(body).encode())


def test_an_adapter_is_registered_by_path_or_url() -> None:
    body = {"name": "tone", "path": "/srv/a.rkllm", "parameters": [TENSOR]}
    new = asked(body).read(RegisterBody)
    assert (new.name, new.version, new.scale, new.activate) == ("tone", None, 1.0, True)
    assert new.source == ("path", "/srv/a.rkllm")
    claim = new.claim("m", 7)
    assert (claim.name, claim.model, claim.size_bytes) == ("tone", "m", 7)
    assert claim.parameters == (Parameter("q", (4, 8), "float16"),)
    rollout = new.rollout("m", "tone", "v1")
    assert (rollout.strategy.value, rollout.in_flight, rollout.auto) == (
        "atomic",
        InFlight.PIN,
        True,
    )
    other = asked({"name": "tone", "url": "https://x/a"}).read(RegisterBody)
    assert other.source == ("url", "https://x/a")


def test_an_upload_has_all_but_its_file_in_the_query() -> None:
    query = (("name", "tone"), ("version", "v2"), ("size", "7"), ("activate", "false"))
    new = ControlRequest(query).read(UploadBody)
    assert (new.version, new.size, new.activate) == ("v2", 7, False)


def test_vllm_s_form_names_the_base_model() -> None:
    body = {"lora_name": "tone", "lora_path": "/srv/a.rkllm", "base_model_name": "m", "scale": 0.5}
    new = asked(body).read(LoadAdapterBody).push
    assert (new.name, new.scale, new.terms.models) == ("tone", 0.5, ("m",))
    assert new.source == ("path", "/srv/a.rkllm")
    with pytest.raises(RequestError, match="'model' is another") as caught:
        _ = asked({**body, "model": "other"}).read(LoadAdapterBody).terms
    assert caught.value.param == "base_model_name"
    with pytest.raises(UnsupportedParameter, match="is_3d_lora_weight"):
        asked({**body, "is_3d_lora_weight": True}).read(LoadAdapterBody)


def test_a_canary_has_a_share_and_a_time() -> None:
    body = {"version": "v2", "strategy": "canary", "canary_weight": 0.25, "observe_s": 60}
    rollout = asked(body).read(NamedRolloutBody).rollout("m", "tone", "v2")
    assert (rollout.strategy.value, rollout.weight, rollout.observe_s) == ("canary", 0.25, 60.0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"path": "/x"}, "name"),
        ({"name": "tone"}, "path"),
        ({"name": "tone", "path": "/x", "url": "https://x"}, "path"),
        ({"name": "../tone", "path": "/x"}, "name"),
        ({"name": "tone", "path": "/x\0"}, "path"),
        ({"name": "tone", "path": "/x" * 4096}, "path"),
        ({"name": "tone", "path": "/x", "sha256": "A" * 64}, "sha256"),
        ({"name": "tone", "path": "/x", "sha256": "a" * 64 + "\n"}, "sha256"),
        ({"name": "tone", "path": "/x", "scale": 0}, "scale"),
        ({"name": "tone", "path": "/x", "parameters": "no JSON"}, "parameters"),
        ({"name": "tone", "path": "/x", "weight": 0.5}, "weight"),
        ({"name": "tone", "path": "/x", "observe_s": 1}, "observe_s"),
        (
            {"name": "tone", "path": "/x", "weight": 0.5, "canary_weight": 0.5},
            "canary_weight",
        ),
    ],
)
def test_what_no_adapter_can_be_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked(body).read(RegisterBody)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a b", "x" * 65])
def test_a_name_leads_nowhere_else(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_name(name, "version")
    assert caught.value.param == "version"


def test_versions_are_listed_with_their_roles_and_boards() -> None:
    old, new = (
        AdapterVersion(AdapterRef("tone", name, letter * 64), size)
        for name, letter, size in (("v1", "a", 7), ("v2", "b", 9))
    )
    line = AdapterVersions("m", "tone", old, candidate=new, weight=0.5)
    board = BoardReport("b1", "m", BoardState.READY, staged=(new.ref.key,), adapters=(old.ref.key,))
    elsewhere = BoardReport("b2", "other", BoardState.READY)
    trials = (
        AdapterTrial("m", old.digest, TrialVerdict.PASSED, "tone@v1", "b1", "", 5.0),
        AdapterTrial("m", "c" * 64, TrialVerdict.CRASHED, "tone@v3", "b2", "SIGSEGV", 6.0),
        AdapterTrial("other", "d" * 64, TrialVerdict.REFUSED, "x@1", "b3", "no", 7.0),
    )
    accepted = AcceptedManifest("m", "tone", 1, "adapter", "SHA256:a", "release")
    elses = AcceptedManifest("other", "tone", 2, "adapter", "SHA256:a", "release")
    manifests = {old.digest: (elses, accepted), new.digest: (elses,)}
    desired = Desired(7, lines=(line,), trials=trials)
    told = lines_list(desired, [board, elsewhere], ["m"], manifests)
    assert told["epoch"] == 7
    (entry,) = told["data"]
    assert (entry["active"], entry["candidate"], entry["previous"]) == ("v1", "v2", None)
    rows = {row["version"]: row for row in entry["versions"]}
    assert {name: row["role"] for name, row in rows.items()} == {"v1": "active", "v2": "candidate"}
    assert {name: row["trial"] for name, row in rows.items()} == {"v1": "passed", "v2": None}
    assert [(one["label"], one["verdict"]) for one in told["trials"]] == [
        ("tone@v3", "crashed_on_load"),
        ("tone@v1", "passed"),
    ], "the latest first, and none of another model"
    assert told["trials"][0] == {
        "model": "m",
        "sha256": "c" * 64,
        "label": "tone@v3",
        "verdict": "crashed_on_load",
        "board": "b2",
        "reason": "SIGSEGV",
        "at_s": 6.0,
        "scale": 1.0,
        "base_sha256": "",
        "release": "",
    }
    signed = {"version": 1, "key": "release", "key_id": "SHA256:a"}
    assert {name: row["manifest"] for name, row in rows.items()} == {"v1": signed, "v2": None}
    assert rows["v1"]["boards"] == {"b1": {"staged": False, "loaded": True}}
    assert rows["v2"]["boards"] == {"b1": {"staged": True, "loaded": False}}
    assert not lines_list(Desired(lines=(line,)), [], ["other"], {})["data"]

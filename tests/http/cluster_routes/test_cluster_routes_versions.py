"""Versions of the weights in answers and requests: stamps, policies, sessions, listed models."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.core.desired_state import AdapterVersions, Desired
from rkserve.core.messages import Delta, VersionSpan
from rkserve.models.folder import open_model_folder
from rkserve.router.served_models import ServedModel
from tests.support.boards.fake_boards import (
    FakeBoards,
    Step,
    accepted,
    eventually,
    finished,
    report,
)
from tests.support.boards.own_time import run_loop
from tests.support.cluster.fake_head import FakeHead, line, version
from tests.support.http.router_house import CHAT, FOLDER, House, chat, events, house, send

# -- versions in answers --------------------------------------------------------------------------


def stamped(*spans: tuple[str, int, int]) -> FakeBoards:
    """A board that accepts with the first version, and generates with them in turn."""
    end = replace(finished(4), versions=tuple(VersionSpan(*span) for span in spans))
    first = replace(accepted("a"), version=spans[0][0], epoch=4)
    script: list[Step] = [first, Delta("a", (1,)), Delta("b", (2,)), end]
    return FakeBoards([report("a")], {"replica of a": [script]})


@pytest.mark.promise(
    "Versions in answers", "Every answer has the versions of its weights, range by range"
)
def test_an_answer_says_which_weights_its_last_token_comes_from() -> None:
    tone = line(previous=version("tone", "v0"))
    of = House(
        stamped(("tone@v0", 0, 2), ("tone@v1", 2, 4)), head=FakeHead(Desired(4, lines=(tone,)))
    )
    asked = {**chat(), "model": "tone", "return_weight_versions": True}
    response = send(of, "POST", CHAT, json=asked)
    assert response.headers["x-weight-version"] == "tone@v1"
    assert response.headers["x-rkserve-epoch"] == "4"
    told = response.json()
    assert told["weight_version"] == "tone@v1"
    assert told["choices"][0]["weight_versions"] == [
        {"version": "tone@v0", "start": 0, "end": 2},
        {"version": "tone@v1", "start": 2, "end": 4},
    ]
    plain = send(of, "POST", CHAT, json={**chat(), "model": "tone"}).json()
    assert "weight_versions" not in plain["choices"][0]
    assert plain["system_fingerprint"] == told["system_fingerprint"]


@pytest.mark.promise(
    "Versions in answers", "Every answer has the versions of its weights, range by range"
)
def test_a_stream_is_stamped_at_its_end_with_what_it_was_generated_with() -> None:
    tone = line(previous=version("tone", "v0"))
    of = House(
        stamped(("tone@v0", 0, 2), ("tone@v1", 2, 4)), head=FakeHead(Desired(4, lines=(tone,)))
    )
    asked = {**chat(stream=True), "model": "tone", "return_weight_versions": True}
    response = send(of, "POST", CHAT, json=asked)
    assert response.headers["x-weight-version"] == "tone@v0"
    chunks = [one for one in events(response.text) if isinstance(one, dict)]
    last = chunks[-1]
    assert last["weight_version"] == "tone@v1"
    assert [span["version"] for span in last["choices"][0]["weight_versions"]] == [
        "tone@v0",
        "tone@v1",
    ]
    assert last["system_fingerprint"] != chunks[0]["system_fingerprint"]


def test_a_version_that_came_during_an_answer_is_told_apart_by_its_content() -> None:
    new = version("tone", "v2")

    async def main() -> tuple[Any, Any]:
        gate = asyncio.Event()
        end = replace(
            finished(2), versions=(VersionSpan("tone@v1", 0, 1), VersionSpan("tone@v2", 1, 2))
        )
        first = replace(accepted("a"), version="tone@v1")
        running: list[Step] = [first, Delta("a", (1,)), gate, Delta("b", (2,)), end]
        fresh = replace(finished(1), versions=(VersionSpan("tone@v2", 0, 1),))
        later: list[Step] = [replace(first, version="tone@v2"), Delta("b", (2,)), fresh]
        boards = FakeBoards([report("a")], {"replica of a": [running, later]})
        of = House(boards, head=FakeHead(Desired(4, lines=(line(),))))
        asked = {**chat(), "model": "tone"}
        answer = asyncio.create_task(of("POST", CHAT, json=asked))
        await eventually(lambda: of.boards.opened)
        # It is rolled out, and what came before is forgotten.
        of.head.desired = Desired(5, lines=(replace(line(), active=new, epoch=5),))
        await of.cluster.refresh()
        gate.set()
        return (await answer).json(), (await of("POST", CHAT, json=asked)).json()

    switched, plain = run_loop(main())
    assert switched["weight_version"] == plain["weight_version"] == "tone@v2"
    assert switched["system_fingerprint"] == plain["system_fingerprint"]


# -- which version is asked of the board ----------------------------------------------------------

BOTH = line(candidate=version("tone", "v2"), weight=0.5, previous=version("tone", "v0"))


@pytest.mark.parametrize(
    ("model", "policy", "bound", "called"),
    [
        pytest.param("tone", None, "tone", None, id="the board binds"),
        pytest.param("sim-chat:tone", "any", "tone", None, id="with its base model"),
        pytest.param("tone@v0", None, None, "v0", id="a version by name"),
        pytest.param("tone", "latest-only", None, "v2", id="the latest is on trial"),
        pytest.param("tone", "min-version:v1", "tone", None, id="both will do"),
        pytest.param("tone", "min-version:v2", None, "v2", id="only the candidate will do"),
    ],
)
def test_what_a_request_for_a_line_asks_of_its_board(
    model: str, policy: str | None, bound: str | None, called: str | None
) -> None:
    of = house(desired=Desired(9, lines=(BOTH,)))
    headers = {"x-session-id": "me"} | ({} if policy is None else {"x-version-policy": policy})
    response = send(of, "POST", CHAT, json={**chat(), "model": model}, headers=headers)
    assert response.status_code == 200, response.text
    ((_, request),) = of.boards.opened
    assert request.line == bound
    assert (None if request.adapter is None else request.adapter.version) == called
    assert (request.session, request.min_epoch) == ("me", BOTH.epoch)
    assert request.keep_version is ("@" in model)


@pytest.mark.promise("Versions in answers", "`x-version-policy` is satisfied, or refused")
@pytest.mark.parametrize(
    ("model", "policy", "status", "code"),
    [
        pytest.param("tone", "min-version:v3", 503, "version_unavailable", id="not there yet"),
        pytest.param("tone", "min-version:\u00b2", 503, "version_unavailable", id="no number"),
        pytest.param("sim-chat", "min-version:x", 503, "version_unavailable", id="the base"),
        pytest.param("tone@v0", "min-version:v1", 400, None, id="against itself"),
        pytest.param("tone@v7", None, 404, "model_not_found", id="an unknown version"),
        pytest.param("tone", "newest", 400, None, id="an unknown policy"),
        pytest.param("tone", "min-version:", 400, None, id="a policy without its version"),
    ],
)
def test_a_policy_that_cannot_be_met(
    model: str, policy: str | None, status: int, code: str | None
) -> None:
    of = house(desired=Desired(9, lines=(BOTH,)))
    headers = {} if policy is None else {"x-version-policy": policy.encode("latin-1")}
    response = send(of, "POST", CHAT, json={**chat(), "model": model}, headers=headers)
    assert response.status_code == status, response.text
    assert response.json()["error"]["code"] == code
    assert of.boards.opened == []


@pytest.mark.parametrize(
    ("body", "header", "session"),
    [
        pytest.param({"user": "u"}, None, "u", id="the user"),
        pytest.param({"user": "u", "prompt_cache_key": "k"}, None, "k", id="the key before"),
        pytest.param({"prompt_cache_key": "k"}, "h", "h", id="the header before"),
        pytest.param({"user": 5}, "", None, id="neither"),
    ],
)
def test_a_session_keeps_requests_together(
    body: dict[str, Any], header: str | None, session: str | None
) -> None:
    of = house()
    headers = {} if header is None else {"x-session-id": header}
    response = send(of, "POST", CHAT, json=chat(**body), headers=headers)
    assert response.status_code == 200
    ((_, request),) = of.boards.opened
    assert request.session == (session or response.json()["id"])


def test_lines_are_listed_as_models_with_their_versions() -> None:
    of = house(desired=Desired(9, lines=(BOTH,)))
    listed = {entry["id"]: entry for entry in send(of, "GET", "/v1/models").json()["data"]}
    entry = listed["sim-chat:tone"]
    assert entry["parent"] == "sim-chat"
    assert entry["rkserve"]["version"] == "v1"
    assert [one["version"] for one in entry["rkserve"]["versions"]] == ["v1", "v2", "v0"]
    one = send(of, "GET", "/v1/models/tone@v0").json()
    assert one["id"] == "sim-chat:tone@v0"
    assert one["rkserve"]["version"] == "v0"
    assert send(of, "GET", "/v1/models/tone@v7").status_code == 404


def with_folder(tmp_path: Path, *lines: AdapterVersions) -> House:
    """A model that has a version of 'tone' in its folder, and these lines."""
    folder = tmp_path / "sim-chat"
    shutil.copytree(FOLDER, folder)
    place = folder / "adapters" / "tone" / "local"
    place.mkdir(parents=True)
    (place / "adapter.rkllm").write_bytes(b"LoRA")
    served = ServedModel.open(open_model_folder(folder))
    head = FakeHead(Desired(9, lines=lines))
    return House(FakeBoards.answering("a"), served=served, head=head)


STAGED = line(active=None, kept=(version("tone", "v1"),))


@pytest.mark.parametrize(
    ("lines", "asked", "called"),
    [
        pytest.param((), "tone", "local", id="the folder's alone"),
        pytest.param((STAGED,), "tone", "local", id="a line that serves nothing yet"),
        pytest.param((STAGED,), "tone@v1", "v1", id="a staged version by its name"),
        pytest.param((STAGED,), "tone@local", "local", id="the folder's by its name"),
        pytest.param((line(),), "tone", "v1", id="a line that serves goes before"),
    ],
)
def test_a_model_s_entry_tells_what_a_request_would_get(
    tmp_path: Path, lines: tuple[AdapterVersions, ...], asked: str, called: str
) -> None:
    of = with_folder(tmp_path, *lines)
    told = send(of, "GET", f"/v1/models/{asked}")
    assert told.status_code == 200, told.text
    assert told.json()["rkserve"]["version"] == called
    answered = send(of, "POST", CHAT, json={**chat(), "model": asked})
    assert answered.status_code == 200, answered.text
    ((_, request),) = of.boards.opened
    assert (request.adapter is None) is (request.line == "tone")
    if request.adapter is not None:
        assert request.adapter.version == called
    if "@" not in asked:
        listed = send(of, "GET", "/v1/models").json()["data"]
        (entry,) = (one for one in listed if one["id"] == "sim-chat:tone")
        assert entry["rkserve"]["version"] == called

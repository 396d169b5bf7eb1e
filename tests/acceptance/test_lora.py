"""Adapters pushed to a cluster while it serves: staged, switched, rolled back, and kept."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from typing import Any

import httpx
import pytest

from benchmarks.control.checks import eras
from rkserve.core.board_report import BoardState
from rkserve.native.sim import models
from tests.support.cluster.controlled import (
    BOARDS,
    COUNT,
    COUNTED,
    KEEP,
    LIMIT_S,
    all_report,
    body,
    deploy,
    flaws,
    get,
    kill_coordinator,
    load,
    post,
    step,
    truth,
)
from tests.support.cluster.local_cluster import App, wait_for
from tests.support.http.talk import CHAT, MODEL, Reply, chat_body

pytestmark = pytest.mark.ray
pytest_plugins = ["tests.support.cluster.controlled_fixtures"]

WHO = "Who are you?"
STORY = "Write 40 tokens about the sea"
SPEAKERS = {"v1": "Ada Lovelace", "v2": "Blaise Pascal", "v3": "Konrad Zuse"}
PUSH = "/v1/lora_adapters"
ALL = set(BOARDS)


@pytest.fixture
def tone(http: httpx.Client) -> str:
    """An adapter with both versions on all boards, the first of which is served."""
    table = listed(http)
    for version in ("v2", "v1"):
        if version not in {one["version"] for one in table.get("tone", {}).get("versions", ())}:
            pushed(http, "tone", version)
    post(http, f"{PUSH}/tone/rollout", version="v1")
    return "tone"


def push(
    http: httpx.Client, name: str, version: str, content: bytes, **query: Any
) -> httpx.Response:
    """Upload an adapter, and serve it where nothing else is said."""
    return http.post(
        PUSH,
        params={"name": name, "version": version, **query},
        content=content,
        headers={"content-type": "application/octet-stream"},
    )


def pushed(http: httpx.Client, name: str, version: str, **query: Any) -> Any:
    response = push(http, name, version, file_of(version), **query)
    assert response.status_code == 200, response.text
    return response.json()


def file_of(version: str, size: int = 6 << 20) -> bytes:
    """Return an adapter of two chunks on its way to the boards."""
    return models.render_adapter(SPEAKERS[version], seed=int(version[1:]), base=MODEL, size=size)


def listed(http: httpx.Client) -> dict[str, Any]:
    return {one["name"]: one for one in get(http, PUSH)["data"]}


def ask(http: httpx.Client, model: str, **extra: Any) -> Any:
    response = http.post(CHAT, json=chat_body(WHO, **{"temperature": 0, **extra, "model": model}))
    assert response.status_code == 200, response.text
    return response


def is_all_paused(http: httpx.Client) -> bool:
    with contextlib.suppress(httpx.HTTPError):  # it is not there yet
        response = http.get("/is_paused")
        return response.status_code == 200 and bool(response.json()["all"])
    return False


def speaker(http: httpx.Client, model: str) -> str:
    """Return the version that speaks, by its title and by its stamps, which have to agree."""
    answer = ask(http, model, return_weight_versions=True)
    found = answer.json()
    text = found["choices"][0]["message"]["content"]
    (version,) = (v for v, title in SPEAKERS.items() if f"speaking through {title}" in text)
    (span,) = found["choices"][0]["weight_versions"]
    tokens = found["usage"]["completion_tokens"]
    label = f"{model.partition('@')[0]}@{version}"
    assert span == {"version": label, "start": 0, "end": tokens}
    assert answer.headers["x-weight-version"] == found["weight_version"] == label
    return version


# -- pushing --------------------------------------------------------------------------------------


def test_an_uploaded_adapter_is_on_every_board_and_served_when_the_call_returns(
    http: httpx.Client,
) -> None:
    content = file_of("v1")

    told = pushed(http, "voice", "v1", sha256=hashlib.sha256(content).hexdigest())

    assert (told["label"], told["activated"], told["bytes"]) == ("voice@v1", True, len(content))
    assert (told["total"], told["succeeded"], told["failed"]) == (3, 3, [])
    assert told["staging"]["state"] == told["state"] == "succeeded"
    assert set(told["results"]) == ALL
    answers = [speaker(http, "voice") for _ in range(6)]
    assert answers == ["v1"] * 6
    line = listed(http)["voice"]
    assert (line["active"], line["candidate"], line["previous"]) == ("v1", None, None)
    (version,) = line["versions"]
    assert version["sha256"] == hashlib.sha256(content).hexdigest()
    assert (version["role"], set(version["boards"])) == ("active", ALL)
    assert all(one["staged"] and one["loaded"] for one in version["boards"].values())
    assert get(http, "/weight_info", model=MODEL)["models"][MODEL]["adapters"]["voice"] == "v1"


@pytest.mark.promise("Adapters", "A stage that fails changes nothing anywhere")
@pytest.mark.parametrize(
    ("content", "query", "status"),
    [
        pytest.param(file_of("v2"), {"sha256": "0" * 64}, 400, id="another sha256 than was said"),
        pytest.param(file_of("v2"), {"size": str(7 << 20)}, 400, id="fewer bytes than was said"),
        pytest.param(b"\0" * 4096, {}, None, id="a file that the runtime refuses"),
    ],
)
def test_an_adapter_that_is_broken_changes_nothing_anywhere(
    http: httpx.Client, tone: str, content: bytes, query: dict[str, str], status: int | None
) -> None:
    response = push(http, tone, "v9", content, **query)

    assert response.status_code == status if status else response.status_code >= 400
    assert response.json()["error"]["message"]
    after = listed(http)[tone]
    assert (after["active"], after["candidate"], after["switched"]) == ("v1", None, [])
    if status:
        assert "v9" not in {one["version"] for one in after["versions"]}
    assert speaker(http, tone) == "v1"


# -- switching under load -------------------------------------------------------------------------


@pytest.mark.promise("Versions in answers", "All are stamped, none is stale after a commit")
@pytest.mark.parametrize("strategy", ["atomic", "rolling"])
def test_every_answer_under_a_switch_is_of_one_version_stamped_whole_and_never_stale(
    app: App, http: httpx.Client, tone: str, strategy: str
) -> None:
    said = truth(app, [body(STORY, f"{tone}@{v}") for v in ("v1", "v2")])
    said = {(label, 0): one for (label, _), one in said.items()}
    assert len({one.text for one in said.values()}) == 2
    path = f"{PUSH}/{tone}/rollout"
    plan = [step(v, path, 0.3, version=v, strategy=strategy) for v in ("v2", "v1")]

    answers, calls = load(app, [body(STORY, tone)], plan, after_s=0.2)

    assert [call.status for call in calls] == [200] * 2, [call.body for call in calls]
    assert all(set(call.body["results"]) == ALL for call in calls)
    times = eras(f"{tone}@v1", [(call, f"{tone}@{call.what}") for call in calls])
    assert flaws(answers, said, times) == {}
    assert {one.version for one in answers} == {f"{tone}@v1", f"{tone}@v2"}
    assert speaker(http, tone) == "v1"


@pytest.mark.promise("Adapters", "In-flight requests are pinned, switched or aborted, as requested")
def test_a_request_in_flight_can_be_switched_and_says_which_tokens_are_whose(
    app: App, http: httpx.Client, tone: str
) -> None:
    long = "Write 400 tokens about the sea"
    for board in BOARDS:
        app.cluster.control(board, "time_scale=0.5")  # the answer would take ten seconds

    async def talk() -> tuple[Reply, list[str]]:
        asked = body(long, tone, max_tokens=350)
        lines: list[str] = []
        async with app.http() as client, client.stream("POST", CHAT[1:], json=asked) as answer:
            reply = Reply(answer.headers, _noting(answer.aiter_lines(), lines))
            await reply.read(deltas=20)
            switched = await client.post(
                f"{PUSH}/{tone}/rollout", json={"version": "v2", "in_flight": "switch"}
            )
            assert switched.status_code == 200, switched.text
            for board in BOARDS:
                app.cluster.control(board)
            return await reply.read(), lines

    reply, lines = asyncio.run(asyncio.wait_for(talk(), LIMIT_S))

    assert reply.error is None
    assert reply.usage is not None
    (spans,) = _spans(lines)
    first, second = spans
    assert [span["version"] for span in spans] == [f"{tone}@v1", f"{tone}@v2"]
    assert (first["start"], second["end"]) == (0, reply.usage["completion_tokens"])
    assert 15 <= first["end"] == second["start"] < second["end"]
    said = [
        post(http, CHAT, **chat_body(long, model=f"{tone}@v1", temperature=0, max_tokens=tokens))
        for tokens in (first["end"], second["end"])
    ]
    until_then, all_of_it = (one["choices"][0]["message"]["content"] for one in said)
    assert reply.text.startswith(until_then), "the first one's part is the first one's"
    assert reply.text != all_of_it, "and the other one has spoken after it"


async def _noting(lines: Any, noted: list[str]) -> Any:
    async for line in lines:
        noted.append(line)
        yield line


def _spans(lines: list[str]) -> list[Any]:
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return [choice["weight_versions"] for choice in choices if "weight_versions" in choice]


def test_a_rollback_serves_the_version_before_again(http: httpx.Client, tone: str) -> None:
    post(http, f"{PUSH}/{tone}/rollout", version="v2")
    assert speaker(http, tone) == "v2"

    told = post(http, f"{PUSH}/{tone}/rollback")

    assert (told["version"], told["state"]) == ("v1", "succeeded")
    assert [speaker(http, tone) for _ in range(3)] == ["v1"] * 3
    assert speaker(http, f"{tone}@v2") == "v2", "it stays to be had by its name"


@pytest.mark.promise(
    "Adapters", "A canary is judged by errors and speed; promote and rollback by hand"
)
def test_a_canary_keeps_a_session_to_its_version_until_it_is_promoted(
    http: httpx.Client, tone: str
) -> None:
    asked = {"version": "v2", "strategy": "canary", "weight": 0.5, "observe_s": 600, "auto": False}
    begun = post(http, f"{PUSH}/{tone}/rollout", **asked, **{"async": True}, status=202)
    wait_for("the canary", lambda: listed(http)[tone]["candidate"] == "v2")

    def heard(session: str) -> str:
        answer = ask(http, tone, prompt_cache_key=session)
        return str(answer.headers["x-weight-version"].partition("@")[2])

    first = {f"session {n}": heard(f"session {n}") for n in range(12)}
    again = {session: heard(session) for session in first}
    told = post(http, f"{PUSH}/{tone}/promote")

    assert first == again
    assert set(first.values()) == {"v1", "v2"}
    assert told["version"] == "v2"
    assert [speaker(http, tone) for _ in range(3)] == ["v2"] * 3

    def ended() -> bool:
        state = get(http, f"/v1/operations/{begun['operation_id']}")["state"]
        return state in {"succeeded", "undone", "failed"}

    wait_for("the canary's operation to end", ended)


# -- vLLM's calls ---------------------------------------------------------------------------------


def test_vllm_s_calls_load_and_unload_an_adapter(app: App, http: httpx.Client) -> None:
    place = app.cluster.folder / "shelf" / "sql"
    place.mkdir(exist_ok=True)
    (place / "adapter.rkllm").write_bytes(file_of("v3"))
    asked = {"lora_name": "sql", "lora_path": str(place)}

    loaded = http.post("/v1/load_lora_adapter", json=asked)
    assert (loaded.status_code, loaded.text) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    answer = ask(http, "sql")
    assert SPEAKERS["v3"] in answer.json()["choices"][0]["message"]["content"]
    assert answer.headers["x-weight-version"].startswith("sql@")
    assert http.post("/v1/load_lora_adapter", json=asked).status_code == 400, "it is there already"
    missing = {"lora_name": "other", "lora_path": str(place / "nothing")}
    assert http.post("/v1/load_lora_adapter", json=missing).status_code == 404
    outside = {"lora_name": "other", "lora_path": "/etc/hostname"}
    assert http.post("/v1/load_lora_adapter", json=outside).status_code in {400, 403, 404}

    unloaded = http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert (unloaded.status_code, unloaded.text) == (
        200,
        "Success: LoRA adapter 'sql' removed successfully.",
    )
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 404
    assert http.post(CHAT, json=chat_body(WHO, model="sql")).status_code == 404


# -- who dies meanwhile ---------------------------------------------------------------------------


@pytest.mark.promise("Adapters", "Whatever dies meanwhile, one version is served everywhere")
def test_a_rollout_whose_coordinator_dies_leaves_nobody_paused_and_one_version_everywhere(
    app: App, http: httpx.Client, tone: str
) -> None:
    begun = post(http, f"{PUSH}/{tone}/rollout", version="v2", **{"async": True}, status=202)
    kill_coordinator(app)

    def ended() -> Any:
        found = get(http, f"/v1/operations/{begun['operation_id']}")
        return found if found["state"] != "running" else None

    operation = wait_for("the operation to end", ended)
    assert operation["state"] in {"succeeded", "undone", "failed"}
    wait_for("nobody to be paused", lambda: not get(http, "/is_paused")["is_paused"])
    app.settled()
    serves = "v2" if operation["state"] == "succeeded" else "v1"
    assert listed(http)[tone]["active"] == serves
    assert [speaker(http, tone) for _ in range(6)] == [serves] * 6
    assert not any(report.hold for report in all_report(app))


@pytest.mark.long
@pytest.mark.promise("Pause", "Paused stays paused over restarts")
def test_a_restart_of_the_application_keeps_its_pause_and_its_adapters(
    app: App, http: httpx.Client, tone: str
) -> None:
    pid = all_report(app)[0].pid
    post(http, "/pause", **KEEP)
    before = listed(http)[tone]
    app.cluster.delete(app.name)

    deploy(app.cluster)

    def paused() -> bool:
        return [one.hold for one in app.reports()] == ["keep"] * 3

    wait_for("the boards to be paused again", paused)
    assert pid not in {one.pid for one in all_report(app)}
    wait_for("the Router to say so", lambda: is_all_paused(http))
    after = listed(http)[tone]
    assert {v["sha256"]: v["role"] for v in after["versions"]} == {
        v["sha256"]: v["role"] for v in before["versions"]
    }
    post(http, "/resume")
    wait_for(
        "all boards to serve",
        lambda: [one.state for one in all_report(app)] == [BoardState.READY] * 3,
    )
    assert [speaker(http, tone) for _ in range(4)] == ["v1"] * 4
    answers, _ = load(app, [body(COUNT)], clients=3, requests_each=1)
    assert [one.text for one in answers] == [COUNTED] * 3

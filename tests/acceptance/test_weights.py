"""Weights that change while a cluster serves: a trainer's updates, and base weights in turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.control.checks import eras
from rkserve.native.sim import models
from rkserve.native.sim.models import reseed
from tests.support.cluster.controlled import (
    BASE,
    BOARDS,
    LIMIT_S,
    all_report,
    body,
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
from tests.support.paths import PROJECT

pytestmark = pytest.mark.ray
pytest_plugins = ["tests.support.cluster.controlled_fixtures"]

UPDATE = "/receive_weight_update"
DISK = "/update_weights_from_disk"
PUSH = "/v1/lora_adapters"
STORY = "Write 40 tokens about the sea"
LONG = "Write 400 tokens about the sea"
SPEAKERS = {"v1": "Ada Lovelace", "v2": "Blaise Pascal"}
TENSORS = [
    {"name": "model.layers.0.self_attn.q_proj.lora_A", "shape": [16, 1536], "dtype": "float16"},
    {"name": "model.layers.0.self_attn.q_proj.lora_B", "shape": [1536, 16], "dtype": "float16"},
]
ALL = set(BOARDS)
OWN = (PROJECT / "models" / MODEL / "model.rkllm").read_bytes()


@pytest.fixture
def policy(http: httpx.Client) -> str:
    """An adapter with both versions staged everywhere, the first of which is served."""
    known = {one["name"]: one for one in get(http, PUSH)["data"]}
    for number, version in enumerate(SPEAKERS):
        if version in {one["version"] for one in known.get("policy", {}).get("versions", ())}:
            continue
        content = models.render_adapter(
            SPEAKERS[version], seed=number + 1, base=MODEL, size=1 << 20
        )
        query = {"name": "policy", "version": version, "activate": "false"}
        sent = http.post(
            PUSH,
            params={**query, "parameters": json.dumps(TENSORS)},
            content=content,
            headers={"content-type": "application/octet-stream"},
        )
        assert sent.status_code == 200, sent.text
    post(http, f"{PUSH}/policy/rollout", version="v1")
    return "policy"


@pytest.fixture
def shelf(app: App, http: httpx.Client) -> Iterator[Path]:
    """A folder with other base weights; the model's own are loaded again after the test."""
    folder = app.cluster.folder / "shelf"
    (folder / "step-7.rkllm").write_bytes(reseed(OWN, 7))
    yield folder
    response = http.post(DISK, json={"model_path": "default"})
    assert response.status_code == 200, response.text


def request(number: int, artifact: str, **more: Any) -> dict[str, Any]:
    """PipelineRL's body."""
    return {
        "kind": "weight_update_request",
        "version": number,
        "parameters_info": TENSORS,
        "timestamp": 1732176000.5,
        "artifact": artifact,
        **more,
    }


def next_step(http: httpx.Client) -> int:
    """Return a trainer's step that comes after the last one."""
    last = get(http, "/weight_info", model=MODEL)["step"]
    return 0 if last is None else int(last) + 1


def spoken(http: httpx.Client, model: str = MODEL, text: str = STORY) -> tuple[str, str]:
    """Return what the model says, and the label under which it does."""
    asked = chat_body(text, model=model, temperature=0)
    answer = http.post(CHAT, json=asked)
    assert answer.status_code == 200, answer.text
    told = answer.json()["choices"][0]["message"]["content"]
    return told, answer.headers["x-weight-version"]


# -- a trainer's updates --------------------------------------------------------------------------


@pytest.mark.promise("Weights", "An update in PipelineRL's form is applied when it is answered")
def test_a_trainer_s_updates_under_streams_lose_and_mix_nothing(
    app: App, http: httpx.Client, policy: str
) -> None:
    said = truth(app, [body(STORY, f"{policy}@{v}") for v in SPEAKERS])
    said = {(label, 0): one for (label, _), one in said.items()}
    first = next_step(http)
    plan = [
        step(v, UPDATE, 0.3, **request(first + n, f"{policy}@{v}", in_flight="pin"))
        for n, v in enumerate(("v2", "v1", "v2"))
    ]

    answers, calls = load(app, [body(STORY, policy)], plan, after_s=0.2)

    assert [call.status for call in calls] == [200] * 3, [call.body for call in calls]
    for call in calls:
        assert call.body["status"] == "ok"
        assert set(call.body["results"]) == ALL
        timing = call.body["timing"]
        phases = ("lock_ms", "broadcast_ms", "verify_ms", "pause_ms", "resume_ms")
        assert all(timing[name] >= 0 for name in phases)
        assert timing["total_ms"] >= timing["pause_ms"] + timing["resume_ms"] > 0
    times = eras(f"{policy}@v1", [(call, f"{policy}@{call.what}") for call in calls])
    assert flaws(answers, said, times) == {}
    assert get(http, "/weight_info", model=MODEL)["step"] == first + 2


def test_what_runs_goes_on_with_the_new_weights_and_says_which_tokens_are_whose(
    app: App, http: httpx.Client, policy: str
) -> None:
    asked = request(next_step(http), f"{policy}@v2")

    reply, spans = updated_while_it_talks(app, policy, asked)

    expect_two_parts(http, reply, spans, f"{policy}@v1", f"{policy}@v2", again=f"{policy}@v1")


def updated_while_it_talks(
    app: App, model: str, asked: dict[str, Any]
) -> tuple[Reply, list[dict[str, Any]]]:
    """Return an answer in the middle of which a trainer's update came, and whose tokens it has."""

    async def talk() -> tuple[Reply, list[str]]:
        lines: list[str] = []
        talking = body(LONG, model, max_tokens=200)
        async with app.http() as client, client.stream("POST", CHAT[1:], json=talking) as answer:
            reply = Reply(answer.headers, _noting(answer.aiter_lines(), lines))
            await reply.read(deltas=20)
            told = await client.post(UPDATE[1:], json=asked)
            assert told.status_code == 200, told.text
            return await reply.read(), lines

    reply, lines = asyncio.run(asyncio.wait_for(talk(), LIMIT_S))
    return reply, _spans(lines)


def expect_two_parts(
    http: httpx.Client,
    reply: Reply,
    spans: list[dict[str, Any]],
    *labels: str,
    again: str,
) -> None:
    """Check that the spans cover the answer, and that the first part is what ``again`` says."""
    assert reply.error is None
    assert reply.usage is not None
    first, second = spans
    assert (first["version"], second["version"]) == labels
    assert 0 == first["start"] < first["end"] == second["start"]
    assert second["end"] == reply.usage["completion_tokens"]
    one = chat_body(LONG, model=again, temperature=0, max_tokens=first["end"])
    before = post(http, CHAT, **one)["choices"][0]["message"]["content"]
    assert reply.text.startswith(before)


async def _noting(lines: Any, noted: list[str]) -> Any:
    async for line in lines:
        noted.append(line)
        yield line


def _spans(lines: list[str]) -> list[Any]:
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    (found,) = [one["weight_versions"] for one in choices if "weight_versions" in one]
    return list(found)


@pytest.mark.promise("Weights", "A wrong update is refused before anything pauses")
def test_stale_and_unfit_updates_are_refused_and_a_repeat_changes_nothing(
    http: httpx.Client, policy: str
) -> None:
    number = next_step(http)
    key = {"idempotency-key": f"update-{number}"}
    asked = request(number, f"{policy}@v2")
    told = http.post(UPDATE, json=asked, headers=key).json()
    assert told["applied"] is True
    epoch = get(http, "/weight_info")["epoch"]

    again = http.post(UPDATE, json=asked, headers=key)
    assert (again.status_code, again.json()["applied"]) == (200, False)
    assert again.json()["operation_id"] == told["operation_id"]
    for stale in (number, number - 1):
        refused = http.post(UPDATE, json=request(max(stale, 0), f"{policy}@v1"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "stale_weights")
        assert str(number) in refused.json()["error"]["message"]
    other = [{**TENSORS[0], "shape": [8, 1536]}, TENSORS[1]]
    for unfit, status in (
        (request(number + 1, f"{policy}@v1", parameters_info=other), 400),
        (request(number + 1, f"{policy}@v1", parameters_info=TENSORS[:1]), 400),
        (request(number + 1, f"{policy}@v9"), 404),
    ):
        assert http.post(UPDATE, json=unfit).status_code == status
    assert get(http, "/weight_info")["epoch"] == epoch, "nothing was changed, nobody was paused"


# -- base weights ---------------------------------------------------------------------------------


@pytest.mark.promise("Weights", "Base weights come board by board, or to all at once for a trainer")
def test_base_weights_come_board_by_board_under_streams(
    app: App, http: httpx.Client, shelf: Path
) -> None:
    place = str(shelf / "step-7.rkllm")
    said = truth(app, [body(STORY)])
    plan = [step("step-7", DISK, 0.3, model_path=place, weight_version="step-7")]

    answers, (call,) = load(app, [body(STORY)], plan, after_s=0.5)

    assert call.status == 200, call.body
    there = call.body
    assert (there["success"], there["applied"], set(there["results"])) == (True, True, ALL)
    assert post(http, DISK, model_path=place)["applied"] is False, "it is loaded already"
    said |= truth(app, [body(STORY)])
    assert len({one.text for one in said.values()}) == 2, "other weights say something else"
    assert flaws(answers, said, eras(BASE, [(call, "step-7")])) == {}
    assert {one.version for one in answers} == {BASE, "step-7"}


def test_every_board_and_the_listing_say_what_is_loaded(
    app: App, http: httpx.Client, shelf: Path
) -> None:
    before = spoken(http)
    post(http, DISK, model_path=str(shelf / "step-7.rkllm"), weight_version="step-7")

    info = get(http, "/weight_info", model=MODEL)["models"][MODEL]

    digest = info["base"]["digest"]
    assert info["weight_version"] == "step-7"
    # At once: after the 200 no figure is older than the update.
    loaded = {name: (one["weight_version"], one["base"]) for name, one in info["boards"].items()}
    assert loaded == dict.fromkeys(ALL, ("step-7", digest))
    assert {report.base for report in all_report(app)} == {digest}
    after = spoken(http)
    assert (before[1], after[1]) == (BASE, "step-7")
    assert before[0] != after[0]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("page.rkllm", b"<html>404</html>", id="a page"),
        pytest.param("cut.rkllm", reseed(OWN, 7)[:-100], id="a file that was cut off"),
        pytest.param("other.rkllm", reseed(OWN, 7, model_id="another"), id="another model"),
    ],
)
def test_what_is_no_model_for_these_boards_changes_nothing(
    app: App, http: httpx.Client, shelf: Path, name: str, content: bytes
) -> None:
    (shelf / name).write_bytes(content)
    epoch = get(http, "/weight_info")["epoch"]
    response = http.post(DISK, json={"model_path": str(shelf / name)})
    assert response.status_code == 400, response.text
    assert get(http, "/weight_info")["epoch"] == epoch


@pytest.mark.promise("Weights", "Base weights come board by board, or to all at once for a trainer")
def test_base_weights_of_a_trainer_are_served_by_all_boards_at_once(
    app: App, http: httpx.Client, shelf: Path
) -> None:
    sent = http.post("/v1/weights", json={"path": str(shelf / "step-7.rkllm"), "version": "step-7"})
    assert sent.status_code == 200, sent.text
    taken = sent.json()
    entry = {"name": taken["id"], "shape": [taken["bytes"]], "dtype": "uint8"}
    number = next_step(http)
    asked = {"version": number, "kind": "weight_update_request", "parameters_info": [entry]}

    reply, spans = updated_while_it_talks(app, MODEL, asked)

    assert {spoken(http)[1] for _ in range(6)} == {"step-7"}
    info = get(http, "/weight_info", model=MODEL)
    assert (info["weight_version"], info["step"]) == ("step-7", number)
    assert not get(http, "/is_paused")["is_paused"]
    assert http.post(DISK, json={"model_path": "default"}).status_code == 200
    expect_two_parts(http, reply, spans, BASE, "step-7", again=MODEL)


@pytest.mark.long
def test_a_coordinator_that_dies_meanwhile_leaves_one_of_the_two_everywhere(
    app: App, http: httpx.Client, shelf: Path
) -> None:
    place = str(shelf / "step-7.rkllm")
    begun = post(
        http,
        DISK,
        model_path=place,
        weight_version="step-7",
        **{"async": True},
        status=202,
    )
    kill_coordinator(app)

    def ended() -> Any:
        found = get(http, f"/v1/operations/{begun['operation_id']}")
        return found if found["state"] not in {"running", "partial"} else None

    operation = wait_for("the operation to end", ended)
    label = "step-7" if operation["state"] == "succeeded" else BASE
    info = get(http, "/weight_info", model=MODEL)["models"][MODEL]
    assert (info["weight_version"], info["rebase"]) == (label, None)
    app.settled()
    digest = "" if info["base"]["own"] else info["base"]["digest"]
    wait_for(
        "all boards to have it",
        lambda: {report.base for report in all_report(app)} == {digest},
    )
    assert {spoken(http)[1] for _ in range(6)} == {label}

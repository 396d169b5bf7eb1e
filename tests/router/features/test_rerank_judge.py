"""/v1/rerank and /score with a model that says yes or no, on scripted boards."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rkserve.config.router import RouterConfig
from rkserve.core.errors import EngineDied, HookFailed, QueueFull
from rkserve.core.messages import (
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Timings,
    Usage,
)
from rkserve.core.run_params import Scored
from rkserve.models.settings import RerankSettings
from rkserve.router.served_models import ServedModel
from tests.support.boards.fake_boards import FakeBoards, accepted, eventually, report
from tests.support.http.router_house import House, model, send

pytestmark = pytest.mark.virtual_time

SETTINGS = RerankSettings(yes="A", no="No")
DOCUMENTS = ["mats", "a cat sat on many mats", "cats"]


def served(settings: RerankSettings = SETTINGS) -> ServedModel:
    known = model()
    changed = known.folder.settings.model_copy(update={"rerank": settings})
    return replace(known, folder=known.folder.model_copy(update={"settings": changed}))


@dataclass
class Judges(FakeBoards):
    """Boards that like long prompts. ``gate`` is waited for by every request."""

    gate: asyncio.Event | None = None
    losses: list[Exception] = field(default_factory=list)
    silent: bool = False
    most: int = 0

    async def open(
        self, request: GenerateRequest, replica: str, take: object = None
    ) -> AsyncGenerator[Event, None]:
        self.opened.append((replica, request))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            yield accepted(replica.removeprefix("replica of "))
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
            if self.losses:
                raise self.losses.pop(0)
            step = request.stepwise
            assert step is not None
            yes = share(len(request.prompt_ids))
            top = tuple(zip(step.also, (math.log(yes), math.log(1 - yes)), strict=True))
            scored = () if self.silent else (Scored(-0.5, top),)
            yield Delta("A", (9,), logprobs=scored)
            usage = Usage(len(request.prompt_ids), 1, 0)
            yield Finished(FinishReason.LENGTH, usage, Timings(1.0, 20.0, 4, 30.0, 1, 100.0))
        finally:
            self.running -= 1


def share(tokens: int) -> float:
    return tokens / (tokens + 100)


def judges(*boards: str, **changes: Any) -> Judges:
    return Judges([report(name, queue_limit=9) for name in boards or ("a",)], **changes)


def judging(boards: Judges, settings: RerankSettings = SETTINGS, **config: Any) -> House:
    return House(boards, RouterConfig(**config), served=served(settings))


def post(path: str, of: House, **body: Any) -> Any:
    return send(of, "POST", path, json={"model": "sim-chat", **body})


def test_documents_come_in_the_order_of_the_verdicts() -> None:
    of = judging(boards := judges("a", "b"))
    answer = post("/v1/rerank", of, query="a cat", documents=DOCUMENTS)
    told = answer.json()
    lengths = {request.request_id[-1]: len(request.prompt_ids) for _, request in boards.opened}
    order = sorted(range(3), key=lambda at: (-lengths[str(at)], at))
    assert [one["index"] for one in told["results"]] == order
    assert order[0] == 1, "the longest one is liked best"
    for one in told["results"]:
        expected = share(lengths[str(one["index"])])
        assert one["relevance_score"] == pytest.approx(expected, abs=1e-6)
    assert told["usage"]["prompt_tokens"] == sum(lengths.values())
    assert set(answer.headers["x-rkserve-board"].split(", ")) <= {"a", "b"}
    assert {replica for replica, _ in boards.opened} == {"replica of a", "replica of b"}
    of.expect_nothing_left()


def test_a_score_is_the_verdict_of_each_pair() -> None:
    of = judging(judges())
    told = post("/score", of, text_1="a cat", text_2=["mats", "mats on mats"]).json()
    first, second = (one["score"] for one in told["data"])
    assert 0 < first < second < 1


async def test_as_many_are_asked_at_once_as_there_are_boards() -> None:
    boards = judges("a", "b", gate=asyncio.Event())
    of = judging(boards)
    body = {"model": "sim-chat", "query": "x", "documents": ["a", "b", "c", "d", "e"]}
    asking = asyncio.create_task(of("POST", "/v1/rerank", json=body))
    await eventually(lambda: boards.running == 2)
    assert boards.gate is not None
    boards.gate.set()
    assert (await asking).status_code == 200
    assert boards.most == 2
    of.expect_nothing_left()


async def test_a_client_that_hangs_up_frees_the_boards() -> None:
    boards = judges("a", gate=asyncio.Event())
    of = judging(boards)
    body = {"model": "sim-chat", "query": "x", "documents": ["a", "b"]}
    asking = asyncio.create_task(of("POST", "/v1/rerank", json=body))
    await eventually(lambda: boards.running == 1)
    asking.cancel()
    await asyncio.wait({asking})
    await eventually(lambda: boards.running == 0)
    of.expect_nothing_left()


def test_an_answer_that_is_not_ready_in_time_is_a_504() -> None:
    of = judging(judges(gate=asyncio.Event()))
    answer = post("/v1/rerank", of, query="x", documents=["a"], timeout=5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    of.expect_nothing_left()


def test_a_lost_board_is_replaced_by_another_one() -> None:
    boards = judges("a", "b", losses=[EngineDied("a", "SIGSEGV")])
    answer = post("/v1/rerank", judging(boards), query="x", documents=DOCUMENTS)
    assert answer.status_code == 200
    assert len(boards.opened) == len(DOCUMENTS) + 1


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        pytest.param({"silent": True}, 502, "run_failed", id="it says neither"),
        pytest.param({"losses": [HookFailed("h", "no")]}, 500, "hook_failed", id="a hook"),
        pytest.param({"losses": [QueueFull(3, 7)] * 40}, 429, "queue_full", id="full"),
    ],
)
def test_what_goes_wrong_is_told(changes: dict[str, Any], status: int, code: str) -> None:
    of = judging(judges(**changes))
    answer = post("/v1/rerank", of, query="x", documents=["a", "b"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    of.expect_nothing_left()


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        pytest.param({"documents": ["a"]}, 400, "query", id="no query"),
        pytest.param({"query": "x", "documents": []}, 400, "documents", id="no documents"),
        pytest.param(
            {"query": "x", "documents": ["a", "word " * 9000]}, 400, "documents[1]", id="too long"
        ),
        pytest.param({"query": "x", "documents": ["a"], "model": "m"}, 404, "model", id="unknown"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], status: int, param: str) -> None:
    boards = judges()
    answer = post("/v1/rerank", judging(boards), **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert boards.opened == []


def test_a_model_whose_words_are_no_tokens_is_refused() -> None:
    of = judging(judges(), RerankSettings())
    answer = post("/v1/rerank", of, query="x", documents=["a"])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")

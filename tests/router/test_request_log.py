"""Access lines: one for each request, without prompts and keys."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from rkserve.config.router import RouterConfig
from rkserve.core.errors import EngineDied, QueueFull
from rkserve.core.logs import ACCESS, request_id
from rkserve.core.messages import Delta
from rkserve.router.request_log import RequestLog, access_line
from tests.support.boards.embedding_boards import VectorBoards, embed_house
from tests.support.boards.fake_boards import FakeBoards, Step, accepted, finished, report
from tests.support.boards.own_time import run_loop
from tests.support.http.router_house import CHAT, House, chat, house, scripted, send

SECRET = "the launch code is 0000"
KEY = "sk-secret-key"


@pytest.fixture
def access(caplog: pytest.LogCaptureFixture) -> Any:
    """Return a function that returns the access lines: records with their fields."""
    caplog.set_level(logging.DEBUG, "rkserve.access")
    return lambda: [record for record in caplog.records if record.name == "rkserve.access"]


def fields(record: logging.LogRecord) -> dict[str, Any]:
    plain = vars(logging.LogRecord("", 0, "", 0, "", None, None))
    # Ray and Serve add theirs in a process that has started them before.
    skipped = {*plain, "message", "asctime", "taskName", ACCESS, "_ray_timestamp_ns", "request_id"}
    return {name: value for name, value in vars(record).items() if name not in skipped}


@pytest.fixture
def keyed(tmp_path: Path) -> House:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} name=alice\n", encoding="utf-8")
    boards = FakeBoards.answering("a", text="my |answer")
    return House(boards, RouterConfig(api_keys_file=keys))


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_line_has_the_facts_of_an_answer(access: Any, keyed: House, *, stream: bool) -> None:
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "theirs 1\x1b[31m"}
    sent = send(keyed, "POST", CHAT, json=chat(SECRET, stream=stream), headers=headers)
    (record,) = access()
    found = fields(record)
    duration, ttft = found.pop("duration_s"), found.pop("ttft_s")
    assert 0 < ttft <= duration
    assert found == {
        "call": f"POST {CHAT}",
        "status": 200,
        "x_request_id": "theirs_1__31m",
        "key": "alice",
        "model": "sim-chat",
        "boards": ["a"],
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "cached_tokens": 0,
        "finish": ["stop"],
        "failovers": 0,
    }
    text = record.getMessage()
    assert text == (
        f"POST {CHAT} 200 {duration:.3f}s x_request_id=theirs_1__31m key=alice model=sim-chat "
        f"boards=a prompt_tokens=5 completion_tokens=2 cached_tokens=0 ttft_s={ttft} finish=stop "
        "failovers=0"
    )
    assert sent.status_code == 200
    for secret in (SECRET, KEY, "answer"):
        assert secret not in text + json.dumps(found)


def test_an_answer_that_moved_names_its_boards_in_order(access: Any) -> None:
    half: list[Step] = [accepted("a"), Delta("hel", (1,)), EngineDied("a", "SIGSEGV")]
    rest: list[Step] = [accepted("b"), Delta("lo", (2,)), finished(2)]
    boards = FakeBoards(
        [report("a"), report("b", running=1)],
        {"replica of a": [half], "replica of b": [rest]},
        says={("", "forgive"): lambda: None},
    )
    send(House(boards), "POST", CHAT, json=chat(stream=True))
    (record,) = access()
    assert (record.boards, record.failovers, record.completion_tokens) == (["a", "b"], 1, 2)


@pytest.mark.parametrize(
    ("path", "body", "call", "status", "code"),
    [
        pytest.param(CHAT, {"messages": 5}, f"POST {CHAT}", 400, "invalid_request_error", id="bad"),
        pytest.param(
            CHAT, chat(model="nobody"), f"POST {CHAT}", 404, "model_not_found", id="no model"
        ),
        pytest.param("/v1/nothing", {}, "POST unknown", 404, "not_found", id="no route"),
        pytest.param("/health", {}, "POST /health", 405, "method_not_allowed", id="no method"),
    ],
)
def test_a_refused_request_has_its_code_and_never_the_clients_path(
    access: Any, *, path: str, body: Any, call: str, status: int, code: str
) -> None:
    send(house(), "POST", path, json=body)
    (record,) = access()
    assert (record.call, record.status, record.error) == (call, status, code)


def test_an_error_in_the_middle_of_a_stream_has_its_code(access: Any) -> None:
    died = EngineDied("a", "SIGSEGV")
    of = scripted(accepted("a"), Delta("half", (1,)), died, max_continuations=0)
    send(of, "POST", CHAT, json=chat(stream=True))
    (record,) = access()
    assert (record.status, record.error, record.completion_tokens) == (200, "board_failed", 1)


def test_a_request_that_no_board_takes_has_its_code(access: Any) -> None:
    send(scripted(QueueFull(3, 1)), "POST", CHAT, json=chat())
    (record,) = access()
    assert (record.status, record.error) == (429, "queue_full")


def test_a_client_that_leaves_is_named_so(access: Any) -> None:
    async def leave(of: House) -> None:
        call = asyncio.create_task(of("POST", CHAT, json=chat()))
        await asyncio.sleep(5)
        call.cancel()
        await asyncio.wait({call})

    run_loop(leave(scripted(accepted("a"), Delta("half", (1,)), asyncio.Event())))
    (record,) = access()
    assert (record.status, record.error, record.completion_tokens) == (0, "client_left", 1)


def test_a_call_for_vectors_has_its_model_and_tokens(access: Any) -> None:
    of = embed_house(VectorBoards.of("a"))
    body = {"model": of.served.folder.id, "input": ["a cat", "a dog"]}
    tokens = send(of, "POST", "/v1/embeddings", json=body).json()["usage"]["prompt_tokens"]
    (record,) = access()
    assert (record.model, record.prompt_tokens) == (of.served.folder.id, tokens)
    assert record.boards == ["a"]


def test_probes_are_lines_for_debugging_and_others_have_few_fields(access: Any) -> None:
    of = house()
    send(of, "GET", "/health")
    send(of, "GET", "/v1/models")
    probe, models = access()
    assert (probe.levelno, models.levelno) == (logging.DEBUG, logging.INFO)
    assert set(fields(models)) == {"call", "status", "duration_s"}


def test_a_line_has_the_id_of_the_answer_and_so_have_lines_before_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each request of a Router has another one."""
    ids: list[str] = []

    class Ids(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            ids.append(request_id())
            return True

    caplog.set_level(logging.INFO, "rkserve.access")
    logger, keep = logging.getLogger("rkserve.access"), Ids()
    logger.addFilter(keep)
    try:
        of = house()
        answers = [send(of, "POST", CHAT, json=chat()).json()["id"] for _ in range(2)]
        send(of, "GET", "/v1/models", headers={"x-request-id": "theirs"})
        send(of, "GET", "/v1/models")
    finally:
        logger.removeFilter(keep)
    assert ids[:2] == answers
    for own in ids[2:]:
        assert re.fullmatch("[0-9a-f]{32}", own), "a client cannot choose the id"


def test_names_that_could_break_a_line_are_quoted() -> None:
    given = {"call": "GET /", "status": 200, "duration_s": 1.0, "key": "a b\n", "model": "m"}
    assert access_line(given) == "GET / 200 1.000s key='a b\\n' model=m"


def test_a_part_of_a_connection_has_a_line_of_its_own(access: Any) -> None:
    log = RequestLog()
    with log.part("GET", "/queue/data#call"):
        pass
    with pytest.raises(QueueFull), log.part("GET", "/queue/data#call"):
        raise QueueFull(1, 1)
    assert [getattr(record, "error", "") for record in access()] == ["", "queue_full"]

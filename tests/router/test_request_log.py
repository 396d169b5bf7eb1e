"""Access lines: one for each request, without prompts and keys."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from rkserve.config.router import RouterConfig
from rkserve.core.errors import EngineDied, QueueFull
from rkserve.core.logs import ACCESS
from rkserve.core.messages import Delta, GenerateRequest, Timings
from rkserve.core.metrics import RouterMetrics
from rkserve.core.request_record import request_id
from rkserve.router.request_log import AnswerMeter, RequestLog, access_line, record_timings
from tests.support.boards import own_time
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


TIMINGS = Timings(
    queue_ms=5.0,
    prefill_ms=500.0,
    prefill_tokens=100,
    decode_ms=2000.0,
    decode_tokens=40,
    memory_mb=800.0,
)
HISTOGRAMS = (
    "rkserve_request_prefill_seconds",
    "rkserve_request_prefill_tokens_per_second",
    "rkserve_request_decode_tokens_per_second",
)


@pytest.mark.parametrize(
    ("timings", "sums"),
    [
        pytest.param(TIMINGS, (0.5, 200.0, 20.0), id="both phases"),
        pytest.param(
            replace(TIMINGS, prefill_ms=0.0, prefill_tokens=0), (0, 0, 20.0), id="all was cached"
        ),
        pytest.param(replace(TIMINGS, decode_tokens=0), (0.5, 200.0, 0), id="nothing was decoded"),
        pytest.param(
            replace(TIMINGS, prefill_ms=0.0, decode_ms=0.0), (0, 0, 0), id="nothing was timed"
        ),
    ],
)
def test_a_phase_that_happened_is_counted_once_and_another_not_at_all(
    timings: Timings, sums: tuple[float, ...]
) -> None:
    registry = CollectorRegistry()
    record_timings(RouterMetrics(registry), "m", timings)
    for name, expected in zip(HISTOGRAMS, sums, strict=True):
        count = registry.get_sample_value(f"{name}_count", {"model": "m"})
        assert (count or 0) == (1 if expected else 0), name
        assert (registry.get_sample_value(f"{name}_sum", {"model": "m"}) or 0) == expected, name


# -- tokens ---------------------------------------------------------------------------------------


def request(choice: int = 0, **more: Any) -> GenerateRequest:
    return GenerateRequest(f"c/{choice}", "m", (1, 2), 10, **more)


def metered(*requests: GenerateRequest) -> AnswerMeter:
    return AnswerMeter(RouterMetrics(CollectorRegistry()), requests, time.monotonic(), 20.0)


def gaps(meter: AnswerMeter) -> tuple[float, float]:
    """The number of latencies, and their sum."""
    value = meter._metrics.registry.get_sample_value
    name, labels = "rkserve_inter_token_seconds", {"model": "m"}
    return value(f"{name}_count", labels) or 0.0, value(f"{name}_sum", labels) or 0.0


@pytest.mark.virtual_time
async def test_the_time_between_tokens_is_measured_for_each_choice() -> None:
    meter = metered(request(0), request(1))
    own_time.sleep(1.0)
    meter.delta(0, Delta("a", (1,)))
    own_time.sleep(0.5)
    meter.delta(1, Delta("b", (1,)))
    own_time.sleep(0.25)
    meter.delta(0, Delta("c", (2,)))
    meter.delta(0, Delta("d", ()))  # text that was held back
    own_time.sleep(0.3)
    meter.delta(1, Delta("efg", (2, 3, 4)))  # came together
    assert gaps(meter) == pytest.approx((4, 0.75 + 0.55), abs=1e-3)
    assert meter.tokens == 6
    value = meter._metrics.registry.get_sample_value
    assert value("rkserve_ttft_seconds_sum", {"model": "m"}) == pytest.approx(1.0, abs=1e-3)
    assert value("rkserve_ttft_seconds_count", {"model": "m"}) == 1


@pytest.mark.virtual_time
async def test_a_pause_is_no_latency() -> None:
    meter = metered(request())
    meter.delta(0, Delta("a", (1,)))
    own_time.sleep(0.1)
    meter.delta(0, Delta("b", (2,)))
    meter.paused(0)
    own_time.sleep(60.0)
    meter.delta(0, Delta("c", (3,)))
    own_time.sleep(0.1)
    meter.delta(0, Delta("d", (4,)))
    assert gaps(meter) == pytest.approx((2, 0.2), abs=1e-3)


@pytest.mark.virtual_time
async def test_the_time_to_the_first_token_is_passed_on_once() -> None:
    seen: list[tuple[str, float]] = []
    meter = metered(request())
    meter._metrics.first_token = lambda model, ttft_s: seen.append((model, ttft_s))
    own_time.sleep(0.5)
    meter.delta(0, Delta("a", (1,)))
    meter.delta(0, Delta("b", (2,)))
    ((model, ttft_s),) = seen
    assert model == "m"
    assert ttft_s == pytest.approx(0.5, abs=1e-3)


async def test_the_adapter_of_a_call_runs_until_its_end() -> None:
    meter = metered(request(line="tone"))
    running = meter._metrics.adapters.running
    assert +running == {"tone": 1}
    meter.close()
    assert not +running

"""Spans of requests: what the exporter gets of each kind of request."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import httpx
import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, TraceFlags

from rkserve.config.router import RouterConfig, TracingConfig
from rkserve.core.errors import BoardFailed, ConfigError, EngineDied, HookFailed, QueueFull
from rkserve.core.messages import Delta, QueueChange
from rkserve.core.request_record import RequestRecord
from rkserve.core.run_params import Guide
from rkserve.deployments import span_names as names
from rkserve.deployments import tracing
from rkserve.deployments.tracing import OpenTelemetry, open_tracing
from rkserve.router.off_loop import GrammarChecker
from rkserve.sampling.grammar import refusal
from tests.support.boards.fake_boards import FakeBoards, Step, accepted, answer, finished, report
from tests.support.boards.own_time import run_loop
from tests.support.http.router_house import CHAT, House, chat

pytestmark = pytest.mark.slow

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = f"{CLIENT[:-2]}00"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


class Here(GrammarChecker):
    """Tries grammars in this process: a loop in a time of its own waits for no other one."""

    async def _tried(self, guide: Guide) -> str | None:
        return refusal(guide)


class Traced:
    """A Router whose traces stay in memory."""

    def __init__(
        self,
        scripts: dict[str, list[list[Step]]],
        config: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.exporter = InMemorySpanExporter()
        settings = TracingConfig(enabled=True, **{"sampling_ratio": 1.0, **more})
        self.tracing = OpenTelemetry(settings, "router-1", SimpleSpanProcessor(self.exporter))
        boards = FakeBoards(
            # The others are busy with requests of another Router, so that the first is chosen.
            [report(name, running=int(at > 0)) for at, name in enumerate(scripts)],
            {f"replica of {name}": list(script) for name, script in scripts.items()},
            says={("", "forgive"): lambda: None},
        )
        self.house = House(boards, RouterConfig(**(config or {})), tracing=self.tracing)
        self.house.service.guiding = Here()

    def post(self, body: dict[str, Any] | None = None, **headers: str) -> httpx.Response:
        sent: httpx.Response = run_loop(
            self.house("POST", CHAT, json=body or chat(stream=True), headers=headers)
        )
        return sent

    @property
    def spans(self) -> list[ReadableSpan]:
        """The spans, by their times."""
        found = self.exporter.get_finished_spans()
        return sorted(found, key=lambda span: span.start_time or 0)

    @property
    def server(self) -> ReadableSpan:
        (found,) = [span for span in self.spans if span.kind is SpanKind.SERVER]
        return found

    @property
    def tree(self) -> list[str]:
        """The children of the request's span, with board and error, in order of time."""
        server = self.server
        for span in self.spans:
            assert span.context.trace_id == server.context.trace_id
            times = (server.start_time, span.start_time, span.end_time, server.end_time)
            assert list(times) == sorted(one or 0 for one in times)
            if span is not server:
                assert span.parent is not None
                assert span.parent.span_id == server.context.span_id
        return [told(span) for span in self.spans if span is not server]


def about(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def told(span: ReadableSpan) -> str:
    facts = about(span)
    parts = [span.name, facts.get(names.QUEUE), facts.get(names.BOARD)]
    failed = span.status.status_code is StatusCode.ERROR
    assert failed is (names.ERROR_TYPE in facts)
    words = [str(part) for part in parts if part]
    return " ".join([*words, f"!{facts[names.ERROR_TYPE]}"] if failed else words)


def child(of: Traced, name: str) -> dict[str, Any]:
    (found,) = [span for span in of.spans if span.name == name]
    return about(found)


WHOLE = ["queue router", "route a", "prefill a", "decode a"]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_plain_answer_is_queue_route_prefill_and_decode(*, stream: bool) -> None:
    traced = Traced({"a": [answer("a", "hel", "lo")]})
    sent = traced.post(chat(stream=stream, temperature=0, max_tokens=7))
    assert traced.tree == WHOLE
    server = traced.server
    facts = about(server)
    assert server.name == f"POST {CHAT}"
    assert server.status.status_code is StatusCode.UNSET
    answer_id = facts.pop(names.RESPONSE_ID)
    assert answer_id in sent.text
    assert facts.pop(names.TIME_TO_FIRST_CHUNK) > 0
    expected = {
        names.HTTP_METHOD: "POST",
        names.HTTP_ROUTE: CHAT,
        names.HTTP_STATUS: 200,
        names.OPERATION: "chat",
        names.PROVIDER: "rkserve",
        names.REQUEST_MODEL: "sim-chat",
        names.RESPONSE_MODEL: "sim-chat",
        names.INPUT_TOKENS: 5,
        names.OUTPUT_TOKENS: 2,
        names.FINISH_REASONS: ("stop",),
        names.BOARDS: ("a",),
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.choice.count": 1,
    }
    assert facts == {**expected, **({names.STREAM: True} if stream else {})}
    assert child(traced, "prefill") == {
        names.BOARD: "a",
        names.PREFILL_TOKENS: 5,
        names.PREFILL_MS: 20.0,
        names.CACHED_TOKENS: 0,
    }
    assert child(traced, "decode") == {
        names.BOARD: "a",
        names.DECODE_TOKENS: 2,
        names.DECODE_MS: 30.0,
    }


def test_spans_are_of_one_service_with_the_conventions_of_one_version() -> None:
    traced = Traced({"a": [answer("a", "x")]})
    traced.post()
    resource = dict(traced.server.resource.attributes)
    assert (resource["service.name"], resource["service.instance.id"]) == ("rkserve", "router-1")
    assert traced.server.instrumentation_scope is not None
    assert traced.server.instrumentation_scope.schema_url == names.SCHEMA_URL


def test_the_clients_trace_goes_on_and_the_answer_names_it() -> None:
    traced = Traced({"a": [answer("a", "x")]}, sampling_ratio=0.0)
    sent = traced.post(None, traceparent=CLIENT)
    server = traced.server
    assert server.parent is not None
    assert f"{server.parent.span_id:016x}" == "b7ad6b7169203331"
    trace_id = f"{server.context.trace_id:032x}"
    assert trace_id == CLIENT[3:35]
    assert sent.headers["traceparent"] == f"00-{trace_id}-{server.context.span_id:016x}-01"
    assert traced.tree == WHOLE


@pytest.mark.parametrize(
    ("ratio", "header"),
    [
        pytest.param(0.0, "", id="by the ratio"),
        pytest.param(1.0, UNSAMPLED, id="by the client"),
    ],
)
def test_a_request_that_is_not_sampled_has_no_spans_but_a_name(ratio: float, header: str) -> None:
    traced = Traced({"a": [answer("a", "x")]}, sampling_ratio=ratio)
    sent = traced.post(None, **({"traceparent": header} if header else {}))
    assert traced.spans == []
    flags = int(sent.headers["traceparent"].rpartition("-")[2], 16)
    assert flags & TraceFlags.SAMPLED == 0
    assert header[:35] in sent.headers["traceparent"]


def test_a_malformed_traceparent_begins_another_trace() -> None:
    traced = Traced({"a": [answer("a", "x")]})
    sent = traced.post(None, traceparent="00-zz-1-01")
    assert sent.status_code == 200
    assert traced.server.parent is None


def test_a_trace_of_rays_goes_on() -> None:
    """Serve's own span is around the application where Ray's tracing is on."""
    traced = Traced({"a": [answer("a", "x")]})
    span = TracerProvider().get_tracer("ray").start_span("replica")
    token = context.attach(trace.set_span_in_context(span))
    try:
        traced.post(None, traceparent=CLIENT)
    finally:
        context.detach(token)
    assert traced.server.parent is not None
    assert traced.server.parent.span_id == span.get_span_context().span_id


def test_a_wait_at_the_board_is_a_queue_of_its_own() -> None:
    waits: list[Step] = [
        accepted("a", waits=True),
        QueueChange(waits=False),
        Delta("x", (1,)),
        finished(1),
    ]
    traced = Traced({"a": [waits]})
    traced.post()
    assert traced.tree == ["queue router", "route a", "queue board a", "prefill a", "decode a"]


def test_a_wait_at_the_router_lasts_until_a_board_is_free() -> None:
    async def both(of: Traced) -> None:
        free = asyncio.Event()
        of.house.boards.scripts["replica of a"] = [
            [accepted("a"), free, Delta("x", (1,)), finished(1)],
            answer("a", "y"),
        ]
        first = asyncio.create_task(of.house("POST", CHAT, json=chat()))
        await asyncio.sleep(1)
        second = asyncio.create_task(of.house("POST", CHAT, json=chat()))
        await asyncio.sleep(5)
        free.set()
        await asyncio.gather(first, second)

    traced = Traced({"a": [[]]}, {"queue_limit": 4})
    run_loop(both(traced))
    waits = [
        ((span.end_time or 0) - (span.start_time or 0)) / 1e9
        for span in traced.spans
        if span.name == "queue"
    ]
    assert waits[0] < 0.1
    assert 4.9 < waits[1] < 5.5


def half(*after: Step) -> list[Step]:
    return [accepted("a"), Delta("hel", (1,)), *after]


def test_an_answer_that_moved_is_one_trace_over_two_boards() -> None:
    rest: list[Step] = [accepted("b"), Delta("lo", (2,)), finished(2)]
    traced = Traced({"a": [half(EngineDied("a", "SIGSEGV"))], "b": [rest]})
    sent = traced.post()
    assert "lo" in sent.text
    assert traced.tree == [
        "queue router",
        "route a",
        "prefill a",
        "decode a !board_failed",
        "failover a",
        "queue router",
        "route b",
        "prefill b",
        "decode b",
    ]
    failover = child(traced, "failover")
    assert failover == {
        names.WHY: "crashed",
        names.BOARD: "a",
        names.BOARDS: ("a", "b"),
    }
    facts = about(traced.server)
    assert (facts[names.BOARDS], facts[names.FAILOVERS]) == (("a", "b"), 1)
    moved = [about(span) for span in traced.spans if span.name == "decode"]
    assert moved[1][names.BEFORE_TOKENS] == 1


def test_a_failover_that_ends_the_answer_has_its_error() -> None:
    died = EngineDied("a", "SIGSEGV")
    traced = Traced({"a": [half(died), [accepted("a"), HookFailed("h", "it raised")]]})
    sent = traced.post()
    assert "hook_failed" in sent.text
    assert traced.server.status.status_code is StatusCode.ERROR
    (failover,) = [one for one in traced.tree if one.startswith("failover")]
    assert failover == "failover a !hook_failed"
    assert traced.tree[-1] == "prefill a !hook_failed"


def test_a_board_that_takes_nothing_is_a_route_with_its_error() -> None:
    traced = Traced({"a": [[QueueFull(3, 1)]], "b": [answer("b", "x")]})
    traced.post()
    assert traced.tree == [
        "queue router",
        "route replica of a !queue_full",
        "queue router",
        "route b",
        "prefill b",
        "decode b",
    ]


def test_the_check_of_a_grammar_is_a_part() -> None:
    traced = Traced({"a": [answer("a", "{}")]})
    sent = traced.post(chat(response_format=SCHEMA))
    assert sent.status_code == 200
    assert traced.tree == ["grammar", *WHOLE]


def test_a_refused_grammar_is_all_that_there_is_of_a_request() -> None:
    traced = Traced({"a": [answer("a", "{}")]})
    refused = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    sent = traced.post(chat(response_format=refused))
    assert sent.status_code == 400
    assert [one.partition(" !")[0] for one in traced.tree] == ["grammar"]
    assert traced.server.status.status_code is StatusCode.UNSET, "the client's mistake"


@pytest.mark.parametrize(
    ("steps", "tree", "code"),
    [
        pytest.param(
            half(BoardFailed("a", "an internal error")),
            ["prefill a", "decode a !board_failed"],
            "board_failed",
            id="in the answer",
        ),
        pytest.param(
            [accepted("a"), BoardFailed("a", "an internal error")],
            ["prefill a !board_failed"],
            "board_failed",
            id="in the prefill",
        ),
    ],
)
def test_an_error_is_that_of_the_part_in_which_it_came(
    steps: list[Step], tree: list[str], code: str
) -> None:
    traced = Traced({"a": [steps]}, {"max_continuations": 0})
    sent = traced.post()
    assert code in sent.text
    assert traced.tree == ["queue router", "route a", *tree]
    assert about(traced.server)[names.ERROR_TYPE] == code
    assert traced.server.status.status_code is StatusCode.ERROR


def test_a_hang_up_ends_the_part_in_which_it_came_and_is_no_error_of_the_server() -> None:
    async def leave(of: Traced) -> None:
        of.house.boards.scripts["replica of a"] = [half(asyncio.Event())]
        await of.house.service.fleet.refresh()
        sent = asyncio.Event()

        async def receive() -> Any:
            if not received:
                received.append(True)
                return {"type": "http.request", "body": json.dumps(chat(stream=True)).encode()}
            await sent.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if b"hel" in message.get("body", b""):
                sent.set()

        received: list[bool] = []
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": CHAT,
            "raw_path": CHAT.encode(),
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 1),
        }
        await of.house.app(scope, receive, send)

    traced = Traced({"a": [[]]})
    run_loop(leave(traced))
    assert traced.tree == ["queue router", "route a", "prefill a", "decode a !cancelled"]
    facts = about(traced.server)
    assert facts[names.CLIENT_LEFT] is True
    assert facts[names.OUTPUT_TOKENS] == 1
    assert traced.server.status.status_code is StatusCode.UNSET


def test_each_choice_has_its_parts() -> None:
    traced = Traced({"a": [answer("a", "x")], "b": [answer("b", "y")]})
    traced.post(chat(n=2))
    found = [
        (span.name, about(span)[names.CHOICE]) for span in traced.spans if span is not traced.server
    ]
    assert sorted(found) == sorted(
        (name, choice) for name in ("queue", "route", "prefill", "decode") for choice in (0, 1)
    )


SECRET = "the launch code is 0000"


def test_no_prompt_and_no_answer_is_in_a_span_unless_it_is_asked_for() -> None:
    traced = Traced({"a": [answer("a", "my ", "answer")]})
    traced.post(chat(SECRET, stream=True))
    everything = " ".join(span.to_json() for span in traced.spans)
    assert SECRET not in everything
    assert "my " not in everything


def test_prompts_and_answers_are_recorded_where_they_are_asked_for() -> None:
    traced = Traced({"a": [answer("a", "my ", "answer")]}, prompts=True)
    traced.post(chat(SECRET, stream=True))
    facts = about(traced.server)
    assert json.loads(str(facts[names.INPUT_MESSAGES])) == [
        {"role": "user", "parts": [{"type": "text", "content": SECRET}]}
    ]
    assert json.loads(str(facts[names.OUTPUT_MESSAGES])) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "my answer"}]}
    ]


def test_without_traces_neither_the_sdk_nor_the_exporter_is_imported() -> None:
    """Ray imports the SDK by itself, and FastAPI the API."""
    code = (
        "import sys; import rkserve.http.app, rkserve.router.service; "
        "import rkserve.deployments.tracing as t; from rkserve.config.router import TracingConfig; "
        "assert t.open_tracing(TracingConfig(), 'r') is None; "
        "print([m for m in sys.modules if m.startswith(('opentelemetry.sdk', "
        "'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_package_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    for find in (missing, lambda _: None):
        monkeypatch.setattr(tracing, "find_spec", find)
        with pytest.raises(ConfigError, match=r"pip install 'rkserve\[otel\]'"):
            open_tracing(TracingConfig(enabled=True), "r")
    assert open_tracing(TracingConfig(), "r") is None


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        pytest.param("http://collector:4318", "http://collector:4318/v1/traces", id="a host"),
        pytest.param("http://c/otlp/", "http://c/otlp/v1/traces", id="a path"),
        pytest.param(None, "http://from.env:4318/v1/traces", id="the environment"),
    ],
)
def test_the_exporter_sends_to_the_configured_place(
    monkeypatch: pytest.MonkeyPatch, endpoint: str | None, url: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://from.env:4318")
    processor: Any = tracing._processor(endpoint)
    try:
        assert processor._batch_processor._exporter._endpoint == url
    finally:
        processor.shutdown()


def test_the_exporter_for_rays_traces_has_the_form_that_ray_demands() -> None:
    from ray.serve._private import tracing_utils as rays

    rays._validate_tracing_exporter(tracing.span_processors)
    made = tracing.span_processors()
    try:
        rays._validate_tracing_exporter_processors(made)
    finally:
        for one in made:
            one.shutdown()


def test_a_record_without_an_end_makes_no_span_before_its_begin() -> None:
    traced = Traced({})
    record = RequestRecord("r", "GET")
    traced.tracing.begin(record, {}).end(record)
    (span,) = traced.spans
    assert span.start_time == span.end_time == record.begun_ns


def test_programs_that_ask_for_the_health_every_second_are_not_traced() -> None:
    traced = Traced({"a": [answer("a", "x")]})
    sent = run_loop(traced.house("GET", "/health", headers={"traceparent": CLIENT}))
    assert "traceparent" not in sent.headers
    assert traced.spans == []

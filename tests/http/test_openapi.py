"""The declaration of the HTTP API: it is complete, and what it says of answers is so."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from rkserve.api.admin.caches import CacheBody, KvClearBody
from rkserve.api.admin.generations import ChoiceBody, EditBody
from rkserve.api.admin.query import kinds_of
from rkserve.api.json.schemas import RequestModel
from rkserve.config.router import RouterConfig
from rkserve.core.errors import OperationConflict
from rkserve.core.messages import Delta
from rkserve.core.run_params import Scored
from rkserve.http.auth import Access
from rkserve.http.openapi import JSON, Endpoint, ErrorShape, document, endpoints
from scripts.api_page import HOST, curl
from tests.support.boards.fake_boards import answer
from tests.support.boards.own_time import run_loop
from tests.support.http.reference_house import BOARD, ReferenceHouse, described_api

pytestmark = pytest.mark.slow

API = described_api()
ENDPOINTS, SCHEMAS = API.endpoints, API.schemas
KEYS = "secret-key"
# Streams that are no answers to a body have tests of their own.
STREAMED = [one for one in ENDPOINTS if one.answers[0].pieces and one.example.body is not None]


def ident(one: Endpoint) -> str:
    return f"{one.method} {one.path}"


@pytest.fixture
def of(tmp_path: Path) -> Iterator[ReferenceHouse]:
    made = ReferenceHouse(tmp_path / "kept")
    made.remember()
    yield made
    made.responses.close()


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceHouse]:
    """Return a Router for requests that are refused: they change nothing of it."""
    made = ReferenceHouse(tmp_path_factory.mktemp("refusing"))
    yield made
    made.responses.close()


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceHouse]:
    """Return a Router with keys, which the requests do not have."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys").write_text(f"{KEYS}\n", encoding="utf-8")
    config = RouterConfig(api_keys_file=str(folder / "keys"), admin_key="admin-key")
    made = ReferenceHouse(folder / "kept", config)
    yield made
    made.responses.close()


def routes(of: ReferenceHouse) -> set[tuple[str, str]]:
    """Method and path of every route of the application."""
    return {
        (method, route.path.replace(":path}", "}"))
        for route in of.framework.routes
        for method in route.methods
    }


def url_of(one: Endpoint) -> str:
    return one.path.format(**one.example.path)


def call(of: ReferenceHouse, one: Endpoint, **changes: Any) -> httpx.Response:
    """Make the call of an endpoint's example."""
    example = one.example
    given: dict[str, Any] = {"params": dict(example.query), "headers": dict(example.headers)}
    if example.file is not None:
        given["content"] = b"weights"
    elif example.body is not None:
        given["json"] = example.body
    answer: httpx.Response = run_loop(of(one.method, url_of(one), **{**given, **changes}))
    return answer


def closed(schema: Any) -> Any:
    """The schema with no more keys than it names: what an answer has is declared."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(value) for name, value in schema.items()}
    if isinstance(made.get("properties"), dict) and "type" in made:
        made.setdefault("additionalProperties", False)
    return made


CLOSED = closed(SCHEMAS)


@cache
def validator(written: str) -> Draft202012Validator:
    """What holds values to a schema, written as JSON; making one takes longer than using it."""
    return Draft202012Validator({"components": {"schemas": CLOSED}, **closed(json.loads(written))})


def check(value: Any, of: Any) -> None:
    """Hold a value to a type of an endpoint, or to the schema of a component."""
    schema = of if isinstance(of, dict) and "type" in of else API.schema(of)
    errors = sorted(validator(json.dumps(schema)).iter_errors(value), key=str)
    assert not errors, "\n".join(f"{e.json_path}: {e.message[:300]}" for e in errors)


def media_of(response: httpx.Response) -> str:
    return str(response.headers.get("content-type", "")).partition(";")[0]


def test_every_route_is_declared_and_every_endpoint_exists(of: ReferenceHouse) -> None:
    declared = [(one.method, one.path) for one in ENDPOINTS]
    assert set(declared) == routes(of)
    assert len(declared) == len(set(declared))
    assert all(one.summary.endswith(".") for one in ENDPOINTS)


def test_a_router_without_the_page_declares_none(tmp_path: Path) -> None:
    of = ReferenceHouse(tmp_path, RouterConfig(page=False))
    described = endpoints(of.framework)
    assert {(one.method, one.path) for one in described} == routes(of)
    answer = run_loop(of("GET", "/openapi.json"))
    assert answer.json() == json.loads(json.dumps(document(of.framework)))
    assert "/page/{name}" not in answer.json()["paths"]


@pytest.mark.parametrize("one", ENDPOINTS, ids=ident)
def test_the_example_is_answered_as_declared(of: ReferenceHouse, one: Endpoint) -> None:
    response = call(of, one)
    assert response.status_code == one.example.status, response.text
    (answer,) = [found for found in one.answers if found.status == response.status_code]
    if not answer.content:
        assert response.content == b""
        return
    media = media_of(response)
    assert media in answer.content
    if media == JSON:
        check(response.json(), answer.content[media])


@pytest.mark.parametrize("one", STREAMED, ids=ident)
def test_a_stream_has_the_pieces_that_are_declared(of: ReferenceHouse, one: Endpoint) -> None:
    body = {**one.example.body, "stream": True}
    if one.path == "/v1/chat/completions":
        body["stream_options"] = {"include_usage": True}
    response = call(of, one, json=body)
    media = media_of(response)
    lines = [line for line in response.text.splitlines() if line]
    if media == "text/event-stream":
        lines = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    assert len(lines) > 2
    for line in lines:
        check(json.loads(line), one.answers[0].pieces[media])


_SCORED = Scored(-0.5, ((100, -0.5), (101, -1.5)))
_VERSIONS = {"return_weight_versions": True}
_USAGE = {"stream_options": {"include_usage": True}, **_VERSIONS}
_LOOK = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
_TOOLS = {"tools": [{"type": "function", "function": _LOOK}]}
_RESPONSE_TOOLS = {"tools": [{"type": "function", **_LOOK}]}
_MESSAGE_TOOLS = {"tools": [{"name": "look", "input_schema": {"type": "object"}}]}
_THOUGHT = ("<think>", "Hm.", "</think>", "A ", "stone.")
_CALL = ("See: ", '<tool_call>{"name": "look", ', '"arguments": {"at": 1}}</tool_call>')


@pytest.mark.parametrize(
    ("path", "asked", "texts", "told"),
    [
        ("/v1/chat/completions", {}, ("Hel", "lo"), ()),
        (
            "/v1/chat/completions",
            {"logprobs": True, "top_logprobs": 2, "n": 2, "return_token_ids": True, **_USAGE},
            ("Hel", "lo"),
            ('"top_logprobs":', '"usage":{', '"weight_versions":', '"prompt_token_ids":'),
        ),
        ("/v1/chat/completions", _USAGE, _THOUGHT, ('"reasoning_content":"Hm."', '"A "')),
        ("/v1/chat/completions", _TOOLS, _CALL, ('"tool_calls":[', '"tool_calls"}')),
        ("/v1/completions", {}, ("Hel", "lo"), ()),
        (
            "/v1/completions",
            {"logprobs": 2, "n": 2, **_USAGE},
            ("Hel", "lo"),
            ('"text_offset":', '"usage":{', '"weight_versions":'),
        ),
        (
            "/v1/responses",
            {"include": ["message.output_text.logprobs"], "top_logprobs": 2, **_VERSIONS},
            ("Hel", "lo"),
            ('"response.output_text.delta"', '"logprobs":[{'),
        ),
        ("/v1/responses", {}, _THOUGHT, ('"response.reasoning_text.delta"',)),
        (
            "/v1/responses",
            _RESPONSE_TOOLS,
            _CALL,
            ('"response.function_call_arguments.delta"',),
        ),
        ("/v1/messages", _VERSIONS, ("Hel", "lo"), ('"text_delta"', '"weight_versions":')),
        ("/v1/messages", {}, _THOUGHT, ('"thinking_delta"',)),
        ("/v1/messages", _MESSAGE_TOOLS, _CALL, ('"input_json_delta"', '"tool_use"')),
        ("/api/chat", _VERSIONS, ("Hel", "lo"), ('"done":true', '"weight_versions":')),
        ("/api/chat", {"think": True}, _THOUGHT, ('"thinking":"Hm."',)),
        ("/api/chat", _TOOLS, _CALL, ('"tool_calls":[',)),
        ("/api/generate", _VERSIONS, ("Hel", "lo"), ('"done":true', '"weight_versions":')),
    ],
)
def test_chunks_that_are_built_for_each_token_have_their_declared_types(
    of: ReferenceHouse,
    path: str,
    asked: dict[str, Any],
    texts: tuple[str, ...],
    told: tuple[str, ...],
) -> None:
    (one,) = [one for one in STREAMED if (one.method, one.path) == ("POST", path)]
    steps = answer(BOARD, *texts)
    if "top_logprobs" in asked or "logprobs" in asked:
        steps = [
            replace(step, logprobs=(_SCORED,)) if isinstance(step, Delta) else step
            for step in steps
        ]
    of.boards["chat"].scripts = {f"replica of {BOARD}": [steps]}
    response = call(of, one, json={**one.example.body, "stream": True, **asked})
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
    pieces = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(pieces) > 2
    for piece in pieces:
        check(piece, one.answers[0].pieces[media_of(response)])
    for part in told:
        assert part in response.text


@pytest.mark.parametrize("one", [one for one in ENDPOINTS if one.body], ids=ident)
def test_a_body_that_is_no_object_is_refused_as_declared(
    refusing: ReferenceHouse, one: Endpoint
) -> None:
    refused = call(refusing, one, json=[], params={}, headers={}, content=None)
    assert refused.status_code == 400
    assert 400 in one.errors
    check(refused.json(), SCHEMAS[one.shape.value])


@pytest.mark.parametrize("one", ENDPOINTS, ids=ident)
def test_who_may_call_is_declared(locked: ReferenceHouse, one: Endpoint) -> None:
    refused = {Access.OPEN: None, Access.OPERATE: 403, Access.ADMIN: 403}.get(one.access, 401)
    status = call(locked, one).status_code
    if refused is None:
        assert status == 200
    else:
        assert status == refused
        assert refused in one.errors


def test_a_change_that_fails_tells_why_as_declared(of: ReferenceHouse) -> None:
    of.head.says["perform"] = OperationConflict("Another one goes on.")
    (pause,) = [one for one in ENDPOINTS if one.path == "/pause"]
    refused = call(of, pause)
    assert refused.status_code == 409
    check(refused.json(), SCHEMAS[ErrorShape.OPENAI.value])


def test_the_document_is_valid_and_refers_to_what_is_there() -> None:
    made = API.document()
    names = [one["operationId"] for path in made["paths"].values() for one in path.values()]
    assert len(names) == len(set(names)) == len(ENDPOINTS)
    text = json.dumps(made)
    parts = made["components"]
    for kind in ("schemas", "responses"):
        for name in {one.partition('"')[0] for one in text.split(f"#/components/{kind}/")[1:]}:
            assert name in parts[kind]
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)
    for one in ENDPOINTS:
        placed = {each.name for each in one.parameters if each.place == "path"}
        assert placed == {part[1:-1] for part in one.path.split("/") if part.startswith("{")}


def test_the_bodies_of_examples_fit_their_own_schemas() -> None:
    for one in ENDPOINTS:
        if one.body is not None and one.example.body is not None:
            schema = API.schema(one.body.content[JSON])
            whole = {"components": {"schemas": SCHEMAS}, **schema}
            problems = [*Draft202012Validator(whole).iter_errors(one.example.body)]
            assert not problems, (ident(one), problems)


def asked_by(method: str, path: str) -> set[str]:
    """The keys that a strict body takes."""
    (one,) = [found for found in ENDPOINTS if (found.method, found.path) == (method, path)]
    assert one.body is not None
    schema = API.schema(one.body.content[JSON])
    if "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    assert schema["additionalProperties"] is False
    return set(schema["properties"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/cache/kv/clear", KvClearBody),
        ("/v1/cache/{model}", CacheBody),
        ("/v1/generations/{generation}/edit", EditBody),
        ("/v1/generations/{generation}/abort", ChoiceBody),
    ],
)  # the very models that refuse unknown keys are what the description is compared with
def test_keys_of_changes_are_those_that_are_read(path: str, body: type[RequestModel]) -> None:
    assert asked_by("POST", path) == set(kinds_of(body))


def test_the_command_of_an_example_is_the_example() -> None:
    for one in ENDPOINTS:
        words = shlex.split(curl(one).replace("\\\n", ""))
        assert words[0] == "curl"
        (url,) = [word for word in words if word.startswith(HOST)]
        assert url.partition("?")[0] == f"{HOST}{url_of(one)}"
        if one.example.body is not None:
            assert json.loads(words[words.index("-d") + 1]) == one.example.body, ident(one)


def test_anthropic_s_keys_are_in_the_list_of_models(of: ReferenceHouse) -> None:
    told = run_loop(of("GET", "/v1/models")).json()
    names = [one["id"] for one in told["data"]]
    assert names == ["sim-chat", "sim-chat:tone", "sim-chat:pirate", "sim-embed"]
    assert (told["first_id"], told["last_id"], told["has_more"]) == (names[0], names[-1], False)
    assert [one["display_name"] for one in told["data"]] == names
    assert {one["type"] for one in told["data"]} == {"model"}


def test_an_adapter_that_names_no_model_is_for_the_only_one_that_generates(
    of: ReferenceHouse,
) -> None:
    (push,) = [one for one in ENDPOINTS if ident(one) == "POST /v1/lora_adapters"]
    query = {name: value for name, value in push.example.query.items() if name != "model"}
    assert call(of, push, params=query).status_code == 200
    refused = call(of, push, params={**query, "model": "sim-chat,sim-embed"})
    assert refused.status_code == 400
    assert "one of 'sim-chat', 'sim-embed'" in refused.json()["error"]["message"]

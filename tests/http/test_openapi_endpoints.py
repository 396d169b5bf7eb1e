"""Odd requests to every endpoint: each is answered with a status that is declared, and its schema.

``make fuzz`` makes requests at random; these are those that no JSON Schema leads to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from rkserve.core.run_params import Guide
from rkserve.http.openapi import JSON, OCTETS, Endpoint
from rkserve.router.off_loop import GrammarChecker
from rkserve.sampling.grammar import refusal
from tests.http.test_openapi import API, ENDPOINTS, SCHEMAS, check, ident, media_of
from tests.support.http.reference_house import ReferenceHouse

pytestmark = [pytest.mark.virtual_time, pytest.mark.slow]

# As they stand in the path; the last ones lead elsewhere where somebody resolves them.
NAMES = {
    "NUL": "%00",
    "no UTF-8": "%ff",
    "surrogate": "%ED%A0%80",
    "emoji": quote("🐟"),
    "line break": "a%0d%0ab",
    "right to left": quote("\u202eabc"),
    "long": "a" * 4000,
    "percent": "%25s%7B0%7D",
    "blank": "%20",
    "up": "..%2f..%2fetc%2fpasswd",
}
# As they stand in JSON, in the place of each value.
VALUES = {
    "null": "null",
    "true": "true",
    "huge": "1" + "0" * 400,
    "digits": "9" * 5000,
    "small": "-1" + "0" * 30,
    "exponent": "1e999",
    "float": "1.5e-320",
    "2**63": str(2**63),
    "NaN": "NaN",
    "surrogate": '"\\ud800"',
    "NUL": '"a\\u0000b"',
    "empty": '""',
    "blank": '" "',
    "long": json.dumps("é" * 5000),
    "place": '"../../etc/passwd"',
    "format": '"{0}%s{{x}}"',
    "list": "[]",
    "nulls": "[null, null]",
    "lists": "[[[[]]]]",
    "deep": "[" * 150 + "]" * 150,
    "too deep": "[" * 5000 + "]" * 5000,
    "object": '{"": null}',
    "token": "[4294967296, -1]",
}
HOLE = "<hole>"
BODIES = {
    "nothing": b"",
    "blank": b" \n",
    "no UTF-8": b'{"model": "\xff"}',
    "byte order mark": b'\xef\xbb\xbf{"model": "sim-chat"}',
    "UTF-16": '{"model": "sim-chat"}'.encode("utf-16"),
    "NUL": b"\0",
    "cut": b'{"model": "sim-',
    "two": b"{}{}",
    "text": b'"text"',
    "twice": b'{"model": "sim-chat", "model": 5}',
    "unknown": b'{"no such key \xf0\x9f\x90\x9f": 1}',
}
TYPES = ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", OCTETS, "é")
UNDECLARED = 4
WITH_BODY = [one for one in ENDPOINTS if one.body is not None]
WITH_PATH = [one for one in ENDPOINTS if one.example.path]


class Here(GrammarChecker):
    """Tries grammars in this process: for another one the time of these tests does not wait."""

    async def _tried(self, guide: Guide) -> str | None:
        return refusal(guide)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceHouse]:
    """Return one Router for all requests: to make it takes longer than to answer dozens."""
    made = ReferenceHouse(tmp_path_factory.mktemp("odd") / "kept")
    made.service.guiding = Here()
    yield made
    made.responses.close()


@pytest.fixture
def of(house: ReferenceHouse) -> ReferenceHouse:
    """Return the Router with what an earlier request may have deleted."""
    house.remember()
    return house


def expect_declared(one: Endpoint, response: httpx.Response, what: str) -> None:
    """The answer is one of those that the endpoint declares."""
    status = response.status_code
    told = f"{what}: {status} {response.text[:300]}"
    assert status != 500, told
    for answer in one.answers:
        if answer.status == status:
            media = media_of(response)
            if answer.content:
                assert media in answer.content, told
            if media == JSON and answer.content:
                check(response.json(), answer.content[media])
            return
    assert status in one.errors, told
    if one.method != "HEAD":
        check_error(one.shape.value, *without_message(response.json()))


def without_message(error: dict[str, Any]) -> tuple[str, bool]:
    """Return an error object as JSON with an empty message, and whether that was a string."""
    inner = error.get("error")
    if isinstance(inner, dict):
        whole = {**error, "error": {**inner, "message": ""}}
        return json.dumps(whole), isinstance(inner.get("message"), str)
    return json.dumps({**error, "error": ""}), isinstance(inner, str)


@cache
def check_error(shape: str, error: str, has_message: bool) -> None:
    """Hold an error object to its schema, once for all messages."""
    assert has_message
    check(json.loads(error), SCHEMAS[shape])


def holes(value: Any) -> Iterator[Any]:
    """The value with a hole in the place of each part of it, and of all of it."""
    yield HOLE
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from ({**value, name: cut} for cut in holes(inner))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from ([*value[:at], cut, *value[at + 1 :]] for cut in holes(inner))


def every_key(one: Endpoint) -> dict[str, Any]:
    """Each key that a body may have, to stand alone beside those of the example.

    Grammars are tried in a process of their own, and read by one function for all dialects.
    """
    assert one.body is not None
    schema = API.schema(one.body.content[JSON])
    if "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    names = schema["properties"]
    guides = [] if one.path == "/v1/chat/completions" else [n for n in names if "guided" in n]
    return dict.fromkeys((name for name in names if name not in guides), HOLE)


def drawn(
    config: pytest.Config, places: Iterable[str], values: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield every ``--odd-every``-th pair of a place and a value, more where there are few places.

    Each value is tried somewhere.
    """
    there = list(places)
    every = max(1, min(config.getoption("--odd-every"), len(there)))
    for at, place in enumerate(there):
        for number, (what, value) in enumerate(values.items()):
            if (at + number) % every == 0:
                yield place, what, value


@pytest.mark.parametrize("one", WITH_PATH, ids=ident)
async def test_odd_names_in_the_path(of: ReferenceHouse, one: Endpoint) -> None:
    for placed in one.example.path:
        for what, name in NAMES.items():
            path = one.path.format(**{**one.example.path, placed: name})
            body = {} if one.example.body is None else {"json": one.example.body}
            response = await of.quick(one.method, path, **body)
            # A slash makes it the path of another endpoint, or of none.
            if "%2f" not in name or response.status_code not in (404, 405):
                expect_declared(one, response, what)


@pytest.mark.parametrize("one", WITH_BODY, ids=ident)
async def test_odd_values_in_the_body(
    of: ReferenceHouse, one: Endpoint, pytestconfig: pytest.Config
) -> None:
    example = one.example.body or {}
    bodies = [*holes(example), *({**example, name: HOLE} for name in every_key(one))]
    texts = dict.fromkeys(json.dumps(body) for body in bodies)
    url = one.path.format(**one.example.path)
    for text, what, value in drawn(pytestconfig, texts, VALUES):
        content = text.replace(f'"{HOLE}"', value)
        response = await of.quick(
            one.method, url, content=content.encode(), headers={"content-type": JSON}
        )
        expect_declared(one, response, f"{what} in {text}")


@pytest.mark.parametrize("one", WITH_BODY, ids=ident)
async def test_odd_bodies_and_types(of: ReferenceHouse, one: Endpoint) -> None:
    url = one.path.format(**one.example.path)
    for what, body in BODIES.items():
        response = await of.quick(one.method, url, content=body, headers={"content-type": JSON})
        expect_declared(one, response, what)
    written = json.dumps(one.example.body).encode()
    for kind in TYPES:
        given = {"content-type": kind.encode("latin-1")}
        response = await of.quick(one.method, url, content=written, headers=given)
        expect_declared(one, response, kind)


@pytest.mark.parametrize("one", ENDPOINTS, ids=ident)
async def test_odd_queries_and_headers(
    of: ReferenceHouse, one: Endpoint, pytestconfig: pytest.Config
) -> None:
    url = one.path.format(**one.example.path)
    body = {} if one.example.body is None else {"json": one.example.body}
    names = [each.name for each in one.parameters if each.place == "query"]
    odd = NAMES | {f"{what} of JSON": quote(value[:4000]) for what, value in VALUES.items()}
    # One function refuses what is not declared: each value is tried at some of the endpoints.
    turn = ENDPOINTS.index(one)
    every = min(UNDECLARED, pytestconfig.getoption("--odd-every"))
    undeclared = {what: odd[what] for at, what in enumerate(odd) if (at + turn) % every == 0}
    tried = [*drawn(pytestconfig, names, odd), *drawn(pytestconfig, ["limit", ""], undeclared)]
    for name, what, value in tried:
        response = await of.quick(one.method, f"{url}?{name}={value}&{name}", **body)
        expect_declared(one, response, f"{what} as {name}")
    for each in one.parameters:
        if each.place == "header":
            for value in ("", " ", "é", "a" * 4000, "nan", "-1", "1e999", "0", "\t,;"):
                given = {each.name: value.encode("latin-1")}
                response = await of.quick(one.method, url, headers=given, **body)
                expect_declared(one, response, f"{value} in {each.name}")


PATHS = sorted({one.path for one in ENDPOINTS})


async def test_other_methods_are_a_405_that_says_which_there_are(tmp_path: Path) -> None:
    of = ReferenceHouse(tmp_path / "kept")  # nothing has been changed in it
    of.remember()
    wrong = []
    for path in PATHS:
        try:
            await expect_405(of, path)
        except AssertionError as exc:  # all of them are shown together
            wrong.append(f"{path}: {exc}")
    of.responses.close()
    assert wrong == []


async def expect_405(of: ReferenceHouse, path: str) -> None:
    """No method is answered at a path but those that it declares."""
    here = [one for one in ENDPOINTS if one.path == path]
    url = path.format(**here[0].example.path)
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"} - {
        one.method for one in here
    }:
        response = await of.quick(method, url)
        if response.status_code == 405:
            check(response.json(), SCHEMAS[here[0].shape.value])
            assert response.headers["allow"] == ", ".join(sorted(one.method for one in here))
            assert len(response.headers.get_list("allow")) == 1
        else:  # the path is somebody's name to another endpoint
            others = [one for one in ENDPOINTS if one.method == method and "{" in one.path]
            assert response.status_code in (200, 400, 404)
            assert any(url.startswith(one.path.partition("{")[0]) for one in others)

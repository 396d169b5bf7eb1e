"""Bodies and answers of the KV cache's and the prompt caches' routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rkserve.api.admin.caches import (
    BuildCall,
    KvClearBody,
    KvScope,
    built,
    caches_list,
    ids_of,
    kv_list,
    parse_build,
)
from rkserve.api.admin.query import ControlRequest
from rkserve.api.common.renderer import Renderer
from rkserve.core.board_report import CacheEntry, KvReport
from rkserve.core.errors import (
    CacheUnsupported,
    ContextOverflow,
    RequestError,
    RkserveError,
    UnsupportedParameter,
)
from rkserve.models.folder import ModelFolder
from tests.support.values.wire_folders import VOCABULARY, make_folder, read_back

CONTEXT = 64
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return make_folder(tmp_path_factory.mktemp("folders") / "tiny")


@pytest.fixture(scope="module")
def renderer(folder: ModelFolder) -> Renderer:
    return Renderer(folder)


def body(**keys: Any) -> ControlRequest:
    return ControlRequest(body=json.dumps(keys).encode())


# --- clearing ---


@pytest.mark.parametrize(
    ("sent", "call"),
    [
        pytest.param(
            body(all=True), (None, KvScope(), None, None, None), id="everything, where that is said"
        ),
        pytest.param(
            body(keep_system_prompt=False, model="m", boards=["a", "b"]),
            (False, KvScope("m", ("a", "b")), None, None, None),
            id="of some boards",
        ),
        pytest.param(
            ControlRequest((("boards", "a,b"), ("keep_system_prompt", "true"))),
            (True, KvScope(None, ("a", "b")), None, None, None),
            id="by a query",
        ),
        pytest.param(
            ControlRequest((("board", "a"),), b'{"keep_system_prompt": false}'),
            (False, KvScope(None, ("a",)), None, None, None),
            id="by a query and a body",
        ),
        pytest.param(
            ControlRequest((("generation", "g"), ("ranges", "[[1,3]]"), ("choice", "1"))),
            (None, KvScope(), "g", 1, ((1, 3),)),
            id="of a generation, by a query",
        ),
        pytest.param(
            body(generation="g", ranges=[[1, 3]], choice=1),
            (None, KvScope(), "g", 1, ((1, 3),)),
            id="of a generation",
        ),
    ],
)
def test_a_clear_is_read(sent: ControlRequest, call: tuple[object, ...]) -> None:
    found = sent.read(KvClearBody)
    about = (found.generation, found.choice, found.ranges)
    assert (found.keep_system_prompt, found.where, *about) == call


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({}, "all"),
        ({"all": False}, "all"),
        ({"keep_system_prompt": False}, "all"),
        ({"all": True, "model": "m"}, "all"),
        ({"all": True, "generation": "g", "ranges": [[0, 1]]}, "all"),
        ({"boards": "a", "board": "b"}, "boards"),
        ({"keep_system": True}, "keep_system"),
        ({"keep_system_prompt": 1}, "keep_system_prompt"),
        ({"model": 5}, "model"),
        ({"boards": []}, "boards"),
        ({"boards": ["a", 5]}, "boards[1]"),
        ({"ranges": [[0, 1]]}, "ranges"),
        ({"choice": 1}, "choice"),
        ({"generation": "g"}, "ranges"),
        ({"generation": ""}, "generation"),
        ({"generation": "g", "ranges": [[2, 1]]}, "ranges[0]"),
        ({"generation": "g", "ranges": [[0, 1]], "model": "m"}, "model"),
        (
            {"generation": "g", "ranges": [[0, 1]], "keep_system_prompt": True},
            "keep_system_prompt",
        ),
    ],
    ids=str,
)
def test_a_bad_clear_is_named(keys: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        body(**keys).read(KvClearBody)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ((("keep_system_prompt", "true"),), "all"),
        ((("model", "m"), ("nonsense", "1")), "nonsense"),
        ((("model", ""),), "model"),
        ((("board", ""),), "board[0]"),
        ((("generation", "g"), ("ranges", "1-3")), "ranges"),
    ],
    ids=str,
)
def test_a_bad_query_clears_nothing(query: tuple[tuple[str, str], ...], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ControlRequest(query).read(KvClearBody)
    assert str(caught.value.param).partition("[")[0] == param.partition("[")[0]


# --- building ---


def test_a_cache_is_built_of_a_prompt_or_of_messages() -> None:
    assert parse_build(body(cache_name="a", prompt="x")) == BuildCall("a", "x")
    assert parse_build(body(cache_name="a", prompt=[5, 6])) == BuildCall("a", (5, 6))
    assert parse_build(body(cache_name="a", messages=HELLO)) == BuildCall(
        "a", messages=tuple(HELLO)
    )


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({}, "cache_name"),
        ({"cache_name": "a"}, "prompt"),
        ({"cache_name": "a", "prompt": "x", "messages": HELLO}, "messages"),
        ({"cache_name": "a", "prompt": ""}, "prompt"),
        ({"cache_name": "a", "prompt": ["x"]}, "prompt[0]"),
        ({"cache_name": "a", "messages": []}, "messages"),
        ({"cache_name": "a", "messages": [{"role": "x"}]}, "messages[0].role"),
        ({"cache_name": "a", "prompt": "x", "n": 1}, "n"),
        ({"cache_name": 5, "prompt": "x"}, "cache_name"),
        *(
            ({"cache_name": name, "prompt": "x"}, "cache_name")
            for name in ("", "..", "../x", "a/b", "/etc/x", "-a", ".a", "a b", "a\0", "x" * 65)
        ),
    ],
    ids=str,
)
def test_a_bad_build_is_named(keys: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_build(body(**keys))
    assert caught.value.param == param


def test_messages_are_cached_without_the_header_of_an_answer(
    renderer: Renderer, folder: ModelFolder
) -> None:
    ids = ids_of(parse_build(body(cache_name="a", messages=HELLO)), renderer, CONTEXT)
    assert read_back(folder, ids) == "<|im_start|>user\nHello<|im_end|>\n"


@pytest.mark.parametrize(("tokens", "fits"), [(CONTEXT - 1, True), (CONTEXT, False)])
def test_a_cache_leaves_room_for_something(renderer: Renderer, tokens: int, fits: bool) -> None:
    call = BuildCall("a", (7,) * tokens)
    if fits:
        assert len(ids_of(call, renderer, CONTEXT)) == tokens
    else:
        with pytest.raises(ContextOverflow) as caught:
            ids_of(call, renderer, CONTEXT)
        assert caught.value.param == "prompt"


def test_an_id_outside_of_the_vocabulary_is_named(renderer: Renderer) -> None:
    with pytest.raises(RequestError) as caught:
        ids_of(BuildCall("a", (7, VOCABULARY)), renderer, CONTEXT)
    assert caught.value.param == "prompt[1]"


@pytest.mark.parametrize("call", [BuildCall("a", "x"), BuildCall("a", messages=tuple(HELLO))])
def test_text_mode_has_no_prompt_caches(tmp_path: Path, call: BuildCall) -> None:
    renderer = Renderer(make_folder(tmp_path / "m", tokenizer=False))
    with pytest.raises(UnsupportedParameter, match="without a tokenizer"):
        ids_of(call, renderer, CONTEXT)


# --- answers ---


def test_kv_caches_are_told_by_board_and_added_up() -> None:
    reports = [
        KvReport("b", "m", (30, 0), 256, 1000, "pending"),
        KvReport("a", "m", (12,), 128, 1000, at_resume=10),
    ]
    lost: dict[str, RkserveError] = {"c": CacheUnsupported("No.")}
    assert kv_list(reports, lost) == {
        "object": "list",
        "data": [
            {
                "board": "a",
                "model": "m",
                "positions": 12,
                "entries": [12],
                "capacity": 128,
                "bytes": 12000,
                "status": "ok",
                "applied": "at_resume",
                "positions_at_resume": 10,
            },
            {
                "board": "b",
                "model": "m",
                "positions": 30,
                "entries": [30, 0],
                "capacity": 256,
                "bytes": 30000,
                "status": "pending",
                "applied": "at_once",
                "positions_at_resume": None,
            },
        ],
        "total": {"positions": 42, "capacity": 384, "bytes": 42000},
        "failed": [{"board": "c", "error": "cache_unsupported", "message": "No."}],
    }


def test_a_sum_with_an_unknown_in_it_is_unknown() -> None:
    told = kv_list([KvReport("a", "m", (1,), 9, 100), KvReport("b", "m", (1,), 9)], {})
    assert [entry["bytes"] for entry in told["data"]] == [100, None]
    assert told["total"]["bytes"] is None
    assert kv_list([], {})["total"] == {"positions": 0, "capacity": 0, "bytes": 0}


def test_caches_are_listed_by_name_and_parked_ones_last() -> None:
    entries = [
        CacheEntry("a", "m", None, 900, 5000, None, 60.0, 2.0),
        CacheEntry("b", "m", "doc", 500, 3000, "kind@v1-0-1"),
        CacheEntry("a", "m", "doc", 500, 3000, "kind@v1-0-1", 9.0, 1.0),
    ]
    told = caches_list(entries, {})["data"]
    assert [(one["cache_name"], one["board"], one["parked"]) for one in told] == [
        ("doc", "a", False),
        ("doc", "b", False),
        (None, "a", True),
    ]
    assert told[2]["tokens"] == 900
    assert (told[2]["bytes"], told[2]["age_s"], told[2]["idle_s"]) == (5000, 60.0, 2.0)


def test_a_built_cache_tells_every_board_in_order() -> None:
    made = [CacheEntry("c", "m", "doc", 5, 100), CacheEntry("a", "m", "doc", 5, 100)]
    told = built(BuildCall("doc", "x"), "m:kind", 5, made, {"b": CacheUnsupported("No.")})
    assert (told["cache_name"], told["model"], told["tokens"]) == ("doc", "m:kind", 5)
    assert told["boards"] == [
        {"board": "a", "tokens": 5, "bytes": 100},
        {"board": "b", "error": "cache_unsupported", "message": "No."},
        {"board": "c", "tokens": 5, "bytes": 100},
    ]

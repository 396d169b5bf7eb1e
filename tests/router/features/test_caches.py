"""KV caches and prompt caches over all boards: sizes, clearing, building and deleting."""

from __future__ import annotations

from typing import Any

import pytest

from rkserve.core.board_report import (
    GenerationInfo,
    GenerationState,
)
from rkserve.core.desired_state import Desired
from rkserve.core.errors import (
    BoardFailed,
    BoardSilent,
    CacheNotFound,
    CacheUnsupported,
    RequestError,
)
from rkserve.core.messages import ControlAction, Edit
from tests.support.boards.fake_boards import FakeBoards, report
from tests.support.cluster.fake_head import line
from tests.support.http.cache_house import CLEAR, MODEL_CACHE, SIZE, cache, house_of, kv
from tests.support.http.router_house import CHAT, House, chat, model

pytestmark = pytest.mark.virtual_time


@pytest.mark.promise("KV cache", "Sizes are exact and per board")
async def test_sizes_are_told_by_board_and_together() -> None:
    house = house_of("a", "b", "c", a__kv=kv("a", 12), b__kv=kv("b", 30, 8))
    house.boards.says["replica of c", "kv"] = BoardFailed("c", "no answer")
    response = await house("GET", SIZE, host="192.0.2.7")  # open to everybody
    found = response.json()
    assert [(one["board"], one["positions"]) for one in found["data"]] == [("a", 12), ("b", 38)]
    assert found["total"] == {"positions": 50, "capacity": 3 * 4096, "bytes": 50_000}
    assert [one["board"] for one in found["failed"]] == ["c"]


@pytest.mark.parametrize(
    ("query", "status", "asked"),
    [
        pytest.param("", 200, "ab", id="all"),
        pytest.param("?model=sim-chat", 200, "ab", id="of a model"),
        pytest.param("?board=b", 200, "b", id="of a board"),
        pytest.param("?model=sim-chat&board=a", 200, "a", id="of both"),
        pytest.param("?boards=a,b", 200, "ab", id="of several"),
        pytest.param("?modle=sim-chat", 400, "", id="a typing error asks none"),
        pytest.param("?model=gpt-5", 404, "", id="an unknown model"),
        pytest.param("?board=z", 404, "", id="an unknown board"),
        pytest.param("?board=%ff%00", 404, "", id="junk"),
    ],
)
async def test_sizes_can_be_asked_of_some(query: str, status: int, asked: str) -> None:
    house = house_of("a", "b", kv=kv("x", 1))
    response = await house("GET", SIZE + query)
    assert response.status_code == status
    assert sorted(replica[-1] for replica, _, _ in house.boards.asked) == list(asked)
    if status != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.promise("KV cache", "A clear empties the cache, with the result of every board")
async def test_clearing_tells_what_became_of_every_board() -> None:
    house = house_of("a", "b")
    house.boards.says = {
        ("replica of a", "clear_kv"): kv("a", 0, status="cleared"),
        ("replica of b", "clear_kv"): kv("b", 20, status="pending"),
    }
    response = await house("POST", CLEAR, json={"all": True})
    found = response.json()
    assert response.status_code == 200
    assert [one["status"] for one in found["data"]] == ["cleared", "pending"]
    assert {b: one["status"] for b, one in found["results"].items()} == {
        "a": "cleared",
        "b": "pending",
    }
    assert all(one["latency_ms"] >= 0 for one in found["results"].values())
    assert found["failed"] == []
    assert {args for _, _, args in house.boards.asked} == {(True,)}


async def test_clearing_some_and_not_others_is_a_207() -> None:
    house = house_of("a", "b", clear_kv=kv("a", 0, status="cleared"))
    house.boards.says["replica of b", "clear_kv"] = BoardFailed("b", "no answer")
    response = await house("POST", CLEAR + "?all=true")
    assert response.status_code == 207
    assert list(response.json()["results"]) == ["a"]
    assert [one["board"] for one in response.json()["failed"]] == ["b"]


async def test_clearing_none_is_the_error_and_no_207() -> None:
    house = house_of("a", clear_kv=BoardFailed("a", "no answer"))
    assert (await house("POST", CLEAR + "?all=1")).status_code == 503
    empty = await house_of()("POST", CLEAR + "?all=1")
    assert (empty.status_code, empty.json()["error"]["code"]) == (503, "no_board")


@pytest.mark.parametrize(
    ("body", "status", "asked"),
    [
        pytest.param({"boards": ["b"]}, 200, ["b"], id="one"),
        pytest.param({"boards": ["b", "a", "b"]}, 200, ["a", "b"], id="each once"),
        pytest.param({"boards": ["b", "z"]}, 404, [], id="an unknown one clears none"),
        pytest.param({"model": "gpt-5"}, 404, [], id="an unknown model"),
        pytest.param({"model": "sim-chat"}, 200, ["a", "b"], id="a model"),
        pytest.param({"keep_system": True}, 400, [], id="a typing error clears none"),
    ],
)
async def test_clearing_can_be_asked_of_some(
    body: dict[str, Any], status: int, asked: list[str]
) -> None:
    house = house_of("a", "b", clear_kv=kv("x", 0, status="cleared"))
    response = await house("POST", CLEAR, json=body)
    assert response.status_code == status
    assert sorted(replica[-1] for replica, _, _ in house.boards.asked) == asked


@pytest.mark.parametrize(
    ("query", "status", "asked"),
    [
        pytest.param("", 400, [], id="nothing named clears none"),
        pytest.param("?keep_system_prompt=true", 400, [], id="nor does what is to be spared"),
        pytest.param("?model=sim-chat&nonsense=1", 400, [], id="an unknown name clears none"),
        pytest.param("?all=true&model=sim-chat", 400, [], id="all of one model is neither"),
        pytest.param("?all=true", 200, [("a", True), ("b", True)], id="all that is said to be"),
        pytest.param("?board=b", 200, [("b", True)], id="the system prompt is spared"),
        pytest.param("?board=b&keep_system_prompt=0", 200, [("b", False)], id="unless it is said"),
    ],
)
async def test_a_clear_by_its_query_clears_what_it_names(
    query: str, status: int, asked: list[tuple[str, bool]]
) -> None:
    house = house_of("a", "b", clear_kv=kv("x", 0, status="cleared"))
    response = await house("POST", CLEAR + query)
    assert response.status_code == status, response.text
    told = sorted((replica[-1], args[0]) for replica, _, args in house.boards.asked)
    assert told == asked
    if status != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/generations/chatcmpl-1/pause?chioce=1"),
        ("POST", "/v1/generations/chatcmpl-1/abort?nonsense=1"),
        ("POST", "/v1/generations/chatcmpl-1/edit?text=x&nonsense=1"),
        ("POST", f"{MODEL_CACHE}?cache_name=a&prompt=x&nonsense=1"),
        ("DELETE", f"{MODEL_CACHE}/doc?board=a"),
    ],
)
async def test_an_unknown_name_in_a_query_does_nothing(method: str, path: str) -> None:
    house = house_of("a")
    response = await house(method, path)
    assert (response.status_code, response.json()["error"]["type"]) == (
        400,
        "invalid_request_error",
    )
    assert "Unknown parameter" in response.json()["error"]["message"]
    assert house.boards.asked == []


async def test_ranges_of_a_paused_generation_are_cleared_as_an_edit() -> None:
    held = GenerationInfo("chatcmpl-1/0", "a", "sim-chat", GenerationState.PAUSED, 5, 3, 8, 7)
    house = house_of("a", generations=[held], control=[held])
    body = {"generation": "chatcmpl-1", "ranges": [[1, 3]]}
    response = await house("POST", CLEAR, json=body)
    assert (response.status_code, response.json()["status"]) == (200, "paused")
    expected = ("chatcmpl-1", ControlAction.EDIT, Edit(clear=((1, 3),)), None)
    assert house.boards.asked[-1] == ("replica of a", "control", expected)


@pytest.mark.parametrize(
    "what",
    [{"prompt": "A long document."}, {"messages": [{"role": "system", "content": "Be kind."}]}],
    ids=["a prompt", "messages"],
)
async def test_a_cache_is_built_on_every_board(what: dict[str, Any]) -> None:
    house = house_of("a", "b", a__build_cache=cache("a"), b__build_cache=cache("b"))
    response = await house("POST", MODEL_CACHE, json={"cache_name": "doc", **what})
    found = response.json()
    assert (response.status_code, found["cache_name"], found["kept"]) == (200, "doc", True)
    (kept,) = [args[0] for method, args in house.head.asked if method == "keep_cache"]
    assert (kept.model, kept.name, len(kept.ids)) == ("sim-chat", "doc", found["tokens"])
    assert (kept.line, kept.version, kept.ref) == (None, None, None)
    assert [(one["board"], one["bytes"]) for one in found["boards"]] == [
        ("a", 3000),
        ("b", 3000),
    ]
    ((_, _, (name, ids, adapter)), _) = house.boards.asked
    assert (name, adapter, len(ids)) == ("doc", None, found["tokens"])
    tokenizer = model().renderer.tokenizer
    assert tokenizer is not None
    shown = tokenizer.text(ids)
    assert shown.rstrip().endswith(("document.", "Be kind."))  # no header of an answer


async def test_a_cache_that_only_some_boards_could_build_is_a_207() -> None:
    house = house_of("a", "b", build_cache=cache("a"))
    house.boards.says["replica of b", "build_cache"] = CacheUnsupported("The disk is full.")
    response = await house("POST", MODEL_CACHE, json={"cache_name": "doc", "prompt": "x"})
    assert response.status_code == 207
    good, bad = response.json()["boards"]
    assert (good["board"], bad["board"], bad["error"]) == ("a", "b", "cache_unsupported")


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        pytest.param(MODEL_CACHE, {"cache_name": "../x", "prompt": "x"}, 400, "cache_name"),
        pytest.param(MODEL_CACHE, {"prompt": "x"}, 400, "cache_name"),
        pytest.param(MODEL_CACHE, {"cache_name": "a"}, 400, "prompt"),
        pytest.param(MODEL_CACHE, {"cache_name": "a", "prompt": [10**9]}, 400, "prompt[0]"),
        pytest.param(MODEL_CACHE, {"cache_name": "a", "prompt": "x " * 9000}, 400, "prompt"),
        pytest.param("/v1/cache/gpt-5", {"cache_name": "a", "prompt": "x"}, 404, "model"),
        pytest.param("/v1/cache/sim-chat:z", {"cache_name": "a", "prompt": "x"}, 404, "model"),
        pytest.param("/v1/cache/a/b", {"cache_name": "a", "prompt": "x"}, 405, None),
    ],
    ids=[
        "climbs",
        "no name",
        "nothing",
        "no token",
        "too long",
        "no model",
        "no adapter",
        "no way",
    ],
)
async def test_a_cache_that_cannot_be_built_asks_no_board(
    path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    house = house_of("a")
    response = await house("POST", path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    assert house.boards.asked == []


async def test_what_no_board_can_build_is_said_in_its_words() -> None:
    house = house_of("a", "b", build_cache=CacheUnsupported("No caches here."))
    response = await house("POST", MODEL_CACHE, json={"cache_name": "doc", "prompt": "x"})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "No caches here."


async def test_a_build_that_takes_too_long_is_said_to_be_withdrawn() -> None:
    late = BoardSilent("a", "nothing came within 60 s")
    house = house_of("a", build_cache=late)
    response = await house("POST", MODEL_CACHE, json={"cache_name": "doc", "prompt": "x"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "board_failed")
    message = response.json()["error"]["message"]
    assert "nothing came within 60 s, and the build was withdrawn" in message


async def test_without_the_coordinator_a_cache_is_built_and_not_kept_and_none_is_deleted() -> None:
    house = house_of("a", build_cache=cache("a"), delete_cache=True, caches=[])
    house.head.away = True
    built = await house("POST", MODEL_CACHE, json={"cache_name": "doc", "prompt": "A text."})
    assert (built.status_code, built.json()["kept"]) == (200, False)
    assert (await house("GET", MODEL_CACHE)).json()["kept"] is None
    refused = await house("DELETE", f"{MODEL_CACHE}/doc")
    assert refused.json()["error"]["code"] == "coordinator_unavailable"
    assert "delete_cache" not in {method for _, method, _ in house.boards.asked}


async def test_a_cache_that_must_not_be_kept_is_left_on_no_board() -> None:
    house = house_of("a", build_cache=cache("a"), delete_cache=True)
    house.head.says["keep_cache"] = RequestError("the limit is 64", "cache_name")
    refused = await house("POST", MODEL_CACHE, json={"cache_name": "doc", "prompt": "A text."})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_name")
    assert house.boards.asked[-1] == ("replica of a", "delete_cache", ("doc",))


@pytest.mark.parametrize(("asked", "version"), [("tone", None), ("tone@v1", "v1")])
async def test_a_cache_of_an_adapter_is_kept_for_its_name_or_for_its_version(
    asked: str, version: str | None
) -> None:
    house = house_of("a", build_cache=cache("a"))
    house.head.desired = Desired(1, lines=(line(),))
    made = {"cache_name": "doc", "prompt": "A text."}
    assert (await house("POST", f"/v1/cache/{asked}", json=made)).status_code == 200
    (kept,) = [args[0] for method, args in house.head.asked if method == "keep_cache"]
    assert (kept.model, kept.line, kept.version) == ("sim-chat", "tone", version)


async def test_caches_are_listed_board_by_board() -> None:
    house = house_of("a", "b", a__caches=[cache("a"), cache("a", None)], b__caches=[])
    response = await house("GET", MODEL_CACHE, host="192.0.2.7")
    assert [(one["cache_name"], one["parked"]) for one in response.json()["data"]] == [
        ("doc", False),
        (None, True),
    ]


async def test_a_cache_is_deleted_wherever_it_is() -> None:
    house = house_of("a", "b", a__delete_cache=True, b__delete_cache=False)
    response = await house("DELETE", f"{MODEL_CACHE}/doc")
    assert response.json() == {
        "cache_name": "doc",
        "deleted": True,
        "model": "sim-chat",
        "boards": ["a"],
        "failed": [],
    }
    house.boards.says = {("", "delete_cache"): False}
    gone = await house("DELETE", f"{MODEL_CACHE}/doc")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "cache_not_found")
    house.boards.says["replica of b", "delete_cache"] = BoardFailed("b", "no answer")
    assert (await house("DELETE", f"{MODEL_CACHE}/doc")).status_code == 503


@pytest.mark.parametrize("name", ["..%2f..%2fetc", "a%2fb", "%2e%2e", ".x", "a%00", "x" * 65])
async def test_a_name_that_climbs_is_told_the_rule(name: str) -> None:
    house = house_of("a")
    response = await house("DELETE", f"{MODEL_CACHE}/{name}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_name")
    assert "begins with a letter" in response.json()["error"]["message"]
    assert house.boards.asked == []


async def test_a_request_for_a_cache_that_no_board_has_is_a_404() -> None:
    lacking = [[CacheNotFound("doc")]]
    boards = FakeBoards([report("a")], {"replica of a": list(lacking)})
    response = await House(boards)("POST", CHAT, json=chat(use_cache="doc"))
    assert (response.status_code, response.json()["error"]["param"]) == (404, "use_cache")

"""The routes of KV caches, prompt caches, boards and adapters, and who may call them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import SecretStr

from rkserve.config.router import RouterConfig
from rkserve.core.board_report import (
    BoardState,
    CacheEntry,
    GenerationInfo,
    GenerationState,
    Hardware,
    KvReport,
)
from rkserve.core.desired_state import Desired
from rkserve.core.errors import (
    AdapterBroken,
    BoardFailed,
    BoardSilent,
    CacheNotFound,
    CacheUnsupported,
    RequestError,
)
from rkserve.core.messages import ControlAction, Edit
from rkserve.http.generation_routes import add_control
from rkserve.models.folder import open_model_folder
from rkserve.router.served_models import ServedModel
from tests.support.boards.fake_boards import FakeBoards, report
from tests.support.boards.own_time import run_loop
from tests.support.cluster.fake_head import line
from tests.support.http.router_house import CHAT, FOLDER, House, chat, model
from tests.support.paths import PROJECT

pytestmark = pytest.mark.virtual_time

SIZE, CLEAR = "/v1/cache/kv/size", "/v1/cache/kv/clear"
MODEL_CACHE = "/v1/cache/sim-chat"
DOCS = PROJECT / "docs" / "reference" / "api.md"


def house_of(*boards: str, config: RouterConfig | None = None, **says: Any) -> House:
    """Boards with things to say; ``a_kv=...`` is what a says to kv, ``kv=...`` what all do."""
    found = FakeBoards([report(b) for b in boards])
    for key, said in says.items():
        board, _, method = key.partition("__")
        where = (f"replica of {board}", method) if method else ("", key)
        found.says[where] = said
    return House(found, config or RouterConfig())


def kv(board: str, *entries: int, status: str = "ok", size: int | None = 1000) -> KvReport:
    """What a board holds."""
    return KvReport(board, "sim-chat", entries, 4096 * len(entries), size, status)


def cache(board: str, name: str | None = "doc", adapter: str | None = None) -> CacheEntry:
    """One file."""
    return CacheEntry(board, "sim-chat", name, 500, 3000, adapter)


# -- the KV cache ---------------------------------------------------------------------------------


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


# -- prompt caches --------------------------------------------------------------------------------


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


# -- boards ---------------------------------------------------------------------------------------


async def test_boards_tell_what_they_are_and_how_they_fare() -> None:
    hardware = Hardware(soc="RK3588", npu_load=(10.0, 20.0, 0.0), temperature_c=61.5)
    house = house_of("a")
    house.boards.reported = [
        report("sim/a@node", hardware=hardware, kv_positions=7, holdings=b"\xff\0"),
        report("b", state=BoardState.FAILED, reason="no such library"),
    ]
    first, second = (await house("GET", "/v1/boards", host="192.0.2.7")).json()["data"]
    assert (first["id"], first["state"], first["reason"]) == ("b", "failed", "no such library")
    assert (second["kv_positions"], second["hardware"]["npu_load"]) == (7, [10.0, 20.0, 0.0])
    assert "holdings" not in second
    assert (await house("GET", "/v1/boards/sim/a@node")).json() == second
    gone = await house("GET", "/v1/boards/z")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "board_not_found")


# -- who may call ---------------------------------------------------------------------------------

GUARDED = [
    ("GET", "/v1/generations"),
    ("POST", CLEAR),
    ("POST", MODEL_CACHE),
    ("DELETE", f"{MODEL_CACHE}/doc"),
]
KEY = "schlüssel-9"
guarded = pytest.mark.parametrize(("method", "path"), GUARDED, ids=str)


def sayings() -> dict[str, Any]:
    """Boards to which every guarded call can be made."""
    return {
        "generations": [],
        "clear_kv": kv("a", 0),
        "build_cache": cache("a"),
        "delete_cache": True,
    }


async def call(house: House, method: str, path: str, **how: Any) -> int:
    """Make a guarded call and return its status; a refusal must have asked no board."""
    bodies = {MODEL_CACHE: {"cache_name": "doc", "prompt": "x"}, CLEAR: {"all": True}}
    body = bodies.get(path)
    response = await house(method, path, json=body, **how)
    if response.status_code == 403:
        assert response.json()["error"]["code"] == "forbidden"
        assert house.boards.asked == []
    return response.status_code


@guarded
@pytest.mark.parametrize(
    ("host", "headers", "status"),
    [
        pytest.param("127.0.0.1", {}, 200, id="loopback"),
        pytest.param("127.1.2.3", {}, 200, id="all of 127/8"),
        pytest.param("::1", {}, 200, id="loopback in IPv6"),
        pytest.param("::ffff:127.0.0.1", {}, 200, id="loopback on a socket for both"),
        pytest.param("192.168.1.7", {}, 403, id="the network"),
        pytest.param("::ffff:192.168.1.7", {}, 403, id="the network on a socket for both"),
        pytest.param("fe80::1", {}, 403, id="the link"),
        pytest.param("localhost.example.com", {}, 403, id="a name"),
        pytest.param("192.168.1.7", {"authorization": "Bearer "}, 403, id="an empty key"),
        pytest.param("127.0.0.1", {"x-forwarded-for": "192.0.2.7"}, 403, id="behind a proxy"),
        pytest.param("127.0.0.1", {"origin": "http://localhost"}, 403, id="a page in a browser"),
    ],
)
def test_without_a_key_only_this_machine_may(
    method: str, path: str, host: str, headers: dict[str, str], status: int
) -> None:
    async def main() -> None:
        house = house_of("a", **sayings())
        assert await call(house, method, path, host=host, headers=headers) == status

    run_loop(main())


@guarded
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(f"Bearer {KEY}".encode(), 200, id="the key"),
        pytest.param(f"bearer  {KEY}".encode(), 200, id="written otherwise"),
        pytest.param(b"Bearer another", 403, id="another key"),
        pytest.param(f"Bearer {KEY}x".encode(), 403, id="a longer one"),
        pytest.param(f"Basic {KEY}".encode(), 403, id="another scheme"),
        pytest.param(KEY.encode(), 403, id="no scheme"),
        pytest.param(b"", 403, id="nothing"),
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.7"])
def test_with_a_key_the_key_counts_and_not_the_place(
    method: str, path: str, sent: bytes, status: int, host: str
) -> None:
    async def main() -> None:
        house = house_of("a", config=RouterConfig(admin_key=SecretStr(KEY)), **sayings())
        headers = {b"authorization": sent} if sent else {}
        assert await call(house, method, path, host=host, headers=headers) == status

    run_loop(main())


async def test_a_refusal_says_what_to_do_and_not_the_key() -> None:
    house = house_of("a", config=RouterConfig(admin_key=SecretStr(KEY)))
    text = (await house("GET", "/v1/generations")).text
    assert "Authorization: Bearer" in text
    assert KEY not in text
    text = (await house_of("a")("GET", "/v1/generations", host="192.0.2.7")).text
    assert "RKSERVE_ADMIN_KEY" in text


# -- adapters -------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> ServedModel:
    """sim-chat with two versions of the adapter kind, and a broken one, in place of its own."""
    folder = tmp_path / "sim-chat"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("adapters"))
    for name, version in (("kind", "v9"), ("kind", "v10"), ("torn", "v1")):
        place = folder / "adapters" / name / version
        place.mkdir(parents=True)
        (place / "adapter.rkllm").write_bytes(f"{name} {version}".encode())
    (place / "manifest.json").write_text('{"size": 1}')
    return ServedModel.open(open_model_folder(folder))


@pytest.mark.parametrize(
    ("asked", "version"),
    [
        pytest.param("kind", "v10", id="the newest"),
        pytest.param("sim-chat:kind", "v10", id="of its model"),
        pytest.param("kind@v9", "v9", id="another version"),
        pytest.param("sim-chat:kind@v9", "v9", id="of its model"),
        pytest.param("sim-chat", None, id="none"),
    ],
)
async def test_the_model_s_name_chooses_the_adapter(
    served: ServedModel, asked: str, version: str | None
) -> None:
    house = House(FakeBoards.answering("a"), served=served)
    response = await house("POST", CHAT, json={**chat(), "model": asked})
    assert response.json()["model"] == asked
    ((_, request),) = house.boards.opened
    assert request.model == "sim-chat"
    assert (request.adapter and request.adapter.version) == version
    plain = await house("POST", CHAT, json=chat())
    same = response.json()["system_fingerprint"] == plain.json()["system_fingerprint"]
    assert same is (version is None)
    assert house.metric("rkserve_ttft_seconds_count", model="sim-chat") == 2


@pytest.mark.parametrize(
    ("asked", "status", "code"),
    [
        pytest.param("none", 404, "model_not_found", id="an unknown adapter"),
        pytest.param("sim-chat:none", 404, "model_not_found", id="of a known model"),
        pytest.param("kind@v1", 404, "model_not_found", id="an unknown version"),
        pytest.param("other:kind", 404, "model_not_found", id="an unknown model"),
        pytest.param("kind@", 404, "model_not_found", id="no version"),
        pytest.param("torn", 400, "adapter_broken", id="a broken one"),
    ],
)
async def test_an_adapter_that_is_not_there_is_refused(
    served: ServedModel, asked: str, status: int, code: str
) -> None:
    house = House(FakeBoards.answering("a"), served=served)
    response = await house("POST", CHAT, json={**chat(), "model": asked})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert response.json()["error"]["param"] == "model"
    assert house.boards.opened == []


async def test_a_file_that_boards_refuse_is_refused_by_its_name(served: ServedModel) -> None:
    script = [AdapterBroken("kind@v10", "the library refuses it")]
    boards = FakeBoards([report("a")], {"replica of a": [script]})
    response = await House(boards, served=served)("POST", CHAT, json={**chat(), "model": "kind"})
    assert response.status_code == 400
    assert "kind@v10" in response.json()["error"]["message"]


async def test_adapters_are_listed_behind_their_model(served: ServedModel) -> None:
    house = House(FakeBoards.answering("a"), served=served)
    base, kind, torn = (await house("GET", "/v1/models")).json()["data"]
    assert (base["id"], kind["id"], torn["id"]) == (
        "sim-chat",
        "sim-chat:kind",
        "sim-chat:torn",
    )
    assert kind["parent"] == "sim-chat"
    told = kind["rkserve"]
    assert (told["version"], len(told["digest"])) == ("v10", 64)
    assert [one["version"] for one in told["versions"]] == ["v9", "v10"]
    assert "size 1" in torn["rkserve"]["broken"]
    assert (await house("GET", "/v1/models/kind")).json() == kind
    older = (await house("GET", "/v1/models/sim-chat:kind@v9")).json()
    assert (older["id"], older["rkserve"]["version"]) == ("sim-chat:kind@v9", "v9")
    assert (await house("GET", "/v1/models/torn")).status_code == 400
    assert (await house("GET", "/v1/models/kind@v1")).status_code == 404


async def test_caches_of_an_adapter_are_built_with_it_and_listed_alone(served: ServedModel) -> None:
    house = House(FakeBoards([report("a")]), served=served)
    house.boards.says["", "build_cache"] = lambda name, _, ref: cache("a", name, ref.key)
    body = {"cache_name": "doc", "prompt": "x"}
    response = await house("POST", "/v1/cache/kind@v9", json=body)
    assert response.json()["model"] == "kind@v9"
    ((_, _, (_, _, ref)),) = house.boards.asked
    assert (ref.name, ref.version) == ("kind", "v9")
    house.boards.says["", "caches"] = [cache("a", "other"), cache("a", "doc", ref.key)]
    listed = (await house("GET", "/v1/cache/kind@v9")).json()["data"]
    assert [one["cache_name"] for one in listed] == ["doc"]


# -- documentation --------------------------------------------------------------------------------


def test_every_route_is_documented() -> None:
    app = FastAPI()
    add_control(app, house_of().service)
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    assert len(routes) > 12
    shown = re.sub(r"{.*?}", "{}", DOCS.read_text(encoding="utf-8"))
    for route in routes:
        for method in route.methods or ():
            assert f"`{method} {re.sub('{.*?}', '{}', route.path)}`" in shown

"""The routes of KV caches, prompt caches, boards and adapters, and who may call them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from rkserve.config.router import RouterConfig
from rkserve.core.board_report import (
    BoardState,
    Hardware,
)
from rkserve.core.errors import (
    AdapterBroken,
)
from rkserve.http.generation_routes import add_control
from rkserve.http.openapi import DescribedRoute
from rkserve.models.folder import open_model_folder
from rkserve.router.served_models import ServedModel
from tests.support.boards.fake_boards import FakeBoards, report
from tests.support.boards.own_time import run_loop
from tests.support.http.cache_house import CLEAR, MODEL_CACHE, cache, house_of, kv
from tests.support.http.router_house import CHAT, FOLDER, House, chat
from tests.support.paths import PROJECT

pytestmark = pytest.mark.virtual_time

DOCS = PROJECT / "docs" / "reference" / "api.md"


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
        pytest.param(b"Bearer another", 401, id="another key"),
        pytest.param(f"Bearer {KEY}x".encode(), 401, id="a longer one"),
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


@pytest.mark.promise("KV cache", "Adapters do not share KV caches")
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


def test_every_route_is_documented() -> None:
    app = FastAPI()
    add_control(app, house_of().service)
    routes = [route for route in app.routes if isinstance(route, DescribedRoute)]
    assert len(routes) > 12
    shown = re.sub(r"{.*?}", "{}", DOCS.read_text(encoding="utf-8"))
    for route in routes:
        for method in route.methods or ():
            assert f"`{method} {re.sub('{.*?}', '{}', route.path)}`" in shown

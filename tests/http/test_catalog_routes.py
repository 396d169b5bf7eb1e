"""The catalogue over HTTP: uploads by the client that ships, their refusals, and fetches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from rkserve.client import AsyncClient
from rkserve.client.errors import CallError, Conflict, SourceFailed
from rkserve.config.router import RouterConfig
from rkserve.coordinator.artifacts.model_catalog import ModelCatalog
from rkserve.core.board_report import (
    BoardReport,
    BoardState,
    CopyState,
    FetchProgress,
    Hardware,
    ModelCopy,
)
from rkserve.core.errors import ArtifactNotFound, BoardFailed, BoardStartFailed
from rkserve.models.index import index_folder
from tests.models.test_incoming import WEIGHTS, contents
from tests.models.test_index import PIECE, folder_with
from tests.support.boards.fake_boards import FakeBoards, report
from tests.support.cluster.fake_head import FakeHead
from tests.support.http.router_house import CHAT, House
from tests.support.http.talk import chat_body

MODELS = "/v1/catalog/models"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model on a PC."""
    return folder_with(tmp_path / "pc" / "chat", WEIGHTS * 2000)


@pytest.fixture
def catalog(tmp_path: Path) -> ModelCatalog:
    """The catalogue of the head."""
    return ModelCatalog(tmp_path / "head", PIECE)


def house_of(catalog: ModelCatalog, boards: FakeBoards | None = None, **config: Any) -> House:
    """A Router whose Coordinator has the catalogue."""
    head = FakeHead(
        says={
            "catalog_models": catalog.models,
            "catalog_upload": lambda index, replace, _: catalog.upload_begin(
                index, replace=replace
            ),
            "catalog_piece": catalog.upload_piece,
            "catalog_end": catalog.upload_end,
            "catalog_target": lambda name: (catalog.platform(name), 5e6),
        }
    )
    boards = boards or FakeBoards.answering("a")
    return House(boards, head=head, config=RouterConfig(**config))


def client_of(house: House) -> AsyncClient:
    """The client that ships, on the machine of the Router."""
    transport = httpx.ASGITransport(house.app, client=("127.0.0.1", 1))
    return AsyncClient("http://localhost", transport=transport)


async def test_a_model_is_pushed_in_pieces_once(source: Path, catalog: ModelCatalog) -> None:
    shown: list[tuple[float, float]] = []
    async with client_of(house_of(catalog)) as client:
        pushed = await client.push_model(
            source, on_progress=lambda one: shown.append((one.done, one.total))
        )
        again = await client.push_model(source)
        (listed,) = await client.catalog()
    assert contents(catalog.folder / "chat") == contents(source)
    size = sum(len(content) for content in contents(source).values())
    assert (pushed.name, pushed.size_bytes, pushed.sent_bytes) == ("chat", size, size)
    assert (again.version, again.sent_bytes) == (pushed.version, 0)
    assert shown[-1] == (size, size)
    assert len(shown) > 3
    assert (listed["name"], listed["version"], listed["bytes"]) == ("chat", pushed.version, size)


async def test_a_push_goes_on_after_another_coordinator_took_over(
    source: Path, catalog: ModelCatalog
) -> None:
    house, calls = house_of(catalog), [0]

    def piece(*args: Any) -> int:
        calls[0] += 1
        if calls[0] == 4:
            catalog.close()  # the successor knows of no upload
        return catalog.upload_piece(*args)

    house.head.says["catalog_piece"] = piece
    async with client_of(house) as client:
        pushed = await client.push_model(source)
    assert contents(catalog.folder / "chat") == contents(source)
    assert pushed.sent_bytes == pushed.size_bytes  # nothing was sent twice
    assert [method for method, _ in house.head.asked].count("catalog_upload") == 2


async def test_a_push_that_the_head_always_forgets_ends(
    source: Path, catalog: ModelCatalog
) -> None:
    house = house_of(catalog)
    house.head.says["catalog_piece"] = ArtifactNotFound("No upload of 'chat' goes on.", "name")
    async with client_of(house) as client:
        with pytest.raises(CallError, match="No upload"):
            await client.push_model(source)


async def test_a_piece_that_was_damaged_on_its_way_is_refused(
    source: Path, catalog: ModelCatalog
) -> None:
    house, index = house_of(catalog), index_folder(source, PIECE)
    begun = await house("POST", MODELS, json=index.model_dump(mode="json"))
    assert begun.status_code == 200
    at = {"version": index.version, "path": "model.rkllm", "number": "0"}
    answer = await house("PUT", f"{MODELS}/chat/pieces", params=at, content=bytes(PIECE))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "piece_corrupted")
    end = await house("POST", f"{MODELS}/chat/complete", params={"version": index.version})
    assert (end.status_code, end.json()["error"]["code"]) == (400, "artifact_refused")


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", ".ssh/x", "a\\b", "a/../b"])
async def test_a_file_that_leads_elsewhere_is_refused(
    path: str, source: Path, catalog: ModelCatalog, tmp_path: Path
) -> None:
    body = index_folder(source, PIECE).model_dump(mode="json")
    body["files"][0]["path"] = path
    answer = await house_of(catalog)("POST", MODELS, json=body)
    assert answer.status_code == 400
    assert "leads out of" in answer.json()["error"]["message"]
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("name", ["../chat", ".chat", "a/b", "x" * 200])
async def test_a_name_that_leads_elsewhere_is_refused(
    name: str, source: Path, catalog: ModelCatalog, tmp_path: Path
) -> None:
    body = index_folder(source, PIECE).model_dump(mode="json") | {"name": name}
    answer = await house_of(catalog)("POST", MODELS, json=body)
    assert answer.status_code == 400
    assert not (tmp_path / "head").exists()


async def test_a_disk_without_room_is_a_507(source: Path, tmp_path: Path) -> None:
    catalog = ModelCatalog(tmp_path / "head", PIECE, free=lambda _folder: 5_000_000)
    async with client_of(house_of(catalog)) as client:
        with pytest.raises(CallError, match=r"5\.0 MB free.*needs 10\.\d MB") as refused:
            await client.push_model(source)
    assert (refused.value.status, refused.value.code) == (507, "disk_full")


async def test_another_model_of_the_name_is_a_conflict(source: Path, catalog: ModelCatalog) -> None:
    folder_with(catalog.folder / "chat", b"another one")
    async with client_of(house_of(catalog)) as client:
        with pytest.raises(Conflict, match="--replace"):
            await client.push_model(source)
        await client.push_model(source, replace=True)
    assert contents(catalog.folder / "chat") == contents(source)


async def test_a_folder_without_a_model_is_not_pushed(
    tmp_path: Path, catalog: ModelCatalog
) -> None:
    async with client_of(house_of(catalog)) as client:
        with pytest.raises(SourceFailed, match="no model folder"):
            await client.push_model(tmp_path / "missing")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", MODELS),
        ("PUT", f"{MODELS}/chat/pieces"),
        ("POST", f"{MODELS}/chat/complete"),
        ("POST", f"{MODELS}/chat/prefetch"),
    ],
)
async def test_an_upload_needs_the_admin_key(method: str, path: str, catalog: ModelCatalog) -> None:
    house = house_of(catalog, admin_key=SecretStr("right"))
    assert (await house(method, path, json={})).status_code == 403
    assert house.head.asked == []


async def test_a_request_for_a_model_that_is_fetched_is_told_when_to_come_back(
    catalog: ModelCatalog,
) -> None:
    fetch = FetchProgress(400_000_000, 2_000_000_000, 40_000_000.0, "head", 1)
    boards = FakeBoards([report("a", state=BoardState.FETCHING, fetch=fetch)])
    house = house_of(catalog, boards)
    answer = await house("POST", CHAT, json=chat_body("Hello"))
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("model_fetching", "overloaded_error")
    assert "400.0 of 2000.0 MB (20 %)" in error["message"]
    assert answer.headers["retry-after"] == "45"  # 40 s for the rest, and the load
    (board,) = (await house("GET", "/v1/boards")).json()["data"]
    assert board["state"] == "fetching"
    assert board["fetch"] == {
        "fetched_bytes": 400_000_000,
        "total_bytes": 2_000_000_000,
        "bytes_per_s": 40_000_000.0,
        "source": "head",
        "corrupted": 1,
    }


async def test_a_board_that_fetches_does_not_hold_up_those_that_serve(
    catalog: ModelCatalog,
) -> None:
    boards = FakeBoards.answering("a")
    boards.reported.append(report("b", state=BoardState.FETCHING, fetch=FetchProgress(1, 9)))
    house = house_of(catalog, boards)
    assert (await house("POST", CHAT, json=chat_body("Hello"))).status_code == 200
    # A board that fetches can only report: calls to all boards leave it out.
    assert [one.board_id for one in house.service.fleet.addresses()] == ["a"]


# -- before a model is deployed --------------------------------------------------------------------


def on(board: str, node: str, soc: str = "RK3588", **changes: Any) -> BoardReport:
    return report(board, node=node, hardware=Hardware(soc=soc), **changes)


async def test_one_board_of_each_node_fetches_a_model_and_each_result_is_told(
    source: Path, catalog: ModelCatalog
) -> None:
    (source / "manifest.json").write_text('{"platform": "RK3588"}')
    fetching = FetchProgress(1, 9)
    boards = FakeBoards(
        [
            on("b@one", "one"),
            on("a@one", "one"),
            on("a@two", "two", "RK3588S", state=BoardState.FETCHING, fetch=fetching),
            on("a@three", "three", "RK3576"),
            on("a@four", "four", ""),
        ],
        failure=BoardStartFailed("a@five", "no such library"),
    )
    boards.says = {
        ("replica of a@one", "prefetch_model"): ModelCopy(CopyState.PRESENT, "v" * 64),
        ("replica of a@two", "prefetch_model"): ModelCopy(
            CopyState.FETCHING, reason="verifies the model", fetch=FetchProgress(4, 8, 2.5, "head")
        ),
        ("replica of a@four", "prefetch_model"): BoardFailed("replica of a@four", "it is frozen"),
    }
    house = house_of(catalog, boards)
    await house.service.fleet.refresh_failures()
    async with client_of(house) as client:
        await client.push_model(source)
    answer = await house("POST", f"{MODELS}/chat/prefetch", json={"again": True})
    assert answer.status_code == 200
    rows = {row["board"]: row for row in answer.json()["boards"]}
    told = {board: (row["state"], row["reason"]) for board, row in rows.items()}
    assert told == {
        "a@one": ("present", ""),
        "a@two": ("fetching", "verifies the model"),
        "a@three": ("unfit", "the model is for RK3588, and this is RK3576"),
        "a@four": ("failed", "it is frozen"),
        "a@five": ("failed", "the board cannot start: no such library"),
    }
    assert rows["a@one"]["version"] == "v" * 64
    assert [rows["a@two"][key] for key in ("fetched_bytes", "total_bytes", "bytes_per_s")] == [
        *(4, 8, 2.5)
    ]
    asked = {(replica, args) for replica, method, args in boards.asked if "fetch" in method}
    assert asked == {
        (f"replica of {name}", ("chat", 5e6, True)) for name in ("a@one", "a@two", "a@four")
    }


async def test_a_board_that_answers_fetches_for_one_of_its_node_that_does_not(
    source: Path, catalog: ModelCatalog
) -> None:
    boards = FakeBoards([on("a@one", "one"), on("b@one", "one"), on("a@two", "two")])
    boards.says = {("", "prefetch_model"): ModelCopy(CopyState.PRESENT)}
    house = house_of(catalog, boards)
    async with client_of(house) as client:
        await client.push_model(source)
        await house.service.fleet.refresh()
        boards.reported = [on("b@one", "one")]
        await house.service.fleet.refresh()
        rows = await client.prefetch_model("chat")
    told = {row["board"]: (row["state"], row["reason"]) for row in rows}
    assert told["b@one"] == ("present", "")
    assert told["a@two"][0] == "failed"
    assert "does not answer" in told["a@two"][1]
    assert len(told) == 2


async def test_a_model_that_the_catalogue_lacks_is_fetched_by_no_board(
    catalog: ModelCatalog,
) -> None:
    house = house_of(catalog)
    answer = await house("POST", f"{MODELS}/chat/prefetch", json={})
    assert answer.status_code == 404
    assert "has no model 'chat'" in answer.json()["error"]["message"]

"""The upload of a model by the client: resumption, damage on the way, and files that change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from rkserve.client import Client
from rkserve.client.errors import Refused, SourceFailed
from tests.models.test_index import folder_with
from tests.support.cluster.fake_control import FakeControl, error, ok

BEGIN = "POST /v1/catalog/models"
PIECES = "PUT /v1/catalog/models/chat/pieces"
END = "POST /v1/catalog/models/chat/complete"
WEIGHTS = b"w" * 2500


def begun(**missing: list[int]) -> httpx.Response:
    """The head's answer to an index."""
    named = {f"{name}.rkllm": numbers for name, numbers in missing.items()}
    return ok({"complete": False, "received_bytes": 0, "missing": named})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model on a PC."""
    return folder_with(tmp_path / "chat", WEIGHTS)


def client_of(server: FakeControl) -> Client:
    """A client whose clock and pauses are the server's."""
    transport = httpx.MockTransport(server.handle)
    return Client(transport=transport, sleep=server.sleep, clock=server.clock)


def test_only_missing_pieces_are_sent(folder: Path) -> None:
    server = FakeControl().on(BEGIN, begun(model=[0])).on(PIECES, ok({"received_bytes": 2500}))
    server.on(END, ok({"complete": True}))
    pushed = client_of(server).push_model(folder)
    assert server.routes == [BEGIN, PIECES, END]
    assert (server.bodies[1], pushed.sent_bytes) == (WEIGHTS, 2500)
    query = dict(server.asked[1].url.params)
    assert query == {"version": pushed.version, "path": "model.rkllm", "number": "0"}


def test_pieces_that_the_disk_of_the_head_damaged_are_sent_again(folder: Path) -> None:
    server = FakeControl().on(BEGIN, begun(model=[0])).on(PIECES, ok({"received_bytes": 2500}))
    server.on(END, begun(model=[0]), ok({"complete": True}))
    assert client_of(server).push_model(folder).sent_bytes == 5000
    assert server.routes == [BEGIN, PIECES, END, BEGIN, PIECES, END]


def test_a_piece_that_was_damaged_on_its_way_is_sent_again(folder: Path) -> None:
    server = FakeControl().on(BEGIN, begun(model=[0])).on(END, ok({"complete": True}))
    server.on(PIECES, error(400, "piece_corrupted"), ok({"received_bytes": 2500}))
    assert client_of(server).push_model(folder).sent_bytes == 2500
    assert server.routes.count(PIECES) == 2


@pytest.mark.parametrize(
    ("code", "tries"), [("piece_corrupted", 5), ("artifact_refused", 1)], ids=str
)
def test_a_piece_that_is_always_refused_ends_the_push(folder: Path, code: str, tries: int) -> None:
    server = FakeControl().on(BEGIN, begun(model=[0])).on(PIECES, error(400, code))
    with pytest.raises(Refused):
        client_of(server).push_model(folder)
    assert server.routes.count(PIECES) == tries


def test_a_file_that_changes_during_the_upload_ends_it(folder: Path) -> None:
    def change(_request: httpx.Request) -> Any:
        (folder / "model.rkllm").write_bytes(b"x" * 2500)
        return begun(model=[0])

    server = FakeControl().on(BEGIN, change)
    with pytest.raises(SourceFailed, match="was changed during the upload"):
        client_of(server).push_model(folder)


# -- before a model is deployed --------------------------------------------------------------------

PREFETCH = "POST /v1/catalog/models/chat/prefetch"


def nodes(**boards: tuple[str, int]) -> httpx.Response:
    """How far each board is: its state, and its bytes of 100."""
    rows = [
        {"board": board, "state": state, "fetched_bytes": done, "total_bytes": 100}
        for board, (state, done) in boards.items()
    ]
    return ok({"name": "chat", "boards": rows})


def test_boards_are_looked_at_until_all_have_ended() -> None:
    server = FakeControl().on(
        PREFETCH,
        nodes(a=("fetching", 0), b=("fetching", 10)),
        nodes(a=("fetching", 50), b=("failed", 10)),
        nodes(a=("present", 100), b=("failed", 10)),
    )
    shown: list[tuple[str, float]] = []
    rows = client_of(server).prefetch_model(
        "chat", on_progress=lambda one: shown.append((one.phase, one.done))
    )
    assert [row["state"] for row in rows] == ["present", "failed"]
    assert [server.json(at) for at in range(3)] == [{"again": at == 0} for at in range(3)]
    assert shown[-2:] == [("a", 100), ("b", 10)]
    assert server.slept == [1.0, 1.0]


def test_a_board_without_progress_is_not_waited_for_without_end() -> None:
    server = FakeControl().on(PREFETCH, nodes(a=("fetching", 5), b=("present", 100)))
    rows = client_of(server).prefetch_model("chat")
    assert [row["state"] for row in rows] == ["fetching", "present"]
    assert sum(server.slept) == 300


def test_no_boards_are_no_wait() -> None:
    assert client_of(FakeControl().on(PREFETCH, nodes())).prefetch_model("chat") == []

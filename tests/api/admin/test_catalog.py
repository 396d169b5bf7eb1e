"""Schemas of the catalogue: copies on boards, and indexes that do not fit."""

from __future__ import annotations

import pytest

from rkserve.api.admin.catalog import PushBody, copies, upload_answer
from rkserve.api.json.schemas import read_model
from rkserve.core.board_report import BoardReport, BoardState, FetchProgress
from rkserve.core.errors import RequestError
from rkserve.models.incoming import UploadProgress

DIGEST = "0" * 64
FILE = {"path": "model.rkllm", "bytes": 5, "sha256": DIGEST, "pieces": [DIGEST]}
BODY = {"name": "chat", "piece_bytes": 4096, "files": [FILE]}


def test_boards_with_a_copy_or_on_the_way_to_one_are_listed() -> None:
    reports = [
        BoardReport("a", "chat", BoardState.READY, copy=DIGEST),
        BoardReport("b", "chat", BoardState.FETCHING, fetch=FetchProgress(2, 5, 1.5)),
        BoardReport("c", "chat", BoardState.READY),
        BoardReport("d", "chat", BoardState.LOST, copy=DIGEST),
    ]
    have, fetches = copies(reports)
    assert (have["board"], have["version"], have["total_bytes"]) == ("a", DIGEST, 0)
    assert (fetches["board"], fetches["version"], fetches["fetched_bytes"]) == ("b", "", 2)


def test_a_body_becomes_an_index() -> None:
    index = read_model(PushBody, BODY).index()
    assert (index.name, index.total_bytes) == ("chat", 5)


@pytest.mark.parametrize(
    ("change", "param", "match"),
    [
        pytest.param({"name": "../chat"}, "name", "no name of a model", id="name"),
        pytest.param({"files": [{**FILE, "path": "../x"}]}, "files.0.path", "leads out", id="path"),
        pytest.param({"files": [{**FILE, "pieces": []}]}, "files", "pieces for its", id="pieces"),
        pytest.param({"files": [{**FILE, "sha256": "x"}]}, "files.0.sha256", "pattern", id="hex"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    change: dict[str, object], param: str, match: str
) -> None:
    with pytest.raises(RequestError, match=match) as refused:
        read_model(PushBody, {**BODY, **change}).index()
    assert refused.value.param == param


def test_an_answer_has_the_missing_pieces_by_file() -> None:
    progress = UploadProgress("chat", DIGEST, 3, 5, complete=False, missing=(("x", (1, 2)),))
    assert upload_answer(progress)["missing"] == {"x": [1, 2]}

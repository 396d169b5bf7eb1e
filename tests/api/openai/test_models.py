"""OpenAI's model entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest

from rkserve.api.openai.models import model_entry, models_list
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.desired_state import Desired


def client_of(answer: Callable[[httpx2.Request], httpx2.Response], strict: bool) -> openai.OpenAI:
    return openai.OpenAI(
        api_key="none",
        base_url="http://rkserve.test/v1",
        max_retries=0,
        http_client=httpx2.Client(transport=httpx2.MockTransport(answer)),
        _strict_response_validation=strict,
    )


def whole(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    return lambda _request: httpx2.Response(status, json=body, headers=headers)


@pytest.fixture(params=[True, False], ids=["strict", "lenient"])
def strict(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_the_client_reads_models(strict: bool) -> None:
    boards = [
        BoardReport("b2", "tiny", BoardState.FAILED, reason="library missing"),
        BoardReport("b1", "tiny", BoardState.READY, release="1.3.0", platform="RK3588"),
    ]
    entry = model_entry("tiny", 1700000000, 4096, boards, Desired())
    with client_of(whole(models_list([entry])), strict) as client:
        (got,) = client.models.list().data
    with client_of(whole(entry), strict) as client:
        assert client.models.retrieve("tiny") == got
    assert (got.id, got.object, got.created, got.owned_by) == (
        "tiny",
        "model",
        1700000000,
        "rkserve",
    )
    assert got.model_extra == {
        "type": "model",
        "display_name": "tiny",
        "lifecycle": "active",
        "created_at": "2023-11-14T22:13:20Z",
        "rkserve": {
            "context_length": 4096,
            "state": "ready",
            "embedding": None,
            "vision": None,
            "boards": [
                {
                    "id": "b1",
                    "state": "ready",
                    "reason": "",
                    "release": "1.3.0",
                    "platform": "RK3588",
                    "library": "",
                    "node": "",
                },
                {
                    "id": "b2",
                    "state": "failed",
                    "reason": "library missing",
                    "release": "",
                    "platform": "",
                    "library": "",
                    "node": "",
                },
            ],
        },
    }

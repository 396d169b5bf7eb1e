"""Errors of requests, and the removal of folder names from the messages that clients read."""

from __future__ import annotations

import pytest

from rkserve.api.common.output import error_object
from rkserve.api.openai.models import adapter_entry, board_entry, model_entry
from rkserve.core import errors
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.desired_state import Desired
from rkserve.core.errors import (
    AdapterBroken,
    BoardFailed,
    BoardOutOfOrder,
    CallFailed,
    EngineDied,
    EngineHung,
    NoBoard,
    RkserveError,
    RunFailed,
)
from rkserve.core.errors.requests import without_folders
from rkserve.models.adapters import Adapter

SAID = "E rkllm: cannot open /home/ann/models/legal/adapter.rkllm"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param("cannot open /a/b/c.rkllm: EIO", "cannot open c.rkllm: EIO", id="a path"),
        pytest.param("/a/b.so: /c/d.so: bad", "b.so: d.so: bad", id="two"),
        pytest.param("no file '/a/my models/b.kv'", "no file 'b.kv'", id="blanks in quotes"),
        pytest.param('no file "/a/b.kv"', 'no file "b.kv"', id="double quotes"),
        pytest.param("(~/x/y, ../z/w)", "(y, w)", id="from home and from here"),
        pytest.param("/dev/rknpu is busy", "rknpu is busy", id="at the beginning"),
        pytest.param("3 tokens/s, on/off, 1/2", "3 tokens/s, on/off, 1/2", id="no path"),
        pytest.param("see https://x.org/a/b", "see https://x.org/a/b", id="an address"),
        pytest.param("model=/a/b.rkllm,", "model=b.rkllm,", id="after an equals sign"),
        pytest.param("in /srv/models/", "in ", id="a folder"),
        pytest.param("", "", id="nothing"),
    ],
)
def test_of_a_path_only_the_name_is_told(text: str, told: str) -> None:
    assert without_folders(text) == told


@pytest.mark.parametrize(
    "error",
    [
        AdapterBroken(
            "legal@1", f"the runtime refused it: {CallFailed('rkllm_load_lora', -1, SAID)}"
        ),
        BoardFailed("b", SAID),
        BoardOutOfOrder("b", SAID),
        EngineDied("b", SAID),
        EngineHung("b", SAID),
        RunFailed("b", SAID),
        NoBoard("m", SAID),
        CallFailed("rkllm_load_lora", -1, SAID),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_tells_clients_what_was_said_without_folders(error: RkserveError) -> None:
    message = error_object(error)[2]["error"]["message"]
    assert "E rkllm: cannot open adapter.rkllm" in message
    assert "/" not in message
    assert SAID in repr(error), "the log may have it all"


def test_a_refusal_names_the_function_and_the_code() -> None:
    message = error_object(CallFailed("rkllm_load_lora", -1, SAID))[2]["error"]["message"]
    assert message.startswith("rkllm_load_lora returned -1 ")


def test_lists_of_boards_and_models_hold_no_folders() -> None:
    report = BoardReport("b", "m", BoardState.FAILED, reason=SAID)
    broken = Adapter("a", "1", broken=f"adapter.rkllm leads out of the model folder, to {SAID}")
    listed = [
        board_entry(report, ("open", report.reason)),
        model_entry("m", 0, 64, [report], Desired()),
        adapter_entry("m", 0, 64, [broken]),
    ]
    for entry in listed:
        assert "cannot open adapter.rkllm" in repr(entry)
        assert "/home" not in repr(entry)


INVALID = "invalid_request_error"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(errors.RequestError("x", "n"), (400, INVALID, "n", None, None), id="bad"),
        pytest.param(
            errors.UnsupportedParameter("x", "tools"),
            (400, INVALID, "tools", "unsupported_parameter", None),
            id="unsupported",
        ),
        pytest.param(
            errors.ModelNotFound("m"),
            (404, INVALID, "model", "model_not_found", None),
            id="unknown model",
        ),
        pytest.param(
            errors.ContextOverflow(9, 8),
            (400, INVALID, "messages", "context_length_exceeded", None),
            id="overflow",
        ),
        pytest.param(
            errors.SamplingFixed("1.2.3", ("top_k",)),
            (400, INVALID, "top_k", "sampling_fixed", None),
            id="fixed sampling",
        ),
    ],
)
def test_clients_can_rely_on(error: RkserveError, said: tuple[object, ...]) -> None:
    status, headers, body = error_object(error)
    got = body["error"]
    retry_after = headers.get("retry-after")
    assert (status, got["type"], got["param"], got["code"], retry_after) == said


def test_the_overflow_of_an_untokenized_prompt_says_at_least() -> None:
    assert "has at least 5000" in errors.ContextOverflow(5000, 4096, "prompt", True).message
    assert "has 5000" in errors.ContextOverflow(5000, 4096, "prompt").message

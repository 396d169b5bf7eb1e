"""The body of a board's heartbeat: names and sizes, and keys of a later version."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rkserve.api.admin.heartbeat import HeartbeatBody

GIVEN: dict[str, Any] = {"key": "0" * 32, "host": "board-1", "version": "0.2.0"}


def test_a_board_that_serves_needs_three_values() -> None:
    body = HeartbeatBody.model_validate(GIVEN)
    assert (body.stage, body.update, body.problem) == ("serving", "", "")
    assert (body.before_tokens_per_s, body.tokens_per_s) == (None, None)


def test_keys_of_a_later_version_are_left_out() -> None:
    assert not hasattr(HeartbeatBody.model_validate({**GIVEN, "colour": "red"}), "colour")


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": "0" * 31},
        {"key": "../" + "0" * 29},
        {"host": ""},
        {"host": "a b"},
        {"version": "1 0"},
        {"stage": "x" * 81},
        {"problem": "x" * 4001},
    ],
)
def test_a_value_that_could_not_be_a_board_s_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        HeartbeatBody.model_validate({**GIVEN, **wrong})

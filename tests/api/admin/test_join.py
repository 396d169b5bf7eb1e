"""The body with which a board asks to join."""

from __future__ import annotations

from typing import Any

import pytest

from rkserve.api.admin.join import JoinBody
from rkserve.api.json.schemas import read_model
from rkserve.core.errors import RequestError

ASKED = {"host": "rock-5b.lan", "ray": "2.60.0", "python": "3.11"}


def test_ids_may_be_unknown() -> None:
    body = read_model(JoinBody, ASKED)
    assert (body.machine, body.serial) == ("", "")
    assert read_model(JoinBody, {**ASKED, "machine": "a" * 32, "serial": ""}).machine == "a" * 32


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"host": "a b"}, id="a blank"),
        pytest.param({"host": "a\nb"}, id="a line break"),
        pytest.param({"host": ""}, id="no name"),
        pytest.param({"host": "a" * 254}, id="a long name"),
        pytest.param({"ray": "2;rm"}, id="no version"),
        pytest.param({"machine": "A"}, id="no digest"),
    ],
)
def test_other_values_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        read_model(JoinBody, {**ASKED, **changes})


def test_keys_of_a_later_version_are_left_out() -> None:
    assert read_model(JoinBody, {**ASKED, "more": "x"}) == read_model(JoinBody, ASKED)

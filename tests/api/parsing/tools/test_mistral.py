"""Calls in lists: values written as Python."""

from __future__ import annotations

import pytest

from rkserve.api.parsing.tools.mistral import python_value


@pytest.mark.parametrize(
    "text",
    [
        "f()",
        "a",
        "1 +",
        "1 + 1",
        "b'x'",
        "...",
        "1j",
        "{1: 2}",
        "{**a}",
        "1e999",
        "-'x'",
        "(" * 999,
    ],
)
def test_what_json_cannot_say_is_no_value(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        python_value(text)

"""Parts of an answer's text."""

from __future__ import annotations

import pytest

from rkserve.api.parsing.parts import overlap


@pytest.mark.parametrize(
    ("text", "mark", "length"),
    [
        ("", "</think>", 0),
        ("well", "</think>", 0),
        ("well<", "</think>", 1),
        ("well</thi", "</think>", 5),
        ("<</", "</think>", 2),
        ("well</think>", "</think>", 0),
        ("aa", "aab", 2),
    ],
)
def test_overlap_is_the_beginning_of_a_mark_at_the_end_of_a_text(
    text: str, mark: str, length: int
) -> None:
    assert overlap(text, mark) == length

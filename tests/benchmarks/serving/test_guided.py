"""Case (i): that what is measured follows the grammar, and what is reported of it."""

from __future__ import annotations

import json

import pytest

from benchmarks.serving.guided import (
    GOOD,
    SCHEMA,
    STRAYS,
    VOCABULARIES,
    WAYS,
    Answered,
    GuidedFound,
    Masked,
    flaws,
    masked,
    rate,
    vocabulary,
)
from benchmarks.serving.report_cases import guided_section


def answered(whole_s: float, tokens: int = 40, text: str = GOOD) -> Answered:
    return Answered(tokens, 0.1, whole_s, 0.02, text)


def test_the_model_is_asked_for_an_answer_that_follows_and_for_one_that_does_not() -> None:
    kinds = SCHEMA["properties"]["kind"]["enum"]  # type: ignore[index] # a schema is any JSON
    assert json.loads(GOOD)["kind"] in kinds
    assert json.loads(STRAYS)["kind"] not in kinds


@pytest.mark.parametrize("text", [STRAYS, GOOD[:-3], "words", "[]"])
def test_an_answer_that_leaves_the_grammar_is_no_measurement(text: str) -> None:
    assert flaws(WAYS[2], [answered(2.0)]) == []
    (flaw,) = flaws(WAYS[2], [answered(2.0), answered(2.0, text=text)])
    assert WAYS[2].name in flaw


@pytest.mark.parametrize("size", [300, VOCABULARIES[0]])
def test_a_made_up_vocabulary_has_so_many_pieces_and_each_once(size: int) -> None:
    pieces = vocabulary(size).pieces
    assert len(pieces) == len(set(pieces)) == size
    found = masked(size)
    assert len(found.mask_ms) == len(found.check_ms) > 10


def test_the_report_compares_with_native_answers_and_with_steps_that_resend() -> None:
    whole_s = dict(zip(WAYS, (2.0, 2.5, 20.0, 2.1, 4.0), strict=True))
    answers = [(way, [answered(of), answered(of * 1.1)]) for way, of in whole_s.items()]
    assert rate(answers[0][1]) == pytest.approx((20 + 40 / 2.2) / 2)
    masks = [Masked(size, 10.0, 1.0, (0.1, 0.3), (0.01,)) for size in VOCABULARIES]
    text = guided_section(GuidedFound(answers, masks))
    rows = {
        line.split("|")[1].strip(): line.split("|")[2:] for line in text.splitlines() if "|" in line
    }
    assert [cell.strip() for cell in rows[WAYS[2].name]][4:6] == ["0.100", "1.00"]
    assert [cell.strip() for cell in rows[WAYS[3].name]][4:6] == ["0.952", "9.52"]
    assert "150 000" in rows

"""The judgement of a measured speed."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from rkserve.api.admin.boards import ExpectedEntry, JudgedSpeed, SpeedEntry, judged

MEASURED: SpeedEntry = {
    "prefill_tokens_per_s": 90.0,
    "decode_tokens_per_s": 6.0,
    "tokens": 192,
}


def against(speed: float, share: float, basis: str = "published") -> ExpectedEntry:
    return {"decode_tokens_per_s": speed, "least_tokens_per_s": share * speed, "basis": basis}


@pytest.mark.parametrize(
    ("expected", "peers", "ratio", "verdict", "said"),
    [
        pytest.param(
            against(12.0, 0.8), None, 0.5, "slow", "50% of 12.0 (published); on", id="slow"
        ),
        pytest.param(against(6.5, 0.8), None, 0.923, "good", "92% of 6.5 (published).", id="good"),
        pytest.param(None, against(6.0, 0.8, "peers"), 1.0, "good", "(peers).", id="peers alone"),
        pytest.param(
            against(6.5, 0.8),
            against(10.0, 0.8, "peers"),
            0.923,
            "slow",
            "60% of 10.0 (peers); on",
            id="as published, and slower than its peers",
        ),
        pytest.param(None, None, None, "unknown", "neither a figure", id="nothing to compare"),
    ],
)
def test_a_speed_is_compared_with_what_is_known(
    expected: ExpectedEntry | None,
    peers: ExpectedEntry | None,
    ratio: float | None,
    verdict: str,
    said: str,
) -> None:
    found = judged("rock-02", MEASURED, expected, peers)
    TypeAdapter(JudgedSpeed).validate_python(found, strict=True)
    assert (found["ratio"], found["verdict"]) == (ratio, verdict)
    assert found["sentence"].startswith("rock-02 decodes 6.0 tokens/s")
    assert said in found["sentence"]


def test_without_a_measurement_nothing_is_judged() -> None:
    found = judged("rock-02", None, against(6.0, 0.8), None)
    assert (found["ratio"], found["sentence"]) == (None, "rock-02 is being measured.")

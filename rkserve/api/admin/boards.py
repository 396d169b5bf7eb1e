"""Calls on single boards: drain and its end, restart of the engine, measurement; see ``pause``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from rkserve.api.admin.operations import ACCEPTED, OK
from rkserve.api.admin.pause import BoardsBody, ControlCall, OperationBody, StatusDone
from rkserve.api.json.schemas import Count, Example, one_of
from rkserve.control.calls import (
    AnyAction,
    DrainAction,
    DrainMode,
    MeasureAction,
    RestartAction,
    UndrainAction,
)
from rkserve.control.operations import OperationOutcome
from rkserve.core.desired_state import Desired, Scope
from rkserve.core.errors import RequestError

MOST_S = 20.0  # requests that come meanwhile wait for so long
Mode = Annotated[DrainMode, Field(strict=False)]


class DrainBody(BoardsBody):
    """POST /v1/boards/drain."""

    mode: Mode = Field(
        DrainMode.WAIT,
        description="`wait`: answers that have begun end where they are. `move`: other boards "
        "continue them at once.",
    )

    @model_validator(mode="after")
    def _check_named(self) -> DrainBody:
        terms = self.terms
        if not (terms.boards or terms.selector or terms.models):
            raise RequestError(
                "Say which boards: 'boards' names them, 'selector' matches them, and 'model' means "
                "all of a model.",
                "boards",
            )
        return self

    def action(self, scope: Scope) -> AnyAction:
        return DrainAction(models=scope.models, boards=scope.boards, mode=self.mode)

    def reply(self, outcome: OperationOutcome, _desired: Desired) -> Mapping[str, object]:
        # Of a partial one the drain is in force, and some boards still have requests.
        status = "drained" if outcome.status == OK else "draining"
        return {"status": status, "mode": self.mode.value}


class UndrainBody(BoardsBody):
    """POST /v1/boards/undrain; without boards, all that are drained."""

    def action(self, scope: Scope) -> AnyAction:
        return UndrainAction(models=scope.models, boards=scope.boards)

    def reply(self, outcome: OperationOutcome, _desired: Desired) -> Mapping[str, object]:
        return {"status": "undraining" if outcome.status == ACCEPTED else "serving"}


class RestartBody(OperationBody):
    """POST /v1/boards/{board_id}/restart."""

    def action(self, scope: Scope) -> AnyAction:
        return RestartAction(models=scope.models, boards=scope.boards)

    def reply(self, outcome: OperationOutcome, _desired: Desired) -> Mapping[str, object]:
        return {"status": "restarting" if outcome.status == ACCEPTED else "restarted"}


class MeasureBody(OperationBody):
    """POST /v1/boards/{board_id}/measure."""

    seconds: float = Field(
        10.0,
        ge=1,
        le=MOST_S,
        description="The time of the measurement, within which several answers are generated. A "
        "board that needs longer for its first one is measured by that one.",
    )
    wait: bool = Field(
        False, description="Wait for a run that goes on, where a busy board is a 409 otherwise."
    )

    def action(self, scope: Scope) -> AnyAction:
        return MeasureAction(
            models=scope.models, boards=scope.boards, seconds=self.seconds, wait=self.wait
        )

    def reply(self, outcome: OperationOutcome, _desired: Desired) -> Mapping[str, object]:
        return {"status": "measuring" if outcome.status == ACCEPTED else "measured"}


class DrainDone(StatusDone):
    """Drained boards."""

    mode: Annotated[str, one_of(DrainMode)]


class SpeedEntry(TypedDict):
    """A board's speed in the runs of a measurement, which generated `tokens`."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    tokens: Count


class ExpectedEntry(TypedDict):
    """A speed to compare with, its origin, and the least that counts as in order."""

    decode_tokens_per_s: float
    least_tokens_per_s: float
    basis: str


class JudgedSpeed(TypedDict):
    """A measured speed, judged."""

    measured: SpeedEntry | None
    expected: ExpectedEntry | None
    peers: ExpectedEntry | None
    ratio: float | None
    verdict: Literal["good", "slow", "unknown"]
    sentence: str


class MeasureDone(StatusDone, JudgedSpeed):
    """A measurement. `expected` is by SoC and model, `peers` the median of the other boards of
    this SoC and model; each is null where it is not known. `ratio` is that of the measured decoding
    speed to the expected one, or else to that of the peers. With `async` nothing is measured yet.
    """

    board: str


def judged(
    board: str,
    measured: SpeedEntry | None,
    expected: ExpectedEntry | None,
    peers: ExpectedEntry | None,
) -> JudgedSpeed:
    """Return a measurement beside the speed that the board should reach, with a sentence on it."""
    against = expected or peers
    if measured is None or against is None or not against["decode_tokens_per_s"]:
        return {
            "measured": measured,
            "expected": expected,
            "peers": peers,
            "ratio": None,
            "verdict": "unknown",
            "sentence": _unjudged(board, measured),
        }
    speed = measured["decode_tokens_per_s"]
    ratio = speed / against["decode_tokens_per_s"]
    compared = [(one, one["least_tokens_per_s"]) for one in (expected, peers) if one is not None]
    missed = [one for one, least in compared if speed < least]
    worst = (missed or [against])[0]
    share = speed / worst["decode_tokens_per_s"]
    what = f"{share:.0%} of {worst['decode_tokens_per_s']:.1f} ({worst['basis']})"
    then = "; on the board, rkserve doctor looks for the cause" if missed else ""
    return {
        "measured": measured,
        "expected": expected,
        "peers": peers,
        "ratio": round(ratio, 3),
        "verdict": "slow" if missed else "good",
        "sentence": f"{board} decodes {speed:.1f} tokens/s, {what}{then}.",
    }


def _unjudged(board: str, measured: SpeedEntry | None) -> str:
    if measured is None:
        return f"{board} is being measured."
    speed = measured["decode_tokens_per_s"]
    return (
        f"{board} decodes {speed:.1f} tokens/s; neither a figure for its SoC and model nor other "
        "boards of its kind are known to compare with."
    )


CALLS = (
    ControlCall(
        "/v1/boards/drain",
        DrainBody,
        DrainDone,
        "Send boards no new requests, and answer when they have none left.",
        Example({"boards": ["sim-0"]}),
        "Boards",
    ),
    ControlCall(
        "/v1/boards/undrain",
        UndrainBody,
        StatusDone,
        "Let drained boards take requests again.",
        tag="Boards",
    ),
)

"""Simulated clusters in virtual time: guarantees hold under any order of faults and calls."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rkserve.control.calls import OperationKind, PauseAction
from rkserve.control.operations import ControlOperation, OperationOutcome, OperationState
from rkserve.core.desired_state import PauseMode
from tests.support.cluster.simulate import HASH_SEED
from tests.support.cluster.simulated_history import BOARDS, Call, History, Violated
from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow

# Seeds that broke a guarantee once: 14, 60 and 66 let a request run under a confirmed pause of mode
# ``wait``, and 39 let a board serve that the Coordinator did not know.
KEPT = (14, 39, 60, 66)
COUNT, LONG_COUNT = 4, 500
# Set here, it spares each program to start itself once more.
ENVIRON = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
COMMAND = (sys.executable, "-m", "tests.support.cluster.simulate")


def simulate(first: int, count: int, *also: int) -> None:
    command = [*COMMAND, f"--first={first}", f"--count={count}", "--jobs=1"]
    done = subprocess.run(
        [*command, "--also", *map(str, also)],
        cwd=PROJECT,
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_seed_holds_and_so_do_those_that_failed_once() -> None:
    simulate(0, COUNT, *KEPT)


@pytest.mark.long
def test_every_seed_of_a_long_run_holds() -> None:
    simulate(COUNT, LONG_COUNT)


@pytest.mark.long
def test_one_seed_is_one_history() -> None:
    command = [*COMMAND, "--count=1", "--story", "--first=7"]
    stories = [
        subprocess.run(
            command, cwd=PROJECT, env=ENVIRON, capture_output=True, text=True, check=True
        ).stdout.splitlines()[:-1]  # the last line has the time that it took
        for _ in range(2)
    ]
    assert stories[0] == stories[1]
    assert len(stories[0]) > 50


def confirmed(began_s: float, ended_s: float, epoch: int, **params: object) -> Call:
    """A pause that succeeded."""
    operation = ControlOperation(
        "op", PauseAction(mode=PauseMode.KEEP), OperationState.SUCCEEDED, epoch=epoch
    )
    return Call(
        OperationKind.PAUSE, dict(params), began_s, ended_s, OperationOutcome(200, operation)
    )


@pytest.mark.parametrize(
    ("token", "params", "fits"),
    [
        pytest.param((2.5, "a"), {}, False, id="after the confirmation"),
        pytest.param((1.5, "a"), {}, True, id="before the confirmation"),
        pytest.param((2.5, "a"), {"boards": ["b"]}, True, id="of another board"),
        pytest.param((4.5, "a"), {"lease_s": 3.0}, True, id="after the lease"),
        pytest.param((3.5, "a"), {"lease_s": 3.0}, False, id="within the lease"),
    ],
)
def test_the_judge_sees_a_token_under_a_confirmed_pause(
    token: tuple[float, str], params: dict[str, object], fits: bool
) -> None:
    history = History(tokens=[(*token, None)], calls=[confirmed(1.0, 2.0, 5, **params)])
    assert set(BOARDS) >= {"a", "b"}
    if fits:
        history.judge()
    else:
        with pytest.raises(Violated, match="gave out a token"):
            history.judge()


@pytest.mark.parametrize(("epoch", "fits"), [(4, False), (6, True)])
def test_the_judge_orders_concurrent_calls_by_their_epochs(epoch: int, fits: bool) -> None:
    pause, other = confirmed(1.0, 2.0, 5), confirmed(0.5, 1.8, epoch)
    other.kind = OperationKind.RESUME
    history = History(tokens=[(2.5, "a", None)], calls=[pause, other])
    if fits:
        history.judge()
    else:
        with pytest.raises(Violated):
            history.judge()

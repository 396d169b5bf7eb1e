"""Progress on a terminal: what is shown of an operation and its boards, and what is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from rkserve.cli.context import MOST_ROWS, OperationProgress, count, describe
from rkserve.client import Progress as Told
from rkserve.client import Unreachable
from rkserve.client.answers import operation
from tests.support.cluster.fake_control import PARTLY, stored

STATES = {"sim-0": "asleep", "sim-1": "ready"}


def told(state: str, changes: Mapping[str, Any]) -> Told:
    one = operation({**stored(state, kind="sleep", **changes), "phase": "sleeping"})
    return Told(one.kind, one.succeeded, one.total, one.phase, one)


def running(kind: str = "sleep", **params: Any) -> Told:
    none = {"total": 0, "succeeded": 0, "results": {}}
    one = operation({**stored("running", kind=kind, **none), "phase": "going", "params": params})
    return Told(one.kind, one.succeeded, one.total, one.phase, one)


def cluster(states: Mapping[str, str], **bases: str) -> dict[str, Any]:
    return {
        "boards": [
            {"id": i, "state": s, "model": f"m-{i}", "base": bases.get(s)}
            for i, s in states.items()
        ]
    }


def shown(
    *steps: Told, look: Callable[[], Mapping[str, Any]] = lambda: cluster(STATES)
) -> list[str]:
    """Return what stands on the terminal after these steps, a line for each bar."""
    columns = TextColumn("{task.description}|{task.completed}/{task.total}|{task.fields[count]}")
    page = StringIO()
    screen = Console(file=page, width=200, force_terminal=False)
    progress = Progress(columns, console=screen)
    bars = OperationProgress(progress, look)
    for step in steps:
        bars.update(step)
    screen.print(progress.get_renderable())
    return [line.rstrip() for line in page.getvalue().splitlines()]


def test_it_says_bytes_and_boards() -> None:
    upload = Told("upload", 1 << 20, 3 << 20)
    assert (describe(upload), count("upload", 1 << 20, 3 << 20)) == ("upload", "1.0 of 3.0 MiB")
    rollout = Told("adapter_rollout", 1, 8, "switching")
    assert (describe(rollout), count("x", 1, 8)) == ("adapter rollout switching", "1 of 8 boards")
    assert count("sleep", 0, 0) == ""


def test_boards_have_bars_by_their_states_while_they_fall_asleep() -> None:
    assert shown(running()) == [
        "sleep going|1/2|1 of 2 boards",
        "  sim-0|1/1|asleep",
        "  sim-1|0/None|ready",
    ]


def test_a_wake_up_goes_the_other_way_and_only_the_boards_that_are_meant_count() -> None:
    assert shown(running("wake", boards=["sim-1"])) == [
        "wake going|1/1|1 of 1 boards",
        "  sim-1|1/1|ready",
    ]
    assert shown(running("wake", models=["m-sim-0"]))[0] == "wake going|0/1|0 of 1 boards"


@pytest.mark.parametrize("kind", ["rebase", "weight_update"])
def test_a_board_has_arrived_when_it_serves_with_the_weights(kind: str) -> None:
    states = {"a": "ready", "b": "recovering"}
    title = kind.replace("_", " ")
    assert shown(running(kind, digest=None), look=lambda: cluster(states)) == [
        f"{title} going|1/2|1 of 2 boards",
        "  a|1/1|ready",
        "  b|0/None|recovering",
    ]
    loaded = running(kind, digest="cd", model="m-a")
    assert shown(loaded, look=lambda: cluster(states))[0] == f"{title} going|0/1|0 of 1 boards"
    there = cluster(states, ready="cd")
    assert shown(loaded, look=lambda: there)[1:] == ["  a|1/1|ready"]


def test_boards_that_are_through_with_one_phase_are_not_through_with_all() -> None:
    staged = operation({**stored("running", kind="adapter_rollout"), "phase": "switching"})
    assert (staged.succeeded, staged.total) == (2, 2)
    step = Told("adapter_rollout", 2, 2, "switching", staged)
    assert shown(step) == ["adapter rollout switching|0/None|"]


def test_the_end_is_what_the_operation_says_of_its_boards() -> None:
    assert shown(running(), told("partial", PARTLY)) == [
        "sleep sleeping|1/2|1 of 2 boards",
        "  sim-0|1/1|paused",
        "  sim-1|0/None|board_failed",
    ]


@pytest.mark.parametrize(
    ("step", "line"),
    [
        pytest.param(running("adapter_rollout"), "adapter rollout going|0/None|", id="another"),
        pytest.param(running("weight_update", name="tone"), "weight update", id="of an adapter"),
        pytest.param(Told("upload", 5 << 20, 5 << 20), "upload|5242880/5242880|5.0 of", id="bytes"),
    ],
)
def test_what_is_not_about_sleeping_looks_at_no_board(step: Told, line: str) -> None:
    lines = shown(step, look=lambda: pytest.fail("nobody is to be asked"))
    assert len(lines) == 1
    assert lines[0].startswith(line)


def test_many_boards_have_one_bar_together() -> None:
    states = {f"sim-{n}": "asleep" for n in range(MOST_ROWS + 1)}
    assert shown(running(), look=lambda: cluster(states)) == ["sleep going|17/17|17 of 17 boards"]


def test_a_cluster_that_does_not_answer_costs_only_the_boards_bars() -> None:
    def away() -> Mapping[str, Any]:
        raise Unreachable("nobody there")

    assert shown(running(), look=away) == ["sleep going|0/None|"]


def test_names_are_text() -> None:
    lines = shown(running(), look=lambda: cluster({"[bold]a": "asleep"}))
    assert lines[1] == "  [bold]a|1/1|asleep"

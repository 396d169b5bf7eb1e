"""The judgement of faults: when the cluster is whole, what records must say, what was lost."""

from __future__ import annotations

import copy
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.control.__main__ import options
from benchmarks.control.answers import Answer, Span
from benchmarks.control.checks import Era, Said, check
from benchmarks.control.faults import (
    Done,
    Lost,
    Sight,
    Trial,
    active_version,
    behind,
    fault_verdicts,
    labels_of,
    labels_said,
    late_texts,
    lost,
    of_one_weights,
    pauses_left,
    record_flaws,
    served_after,
    summed,
)
from benchmarks.control.faults_cases import chosen
from benchmarks.control.faults_list import FAULTS
from benchmarks.control.faults_site import Site, frozen, full_disk, kill, wait_for
from benchmarks.control.report import faults_section
from benchmarks.harness.exchange import Exchange
from rkserve.bench.processes import BenchFailed
from rkserve.control.calls import OperationKind
from rkserve.coordinator.state.ledger import Ledger
from tests.support.values.control_values import recorded

LINE = "tone"
BOARDS = ("sim-0", "sim-1")
GOOD = Trial(True, 1.0, (), ("rollout succeeded",), False, 9, 0, 0, Lost())


def board(name: str, **changes: Any) -> dict[str, Any]:
    plain = {"state": "ready", "reason": "", "epoch": 7, "missing": 0, "pid": 1, "engine_pid": 2}
    return {"id": name, **plain, **changes}


def operation(state: str = "succeeded", **changes: Any) -> dict[str, Any]:
    plain = {"kind": "adapter_rollout", "params": {"version": "b1"}, "error": None}
    return {"state": state, **plain, **changes}


def sight(active: str = "b1", **operations: Any) -> Sight:
    """A cluster of two boards that is whole."""
    there = {name: {"staged": True} for name in BOARDS}
    line = {"name": LINE, "active": active, "versions": [{"label": "tone@b1", "boards": there}]}
    paused = {name: {"paused": False, "reported": None} for name in BOARDS}
    return copy.deepcopy(
        Sight(
            boards={"data": [board(name) for name in BOARDS]},
            paused={"epoch": 7, "boards": paused, "adapters": {}},
            adapters={"data": [line]},
            operations=operations,
        )
    )


def answer(version: str = "tone@b1", **changes: Any) -> Answer:
    exchange = Exchange(
        **{
            "sent_s": 0.0,
            "content_s": (1.0, 2.0),
            "end_s": 3.0,
            "board": "sim-0",
            "completion_tokens": 2,
            **changes.pop("exchange", {}),
        }
    )
    plain = Answer(exchange, 0, "ab", "length", version, version, (Span(version, 0, 2),))
    return replace(plain, **changes)


def broken(where: str, *texts_s: float) -> Answer:
    return answer(exchange={"board": where, "content_s": texts_s, "error": "boom"})


# -- is it whole? ---------------------------------------------------------------------------------


def test_a_cluster_with_nothing_left_to_do_is_whole() -> None:
    assert behind(sight(one=operation(), two=operation("undone")), BOARDS, dead=[99]) == []


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        pytest.param(lambda s: s.boards["data"].pop(), "sim-1 is not there", id="a board lacks"),
        pytest.param(
            lambda s: s.boards["data"][0].update(state="joining"), "sim-0 is joining", id="joining"
        ),
        pytest.param(
            lambda s: s.boards["data"][0].update(epoch=6), "epoch 6 and not 7", id="an old epoch"
        ),
        pytest.param(
            lambda s: s.boards["data"][1].update(missing=1), "lacks 1 version", id="a version lacks"
        ),
        pytest.param(
            lambda s: s.boards["data"][1].update(pid=99), "before it died", id="an old report"
        ),
        pytest.param(
            lambda s: s.boards["data"][1].update(engine_pid=99), "before it died", id="of an engine"
        ),
        pytest.param(
            lambda s: s.paused["boards"]["sim-0"].update(paused=True),
            "paused",
            id="shall be paused",
        ),
        pytest.param(
            lambda s: s.paused["boards"]["sim-0"].update(reported="keep"), "paused", id="is paused"
        ),
        pytest.param(
            lambda s: s.paused["adapters"].update(tone={}), "tone is paused", id="an adapter is"
        ),
        pytest.param(
            lambda s: s.adapters["data"][0]["versions"][0]["boards"].pop("sim-1"),
            "sim-1 has not tone@b1",
            id="not staged",
        ),
        pytest.param(
            lambda s: s.operations["one"].update(state="running"), "is running", id="it runs"
        ),
        pytest.param(
            lambda s: s.operations["one"].update(state="partial"), "is partial", id="in part only"
        ),
        pytest.param(
            lambda s: s.operations.update(one=None), "unknown", id="nobody knows the operation"
        ),
    ],
)
def test_whatever_is_left_to_do_is_said(spoil: Any, says: str) -> None:
    found = sight(one=operation())
    spoil(found)

    (said,) = behind(found, BOARDS, dead=[99])

    assert says in said


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(replace(sight(), boards=None), id="boards"),
        pytest.param(replace(sight(), paused=None), id="paused"),
        pytest.param(replace(sight(), adapters=None), id="adapters"),
    ],
)
def test_a_cluster_that_does_not_answer_is_not_whole(seen: Sight) -> None:
    assert behind(seen, BOARDS) == ["it does not answer"]


def test_who_is_paused_is_named() -> None:
    paused = sight().paused
    assert paused is not None
    assert pauses_left(paused) == []
    paused["boards"]["sim-1"]["reported"] = "keep"
    assert pauses_left(paused) == ["sim-1 is paused"]


# -- records --------------------------------------------------------------------------------------

WHY = {"code": "operation_timeout", "message": "It was not done."}


@pytest.mark.parametrize(
    ("found", "says"),
    [
        pytest.param(sight(one=operation()), None, id="succeeded, and served"),
        pytest.param(sight("a0", one=operation("undone", error=WHY)), None, id="undone"),
        pytest.param(sight("a0"), None, id="it never got so far"),
        pytest.param(sight("a0", one=operation()), "says otherwise", id="said, and not served"),
        pytest.param(
            sight(one=operation("failed", error=WHY)), "says otherwise", id="served, and not said"
        ),
        pytest.param(
            sight("a9", one=operation("undone", error=WHY)), "not requested", id="another version"
        ),
        pytest.param(sight("a0", one=operation("undone")), "does not say why", id="no reason"),
        pytest.param(
            sight(one=operation(error=WHY)), "with an error", id="a success with an error"
        ),
    ],
)
def test_a_record_must_say_what_is_served_and_why_not(found: Sight, says: str | None) -> None:
    flaws = record_flaws(Done(True, 0.0, version="b1"), found, LINE, "a0")

    assert len(flaws) == (says is not None)
    assert not says or says in flaws[0]


def test_a_fault_that_changes_no_version_leaves_the_one_that_is_served_alone() -> None:
    found = sight("a0", one=operation(kind="pause", params={}))

    assert record_flaws(Done(True, 0.0), found, LINE, "a0") == []
    assert active_version({"data": []}, LINE) is None


# -- answers --------------------------------------------------------------------------------------


def test_a_killed_board_may_cost_the_one_answer_that_it_was_in_the_middle_of() -> None:
    answers = [answer(), broken("sim-0"), broken("sim-0", 1.0), broken("sim-1", 1.0)]

    found = lost(answers, ["sim-0"])

    assert (found.of_killed, found.beyond) == (1, 2)
    assert set(found.errors) == {"sim-0, no text: boom", "sim-1, text: boom"}


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(broken("", 1.0), id="an error"),
        pytest.param(answer(finish="abort"), id="aborted"),
        pytest.param(answer(exchange={"end_s": None}), id="no end"),
    ],
)
def test_an_answer_without_its_own_end_is_lost(one: Answer) -> None:
    assert lost([one], []).beyond == 1
    assert lost([answer()], ["sim-0"]) == Lost()


def test_versions_are_known_by_their_content_and_labels_by_the_base_model() -> None:
    letters = {"a": {0: Said("a", 1)}, "b": {0: Said("ab", 2)}, "": {1: Said("base", 3)}}
    labels = labels_of([answer(), answer("w7")])

    said = labels_said(letters, labels)

    assert labels == {"tone@b1", "w7"}
    assert said == {("tone@b1", 0): Said("ab", 2), ("w7", 1): Said("base", 3)}
    assert check([answer()], said, [Era("tone@b1")]).wrong == 0
    assert check([answer(text="ax")], said, [Era("tone@b1")]).wrong == 1


def test_a_new_label_in_the_middle_of_an_answer_is_no_mixture() -> None:
    said = {("w2", 0): Said("ab", 2)}
    renamed = answer("w2", spans=(Span("w1", 0, 1), Span("w2", 1, 2)))
    switched = answer(spans=(Span("tone@a0", 0, 1), Span("tone@b1", 1, 2)))
    gap = answer("w2", spans=(Span("w1", 0, 1), Span("w2", 2, 2)))

    assert of_one_weights(renamed).spans == (Span("w2", 0, 2),)
    assert check([of_one_weights(renamed)], said, [Era("w2")]).wrong == 0
    assert of_one_weights(switched) == switched
    assert of_one_weights(gap) == gap
    assert of_one_weights(answer(spans=())).spans == ()


def test_what_begins_with_an_old_version_once_the_cluster_is_whole_is_stale() -> None:
    times = served_after({"tone@a0", "tone@b1"}, {"tone@b1"}, settled_s=10.0)
    late = answer("tone@a0", exchange={"sent_s": 11.0, "content_s": (12.0,), "end_s": 13.0})

    assert check([answer("tone@a0"), answer("tone@b1")], {}, times).stale == 0
    assert check([late], {}, times).stale == 1


def test_texts_within_a_pause_are_counted() -> None:
    assert late_texts([answer()], None) == []
    assert late_texts([answer()], (2.5, 9.0)) == []
    assert late_texts([answer()], (0.5, 9.0)) == ["2 texts while paused"]


# -- sums -----------------------------------------------------------------------------------------


def test_only_hits_are_times_and_everything_that_is_wrong_counts() -> None:
    missed = replace(GOOD, hit=False, settled_s=None, behind=("sim-0 is joining",), mixed=1)
    slow = replace(GOOD, settled_s=3.0, lost=Lost(1, 2, ("boom", "boom")), left_paused=True)

    found = summed("a fault", [GOOD, slow, missed])

    assert (found.hits, found.tries, found.answers) == (2, 3, 27)
    assert (found.p50_s, found.max_s) == (2.0, 3.0)
    assert found.states == {"rollout succeeded": 2}
    assert (found.unsettled, found.left_paused, found.mixed) == (1, 1, 1)
    assert (found.lost, found.lost_of_killed) == (2, 1)
    assert found.flaws == ["1 x sim-0 is joining"]
    assert found.errors == ["2 x boom"]


@pytest.mark.parametrize(
    ("trial", "missed"),
    [
        pytest.param(GOOD, "", id="as it must be"),
        pytest.param(replace(GOOD, hit=False), "hits", id="never at its moment"),
        pytest.param(replace(GOOD, settled_s=None), "whole", id="not whole again"),
        pytest.param(replace(GOOD, left_paused=True), "paused", id="left paused"),
        pytest.param(replace(GOOD, mixed=1), "mixture", id="a mixture"),
        pytest.param(replace(GOOD, lost=Lost(1, 1)), "lost", id="lost"),
        pytest.param(replace(GOOD, lost=Lost(1, 0)), "", id="lost by the killed board"),
        pytest.param(replace(GOOD, stale=1), "gone", id="stale"),
        pytest.param(replace(GOOD, flaws=("it denies",)), "records", id="a record that hides"),
    ],
)
def test_each_way_to_be_wrong_misses_its_target(trial: Trial, missed: str) -> None:
    found = [one.what for one in fault_verdicts([summed("it", [trial])], 1) if not one.reached]

    assert len(found) == bool(missed)
    assert all(missed in what for what in found)


def test_the_report_has_every_fault_with_what_was_wrong() -> None:
    text = faults_section([summed("a fault", [replace(GOOD, flaws=("it denies",))])])

    assert "| a fault" in text
    assert "1 x rollout succeeded" in text
    assert "- a fault: 1 x it denies" in text
    assert faults_section([]) == ""


# -- what is asked for ----------------------------------------------------------------------------


def test_every_fault_has_a_name_of_its_own_and_can_be_chosen() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    asked = options(["--cases", "faults", "--quick", "--fault", "disk", "--times", "3"])
    assert (asked.size.faults, asked.output) == (3, None)
    assert [fault.name for fault in chosen(asked.size.fault)] == ["full disk on one board"]
    assert options([]).size.faults == 20
    for wrong in (["--fault", "nothing"], ["--times", "0"]):
        with pytest.raises(SystemExit):
            options(wrong)


# -- its hands ------------------------------------------------------------------------------------


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    """A process that says for each line how writing so many bytes went."""
    code = (
        "import sys\n"
        "for line in sys.stdin:\n"
        "    try:\n"
        f"        open({str(tmp_path / 'file')!r}, 'wb').write(bytes(int(line)))\n"
        "        print('ok', flush=True)\n"
        "    except OSError as exc:\n"
        "        print(exc.errno, flush=True)\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:  # type: ignore[call-overload]
        yield process
        process.stdin.close()


def _write(process: Any, size: int) -> str:
    process.stdin.write(f"{size}\n")
    process.stdin.flush()
    return str(process.stdout.readline().strip())


def test_a_full_disk_is_full_for_one_process_and_for_a_while(writer: Any) -> None:
    before = resource.prlimit(writer.pid, resource.RLIMIT_FSIZE)
    assert _write(writer, 100_000) == "ok"
    with full_disk(writer.pid, 50_000):
        assert _write(writer, 100_000).isdecimal()
        assert _write(writer, 10_000) == "ok"
    assert _write(writer, 100_000) == "ok"
    assert resource.prlimit(writer.pid, resource.RLIMIT_FSIZE) == before


def test_what_is_frozen_goes_on_afterwards_and_what_is_killed_does_not(writer: Any) -> None:
    with frozen(writer.pid):
        _, status = os.waitpid(writer.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
    assert _write(writer, 1) == "ok"
    kill(writer.pid)
    assert writer.wait() == -signal.SIGKILL
    kill(writer.pid)  # once more does no harm


def test_a_file_on_its_way_can_be_spoiled_by_one_byte_and_a_disk_emptied(tmp_path: Path) -> None:
    site = Site(("127.0.0.1", 9), tmp_path, list)
    part = tmp_path / "state" / "adapters" / "sim-0" / ".parts" / "d.part"
    assert site.part_size("sim-0", "d") == 0
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(10))

    site.spoil_part("sim-0", "d", 5)

    assert part.read_bytes() == bytes(5) + b"\xff" + bytes(4)
    assert site.part_size("sim-0", "d") == 10
    site.wipe("sim-0")
    site.wipe("sim-0")
    assert not part.exists()


def test_the_ledger_tells_where_an_operation_was_when_its_coordinator_died(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    ledger = Ledger.open(tmp_path / "data")
    site = Site(("127.0.0.1", 9), tmp_path, list)
    begun = recorded("op-1", OperationKind.PAUSE)
    ledger.write(operations=[begun])
    assert site.ledger_phase("op-1") == "accepted"
    assert site.until_phase("op-1", "accepted")
    assert site.ledger_phase("op-2") == ""
    assert not site.until_phase("op-2", "stopping")
    ledger.close()


def test_nobody_who_answers_is_told_from_an_answer() -> None:
    site = Site(("127.0.0.1", 9), Path("/nowhere"), list)

    assert site.get("/v1/boards") is None
    assert behind(site.sight(["op-1"]), BOARDS) == ["it does not answer"]
    with pytest.raises(BenchFailed):
        site.post("/pause")
    with pytest.raises(BenchFailed, match="rain"):
        wait_for("rain", lambda: None, 0.0)

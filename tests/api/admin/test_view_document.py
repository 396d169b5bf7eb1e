"""The document of a view, and deltas between two of them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rkserve.api.admin.cluster_view import (
    BoardHistoryAnswer,
    HistoryEntry,
    KeyUsageAnswer,
    VerdictAnswer,
    ViewDocument,
)
from rkserve.api.admin.view_document import (
    ViewContext,
    board_history,
    document,
    history_entry,
    operation_subject,
    usage_answer,
    verdict_answer,
)
from rkserve.control.calls import OperationKind
from rkserve.control.operations import BoardOutcome, ControlOperation, ResultStatus
from rkserve.core.answer_metrics import DayUsage, UsageReport
from rkserve.core.board_report import BoardState, FetchProgress
from rkserve.core.desired_state import (
    AdapterVersion,
    AdapterVersions,
    BoardTarget,
    Desired,
    EffectivePause,
    PauseMode,
)
from rkserve.core.merge_patch import merge_patch, patched
from rkserve.core.messages import AdapterRef
from rkserve.verdicts.facts import ClusterFacts, RequestPhase, RequestView
from rkserve.verdicts.history import BoardHistory, figures_of
from rkserve.verdicts.rules import judge
from tests.support.values.cluster_facts import (
    HEALTHY,
    MODEL,
    NOW_S,
    PLANTED,
    board,
    healthy,
    pause,
)
from tests.support.values.control_values import recorded

CLIENT, OPERATOR = ViewContext("0", 3), ViewContext("0", 3, operations=())
REQUEST = RequestView("chatcmpl-1", RequestPhase.DECODE, NOW_S - 8.26, MODEL, "rock-01", 1, "alice")


def made(facts: ClusterFacts, about: ViewContext = CLIENT) -> ViewDocument:
    """A document that is what its schema states, and survives JSON."""
    found = document(facts, judge(facts), about)
    TypeAdapter(ViewDocument).validate_python(found, strict=True)
    assert json.loads(json.dumps(found)) == found
    return found


@pytest.mark.parametrize("name", PLANTED)
def test_the_document_of_each_planted_cause_follows_the_schema(name: str) -> None:
    facts = PLANTED[name][0]()
    view = made(facts)
    assert view["verdict"]["reasons"][0]["rule"] == name
    answer = verdict_answer(facts, judge(facts))
    TypeAdapter(VerdictAnswer).validate_python(answer, strict=True)


def values(of: object) -> list[object]:
    """All values of objects within objects."""
    if isinstance(of, dict):
        return [one for value in of.values() for one in (value, *values(value))]
    return []


@pytest.mark.parametrize("name", PLANTED)
def test_no_value_of_the_document_is_null(name: str) -> None:
    assert None not in values(made(PLANTED[name][0]()))


def test_figures_are_columns_in_the_order_of_the_boards() -> None:
    facts = healthy(board(1, replace(HEALTHY, ddr_hz=None), running=0), count=3)
    view = made(facts)
    assert view["order"] == ["rock-01", "rock-02", "rock-03"]
    assert view["now"]["running"] == [0, 1, 1]
    assert view["now"]["ddr_mhz"] == [None, 2112, 2112]


def test_keys_and_operations_are_for_the_operator() -> None:
    facts = replace(healthy(), requests=(REQUEST, replace(REQUEST, id="chatcmpl-2", key="")))
    done = replace(recorded("op-1", OperationKind.PAUSE), finished_s=NOW_S)
    seen = made(facts, ViewContext("0", 3, operations=(done,)))
    assert [one.get("key") for one in seen["requests"].values()] == ["alice", "anonymous"]
    assert seen["operations"]["op-1"]["kind"] == "pause"
    hidden = made(facts)
    assert (seen["operator"], hidden["operator"]) == (True, False)
    assert "alice" not in json.dumps(hidden)
    assert hidden["operations"] == {}
    assert hidden["requests"]["chatcmpl-1"] == {
        "phase": "decode",
        "since_s": NOW_S - 8.3,
        "board": "rock-01",
        "failovers": 1,
    }


def test_a_board_shows_what_is_out_of_the_ordinary() -> None:
    version = AdapterVersion(AdapterRef("tone", "v2", "d" * 64), 100)
    line = AdapterVersions(MODEL, "tone", candidate=version, switched=("rock-01",))
    hold = EffectivePause(PauseMode.KEEP)
    target = BoardTarget(13, hold=hold, label="step-7", drained=True)
    odd = board(
        1,
        target=target,
        state=BoardState.FETCHING,
        reason="no space in /var/lib/rkserve",
        fetch=FetchProgress(1, 10, 2.5, "head"),
        circuit="open",
        circuit_reason="3 requests failed",
        crashes=(("SIGSEGV", 2),),
        cache_bytes=310_000_000,
    )
    desired = Desired(13, (pause(),), (line,))
    view = made(replace(healthy(odd, count=3), desired=desired))
    one = view["boards"]["rock-01"]
    assert (one["state"], one["reason"], one["weights"]) == (
        "fetching",
        "no space in rkserve",
        "step-7",
    )
    assert (one["behind"], one["hold"], one["prompt_cache_mb"]) == (1, "keep", 310)
    assert one["drained"] is True
    assert one["fetch"]["source"] == "head"
    assert one["circuit"]["state"] == "open"
    assert one["crashes"] == {"SIGSEGV": 2}
    assert (one["disk_free_mb"], one["ddr_max_mhz"]) == (21_000, 2112)
    plain = view["boards"]["rock-02"]
    assert (
        not {"reason", "behind_", "hold", "drained", "circuit", "fetch", "crashes"} & plain.keys()
    )
    assert view["rollouts"][f"{MODEL}:tone"]["switched"] == 1
    assert view["pauses"]["op-7"]["models"] == [MODEL]


def test_histories_follow_their_schemas() -> None:
    history = BoardHistory()
    for _ in range(7):
        history.add(BoardState.READY, figures_of(board(1)))
    entry = history_entry({"rock-01": history}, NOW_S)
    TypeAdapter(HistoryEntry).validate_python(entry, strict=True)
    assert entry["columns"]["rock-01"]["running"] == [1, 1]
    answer = board_history("rock-01", history, NOW_S)
    TypeAdapter(BoardHistoryAnswer).validate_python(answer, strict=True)
    assert answer["states"] == [{"state": "ready", "points": 7}]


FACTS = st.sampled_from([healthy(), *(facts() for facts, _ in PLANTED.values())])


@settings(max_examples=30)
@given(st.lists(FACTS, min_size=2, max_size=6))
def test_deltas_reconstruct_every_later_document(steps: list[ClusterFacts]) -> None:
    views: list[Any] = [document(one, judge(one), OPERATOR) for one in steps]
    known: dict[str, Any] = json.loads(json.dumps(views[0]))
    for before, after in pairwise(views):
        known = patched(known, json.loads(json.dumps(merge_patch(before, after))))
        assert known == after


def test_columns_without_changes_are_not_in_a_patch() -> None:
    before = document(healthy(), judge(healthy()), CLIENT)
    warmer = healthy(board(1, replace(HEALTHY, temperature_c=62.0)))
    patch = merge_patch(before, document(warmer, judge(warmer), replace(CLIENT, tick=4)))
    assert patch == {"tick": 4, "now": {"temperature_c": [62, 61, 61, 61]}}


def test_an_operation_counts_its_boards() -> None:
    operation: ControlOperation = recorded("op-1", OperationKind.PAUSE)
    statuses = (ResultStatus.OK, ResultStatus.GONE, ResultStatus.SILENT, ResultStatus.WAITING)
    for number, status in enumerate(statuses):
        operation = operation.with_result(f"rock-{number}", BoardOutcome(status))
    view = made(healthy(), ViewContext("0", 1, operations=(operation,)))
    entry = view["operations"]["op-1"]
    assert (entry["total"], entry["done"], entry["failed"]) == (4, 2, 1)


@pytest.mark.parametrize(
    ("params", "subject"),
    [
        ({"model": "sim-chat", "name": "tone", "version": "v2"}, "tone@v2"),
        ({"model": "sim-chat", "name": "tone"}, "tone"),
        ({"models": [], "boards": [], "adapter": "tone"}, "tone"),
        ({"models": ["sim-chat"], "boards": ["a"]}, "a"),
        ({"models": ["sim-chat"], "boards": []}, "sim-chat"),
        ({"boards": ["a", "b", "c", "d", "e"]}, "a, b, c, and 2 more"),
        ({"models": [], "boards": [], "adapter": None}, None),
    ],
)
def test_an_operation_has_its_subject(params: dict[str, Any], subject: str | None) -> None:
    assert operation_subject(params) == subject


def test_usage_begins_with_the_latest_day_and_names_calls_without_a_key_anonymous() -> None:
    rows = [
        DayUsage(20_454, "bob", 1),
        DayUsage(20_455, "bob", 2, 30, 4, 1.26),
        DayUsage(20_455, "(none)", 1),
    ]
    answer = usage_answer(UsageReport(rows, ["1", "0"], ["2"], ["1"]))
    found = [(one["day"], one["key"], one["requests"]) for one in answer["data"]]
    assert found == [
        ("2026-01-02", "anonymous", 1),
        ("2026-01-02", "bob", 2),
        ("2026-01-01", "bob", 1),
    ]
    assert answer["data"][1]["board_s"] == 1.3
    assert answer["routers"] == {"up": ["0", "1"], "silent": ["2"]}
    assert answer["unstored"] == ["1"]
    TypeAdapter(KeyUsageAnswer).validate_python(answer, strict=True)

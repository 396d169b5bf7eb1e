"""The desired state: which part of the cluster a scope is, and what each board has to do."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given

from rkserve.core.desired_state import (
    ActivePause,
    AdapterVersions,
    Adoption,
    BaseVersion,
    BaseWeightsChange,
    Desired,
    EffectivePause,
    PauseMode,
    Scope,
    SleepLevel,
    Weights,
)
from tests.support.values.control_values import (
    BOARDS,
    MODELS,
    SESSIONS,
    desires,
    scopes,
    version,
)

V1, V2 = version("law", "v1"), version("law", "v2")
BASE = BaseVersion("m", "step-7", "b" * 64, 5)
KEEP, WAIT, ABORT = PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT


@given(scopes, scopes)
def test_a_scope_within_another_covers_no_other_board(inner: Scope, outer: Scope) -> None:
    assert inner.within(inner)
    assert inner.within(Scope())
    if inner.within(outer):
        for board in BOARDS:
            for model in MODELS:
                assert outer.covers(board, model) or not inner.covers(board, model)


def test_a_scope_restricts_only_what_it_names() -> None:
    assert Scope().covers("b1", "m")
    assert Scope(models=("m",)).covers("b1", "m")
    assert not Scope(models=("m",)).covers("b1", "n")
    assert not Scope(models=("m",), boards=("b2",)).covers("b1", "m")
    assert Scope(adapter="law").within(Scope())
    assert not Scope().within(Scope(adapter="law"))


def test_versions_are_listed_once_and_found_by_name() -> None:
    line = AdapterVersions("m", "law", V1, V2, V1, kept=(V2,))
    assert line.versions == (V1, V2)
    assert (line.version("v2"), line.version("v3")) == (V2, None)


def test_a_candidate_is_served_by_switched_boards_and_to_its_share_of_sessions() -> None:
    line = AdapterVersions("m", "law", V1, V2, switched=("b2",))
    assert {line.serves("b2", session) for session in SESSIONS} == {V2.ref}
    assert {line.serves("b1", session) for session in SESSIONS} == {V1.ref}
    half = AdapterVersions("m", "law", V1, V2, weight=0.5)
    sessions = [f"s{number}" for number in range(400)]
    got = [half.serves("b1", session) for session in sessions]
    assert 150 < got.count(V2.ref) < 250
    assert got == [half.serves("b3", session) for session in sessions]
    assert AdapterVersions("m", "law").serves("b1", "s") is None


def test_a_change_of_base_weights_is_for_the_boards_whose_turn_it_is() -> None:
    change = BaseWeightsChange(BASE, "new", switched=("b1",))
    weights = Weights("m", "old", rebase=change)
    assert weights.on("b1") == (BASE, "new")
    assert weights.on("b2") == (None, "old")
    assert BaseWeightsChange(None, "new", everywhere=True).meets("b2")


def test_a_board_obeys_the_strictest_of_its_pauses_until_the_last_lease_ends() -> None:
    desired = Desired(
        3,
        pauses=(
            ActivePause("a", Scope(("m",)), KEEP, expires_s=5.0),
            ActivePause("b", Scope((), ("b1",)), ABORT, clear_cache=True, expires_s=9.0),
            ActivePause("c", Scope(("m",), (), "law"), WAIT),
            ActivePause("d", Scope(("n",)), KEEP, level=SleepLevel.DROPPED),
        ),
    )
    target = desired.target("b1", "m")
    assert target.hold == EffectivePause(ABORT, clear_cache=True, expires_s=9.0)
    assert target.adapter_holds == (("law", EffectivePause(WAIT)),)
    assert target.held("med") == target.hold
    assert desired.target("b2", "m").held("law") == EffectivePause(WAIT, keeps=True)
    assert (target.level, desired.target("b1", "n").level) == (None, SleepLevel.DROPPED)
    assert desired.target("b3", "o").hold is None


def test_a_hold_has_a_reason() -> None:
    calm = Desired(lines=(AdapterVersions("m", "law", V1),))
    asleep = Desired(
        pauses=(ActivePause("a", Scope(), KEEP, level=SleepLevel.UNLOADED),), lines=calm.lines
    )
    updated = Desired(lines=(AdapterVersions("m", "law", V2),))
    before = calm.served("m")
    assert before.held_by(updated.served("m")) == "update"
    assert asleep.served("m").held_by(before) == "sleep"
    assert before.held_by(asleep.served("m")) == "pause"


def test_a_board_says_every_file_that_it_lacks() -> None:
    assert Adoption("b1", 3).lacking == ()
    assert Adoption("b1", 3, (V1,), missing_base=BASE).lacking == (V1, BASE)
    assert (V1.key, V1.digest) == (V1.ref.key, V1.ref.digest)
    assert (BASE.key, BASE.title) == (f"m-{'b' * 12}", "model m@step-7")


@given(desires)
def test_a_desired_state_crosses_processes(desired: Desired) -> None:
    assert pickle.loads(pickle.dumps(desired)) == desired
    for board in BOARDS:
        target = desired.target(board, "small")
        assert pickle.loads(pickle.dumps(target)) == target


@pytest.mark.parametrize("model", MODELS)
def test_a_board_needs_the_versions_of_its_model_only(model: str) -> None:
    lines = tuple(AdapterVersions(name, "law", V1, previous=V2) for name in MODELS)
    assert Desired(lines=lines).target("b1", model).versions == (V1, V2)
    assert Desired(lines=lines[:1]).target("b1", MODELS[1]).versions == ()

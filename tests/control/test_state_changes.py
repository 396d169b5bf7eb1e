"""Every change makes the next epoch or none, and leaves a state that makes sense."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkserve.control import state_changes
from rkserve.core.board_report import AdapterTrial, TrialVerdict
from rkserve.core.desired_state import (
    ActivePause,
    AdapterVersion,
    AdapterVersions,
    BaseVersion,
    Desired,
    EffectivePause,
    InFlight,
    PauseMode,
    Scope,
    Weights,
)
from rkserve.core.errors import (
    AdapterExists,
    AdapterNotFound,
    OperationConflict,
    RequestError,
    RkserveError,
    StaleEpoch,
    StaleWeights,
)
from rkserve.core.messages import AdapterRef
from tests.support.values.control_values import (
    BOARDS,
    MODELS,
    NAMES,
    SESSIONS,
    labels,
    scopes,
    version,
)

KEEP, WAIT, ABORT = PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT
V1, V2, V3, V4 = (version("law", f"v{n}") for n in range(1, 5))
Change: TypeAlias = Callable[[Desired], Desired]


def line(desired: Desired) -> AdapterVersions:
    found = desired.line("m", "law")
    assert found is not None
    return found


def serving(*versions: AdapterVersion) -> Desired:
    """The state after these were rolled out, one after the other."""
    desired = Desired()
    for one in versions:
        desired = state_changes.commit(state_changes.begin(desired, "m", one), "m", "law")
    return desired


# Pauses


def test_a_pause_holds_its_scope_until_it_is_resumed() -> None:
    paused = state_changes.pause(Desired(4), "op", Scope(boards=("b1",)), WAIT, 10.0, lease_s=5)
    assert paused.epoch == 5
    assert paused.target("b1", "m").hold == EffectivePause(WAIT, expires_s=15.0)
    assert paused.target("b2", "m").hold is None
    resumed, removed = state_changes.resume(paused)
    assert (resumed, removed) == (Desired(6), paused.pauses)


def test_to_resume_nothing_changes_nothing() -> None:
    desired = Desired(3)
    assert state_changes.resume(desired) == (desired, ())
    assert state_changes.resume(desired, Scope(("m",)))[0] is desired


@pytest.mark.parametrize(
    ("paused", "resumed", "freed"),
    [
        pytest.param(Scope(), None, True, id="all by all"),
        pytest.param(Scope(("m",)), None, True, id="a model by all"),
        pytest.param(Scope((), (), "law"), None, True, id="an adapter by all"),
        pytest.param(Scope(("m",), ("b1",)), Scope(("m",)), True, id="a board by its model"),
        pytest.param(Scope((), (), "law"), Scope((), (), "law"), True, id="an adapter by itself"),
        pytest.param(Scope(("m",)), Scope(("n",)), False, id="a model by another"),
        pytest.param(Scope((), ("b1",)), Scope((), ("b2",)), False, id="a board by another"),
        pytest.param(
            Scope((), (), "law"), Scope((), (), "med"), False, id="one adapter by another"
        ),
    ],
)
def test_a_resume_frees_what_lies_within_it(
    paused: Scope, resumed: Scope | None, freed: bool
) -> None:
    desired = state_changes.pause(Desired(), "op", paused, KEEP, 0.0)
    assert bool(state_changes.resume(desired, resumed)[1]) is freed


@pytest.mark.parametrize(
    ("paused", "resumed", "said"),
    [
        pytest.param(Scope(), Scope(("m",)), "the whole cluster", id="a model of all"),
        pytest.param(Scope(("m",)), Scope((), ("b1",)), "model m", id="a board of a model"),
        pytest.param(Scope((), ("b1", "b2")), Scope((), ("b1",)), "board b1, b2", id="one of two"),
        pytest.param(Scope(), Scope((), (), "law"), "the whole cluster", id="an adapter of all"),
    ],
)
def test_half_a_pause_cannot_be_resumed(paused: Scope, resumed: Scope, said: str) -> None:
    desired = state_changes.pause(Desired(), "op", paused, KEEP, 0.0)
    with pytest.raises(OperationConflict, match=said):
        state_changes.resume(desired, resumed)


def test_a_lease_ends_at_its_time_and_not_before() -> None:
    desired = state_changes.pause(Desired(), "op", Scope(), KEEP, 100.0, lease_s=2)
    assert state_changes.expire(desired, 101.9) == (desired, ())
    freed, gone = state_changes.expire(desired, 102.0)
    assert (freed.pauses, freed.epoch, len(gone)) == ((), 2, 1)


@pytest.mark.parametrize("lease_s", [0, -1.0, float("nan")])
def test_a_lease_of_no_time_is_refused(lease_s: float) -> None:
    with pytest.raises(RequestError, match="lease_s"):
        state_changes.pause(Desired(), "op", Scope(), KEEP, 0.0, lease_s=lease_s)


def test_a_pause_that_holds_already_changes_nothing() -> None:
    desired = state_changes.pause(Desired(), "a", Scope(), KEEP, 0.0)
    assert state_changes.pause(desired, "b", Scope(), KEEP, 1.0, lease_s=9) is desired
    assert state_changes.pause(desired, "b", Scope(), ABORT, 1.0).epoch == 2
    # What may yet be undone is nothing to rely on.
    assert state_changes.pause(desired, "b", Scope(), KEEP, 1.0, running={"a"}).epoch == 2


def test_a_lease_that_is_renewed_for_ever_leaves_no_pile() -> None:
    desired = Desired()
    for n in range(1000):
        desired = state_changes.pause(desired, f"op-{n}", Scope(), KEEP, float(n), lease_s=3600)
    assert len(desired.pauses) <= 2
    assert desired.target("b", "m").hold == EffectivePause(KEEP, expires_s=999.0 + 3600)


def test_too_many_pauses_are_refused() -> None:
    desired = Desired()
    for n in range(state_changes.MAX_PAUSES):
        desired = state_changes.pause(desired, "op", Scope((), (f"b{n}",)), KEEP, 0.0)
    with pytest.raises(OperationConflict, match="64 pauses"):
        state_changes.pause(desired, "op", Scope((), ("more",)), KEEP, 0.0)


pause_calls = st.tuples(
    st.sampled_from(("op-1", "op-2", "op-3", "op-4")),
    scopes,
    st.sampled_from(PauseMode),
    st.booleans(),
    st.none() | st.integers(1, 20).map(float),
)


@settings(deadline=None)
@given(
    st.lists(pause_calls, max_size=12),
    st.frozensets(st.sampled_from(("op-1", "op-2"))),
    st.integers(0, 40).map(float),
)
def test_what_is_forgotten_of_pauses_changes_nothing_for_any_board_at_any_time(
    calls: list[tuple[str, Scope, PauseMode, bool, float | None]],
    running: frozenset[str],
    later_s: float,
) -> None:
    desired, naive = Desired(), Desired()
    for n, (who, scope, mode, clear, lease_s) in enumerate(calls):
        now_s, ends_s = float(n), None if lease_s is None else n + lease_s
        desired = state_changes.pause(
            desired, who, scope, mode, now_s, clear_cache=clear, lease_s=lease_s, running=running
        )
        naive = state_changes.hold(naive, ActivePause(who, scope, mode, clear, now_s, ends_s))
    for undo in (None, "op-1", "op-2"):
        if undo is not None and undo not in running:
            continue  # only what goes on is ever undone
        ours = desired if undo is None else state_changes.withdraw(desired, undo)
        theirs = naive if undo is None else state_changes.withdraw(naive, undo)
        ours, theirs = (
            state_changes.expire(ours, later_s)[0],
            state_changes.expire(theirs, later_s)[0],
        )
        for board in BOARDS:
            for model in MODELS:
                one, other = ours.target(board, model), theirs.target(board, model)
                assert (one.hold, one.adapter_holds) == (other.hold, other.adapter_holds)


# Adapters


def test_a_version_is_added_without_being_served() -> None:
    desired = state_changes.add_version(serving(V1), "m", V2)
    assert line(desired).serves("b1", "s") == V1.ref
    assert line(desired).version("v2") == V2
    assert line(desired).epoch < desired.epoch  # boards bind nothing anew for it
    assert state_changes.add_version(desired, "m", V2) is desired


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(version("law", "v1", "other"), id="another file"),
        pytest.param(version("law", "v1", scale=0.5), id="another scale"),
        pytest.param(replace(V1, size_bytes=1), id="another size"),
    ],
)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda d, v: state_changes.add_version(d, "m", v), id="add"),
        pytest.param(lambda d, v: state_changes.begin(d, "m", v), id="begin"),
        pytest.param(lambda d, v: state_changes.check_version(d, "m", v), id="check"),
    ],
)
def test_the_name_of_a_version_stands_for_one_content(
    change: Callable[[Desired, AdapterVersion], object], other: AdapterVersion
) -> None:
    with pytest.raises(AdapterExists, match="v1"):
        change(serving(V1, V2), other)
    change(Desired(), other)  # it is the name that is taken, nothing is wrong with the content


def test_what_is_committed_is_served_and_what_was_is_remembered() -> None:
    desired = serving(V1, V2, V3, V4)
    assert (line(desired).active, line(desired).previous) == (V4, V3)
    assert line(desired).kept == (V2, V1)
    assert line(desired).epoch == desired.epoch
    five = version("law", "v5")
    six = version("law", "v6")
    for one in (five, six):
        desired = state_changes.commit(state_changes.begin(desired, "m", one), "m", "law", keep=1)
    assert line(desired).versions == (six, five, V4)


def test_what_was_staged_and_never_served_is_pushed_out_by_nothing() -> None:
    desired = serving(V1)
    waiting = [version("law", f"w{n}") for n in range(5)]
    for one in waiting:
        desired = state_changes.add_version(desired, "m", one)
    for one in (V2, V3, V4, waiting[4]):
        desired = state_changes.commit(state_changes.begin(desired, "m", one), "m", "law", keep=1)
    assert (line(desired).active, line(desired).previous) == (waiting[4], V4)
    assert set(line(desired).kept) == {*waiting[:4], V3}
    assert line(desired).left == ("v3",)
    back = state_changes.rollback(desired, "m", "law", keep=1)
    assert set(line(back).kept) == set(waiting)
    assert line(back).left == ("w4",)


def test_a_candidate_that_was_taken_back_has_had_its_turn() -> None:
    desired = serving(V1)
    for label in ("w1", "w2", "w3"):
        failed = version("law", label)
        begun = state_changes.begin(
            state_changes.add_version(desired, "m", failed), "m", failed, weight=0.5
        )
        desired = state_changes.drop(begun, "m", "law")
    assert len(line(desired).kept) == 3
    desired = state_changes.commit(state_changes.begin(desired, "m", V2), "m", "law", keep=2)
    assert [one.ref.version for one in line(desired).kept] == ["w3", "w2"]


def test_versions_that_wait_for_ever_are_no_more_than_so_many() -> None:
    desired = Desired()
    for n in range(state_changes.MAX_WAITING):
        desired = state_changes.add_version(desired, "m", version("law", f"w{n}"))
    with pytest.raises(OperationConflict, match="never served"):
        state_changes.add_version(desired, "m", V1)
    assert state_changes.add_version(desired, "m", version("law", "w0")) is desired


def test_a_candidate_that_nobody_gets_yet_is_no_change_of_what_is_served() -> None:
    before = serving(V1)
    offered = state_changes.begin(before, "m", V2, in_flight=InFlight.SWITCH)
    assert line(offered).epoch == line(before).epoch
    weighed = state_changes.begin(before, "m", V2, weight=0.5)
    assert line(weighed).epoch == weighed.epoch
    served = {line(weighed).serves("b1", session) for session in SESSIONS}
    assert served == {V1.ref, V2.ref}


def test_boards_are_switched_one_after_the_other() -> None:
    desired = state_changes.switch(state_changes.begin(serving(V1), "m", V2), "m", "law", ["b2"])
    assert line(desired).serves("b2", "s") == V2.ref
    assert line(desired).serves("b1", "s") == V1.ref
    assert line(desired).epoch == desired.epoch
    assert state_changes.switch(desired, "m", "law", ["b2"]) is desired
    assert line(state_changes.switch(desired, "m", "law", ["b1"])).switched == ("b1", "b2")


@pytest.mark.parametrize("before", [(), (V1,), (V1, V2), (V1, V3, V2)], ids=len)
def test_a_candidate_that_is_dropped_leaves_nothing(before: tuple[AdapterVersion, ...]) -> None:
    desired = serving(*before)
    begun = state_changes.switch(
        state_changes.begin(desired, "m", V4, weight=0.3), "m", "law", ["b1"]
    )
    dropped = state_changes.drop(begun, "m", "law")
    if not before:
        assert dropped.lines == ()
        return
    assert line(dropped) == replace(line(desired), epoch=dropped.epoch)


def trial(digest: int, verdict: TrialVerdict, reason: str = "") -> AdapterTrial:
    return AdapterTrial("m", f"{digest:064x}", verdict, reason=reason)


def test_the_latest_trial_of_a_content_stands() -> None:
    desired = state_changes.note_trial(Desired(4), trial(1, TrialVerdict.CRASHED, "SIGSEGV"))
    desired = state_changes.note_trial(desired, trial(2, TrialVerdict.PASSED))
    desired = state_changes.note_trial(desired, trial(1, TrialVerdict.PASSED))
    assert desired.epoch == 7
    assert desired.trials == (trial(2, TrialVerdict.PASSED), trial(1, TrialVerdict.PASSED))
    version = AdapterVersion(AdapterRef("law", "v1", f"{1:064x}"), 7)
    assert desired.trial("m", version) == trial(1, TrialVerdict.PASSED)
    assert desired.trial("other", version) is None


def test_a_trial_is_of_a_scale_on_base_weights_in_a_release() -> None:
    old = replace(trial(1, TrialVerdict.CRASHED), release="1.2.3")
    half, newer = replace(old, scale=0.5), replace(old, release="1.3.1")
    desired = Desired()
    for one in (old, half, newer, replace(old, reason="again")):
        desired = state_changes.note_trial(desired, one)
    assert desired.trials == (half, newer, replace(old, reason="again"))
    ref = AdapterRef("law", "v1", f"{1:064x}")
    version = AdapterVersion(ref, 7)
    assert desired.trial("m", version, {"1.3.1", "1.3.0"}) == newer
    assert desired.trial("m", version, {"1.3.0"}) is None
    assert desired.trial("m", AdapterVersion(replace(ref, scale=0.5), 7)) == half
    base = BaseVersion("m", "b2", "b" * 64, 9)
    assert replace(desired, weights=(Weights("m", base=base),)).trial("m", version) is None


def test_failures_are_remembered_longer_than_successes() -> None:
    desired = Desired()
    bad = [trial(n, TrialVerdict.CRASHED) for n in range(10)]
    for one in bad:
        desired = state_changes.note_trial(desired, one)
    for n in range(100, 300):
        desired = state_changes.note_trial(desired, trial(n, TrialVerdict.PASSED))
    assert len(desired.trials) == state_changes.MAX_TRIALS
    assert set(bad) <= set(desired.trials)
    assert desired.trials[-1] == trial(299, TrialVerdict.PASSED)
    for n in range(300, 400):
        desired = state_changes.note_trial(desired, trial(n, TrialVerdict.HUNG))
    assert len(desired.trials) == state_changes.MAX_TRIALS
    assert desired.trials[0] == trial(336, TrialVerdict.HUNG), "then the oldest is forgotten"


def test_the_version_before_can_be_brought_in_again() -> None:
    desired = state_changes.commit(state_changes.begin(serving(V1, V2), "m", V1), "m", "law")
    assert (line(desired).active, line(desired).previous, line(desired).kept) == (V1, V2, ())


def test_a_rollback_goes_back_one_step_and_no_further() -> None:
    desired = state_changes.rollback(serving(V1, V2), "m", "law", in_flight=InFlight.SWITCH)
    assert (line(desired).active, line(desired).previous) == (V1, None)
    assert line(desired).version("v2") == V2
    assert (line(desired).epoch, line(desired).in_flight) == (desired.epoch, InFlight.SWITCH)
    with pytest.raises(OperationConflict, match="no version to roll back to"):
        state_changes.rollback(desired, "m", "law")


def test_versions_and_adapters_are_retired() -> None:
    desired = serving(V1, V2, V3)
    assert line(state_changes.retire(desired, "m", "law", "v2")).previous is None
    assert line(state_changes.retire(desired, "m", "law", "v1")).kept == ()
    assert state_changes.retire(desired, "m", "law").lines == ()
    assert state_changes.retire(serving(V1), "m", "law", "v1").lines == ()
    # What is served stays as it is, so boards bind nothing anew.
    assert line(state_changes.retire(desired, "m", "law", "v1")).epoch == line(desired).epoch


CANARY = state_changes.begin(serving(V1, V2), "m", V3, weight=0.5)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        pytest.param(
            lambda: state_changes.commit(serving(V1), "m", "law"), OperationConflict, id="commit"
        ),
        pytest.param(
            lambda: state_changes.promote(serving(V1), "m", "law"), OperationConflict, id="promote"
        ),
        pytest.param(
            lambda: state_changes.drop(serving(V1), "m", "law"), OperationConflict, id="drop"
        ),
        pytest.param(
            lambda: state_changes.switch(serving(V1), "m", "law", ["b"]),
            OperationConflict,
            id="switch",
        ),
        pytest.param(
            lambda: state_changes.rollback(serving(V1), "m", "law"),
            OperationConflict,
            id="back to what",
        ),
        pytest.param(
            lambda: state_changes.rollback(CANARY, "m", "law"),
            OperationConflict,
            id="back from a canary",
        ),
        pytest.param(
            lambda: state_changes.begin(CANARY, "m", V4), OperationConflict, id="two candidates"
        ),
        pytest.param(
            lambda: state_changes.begin(CANARY, "m", V3), OperationConflict, id="it is one now"
        ),
        pytest.param(
            lambda: state_changes.begin(serving(V1), "m", V2, weight=1.1),
            RequestError,
            id="weight above 1",
        ),
        pytest.param(
            lambda: state_changes.begin(serving(V1), "m", V2, weight=float("nan")),
            RequestError,
            id="weight of nothing",
        ),
        pytest.param(
            lambda: state_changes.retire(serving(V1, V2), "m", "law", "v2"),
            OperationConflict,
            id="retire what is served",
        ),
        pytest.param(
            lambda: state_changes.retire(CANARY, "m", "law", "v3"),
            OperationConflict,
            id="retire a canary",
        ),
        pytest.param(
            lambda: state_changes.retire(CANARY, "m", "law"), OperationConflict, id="retire all"
        ),
        pytest.param(
            lambda: state_changes.retire(serving(V1), "m", "law", "v9"),
            AdapterNotFound,
            id="no version",
        ),
        pytest.param(
            lambda: state_changes.retire(serving(V1), "m", "x"), AdapterNotFound, id="no adapter"
        ),
        pytest.param(
            lambda: state_changes.rollback(serving(V1), "n", "law"), AdapterNotFound, id="no model"
        ),
        pytest.param(
            lambda: state_changes.commit(Desired(), "m", "law"), AdapterNotFound, id="no one"
        ),
        pytest.param(
            lambda: state_changes.set_label(Desired(), "m", ""), RequestError, id="no label"
        ),
        pytest.param(lambda: state_changes.expect(Desired(4), 3), StaleEpoch, id="an older epoch"),
        pytest.param(lambda: state_changes.expect(Desired(4), 5), StaleEpoch, id="a later epoch"),
    ],
)
def test_an_invalid_change_is_refused(change: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error) as failure:
        change()
    assert type(failure.value) is error


def test_what_is_active_already_needs_no_candidate() -> None:
    desired = serving(V1)
    assert state_changes.begin(desired, "m", V1, weight=0.5) is desired


# Labels and steps


def test_labels_and_steps_are_those_of_a_model() -> None:
    desired = state_changes.set_step(state_changes.set_label(Desired(), "m", "step-3"), "m", 3)
    assert desired.target("b", "m").label == "step-3"
    assert desired.weights_of("m").step == 3
    assert desired.target("b", "n").label == "default"
    assert state_changes.set_label(desired, "m", "step-3") is desired
    state_changes.expect(desired, 2)
    state_changes.expect(desired, None)


@pytest.mark.parametrize("step", [2, 3])
def test_a_step_that_is_not_later_is_stale(step: int) -> None:
    with pytest.raises(StaleWeights, match="3"):
        state_changes.set_step(state_changes.set_step(Desired(), "m", 3), "m", step)


def test_several_changes_in_one_epoch_are_one_change() -> None:
    before = state_changes.pause(serving(V1), "op", Scope(), KEEP, 0.0)
    after = state_changes.as_one(
        before,
        lambda d: state_changes.begin(d, "m", V2),
        lambda d: state_changes.commit(d, "m", "law"),
        lambda d: state_changes.withdraw(d, "op"),
    )
    assert (after.epoch, line(after).epoch, after.pauses) == (
        before.epoch + 1,
        before.epoch + 1,
        (),
    )
    assert state_changes.as_one(before, lambda d: state_changes.withdraw(d, "other")) is before


# Anything, in any order

model = st.sampled_from(MODELS)
name = st.sampled_from(NAMES)


def built(n: str, label: str, other: bool) -> AdapterVersion:
    return version(n, label, "other" if other else "")


some_version = st.builds(built, name, labels, st.booleans())
lease = st.none() | st.integers(1, 9).map(float)
random_changes: st.SearchStrategy[Change] = st.one_of(
    st.builds(
        lambda s, m, t: (
            lambda d: state_changes.pause(d, f"op-{d.epoch}", s, m, 1.0 * d.epoch, lease_s=t)
        ),
        scopes,
        st.sampled_from(PauseMode),
        lease,
    ),
    st.builds(lambda s: lambda d: state_changes.resume(d, s)[0], st.none() | scopes),
    st.just(lambda d: state_changes.expire(d, 1.0 * d.epoch)[0]),
    st.builds(lambda m, v: lambda d: state_changes.add_version(d, m, v), model, some_version),
    st.builds(
        lambda m, v, w: lambda d: state_changes.begin(d, m, v, weight=w),
        model,
        some_version,
        st.sampled_from((0.0, 0.5, 1.0)),
    ),
    st.builds(
        lambda m, n, b: lambda d: state_changes.switch(d, m, n, [b]),
        model,
        name,
        st.sampled_from(BOARDS),
    ),
    st.builds(
        lambda m, n, k: lambda d: state_changes.commit(d, m, n, k), model, name, st.integers(0, 3)
    ),
    st.builds(lambda m, n: lambda d: state_changes.drop(d, m, n), model, name),
    st.builds(lambda m, n: lambda d: state_changes.rollback(d, m, n), model, name),
    st.builds(
        lambda m, n, v: lambda d: state_changes.retire(d, m, n, v), model, name, st.none() | labels
    ),
    st.builds(lambda m, v: lambda d: state_changes.set_label(d, m, v), model, labels),
    st.builds(lambda m, s: lambda d: state_changes.set_step(d, m, s), model, st.integers(0, 9)),
)


def check(before: Desired, after: Desired) -> None:
    assert after is before or after.epoch == before.epoch + 1
    keys = [(one.model, one.name) for one in after.lines]
    assert keys == sorted(set(keys))
    for one in after.lines:
        found = one.versions
        assert found
        assert len({each.ref.version for each in found}) == len(found)
        assert {each.ref.name for each in found} == {one.name}
        named = [each for each in (one.active, one.previous, *one.kept) if each is not None]
        assert len(set(named)) == len(named)
        assert {*one.left} <= {each.ref.version for each in one.kept}
        assert one.candidate is None or one.candidate != one.active
        assert one.candidate is not None or (one.switched, one.weight) == ((), 0.0)
        assert one.epoch <= after.epoch
        old = before.line(one.model, one.name)
        if after is not before and old is not None:
            same = all(
                old.serves(board, session) == one.serves(board, session)
                for board in BOARDS
                for session in SESSIONS
            )
            assert same or one.epoch == after.epoch


@settings(deadline=None, max_examples=300)
@given(st.lists(random_changes, max_size=40))
def test_whatever_is_changed_in_whatever_order_leaves_a_state_that_makes_sense(
    these: list[Change],
) -> None:
    desired = Desired()
    for change in these:
        try:
            after = change(desired)
        except RkserveError:
            continue  # refused, and nothing has happened
        check(desired, after)
        desired = after
    assert pickle.loads(pickle.dumps(desired)) == desired
    now_s = 1.0 * desired.epoch
    left, gone = state_changes.expire(desired, now_s)
    assert all(one.expires_s is None or one.expires_s > now_s for one in left.pauses)
    assert all(one.expires_s is not None and one.expires_s <= now_s for one in gone)
    assert {*left.pauses, *gone} == {*desired.pauses}
    assert state_changes.resume(left)[0].pauses == ()


@settings(deadline=None)
@given(st.lists(some_version, min_size=1, max_size=6), st.integers(0, 3), st.booleans())
def test_a_rollback_brings_back_what_was_active_before_the_commit(
    history: list[AdapterVersion], keep: int, canary: bool
) -> None:
    desired = state_changes.set_label(Desired(), "m", "base")
    for one in [replace(one, ref=replace(one.ref, name="law")) for one in history]:
        before = desired.line("m", "law")
        try:
            begun = state_changes.begin(desired, "m", one, weight=0.5 if canary else 0.0)
        except AdapterExists:
            continue
        if begun is desired:
            continue
        desired = state_changes.commit(begun, "m", "law", keep)
        if before is not None:
            back = line(state_changes.rollback(desired, "m", "law", keep=keep))
            assert back.active == before.active
            assert one in back.kept
    assert line(desired).active is not None

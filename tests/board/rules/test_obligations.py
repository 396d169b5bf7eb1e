"""What a board makes of what the cluster shall be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rkserve.board.rules.obligations import RETRY_AFTER_S, Obligations, adapter_name
from rkserve.core.board_report import BoardState
from rkserve.core.desired_state import (
    ActivePause,
    AdapterVersion,
    AdapterVersions,
    BaseVersion,
    Desired,
    PauseMode,
    Scope,
    SleepLevel,
    Weights,
)
from rkserve.core.errors import (
    BoardAsleep,
    BoardBehind,
    BoardDrained,
    EngineAsleep,
    EnginePaused,
    ModelNotFound,
)
from rkserve.core.messages import FIRST_LABEL, FailoverState, GenerateRequest
from tests.support.boards.holding import LINE, governed, version_of

ONE, TWO = version_of(b"one", "1"), version_of(b"two", "2")
NOW_S = 1000.0


def asked(line: str | None = None, min_epoch: int = 0, **extra: str) -> GenerateRequest:
    return GenerateRequest("r", "m", (1,), 4, line=line, min_epoch=min_epoch, **extra)  # type: ignore[arg-type]


def charge(
    *staged: AdapterVersion, governed: bool = True, desired: Desired | None = None
) -> Obligations:
    made = Obligations("b", "m", lambda: staged, governed=governed)
    if desired is not None:
        assert made.take(desired)
    return made


def line(active: AdapterVersion | None = ONE, **more: object) -> AdapterVersions:
    return AdapterVersions("m", LINE, active, **more)  # type: ignore[arg-type]


def paused(mode: PauseMode, adapter: str | None = None, expires_s: float | None = None) -> Desired:
    return Desired(
        3, (ActivePause("op", Scope(adapter=adapter), mode, expires_s=expires_s),), (line(),)
    )


@pytest.mark.parametrize(
    ("made", "why"),
    [
        pytest.param(charge(), "no desired state", id="governed, and not told"),
        pytest.param(charge(governed=False), "", id="on its own"),
        pytest.param(charge(desired=Desired(1)), "", id="told"),
        pytest.param(charge(desired=Desired(1, lines=(line(),))), "tone@1", id="without the file"),
        pytest.param(charge(ONE, desired=Desired(1, lines=(line(),))), "", id="with the file"),
        pytest.param(
            charge(ONE, desired=Desired(1, lines=(line(previous=TWO),))),
            "tone@2",
            id="without what it may be rolled back to",
        ),
    ],
)
def test_a_board_joins_until_it_was_told_and_has_all(made: Obligations, why: str) -> None:
    assert (why in made.joining) if why else made.joining == ""
    if why:
        with pytest.raises(BoardBehind):
            made.check(asked(), NOW_S)
    else:
        made.check(asked(), NOW_S)


def test_epochs_do_not_go_back() -> None:
    made = charge(desired=Desired(5, weights=(Weights("m", "new"),)))
    assert not made.take(Desired(4))
    assert not made.take(Desired(5))
    assert (made.epoch, made.label(None)) == (5, "new")
    assert made.take(Desired(6))
    assert made.label(None) == "default"


def test_a_request_that_knows_a_later_epoch_is_for_another_board() -> None:
    made = charge(desired=Desired(5))
    made.check(asked(min_epoch=5), NOW_S)
    with pytest.raises(BoardBehind):
        made.check(asked(min_epoch=6), NOW_S)


@pytest.mark.parametrize(
    ("desired", "request_", "retry_after_s"),
    [
        pytest.param(paused(PauseMode.KEEP), asked(), None, id="kept: it waits"),
        pytest.param(paused(PauseMode.WAIT), asked(), RETRY_AFTER_S, id="no lease"),
        pytest.param(paused(PauseMode.ABORT, expires_s=NOW_S + 7.2), asked(), 8, id="a lease"),
        pytest.param(paused(PauseMode.ABORT, expires_s=NOW_S - 3), asked(), 1, id="just over"),
        pytest.param(paused(PauseMode.WAIT, LINE), asked(), None, id="another adapter's"),
        pytest.param(paused(PauseMode.WAIT, LINE), asked(LINE), RETRY_AFTER_S, id="its adapter's"),
    ],
)
def test_pauses_that_take_nothing_new_say_when_to_come_back(
    desired: Desired, request_: GenerateRequest, retry_after_s: int | None
) -> None:
    made = charge(ONE, desired=desired)
    if retry_after_s is None:
        made.check(request_, NOW_S)
        return
    with pytest.raises(EnginePaused) as refused:
        made.check(request_, NOW_S)
    assert refused.value.retry_after_s == retry_after_s


GOES_ON = FailoverState()


@pytest.mark.promise("Single boards", "A drained board takes no new requests")
@pytest.mark.parametrize(
    ("moved", "begun", "takes"),
    [
        pytest.param((), None, False, id="a new one"),
        pytest.param((), GOES_ON, True, id="one that was accepted before"),
        pytest.param(("b",), GOES_ON, False, id="one that was accepted, where all are moved"),
    ],
)
def test_a_drained_board_takes_no_new_request(
    moved: tuple[str, ...], begun: FailoverState | None, takes: bool
) -> None:
    made = charge(desired=Desired(5, drained=("b",), moved=moved))
    request = replace(asked(), continued=begun)
    if takes:
        made.check(request, NOW_S)
    else:
        with pytest.raises(BoardDrained, match="Board b is drained"):
            made.check(request, NOW_S)
    made.take(Desired(6))
    made.check(request, NOW_S)


@pytest.mark.parametrize(
    ("whole", "named", "said"),
    [
        pytest.param(PauseMode.KEEP, PauseMode.ABORT, "adapter tone", id="the adapter's"),
        pytest.param(PauseMode.ABORT, PauseMode.KEEP, "board b", id="the board's"),
        pytest.param(None, PauseMode.WAIT, "adapter tone", id="the adapter's alone"),
        pytest.param(PauseMode.WAIT, None, "board b", id="the board's alone"),
    ],
)
def test_what_refuses_a_request_is_named(
    whole: PauseMode | None, named: PauseMode | None, said: str
) -> None:
    pauses = [
        ActivePause("op", Scope(adapter=adapter), mode)
        for mode, adapter in ((whole, None), (named, LINE))
        if mode is not None
    ]
    made = charge(ONE, desired=Desired(3, tuple(pauses), (line(),)))
    with pytest.raises(EnginePaused, match=said):
        made.check(asked(LINE), NOW_S)


def asleep(level: SleepLevel, mode: PauseMode = PauseMode.KEEP) -> Obligations:
    return charge(desired=Desired(3, (ActivePause("nap", Scope(), mode, level=level),)))


@pytest.mark.parametrize("level", list(SleepLevel))
def test_a_sleep_takes_who_waits_and_sends_on_who_does_not(level: SleepLevel) -> None:
    made = asleep(level)
    made.check(asked(), NOW_S)
    with pytest.raises(BoardAsleep, match=f"level {level:d}"):
        made.check(replace(asked(), patient=False), NOW_S)
    with pytest.raises(EngineAsleep, match="board b") as refused:
        asleep(level, PauseMode.WAIT).check(asked(), NOW_S)
    assert refused.value.retry_after_s == RETRY_AFTER_S
    assert made.unloads is (level is not SleepLevel.PAUSED)


def test_a_pause_is_no_sleep() -> None:
    made = charge(desired=Desired(3, (ActivePause("op", Scope(), PauseMode.WAIT),)))
    with pytest.raises(EnginePaused) as refused:
        made.check(replace(asked(), patient=False), NOW_S)
    assert not isinstance(refused.value, EngineAsleep)
    assert (made.unloads, charge().unloads) == (False, False)


def test_a_request_for_a_line_is_bound_by_its_session() -> None:
    made = charge(ONE, TWO, desired=Desired(1, lines=(line(candidate=TWO, weight=0.5),)))
    bound = {made.bind(asked(LINE, session=str(n))) for n in range(50)}
    assert bound == {ONE.ref, TWO.ref}
    assert len({made.bind(asked(LINE, session="same")) for _ in range(9)}) == 1
    assert made.label(ONE.ref) == "tone@1"


@pytest.mark.parametrize(
    "lines",
    [pytest.param((), id="no line"), pytest.param((line(None, kept=(ONE,)),), id="none active")],
)
def test_a_line_of_which_nothing_is_served_is_not_found(lines: tuple[AdapterVersions, ...]) -> None:
    with pytest.raises(ModelNotFound):
        charge(ONE, desired=Desired(1, lines=lines)).bind(asked(LINE))


def test_the_name_of_an_adapter_is_that_of_its_line_or_version() -> None:
    named = GenerateRequest("r", "m", (1,), 4, adapter=ONE.ref)
    assert [adapter_name(one) for one in (asked(), asked(LINE), named)] == [None, LINE, LINE]


async def test_a_governed_board_serves_once_it_has_what_it_was_told_to(tmp_path: Path) -> None:
    async with governed(tmp_path, governed=True) as told:
        assert (told.board.report().state, told.board.report().epoch) == (
            BoardState.JOINING,
            None,
        )
        with pytest.raises(BoardBehind):
            await told.ask().end()
        staged = told.stage("v1", 1)
        told.versions["v2"] = version_of(b"never sent", "v2")
        adoption = await told.serve("v1")
        assert adoption.missing == (told.versions["v2"],)
        report = told.board.report()
        assert (report.state, report.missing) == (BoardState.JOINING, 1)
        assert report.staged == (staged.ref.key,)
        del told.versions["v2"]
        assert (await told.serve("v1")).missing == ()
        assert told.board.report().state is BoardState.READY
        await told.ask(max_tokens=3, line=LINE, min_epoch=2).end()
        with pytest.raises(BoardBehind):
            await told.ask(min_epoch=3).end()


async def test_generations_are_aborted_by_their_ids_or_all(tmp_path: Path) -> None:
    async with governed(tmp_path) as told:
        clients = [told.ask(max_tokens=400) for _ in range(4)]
        await told.said(clients[0], 3)
        assert told.board.abort_all(("g2", "g3/0", "nobody")) == 2
        assert told.board.abort_all(None) == 2
        assert told.board.abort_all(None) == 0
        assert [(await one.end())[1].value for one in clients] == ["abort"] * 4


# -- base weights ---------------------------------------------------------------------------------

BASE = BaseVersion("m", "v2", "d" * 64, 7)
OTHER = BaseVersion("m", "v3", "e" * 64, 7)


def swapped(base: BaseVersion | None = BASE) -> Desired:
    label = FIRST_LABEL if base is None else base.version
    return Desired(5, weights=(Weights("m", label, base=base),))


def test_desired_base_weights_are_missing_until_their_file_is_there() -> None:
    made = charge(desired=swapped())
    assert (made.missing_base, made.has_base) == (BASE, False)
    assert made.joining == "missing files: model m@v2"

    made.weights_here(lambda base: base == BASE)
    assert made.missing_base is None
    assert made.joining == "", "it may be loaded now"


def test_weights_that_are_loaded_are_not_missing_without_their_file() -> None:
    made = charge(desired=swapped())
    made.loaded(BASE)
    assert (made.missing_base, made.has_base, made.joining) == (None, True, "")


@pytest.mark.parametrize(
    ("wanted", "loaded", "has"),
    [
        pytest.param(None, None, True, id="the model folder's"),
        pytest.param(BASE, BASE, True, id="the desired ones"),
        pytest.param(BASE, replace(BASE, version="same content"), True, id="by content"),
        pytest.param(BASE, OTHER, False, id="others"),
        pytest.param(None, BASE, False, id="to go back to the folder's"),
    ],
)
def test_a_board_has_its_base_weights_by_their_content(
    wanted: BaseVersion | None, loaded: BaseVersion | None, has: bool
) -> None:
    made = charge(desired=swapped(wanted))
    made.loaded(loaded)
    assert made.has_base is has


def test_a_board_that_was_told_nothing_has_its_base_weights() -> None:
    made = charge(governed=False)
    made.loaded(BASE)
    assert (made.has_base, made.missing_base, made.joining) == (True, None, "")


def test_weights_that_cannot_be_loaded_keep_a_board_from_serving_until_others_are() -> None:
    made = charge(desired=swapped())
    made.weights_here(lambda _: True)
    made.refused("no such tensor")
    assert made.joining == "no such tensor"
    with pytest.raises(BoardBehind, match="no such tensor"):
        made.check(asked(), NOW_S)

    made.loaded(BASE)
    assert made.joining == ""
    made.check(asked(), NOW_S)


@pytest.mark.parametrize(
    ("mode", "taken"),
    [
        pytest.param(PauseMode.WAIT, True, id="wait: it was accepted before the pause"),
        pytest.param(PauseMode.ABORT, False, id="abort: nobody goes on"),
    ],
)
def test_a_continued_answer_goes_on_in_a_pause_that_waits_for_answers(
    mode: PauseMode, taken: bool
) -> None:
    made = charge(ONE, desired=paused(mode))
    continued = replace(asked(), continued=FailoverState())
    if taken:
        made.check(continued, NOW_S)
    else:
        with pytest.raises(EnginePaused):
            made.check(continued, NOW_S)
    with pytest.raises(EnginePaused):
        made.check(asked(), NOW_S)

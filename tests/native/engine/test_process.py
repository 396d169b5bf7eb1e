"""What the engine makes of its commands, on a scripted runtime and without a process."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from rkserve.core.errors import (
    CallFailed,
    FrameCorrupt,
    LoadFailed,
    Misuse,
    NativeError,
    NothingComputed,
)
from rkserve.core.run_params import Sampling
from rkserve.native import engine_frames
from rkserve.native.engine_frames import FrameKind
from rkserve.native.runtime import (
    EvaluateMode,
    LoadParams,
    Matrix,
    PromptInput,
    RunParams,
    SinkAction,
    Step,
    TokenInput,
    TokenPiece,
)
from tests.support.boards.engine_desk import Desk

GO_ON, PAUSE = SinkAction.CONTINUE, SinkAction.PAUSE
CUT = [[2, 4], [0, 1]]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """Return an engine that has loaded a scripted runtime."""
    made = Desk(tmp_path)
    made.load()
    return made


def piece(token_id: int, text: bytes = b"x", *, waiting: bool = False) -> TokenPiece:
    return TokenPiece(token_id, text, waiting)


def steps(*ids: int) -> list[Step]:
    return [(piece(token_id),) for token_id in ids]


# -- loading ----------------------------------------------------------------------------------


def test_a_load_passes_everything_on_and_says_what_is_loaded(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.load(n_batch=4)
    [(_, (params,))] = desk.runtime.made("load")
    assert params == LoadParams(
        "m", 64, 64, Sampling(), cpus=(4, 5), n_batch=4, image_tags=("a", "b", "c")
    )
    kind, facts = desk.last
    assert kind is FrameKind.LOADED
    assert facts.pop("load_s") >= 0
    assert facts == {
        "release": "1.3.0",
        "per_run_sampling": True,
        "quirks": {"q": True},
        "n_batch": 4,
        "entries": 1,
        "confined": "off",
    }


def test_nothing_runs_before_a_model_is_loaded(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    ended = desk.run()
    assert (ended["end"], ended["error"]) == (
        "failed",
        "no model is loaded",
    )
    desk.do(FrameKind.CALL, {"call_id": 3, "method": "drain", "args": {}})
    kind, result = desk.last
    assert (kind, result["call_id"], result["error"]["kind"]) == (FrameKind.RESULT, 3, "LoadFailed")


# -- runs -------------------------------------------------------------------------------------


def test_a_run_is_asked_for_as_the_board_said(desk: Desk) -> None:
    ended = desk.run(
        1,
        (5, 6),
        (),
        texts=[None, "hello"],
        keep_history=True,
        resume=True,
        sampling={"top_k": 3},
        max_new_tokens=9,
        adapter="a",
        save_cache="/c",
    )
    assert desk.runtime.made("run") == [
        (
            "run",
            RunParams(
                inputs=(TokenInput((5, 6)), PromptInput("hello")),
                keep_history=True,
                sampling=Sampling(top_k=3),
                max_new_tokens=9,
                resume=True,
                adapter="a",
                save_cache="/c",
            ),
        )
    ]
    assert ended == {
        "run_id": 1,
        "end": "finished",
        "return_code": 0,
        "perf": {
            "prefill_ms": 1.0,
            "prefill_tokens": 2,
            "decode_ms": 3.0,
            "decode_tokens": 4,
            "memory_mb": 5.0,
            "encode_ms": 0.0,
        },
        "kv_positions": [7],
        "cache_refused": None,
        "encoded": 0,
    }


def test_the_tokens_of_a_step_leave_in_one_piece_without_those_of_ended_entries(
    desk: Desk,
) -> None:
    desk.runtime.steps = [
        (piece(1, b"a"), piece(2, b"b"), piece(3, b"", waiting=True)),
        (piece(4, b"\xe4\xbd"), None, piece(5)),
        (None, None, piece(6)),
    ]
    desk.run(9, (1,), (2,), (3,))
    assert desk.tokens() == [
        [(9, 0, 1, b"a", False), (9, 1, 2, b"b", False), (9, 2, 3, b"", True)],
        [(9, 0, 4, b"\xe4\xbd", False), (9, 2, 5, b"x", False)],
        [(9, 2, 6, b"x", False)],
    ]


def test_a_handle_is_prepared_in_the_promised_order(desk: Desk) -> None:
    desk.run(1, (1,), (2,), cut=CUT, resume=True, clear=True, release_cache=True, load_cache="/c")
    names = [name for name, _ in desk.runtime.calls]
    assert names[1:] == [
        "clear_kv_cache",
        *["kv_cache_sizes", "clear_kv_range", "kv_cache_sizes"] * 2,
        "release_prompt_cache",
        "load_prompt_cache",
        "run",
        "kv_cache_sizes",
    ]
    assert desk.runtime.made("clear_kv_range", "load_prompt_cache") == [
        ("clear_kv_range", ([(2, 4), (0, 0)],)),
        ("clear_kv_range", ([(0, 1), (0, 0)],)),
        ("load_prompt_cache", ("/c",)),
    ]


@pytest.mark.parametrize(
    ("failing", "asked"),
    [
        pytest.param("clear_kv_range", {"cut": CUT, "resume": True}, id="a cut"),
        pytest.param("clear_kv_cache", {"clear": True}, id="a clear"),
    ],
)
def test_a_run_whose_context_is_not_as_asked_does_not_begin(
    desk: Desk, failing: str, asked: dict[str, Any]
) -> None:
    desk.runtime.errors[failing] = CallFailed(failing, -1)
    ended = desk.run(1, **asked)
    assert (ended["end"], ended["error"]) == ("failed", f"{failing} returned -1")
    assert len(desk.runtime.made(failing)) == 1
    assert desk.runtime.made("run") == []
    assert desk.run(2)["end"] == "finished"


def test_a_cut_that_the_library_only_says_it_has_made_is_not_believed(desk: Desk) -> None:
    def pretend() -> None:
        desk.runtime.values["kv_cache_sizes"] = (9,)

    desk.runtime.during["clear_kv_range"] = pretend
    ended = desk.run(1, cut=CUT, resume=True)
    assert (ended["end"], ended["error"]) == (
        "failed",
        "KV cache holds 7 positions after the range [2, 4) of 7 was cleared",
    )
    assert desk.runtime.made("run") == []


@pytest.mark.parametrize("failing", ["load_prompt_cache", "release_prompt_cache"])
def test_a_cache_that_is_refused_costs_no_answer(desk: Desk, failing: str) -> None:
    desk.runtime.errors[failing] = CallFailed(failing, -1)
    ended = desk.run(1, load_cache="/c", release_cache=True)
    assert (ended["end"], ended["cache_refused"]) == ("finished", f"{failing} returned -1")


def test_positions_that_the_library_does_not_tell_are_unknown(desk: Desk) -> None:
    desk.runtime.errors["kv_cache_sizes"] = CallFailed("rkllm_get_kv_cache_size", -1)
    ended = desk.run()
    assert (ended["end"], ended["kv_positions"]) == ("finished", [])


@pytest.mark.parametrize(
    ("pooling", "last", "vector"),
    [("last", True, [5.0, 6.0]), ("cls", False, [1.0, 2.0]), ("mean", False, [3.0, 4.0])],
)
def test_hidden_states_leave_as_one_vector_before_the_end(
    desk: Desk, pooling: str, last: bool, vector: list[float]
) -> None:
    rows = [[5.0, 6.0]] if last else [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    data = array("f", [value for row in rows for value in row]).tobytes()
    desk.runtime.values["evaluate"] = Matrix(len(rows), 2, data)
    ended = desk.run(3, (7, 8, 9), pooling=pooling, adapter="a")
    ((_, asked),) = desk.runtime.made("evaluate")
    assert asked == (TokenInput((7, 8, 9)), EvaluateMode.HIDDEN, {"adapter": "a", "last": last})
    [(kind, payload)] = desk.puts[-2]
    assert kind is FrameKind.VECTOR
    assert engine_frames.unpack_vector(payload) == (3, 3, array("f", vector).tobytes())
    assert (ended["end"], ended["kv_positions"]) == ("finished", [7])
    assert desk.runtime.made("run") == []


def test_hidden_states_that_do_not_come_fail_the_run_and_send_no_vector(desk: Desk) -> None:
    desk.runtime.errors["evaluate"] = NothingComputed(EvaluateMode.HIDDEN.value, "it was aborted")
    ended = desk.run(pooling="last")
    assert (ended["end"], "it was aborted" in ended["error"]) == ("failed", True)
    assert all(kind is not FrameKind.VECTOR for put in desk.puts for kind, _ in put)


def test_a_run_that_fails_says_why_and_the_next_one_begins(desk: Desk) -> None:
    desk.runtime.errors["run"] = Misuse("not now")
    assert desk.run(1) == {"run_id": 1, "end": "failed", "error": "not now"}
    del desk.runtime.errors["run"]
    assert desk.run(2)["end"] == "finished"


# -- pauses and aborts ------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(5))
def test_a_pause_is_granted_at_the_next_token(desk: Desk, at: int) -> None:
    desk.runtime.steps = steps(*range(10, 15))
    desk.runtime.between[at] = lambda: desk.say(FrameKind.PAUSE, 1)
    ended = desk.run()
    assert (ended["end"], ended["kv_positions"]) == ("paused", [7])
    assert desk.runtime.verdicts == [GO_ON] * at + [PAUSE]
    assert len(desk.tokens()) == at + 1


def test_a_pause_is_asked_for_again_until_the_library_can(desk: Desk) -> None:
    held_back: list[Step] = [(piece(token_id, b"", waiting=True),) for token_id in (11, 12)]
    desk.runtime.steps = [*held_back, *steps(13, 14)]
    desk.runtime.between[0] = lambda: desk.say(FrameKind.PAUSE, 1)
    assert desk.run()["end"] == "paused"
    assert desk.runtime.verdicts == [PAUSE] * 3


@pytest.mark.parametrize(
    ("asked", "when"),
    [
        pytest.param(5, "before", id="before its run began"),
        pytest.param(4, "during", id="for the run before"),
        pytest.param(6, "during", id="for the run after"),
    ],
)
def test_a_pause_that_does_not_concern_the_run_changes_nothing(
    desk: Desk, asked: int, when: str
) -> None:
    desk.run(4)
    desk.runtime.steps = steps(10, 11, 12)
    if when == "before":
        desk.say(FrameKind.PAUSE, asked)
    else:
        desk.runtime.between[1] = lambda: desk.say(FrameKind.PAUSE, asked)
    assert desk.run(5)["end"] == "finished"
    desk.runtime.between.clear()
    desk.say(FrameKind.PAUSE, 5)  # it has ended
    assert desk.run(6)["end"] == "finished"
    assert desk.runtime.verdicts == [GO_ON] * 6


@pytest.mark.parametrize(
    "order", [(FrameKind.PAUSE, FrameKind.ABORT), (FrameKind.ABORT, FrameKind.PAUSE)], ids=str
)
def test_an_abort_outweighs_a_pause(desk: Desk, order: tuple[FrameKind, FrameKind]) -> None:
    desk.runtime.steps = steps(*range(10, 20))
    desk.runtime.deaf_until = 5  # an abort is asynchronous: tokens still come

    def both() -> None:
        for kind in order:
            desk.say(kind, 1)

    desk.runtime.between[2] = both
    assert desk.run()["end"] == "finished"
    assert desk.runtime.verdicts == [GO_ON] * 5


def test_an_abort_before_the_run_keeps_it_from_beginning(desk: Desk) -> None:
    desk.say(FrameKind.ABORT, 1)
    assert desk.run(1) == {"run_id": 1, "end": "unstarted"}
    assert desk.runtime.made("run", "abort") == []
    assert desk.run(2)["end"] == "finished"


def test_an_abort_while_the_handle_is_prepared_keeps_the_run_from_beginning(desk: Desk) -> None:
    desk.runtime.during["clear_kv_range"] = lambda: desk.say(FrameKind.ABORT, 1)
    ended = desk.run(1, cut=[[0, 1]], resume=True)
    assert (ended["end"], desk.runtime.made("run")) == ("unstarted", [])


def test_an_abort_that_the_library_may_have_missed_is_repeated_at_the_first_token(
    desk: Desk,
) -> None:
    """It came after the engine began the run, and before the library did."""
    desk.runtime.steps = steps(10, 11, 12)
    desk.runtime.deaf_until = 2

    def too_early() -> None:
        desk.say(FrameKind.ABORT, 1)
        desk.runtime.heard_abort.clear()

    def heard() -> None:
        assert desk.runtime.heard_abort.wait(10)

    desk.runtime.between |= {0: too_early, 1: heard}
    assert desk.run()["end"] == "finished"
    assert len(desk.tokens()) == 2


def test_an_abort_that_is_refused_is_said_aloud(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise Misuse("the handle is paused")

    desk.runtime.abort = refuse  # type: ignore[method-assign]
    desk.runtime.steps = steps(10, 11)
    desk.runtime.between[1] = lambda: desk.say(FrameKind.ABORT, 1)
    assert desk.run()["end"] == "finished"
    assert "W rkserve: the abort was refused: the handle is paused" in capsys.readouterr().err


# -- calls ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "args", "made"),
    [
        pytest.param("drain", {}, ("drain", ()), id="drain"),
        pytest.param(
            "clear_kv",
            {"keep_system_prompt": True},
            ("clear_kv_cache", ({"keep_system_prompt": True},)),
            id="clear",
        ),
        pytest.param(
            "load_adapter",
            {"path": "/a", "name": "n", "scale": 0.5},
            ("load_adapter", ("/a", "n", 0.5)),
            id="load an adapter",
        ),
        pytest.param("release_cache", {}, ("release_prompt_cache", ()), id="release a cache"),
    ],
)
def test_a_call_reaches_the_runtime(
    desk: Desk, method: str, args: dict[str, Any], made: tuple[str, Any]
) -> None:
    desk.do(FrameKind.CALL, {"call_id": 8, "method": method, "args": args})
    assert desk.runtime.calls[1:] == [made]
    assert desk.last == (FrameKind.RESULT, {"call_id": 8, "value": None})


def test_a_call_brings_a_value_back(desk: Desk) -> None:
    desk.runtime.values["kv_cache_sizes"] = (3, 0, 9)
    desk.do(FrameKind.CALL, {"call_id": 8, "method": "kv_sizes", "args": {}})
    assert desk.last == (FrameKind.RESULT, {"call_id": 8, "value": [3, 0, 9]})


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(Misuse("paused"), {"kind": "Misuse", "args": ["paused"]}, id="misuse"),
        pytest.param(
            CallFailed("rkllm_run", -1),
            {"kind": "CallFailed", "args": ["rkllm_run", -1, ""]},
            id="a code",
        ),
        pytest.param(LoadFailed("no"), {"kind": "LoadFailed", "args": ["no"]}, id="a load"),
    ],
)
def test_a_call_that_fails_says_what_the_runtime_said(
    desk: Desk, error: NativeError, said: dict[str, Any]
) -> None:
    desk.runtime.errors["drain"] = error
    desk.do(FrameKind.CALL, {"call_id": 8, "method": "drain", "args": {}})
    assert desk.last == (FrameKind.RESULT, {"call_id": 8, "error": said})


@pytest.mark.parametrize("method", ["destroy", "run", "_state", "no such", ""])
def test_only_what_is_listed_can_be_called(desk: Desk, method: str) -> None:
    before = list(desk.runtime.calls)
    desk.do(FrameKind.CALL, {"call_id": 8, "method": method, "args": {}})
    _, result = desk.last
    assert result["error"]["kind"] == "Misuse"
    assert "known are drain, clear_kv, kv_sizes" in result["error"]["args"][0]
    assert desk.runtime.calls == before


@pytest.mark.parametrize(
    ("method", "args", "words"),
    [
        pytest.param("load_adapter", {"path": "/a"}, "'name'", id="too few"),
        pytest.param("drain", {"now": True}, "'now'", id="too many"),
    ],
)
def test_a_call_whose_arguments_do_not_fit_costs_no_engine(
    desk: Desk, method: str, args: dict[str, Any], words: str
) -> None:
    before = list(desk.runtime.calls)
    desk.do(FrameKind.CALL, {"call_id": 8, "method": method, "args": args})
    _, result = desk.last
    assert result["error"]["kind"] == "Misuse"
    assert words in result["error"]["args"][0]
    assert desk.runtime.calls == before


# -- what is no command -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "payload", "error"),
    [
        pytest.param(FrameKind.ABORT, b"[]", FrameCorrupt, id="an abort of nothing"),
        pytest.param(FrameKind.PAUSE, b"{}", KeyError, id="a pause of nothing"),
        pytest.param(FrameKind.CALL, b"{}", KeyError, id="a call of nothing"),
        pytest.param(FrameKind.RUN, b"\0", FrameCorrupt, id="a cut run"),
    ],
)
def test_a_command_that_makes_no_sense_is_not_survived(
    desk: Desk, kind: FrameKind, payload: bytes, error: type[Exception]
) -> None:
    """Both threads end the process then; the board starts another."""
    take = (
        desk.engine.command if kind in (FrameKind.ABORT, FrameKind.PAUSE) else desk.engine.carry_out
    )
    with pytest.raises(error):
        take(kind, payload)

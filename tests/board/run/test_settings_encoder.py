"""``cross_attention``: an encoder's output as it is sent, answers that depend on it, refusals."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.core.errors import ConfigError, FrameCorrupt, NativeError, RequestError, RunFailed
from rkserve.core.messages import Delta, FailoverState, GenerateRequest, TranscriptToken
from rkserve.core.run_params import EncoderShape, EncoderStates
from rkserve.local import LocalBoard, open_board
from rkserve.models.folder import open_model_folder
from rkserve.native.engine_frames import FrameKind, FrameReader, pack_encoder, unpack_encoder
from rkserve.router.served_models import ServedModel
from tests.board.run.test_settings_embeds import FIT, events_of, safetensors
from tests.local.test_board import COUNTED, MODEL, SIMULATED, folder_with
from tests.support.boards.engine_desk import Desk
from tests.support.boards.fake_boards import FakeBoards, accepted, finished, report
from tests.support.http.router_house import House, house, send

PATH = "/v1/completions"
SHAPE = EncoderShape(4, 2, 16)  # the 128 numbers for each token that the simulated library reads
SECTION = "\ncross_attention: {layers: 4, kv_heads: 2, head_dim: 16, max_tokens: 8}\n"
QUESTION = "Tell me something about the sea"


def states(value: float = 1.0, tokens: int = 3) -> dict[str, Any]:
    """A request's ``cross_attention``, of which every number of K is ``value``."""
    keys = array("f", [value] * tokens * SHAPE.row).tobytes()
    values = array("f", [0.5] * tokens * SHAPE.row).tobytes()
    return {
        "k_cache": safetensors(keys, [4, tokens, 2, 16]),
        "v_cache": safetensors(values, [4, 2, 16, tokens]),
        "mask": [1] * tokens,
        "positions": list(range(tokens)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = folder_with(tmp_path_factory.mktemp("decoder"), SECTION)
    settings = (made / "rkserve.yaml").read_text(encoding="utf-8")
    # RKLLM 1.2.x fixes the temperature at load.
    greedy = settings.replace("temperature: 0.8", "temperature: 0")
    (made / "rkserve.yaml").write_text(greedy, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def served(folder: Path) -> ServedModel:
    return ServedModel.open(open_model_folder(folder))


# -- the Router -----------------------------------------------------------------------------------


def scripted(served: ServedModel, *steps: Any) -> House:
    return House(FakeBoards([report("a")], {"replica of a": [steps]}), served=served)


def test_the_request_carries_the_states_and_no_ids_to_share_by(served: ServedModel) -> None:
    of = scripted(served, accepted("a"), Delta("x", (1,)), finished(1))
    body = {"model": "sim-chat", "prompt": [5, 6], "max_tokens": 4, "cross_attention": states()}
    answer = send(of, "POST", PATH, json=body)
    assert answer.status_code == 200, answer.text
    ((_, request),) = of.boards.opened
    assert (request.prompt_ids, request.prompt_text, request.decoder_ids) == ((), "", (5, 6))
    assert (request.counted, request.in_one_go) == (2, True)
    assert request.encoder is not None
    assert (request.encoder.shape, request.encoder.tokens) == (SHAPE, 3)
    assert request.encoder.k_cache == array("f", [1.0] * 3 * SHAPE.row).tobytes()
    assert request.encoder.mask == array("f", [1, 1, 1]).tobytes()
    assert request.encoder.positions == array("i", [0, 1, 2]).tobytes()


FLAT = array("f", [1.0] * 3 * SHAPE.row).tobytes()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"k_cache": None}, "cross_attention.k_cache"),
        ({"k_cache": "?"}, "cross_attention.k_cache"),
        ({"k_cache": safetensors(FLAT, [3, SHAPE.row])}, "cross_attention.k_cache"),
        ({"v_cache": safetensors(FLAT, [4, 3, 2, 16])}, "cross_attention.v_cache"),
        ({"mask": [1, 1]}, "cross_attention.mask"),
        ({"mask": [1, 1, "1"]}, "cross_attention.mask"),
        ({"mask": [1, 1, True]}, "cross_attention.mask"),
        ({"mask": [1, 1, 1e39]}, "cross_attention.mask"),
        ({"mask": 10**400}, "cross_attention.mask"),
        ({"positions": [0, 1, 2, 3]}, "cross_attention.positions"),
        ({"positions": [0, 1, 1.5]}, "cross_attention.positions"),
        ({"positions": [0, 1, -1]}, "cross_attention.positions"),
        ({"positions": [0, 1, 2**31]}, "cross_attention.positions"),
        ({"num_tokens": 3}, "cross_attention.num_tokens"),
        (states(tokens=9), "cross_attention"),
        (
            {
                "k_cache": safetensors(FLAT, [2, 3, 4, 16]),
                "v_cache": safetensors(FLAT, [2, 4, 16, 3]),
            },
            "cross_attention",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    served: ServedModel, change: dict[str, Any], param: str
) -> None:
    of = House(FakeBoards.answering("a"), served=served)
    body = {"model": "sim-chat", "prompt": "x", "cross_attention": {**states(), **change}}
    answer = send(of, "POST", PATH, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert of.boards.opened == []


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"echo": True}, "echo"),
        ({"logprobs": 1}, "logprobs"),
        ({"seed": 3, "temperature": 1}, "seed"),
        ({"use_cache": "x"}, "use_cache"),
        ({"pause_on": ["x"]}, "pause_on"),
        ({"native_pause": True}, "native_pause"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"prompt": "", "prompt_embeds": FIT}, "prompt_embeds"),
        ({"cross_attention": None}, "cross_attention"),
        ({"cross_attention": [1]}, "cross_attention"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(
    served: ServedModel, more: dict[str, Any], param: str
) -> None:
    of = House(FakeBoards.answering("a"), served=served)
    body = {"model": "sim-chat", "prompt": "x", "cross_attention": states(), **more}
    answer = send(of, "POST", PATH, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_other_calls_of_the_model_are_refused_and_other_models_take_none(
    served: ServedModel,
) -> None:
    of = House(FakeBoards.answering("a"), served=served)
    chat = {"model": "sim-chat", "messages": [{"role": "user", "content": "x"}]}
    answer = send(of, "POST", "/v1/chat/completions", json=chat)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cross_attention")
    body = {"model": "sim-chat", "prompt": "x", "cross_attention": states()}
    answer = send(house("a"), "POST", PATH, json=body)
    assert answer.json()["error"]["code"] == "unsupported_parameter"
    assert answer.json()["error"]["param"] == "cross_attention"


@pytest.mark.parametrize(
    "more",
    [
        "embedding: {}",
        "rerank: {}",
        "cross_attention: {layers: 0, kv_heads: 2, head_dim: 16, max_tokens: 8}",
    ],
)
def test_a_folder_that_cannot_be_is_refused(tmp_path: Path, more: str) -> None:
    section = SECTION if "cross_attention" not in more else "\n"
    with pytest.raises(ConfigError, match="cross_attention"):
        open_model_folder(folder_with(tmp_path, f"{section}{more}\n"))


def test_boards_with_batches_are_refused(folder: Path) -> None:
    with (
        pytest.raises(ConfigError, match="encoder-decoder"),
        open_board(folder, simulated=SIMULATED, n_batch=2),
    ):
        pass


# -- the engine -----------------------------------------------------------------------------------


def given(value: float = 1.0, tokens: int = 2) -> EncoderStates:
    cache = array("f", [value] * tokens * SHAPE.row).tobytes()
    flat = array("f", [1.0] * tokens).tobytes()
    return EncoderStates(SHAPE, tokens, cache, cache, flat, array("i", range(tokens)).tobytes())


def test_a_frame_brings_them_whole_or_not_at_all() -> None:
    ((kind, payload),) = FrameReader().feed(pack_encoder(7, given()))
    assert (kind, unpack_encoder(payload)) == (FrameKind.ENCODER, (7, given()))
    for cut in (b"", payload[:8], payload[:-1], payload + b"x"):
        with pytest.raises(FrameCorrupt):
            unpack_encoder(cut)


def test_an_engine_hands_over_each_runs_own_and_starts_none_without(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.load(use_cross_attn=True)

    def bring(run_id: int) -> None:
        ((kind, payload),) = FrameReader().feed(pack_encoder(run_id, given()))
        desk.engine.carry_out(kind, payload)

    bring(1)
    assert desk.run(1)["end"] == "finished"
    names = [name for name, _ in desk.runtime.calls]
    assert names.index("set_cross_attention") < names.index("run")
    ((_, (handed,)),) = desk.runtime.made("set_cross_attention")
    assert (handed.k_cache, handed.n_tokens) == (given().k_cache, 2)
    bring(1)  # of a run that is over
    for run_id in (2, 3):
        ended = desk.run(run_id)
        assert ended["end"] == "failed"
        assert "has no encoder output" in ended["error"]
    assert len(desk.runtime.made("run")) == 1


def test_what_the_library_refuses_of_them_fails_the_run(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.load(use_cross_attn=True)
    desk.runtime.errors["set_cross_attention"] = NativeError("no room")
    ((kind, payload),) = FrameReader().feed(pack_encoder(1, given()))
    desk.engine.carry_out(kind, payload)
    ended = desk.run(1)
    assert (ended["end"], ended["error"]) == ("failed", "no room")
    assert desk.runtime.made("run") == []


@pytest.fixture(scope="module", params=["1.2.3", "1.3.0"])
def board(request: pytest.FixtureRequest, folder: Path) -> Iterator[LocalBoard]:
    with open_board(folder, simulated={**SIMULATED, "release": request.param}) as opened:
        yield opened


def told(board: LocalBoard, value: float, prompt: Any = QUESTION) -> str:
    answer = board.generate(
        prompt=prompt, cross_attention=states(value), max_tokens=24, temperature=0
    )
    assert answer.usage.cached_tokens == 0
    return answer.text


def test_answers_depend_on_the_states_of_their_own_request(board: LocalBoard) -> None:
    first, other = told(board, 1.0), told(board, 2.0)
    assert first != other
    # The KV cache of the same prompt with other states is not taken up, in either order.
    assert (told(board, 1.0), told(board, 2.0)) == (first, other)


def test_a_request_without_never_gets_those_of_another_one(board: LocalBoard) -> None:
    told(board, 1.0)
    bare = GenerateRequest("r/0", "sim-chat", (5, 6, 7), 9)
    with pytest.raises(RequestError, match="needs 'cross_attention'"):
        board._thread.call(events_of(board, bare))


@pytest.mark.parametrize(
    "unfit",
    [
        replace(given(), shape=EncoderShape(4, 2, 8)),
        replace(given(), tokens=9),
        replace(given(), tokens=0),
    ],
)
def test_states_that_the_library_would_read_beyond_are_refused_by_the_board(
    board: LocalBoard, unfit: EncoderStates
) -> None:
    request = GenerateRequest(
        "r/0", "sim-chat", (), 9, prompt_text="", decoder_ids=(5, 6), encoder=unfit
    )
    with pytest.raises(RequestError, match="other sizes"):
        board._thread.call(events_of(board, request))


def test_one_that_was_begun_elsewhere_fails_and_the_board_goes_on(board: LocalBoard) -> None:
    request = GenerateRequest(
        "r/0",
        "sim-chat",
        (),
        9,
        prompt_text="",
        decoder_ids=(5, 6),
        encoder=given(),
        continued=FailoverState(slots=(TranscriptToken(16, b"1"),), text="1"),
    )
    with pytest.raises(RunFailed, match="cannot go on"):
        board._thread.call(events_of(board, request))
    assert told(board, 1.0)


def test_such_an_answer_cannot_be_paused(board: LocalBoard) -> None:
    with board.start(prompt="Count to 60", cross_attention=states(), max_tokens=200) as generation:
        next(generation)
        with pytest.raises(RequestError, match="cannot be paused"):
            generation.pause()
        generation.abort()
        assert generation.answer().finish_reason == "abort"


def test_a_plain_model_gets_none(tmp_path: Path) -> None:
    with open_board(MODEL, simulated=SIMULATED) as plain:
        request = GenerateRequest(
            "r/0", "sim-chat", (), 9, prompt_text="", decoder_ids=(5,), encoder=given()
        )
        with pytest.raises(RequestError, match="takes no 'cross_attention'"):
            plain._thread.call(events_of(plain, request))
        assert plain.generate("Count to 8", temperature=0).text == COUNTED

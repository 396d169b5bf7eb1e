"""``prompt_embeds``: tensors as they are sent, answers to them, and what is refused by name."""

from __future__ import annotations

import base64
import json
import struct
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.api.common.renderer import Renderer
from rkserve.api.common.tensors import check_embeds, read_embeds
from rkserve.core.errors import RequestError, RunFailed
from rkserve.core.messages import Delta, FailoverState, GenerateRequest, TranscriptToken
from rkserve.core.run_params import Embeds
from rkserve.local import LocalBoard, open_board
from rkserve.models.folder import open_model_folder
from rkserve.native.sim.models import embeddings
from rkserve.router.served_models import ServedModel
from tests.local.test_board import COUNTED, MODEL, SIMULATED, folder_with
from tests.support.boards.fake_boards import accepted, finished
from tests.support.http.router_house import house, model, scripted, send

PATH = "/v1/completions"
HIDDEN = 64
# Written by safetensors 0.6 and numpy 2.
SAFETENSORS_F32 = (
    "SAAAAAAAAAB7InByb21wdF9lbWJlZHMiOnsiZHR5cGUiOiJGMzIiLCJzaGFwZSI6WzMsMl0sImRhdGFfb2Zmc2V0"
    "cyI6WzAsMjRdfX0gICAAAIA/AAAgQAAAQMAAAAA+AACAQAAAoEA="
)


def safetensors(raw: bytes, shape: list[Any], kind: str = "F32", **more: Any) -> str:
    told = {"dtype": kind, "shape": shape, "data_offsets": [0, len(raw)], **more}
    header = json.dumps({"__metadata__": {"a": "b"}, "prompt_embeds": told}).encode()
    return base64.b64encode(struct.pack("<Q", len(header)) + header + raw).decode()


def of_ids(ids: tuple[int, ...]) -> str:
    return safetensors(embeddings(ids), [len(ids), HIDDEN])


# -- tensors --------------------------------------------------------------------------------------


# -- bodies ---------------------------------------------------------------------------------------


FIT = of_ids((5, 6, 7))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"echo": True}, "echo"),
        ({"logprobs": 1}, "logprobs"),
        ({"seed": 3}, "seed"),
        ({"min_p": 0.1}, "min_p"),
        ({"use_cache": "x"}, "use_cache"),
        ({"pause_on": ["x"]}, "pause_on"),
        ({"native_pause": True}, "native_pause"),
        ({"prompt_embeds": SAFETENSORS_F32}, "prompt_embeds"),
        ({"prompt_embeds": [FIT, SAFETENSORS_F32]}, "prompt_embeds[1]"),
    ],
)
def test_what_does_not_go_with_embeddings_is_refused_by_name(
    more: dict[str, Any], param: str
) -> None:
    body = {"model": "sim-chat", "max_tokens": 4, "prompt_embeds": FIT, **more}
    answer = send(house("a"), "POST", PATH, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_model_that_does_not_say_its_size_takes_none(tmp_path: Path) -> None:
    made = folder_with(tmp_path, "")
    settings = (made / "rkserve.yaml").read_text().replace("hidden_size: 64", "")
    (made / "rkserve.yaml").write_text(settings)
    served = ServedModel.open(open_model_folder(made))
    with pytest.raises(RequestError, match="has no 'hidden_size'"):
        check_embeds(read_embeds(FIT, "p"), served.renderer.hidden_size, "p")


def test_the_request_carries_the_rows_and_counts_them() -> None:
    of = scripted(accepted("a"), Delta("x", (1,)), finished(1))
    body = {"model": "sim-chat", "max_tokens": 4, "prompt": "", "prompt_embeds": FIT}
    answer = send(of, "POST", PATH, json=body)
    assert answer.status_code == 200, answer.text
    ((_, request),) = of.boards.opened
    assert request.embeds == Embeds(3, HIDDEN, embeddings((5, 6, 7)))
    assert (request.prompt_ids, request.prompt_text, request.counted) == ((), "", 3)


def test_more_rows_than_the_context_are_an_overflow() -> None:
    body = {"model": "sim-chat", "max_tokens": 4, "prompt_embeds": of_ids((5,) * 4096)}
    error = send(house("a"), "POST", PATH, json=body).json()["error"]
    assert error["code"] == "context_length_exceeded"


# -- answers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["1.2.3", "1.3.0"])
def board(request: pytest.FixtureRequest) -> Iterator[LocalBoard]:
    with open_board(MODEL, simulated={**SIMULATED, "release": request.param}) as opened:
        yield opened


def prompt_of(text: str) -> tuple[int, ...]:
    served: Renderer = model().renderer
    return served.chat([{"role": "user", "content": text}]).ids


def test_the_answer_is_that_to_the_tokens_whose_embeddings_they_are(board: LocalBoard) -> None:
    sent = of_ids(prompt_of("Count to 8"))
    answer = board.generate(prompt="", prompt_embeds=sent, max_tokens=40)
    assert (answer.text, answer.finish_reason) == (COUNTED, "stop")
    assert answer.usage.prompt_tokens == len(prompt_of("Count to 8"))
    assert answer.usage.cached_tokens == 0
    # Nothing is left in the KV cache that another request could be taken to begin like.
    assert board.generate("Count to 8", temperature=0).text == COUNTED
    again = board.generate(prompt="", prompt_embeds=sent, max_tokens=40, stop=[", 5"])
    assert again.text == "1, 2, 3, 4"


def test_rows_of_no_token_are_answered_too(board: LocalBoard) -> None:
    noise = array("f", [0.25 * (at % 7) for at in range(3 * HIDDEN)]).tobytes()
    sent = safetensors(noise, [3, HIDDEN])
    answer = board.generate(prompt="", prompt_embeds=sent, max_tokens=4)
    assert answer.usage.prompt_tokens == 3


def test_such_an_answer_cannot_be_paused(board: LocalBoard) -> None:
    sent = of_ids(prompt_of("Count to 60"))
    with board.start(prompt="", prompt_embeds=sent, max_tokens=200) as generation:
        next(generation)
        with pytest.raises(RequestError, match="cannot be paused"):
            generation.pause()
        generation.abort()
        assert generation.answer().finish_reason == "abort"


def request_of(embeds: Embeds, **more: Any) -> GenerateRequest:
    return GenerateRequest("r/0", "sim-chat", (), 9, prompt_text="", embeds=embeds, **more)


async def events_of(opened: LocalBoard, request: GenerateRequest) -> None:
    async for _ in opened._inner._board.generate(request):
        pass


def test_rows_that_the_library_would_read_beyond_are_refused_by_the_board(
    board: LocalBoard,
) -> None:
    short = Embeds(3, 32, bytes(3 * 32 * 4))
    with pytest.raises(RequestError, match="hidden_size is 64"):
        board._thread.call(events_of(board, request_of(short)))


def test_one_that_was_begun_elsewhere_fails_and_the_board_goes_on(board: LocalBoard) -> None:
    embeds = read_embeds(of_ids(prompt_of("Count to 8")), "p")
    begun = FailoverState(slots=(TranscriptToken(16, b"1"),), text="1")
    with pytest.raises(RunFailed, match="cannot go on"):
        board._thread.call(events_of(board, replace(request_of(embeds), continued=begun)))
    assert board.generate("Count to 8", temperature=0).text == COUNTED

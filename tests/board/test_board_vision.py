"""Images on a board over the simulated runtimes: what is seen and kept, and never mixed up."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.board import Board
from rkserve.board.engine.process import EngineProcess
from rkserve.board.engine.protocol import EngineSpec, EntryCommand, RunCommand
from rkserve.board.rules.hang_limits import RunTimeouts, limits_of
from rkserve.board.run.job import RunSpec
from rkserve.board.run.settings import BoardSettings
from rkserve.core.errors import EngineDied, LoadFailed, RequestError, RunFailed
from rkserve.core.messages import (
    Delta,
    FailoverState,
    Finished,
    FinishReason,
    GenerateRequest,
    TranscriptToken,
)
from rkserve.core.run_params import Picture, Stepwise
from rkserve.native.runtime import VisionParams
from rkserve.native.sim.build import ensure_encoder_built
from rkserve.native.sim.models import SimEncoder, pattern
from tests.support.boards.board_bench import collect, until
from tests.support.sim.sim_board import (
    CALM,
    CONTEXT_LEN,
    EOS_IDS,
    FOLDER,
    GREEDY,
    Sim,
    ask,
    both_releases,
    chat,
)

SIDE, TOKENS = 16, 4
ENCODER = SimEncoder(SIDE, SIDE, TOKENS)


@pytest.fixture
def sim(tmp_path: Path) -> Sim:
    """Return a place for one simulated board."""
    return Sim(tmp_path, sampling=GREEDY)


def picture(seed: int) -> Picture:
    return Picture(SIDE, SIDE, random.Random(seed).randbytes(SIDE * SIDE * 3))


def shows(*seeds: int) -> str:
    seen = [pattern(ENCODER.encoded(picture(seed).pixels)) for seed in seeds]
    if len(seen) == 1:
        return f"The picture shows pattern {seen[0]}."
    return f"The pictures show patterns {' and '.join(seen)}."


def asked(text: str, *seeds: int, **changes: Any) -> GenerateRequest:
    """Return a request of one turn; ``text`` has an ``<image>`` for each picture."""
    prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    values = {"max_tokens": 100, "prompt_text": prompt, "sampling": GREEDY, **changes}
    images = tuple(map(picture, seeds))
    return GenerateRequest("r", FOLDER.id, (), images=images, **values)


def seeing(sim: Sim, **changes: Any) -> EngineSpec:
    """Return how an engine with an encoder is started."""
    model = sim.place / "vision.rknn"
    ENCODER.write(model)
    tags = ("<img>", "</img>", "<|pad|>")
    params = VisionParams(ensure_encoder_built(), model, SIDE, SIDE, TOKENS, tags)
    return replace(sim.spec(), vision=replace(params, **changes))


@asynccontextmanager
async def board(sim: Sim, *, vision: bool = True, **changes: Any) -> AsyncIterator[Board]:
    settings = BoardSettings(
        "b", FOLDER.id, CONTEXT_LEN, EOS_IDS, sampling=GREEDY, patience=CALM, vision=vision
    )
    spec = seeing(sim, **changes) if vision else sim.spec()

    async def start(_: Path | None) -> EngineProcess:
        return await EngineProcess.start("b", spec)

    made = Board(settings, start)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def told(of: Board, request: GenerateRequest) -> tuple[str, Finished]:
    events = await collect(of.generate(request))
    assert isinstance(events[-1], Finished)
    return "".join(one.text for one in events if isinstance(one, Delta)), events[-1]


@both_releases
async def test_an_answer_tells_what_is_on_the_pictures(sim: Sim, release: str) -> None:
    sim.release = release
    async with board(sim) as seer:
        one, end = await told(seer, asked("<image>What is this?", 1))
        assert one.startswith(shows(1))
        assert end.timings.encode_ms > 0
        # Both the words and the rows of the picture are counted, by the runtime.
        blind = await told(seer, asked("What is this?"))
        assert blind[1].timings.encode_ms == 0
        assert end.usage.prompt_tokens > blind[1].usage.prompt_tokens + TOKENS
        two, _ = await told(seer, asked("<image> or <image>: which one?", 2, 3))
        assert two.startswith(shows(2, 3))
        again, _ = await told(seer, asked("<image> or <image>: which one?", 3, 2))
        assert again.startswith(shows(3, 2))


async def test_the_same_words_with_another_picture_are_another_prompt(sim: Sim) -> None:
    async with board(sim) as seer:
        for seed in (1, 2, 1):
            said, end = await told(seer, asked("<image>What is this?", seed))
            assert said.startswith(shows(seed))
            assert end.usage.cached_tokens == 0
        assert seer.report().kv_positions == 0  # nothing of it is taken for anybody's context


async def test_conversations_in_ids_and_with_pictures_never_share_a_context(sim: Sim) -> None:
    async with board(sim) as seer:
        first, _ = await told(seer, asked("<image>What is this?", 1))
        plain = await ask(seer, chat("Repeat after me: tea"), sampling=GREEDY)
        said = "".join(one.text for one in plain if isinstance(one, Delta))
        assert said == "tea"
        second, _ = await told(seer, asked("<image>What is this?", 2))
        assert (first[: len(shows(1))], second[: len(shows(2))]) == (shows(1), shows(2))
        more = await ask(seer, chat("Repeat after me: tea", said, "Count to 3"))
        assert "".join(one.text for one in more if isinstance(one, Delta)) == "1, 2, 3."
        assert isinstance(more[-1], Finished)
        assert more[-1].usage.cached_tokens == 0


async def test_equal_pictures_are_encoded_once(sim: Sim) -> None:
    engine = await EngineProcess.start("b", seeing(sim))
    live = _Live(engine)
    try:
        assert [await live.run(*seeds) for seeds in ((1,), (1,), (2, 1, 2), (1, 2))] == [
            1,
            0,
            1,
            0,
        ]
    finally:
        assert await engine.kill()


async def test_a_generation_goes_on_with_its_pictures_on_another_board(sim: Sim) -> None:
    async with board(sim) as seer:
        whole, _ = await told(seer, asked("<image>What is this?", 4))
        events = await collect(seer.generate(asked("<image>What is this?", 4)))
        ids = [i for one in events if isinstance(one, Delta) for i in one.token_ids]
        half = len(ids) // 2
        deltas = [one for one in events if isinstance(one, Delta)]
        slots: list[TranscriptToken] = []
        text = ""
        for delta in deltas:
            parts, at = delta.parts, 0
            for token_id, size in zip(delta.token_ids, parts, strict=True):
                if len(slots) < half:
                    piece = delta.text[at : at + size]
                    slots.append(TranscriptToken(token_id, piece.encode()))
                    text += piece
                at += size
        rest = replace(
            asked("<image>What is this?", 4), continued=FailoverState(tuple(slots), text)
        )
        said, end = await told(seer, rest)
        assert text + said == whole
        assert end.usage.completion_tokens >= half


async def test_an_encoder_that_fails_costs_one_answer(sim: Sim) -> None:
    sim.environ["RKSIM_ENCODER_FAULT"] = "run"
    async with board(sim) as seer:
        with pytest.raises(RunFailed, match="rknn_run returned -1"):
            await told(seer, asked("<image>What is this?", 1))
        plain = await ask(seer, chat("Count to 3"))
        assert "".join(one.text for one in plain if isinstance(one, Delta)) == "1, 2, 3."


async def test_an_encoder_that_crashes_is_replaced_with_its_engine(sim: Sim) -> None:
    sim.environ["RKSIM_ENCODER_FAULT"] = "segv"
    async with board(sim) as seer:
        starts = seer.report().engine_starts
        with pytest.raises(EngineDied, match="SIGSEGV"):
            await told(seer, asked("<image>What is this?", 1))
        await until(lambda: seer.report().engine_starts == starts + 1)
        plain = await ask(seer, chat("Count to 3"))
        assert isinstance(plain[-1], Finished)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"tokens": TOKENS + 1}, "4 tokens", id="another one"),
        pytest.param({"model": Path("/nowhere.rknn")}, "does not exist", id="no file"),
    ],
)
async def test_an_encoder_that_is_not_the_folders_is_refused_at_load(
    sim: Sim, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(LoadFailed, match=words):
        await EngineProcess.start("b", seeing(sim, **changes))


@pytest.mark.parametrize(
    ("vision", "changes", "words"),
    [
        pytest.param(False, {}, "takes no images", id="a model without eyes"),
        pytest.param(True, {"stepwise": Stepwise(1)}, "as RKLLM itself", id="single steps"),
        pytest.param(True, {"use_cache": "x"}, "prompt cache", id="a prompt cache"),
    ],
)
async def test_a_board_refuses_what_it_cannot_see(
    sim: Sim, vision: bool, changes: dict[str, Any], words: str
) -> None:
    async with board(sim, vision=vision) as one:
        with pytest.raises(RequestError, match=words):
            await told(one, asked("<image>?", 1, **changes))
        assert one.report().running == 0


def test_each_image_is_given_its_time() -> None:
    entry = EntryCommand(prompt_text="<image><image>", images=(picture(1), picture(2)))
    patience = RunTimeouts(first_token_s=10.0, image_s=7.0)
    seeing, plain = RunSpec((entry,)).shape(), RunSpec((EntryCommand((1,)),)).shape()
    assert limits_of(seeing, patience, patience) == replace(patience, first_token_s=24.0)
    assert limits_of(plain, patience, patience) == patience
    assert (seeing.usual, plain.usual) == (False, True)


async def test_the_limit_holds_and_leaves_the_board_clean(sim: Sim) -> None:
    async with board(sim) as seer:
        said, end = await told(seer, asked("<image>What is this?", 1, max_tokens=3))
        assert (end.reason, end.usage.completion_tokens) == (FinishReason.LENGTH, 3)
        assert shows(1).startswith(said)
        whole, _ = await told(seer, asked("<image>What is this?", 1))
        assert whole.startswith(shows(1))


class _Live:
    """Runs of one engine, as a board asks for them."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine, self._number = engine, 0

    async def run(self, *seeds: int) -> int:
        """Return how many of the pictures were encoded."""
        self._number += 1
        text = "<|im_start|>user\n" + "<image>" * len(seeds) + "<|im_end|>\n<|im_start|>assistant\n"
        entry = EntryCommand(prompt_text=text, images=tuple(map(picture, seeds)))
        said: list[bytes] = []
        ended = await self._engine.run(
            RunCommand(self._number, (entry,), clear=True),
            lambda _, __, data, ___: said.append(data),
        )
        assert ended.in_order, ended.error
        assert b"".join(said).decode().startswith(shows(*seeds))
        return ended.encoded

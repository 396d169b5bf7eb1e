"""Answers that another board goes on with, over real engine processes: on the simulated runtime,
and on llama.cpp with the trained model.

Byte for byte they are those of a board that lives, after any token, for every kind of request.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.board import Board
from rkserve.board.engine.protocol import EngineSpec
from rkserve.core.desired_state import InFlight
from rkserve.core.messages import AdapterRef, FailoverState, FinishReason, GenerateRequest
from tests.support.boards.board_bench import until
from tests.support.boards.continued_house import Heard, How, Loss, Site, sent_to
from tests.support.boards.fakes import run_loop
from tests.support.boards.holding import Governed, governed
from tests.support.sampler import Sampler
from tests.support.sim.cpu_board import every_kind
from tests.support.sim.sim_board import (
    CALM,
    FOLDER,
    GREEDY,
    TOKENIZER,
    Sim,
    both_releases,
    words,
)

LENGTH = 64
LIMIT_S = 240.0
answers = pytest.mark.parametrize("question", Sim.QUESTIONS)


@dataclass
class Real:
    """A board with a real engine process."""

    sim: Sim
    board: Board

    def die(self) -> None:
        os.kill(self.board.report().engine_pid, signal.SIGKILL)


class TextSim(Sim):
    """Of a model folder without a tokenizer."""

    def spec(self, n_batch: int = 1) -> EngineSpec:
        return replace(super().spec(n_batch), text_mode=True)


def ask(prompt: tuple[int, ...], tokens: int = LENGTH, **extra: Any) -> GenerateRequest:
    return GenerateRequest("r/0", FOLDER.id, prompt, tokens, sampling=GREEDY, **extra)


@asynccontextmanager
async def two(sims: Sequence[Sim], **settings: Any) -> AsyncIterator[tuple[Site, list[Real]]]:
    """A Router's dispatch and the boards that it asks in turn, the first one first."""
    async with AsyncExitStack() as stack:
        usual = {"patience": CALM, "crash_limit": 1000, **settings}
        boards = [await stack.enter_async_context(sim.board(**usual)) for sim in sims]
        reals = [Real(sim, board) for sim, board in zip(sims, boards, strict=True)]
        named = {f"r{at}": real for at, real in enumerate(reals)}
        yield await stack.enter_async_context(sent_to(named, model=FOLDER.id)), reals


def made(place: Path, release: str, kind: type[Sim], count: int = 2) -> list[Sim]:
    """Places for boards of their own."""
    places = [place / f"board-{at}" for at in range(count)]
    for one in places:
        one.mkdir()
    return [kind(one, release, sampling=GREEDY) for one in places]


async def again(site: Site, asked: GenerateRequest, *losses: Loss) -> Heard:
    """Ask the first board, which is lost so."""
    site.usher.replicas.sort()
    site.house.losses = list(losses)
    return await site.listen(asked)


async def cut_after(tokens: int, site: Site, asked: GenerateRequest) -> Heard:
    """Ask the first board; the connection is lost when it has heard so many of the library."""
    site.usher.replicas.sort()
    first = site.house.benches["r0"]
    assert isinstance(first, Real)
    held, cut = first.sim.tap.hold(tokens), site.house.sever("r0")
    listening = asyncio.create_task(site.listen(asked))
    await held
    await until(lambda: first.board.emitted().tokens[0][1] >= tokens)
    for _ in range(5):  # what is there goes out
        await asyncio.sleep(0)
    cut()
    return await listening


def continued(site: Site) -> FailoverState:
    """What the last board was told."""
    found = site.house.opened[-1][1].continued
    assert found is not None
    return found


def same(broken: Heard, whole: Heard) -> None:
    assert broken.told == whole.told
    assert broken.ids == whole.ids
    assert broken.retracted == 0


@every_kind
@answers
def test_lost_after_any_token_it_goes_on_as_if_nothing_were(
    tmp_path: Path, kind: type[Sim], release: str, question: str, sampled: Sampler
) -> None:
    async def main() -> None:
        async with two(made(tmp_path, release, kind)) as (site, _):
            whole = await again(site, ask(kind.asked(question)))
            assert len(whole.ids) == LENGTH
            known = set()
            tried = [*sampled(range(1, LENGTH)), LENGTH]
            for tokens in tried:
                broken = await cut_after(tokens, site, ask(kind.asked(question)))
                same(broken, whole)
                assert broken.finished is not None
                times = broken.finished.timings.continued
                # After the last token the end may have been on its way already.
                assert times == 1 or (tokens == LENGTH and times == 0)
                if times == 1:
                    known.add(len(continued(site).slots))
            # Only the beginning of a character is not known to whoever goes on.
            assert len(known) > len(tried) / 2

    run_loop(main(), LIMIT_S)


LOST_AT = [
    "prefill",
    "token:1",
    pytest.param("token:2", marks=pytest.mark.long),
    "token:31",
    pytest.param("token:63", marks=pytest.mark.long),
]


@every_kind
@answers
@pytest.mark.parametrize("where", LOST_AT)
def test_killed_where_it_stands_it_goes_on_elsewhere(
    tmp_path: Path, kind: type[Sim], release: str, question: str, where: str
) -> None:
    async def main() -> None:
        async with two(made(tmp_path, release, kind)) as (site, [first, _]):
            whole = await again(site, ask(kind.asked(question)))
            site.usher.replicas.sort()
            first.sim.gate(where)
            listening = asyncio.create_task(site.listen(ask(kind.asked(question))))
            await first.sim.at_gate()
            first.die()
            first.sim.pace(0)  # for the engine after it
            broken = await listening
            same(broken, whole)
            assert broken.finished is not None
            assert broken.finished.timings.continued == 1

    run_loop(main(), LIMIT_S)


@every_kind
def test_lost_twice_and_back_on_the_first_board(
    tmp_path: Path, kind: type[Sim], release: str
) -> None:
    async def main() -> None:
        async with two(made(tmp_path, release, kind)) as (site, _):
            asked = ask(kind.asked("multi-byte"))
            whole = await again(site, asked)
            for first in (0, 1, 7, 20):
                for second in (0, 1, 5, 30):
                    broken = await again(
                        site, asked, Loss(first, How.SWALLOWED), Loss(second, How.CUT)
                    )
                    same(broken, whole)

    run_loop(main(), LIMIT_S)


@every_kind
def test_an_adapter_is_pinned_wherever_it_goes_on(
    tmp_path: Path, kind: type[Sim], release: str
) -> None:
    async def main() -> None:
        sims = made(tmp_path, release, kind)
        refs: set[AdapterRef] = {sim.adapter("Pirate") for sim in sims}
        [ref] = refs
        async with two(sims) as (site, _):
            asked = ask(kind.asked("plain"), adapter=ref)
            whole = await again(site, asked)
            assert whole.text != (await again(site, ask(kind.asked("plain")))).text
            for tokens in (0, 1, 13, 40, 63):
                same(await cut_after(max(1, tokens), site, asked), whole)

    run_loop(main(), LIMIT_S)


@every_kind
def test_a_stop_string_that_is_half_said_ends_it_elsewhere(
    tmp_path: Path, kind: type[Sim], release: str, sampled: Sampler
) -> None:
    async def main() -> None:
        async with two(made(tmp_path, release, kind)) as (site, _):
            plain = await again(site, ask(kind.asked("plain")))
            stop = plain.text[60:72]
            asked = ask(kind.asked("plain"), stop=(stop,))
            whole = await again(site, asked)
            assert whole.text == plain.text[: plain.text.index(stop)]
            assert whole.finished is not None
            assert whole.finished.reason is FinishReason.STOP
            for tokens in sampled(range(1, len(whole.ids))):
                same(await cut_after(tokens, site, asked), whole)

    run_loop(main(), LIMIT_S)


@both_releases
def test_in_text_mode_it_goes_on_from_what_was_said(
    tmp_path: Path, release: str, sampled: Sampler
) -> None:
    async def main() -> None:
        sims = made(tmp_path, release, TextSim)
        async with two(sims, text_mode=True, vocab_size=None) as (site, _):
            prompt = TOKENIZER.decode(Sim.asked("plain"), skip_special_tokens=False)
            asked = ask((), 40, prompt_text=prompt)
            whole = await again(site, asked)
            assert whole.finished is not None
            assert whole.finished.usage.prompt_tokens > 0
            for tokens in sampled(range(1, 40)):
                broken = await cut_after(tokens, site, asked)
                assert (broken.text, broken.retracted) == (whole.text, 0)
                assert broken.finished is not None
                assert broken.finished.usage == whole.finished.usage
                assert broken.finished.reason is whole.finished.reason

    run_loop(main(), LIMIT_S)


@both_releases
def test_all_of_a_batch_go_on_and_suspects_run_alone(tmp_path: Path, release: str) -> None:
    async def main() -> None:
        sims = made(tmp_path, release, Sim)
        settings = {"n_batch": 2, "batch_window_s": 1.5, "queue_limit": 8}
        async with two(sims, **settings) as (site, [first, _]):
            asked = [
                replace(ask(words(said), 40), request_id=f"r{at}/0")
                for at, said in enumerate(("The tide of the river", "And the old lamp"))
            ]

            async def both() -> list[Heard]:
                # Both to the first board, where the run begins as soon as it is full.
                site.usher.replicas[:] = ["r0", "r0", "r1", "r1"]
                return list(await asyncio.gather(*(site.listen(one) for one in asked)))

            whole = await both()
            first.sim.gate("token:9")
            listening = asyncio.create_task(both())
            await first.sim.at_gate()
            first.die()
            first.sim.pace(0)
            for broken, expected in zip(await listening, whole, strict=True):
                same(broken, expected)
            later = [request.continued for _, request in site.house.opened[-2:]]
            assert all(one is not None and one.suspect for one in later)

    run_loop(main(), LIMIT_S)


@asynccontextmanager
async def lines(place: Path, release: str) -> AsyncIterator[tuple[Site, list[Governed]]]:
    """Two boards that serve the first of two versions of a line."""
    async with AsyncExitStack() as stack:
        boards = []
        for at in range(2):
            (place / f"board-{at}").mkdir()
            made = await stack.enter_async_context(governed(place / f"board-{at}", release))
            made.stage("1", seed=1)
            made.stage("2", seed=2)
            await made.serve("1")
            boards.append(made)
        named = {f"r{at}": Real(one.sim, one.board) for at, one in enumerate(boards)}
        yield await stack.enter_async_context(sent_to(named, model=FOLDER.id)), boards


@both_releases
@pytest.mark.parametrize("in_flight", [InFlight.PIN, InFlight.SWITCH], ids=lambda how: how.value)
@pytest.mark.parametrize("lost_after", [10, 30], ids=["before it goes on", "when it has gone on"])
def test_a_version_that_was_switched_or_pinned_in_flight_stays_so_elsewhere(
    tmp_path: Path, release: str, in_flight: InFlight, lost_after: int
) -> None:
    async def main() -> None:
        async with lines(tmp_path, release) as (site, [first, second]):
            asked = ask(words("The tide of the river and the old lamp"), 50, line="tone")

            async def told(*losses: Loss) -> Heard:
                for board in (first, second):
                    await board.serve("1")
                site.usher.replicas.sort()
                site.house.losses = list(losses)
                first.stand(10)
                listening = asyncio.create_task(site.listen(asked))
                await first.sim.at_gate()
                # All ten have left the board before it is told something new.
                await until(lambda: first.board.emitted().tokens[0][1] == 10)
                await asyncio.gather(
                    second.serve("2", in_flight=in_flight), first.serve("2", in_flight=in_flight)
                )
                first.pace()
                return await listening

            whole = await told()
            assert whole.finished is not None
            spans = [(s.version, s.start, s.end) for s in whole.finished.versions]
            if in_flight is InFlight.PIN:
                assert spans == [("tone@1", 0, 50)]
            else:
                assert spans == [("tone@1", 0, 10), ("tone@2", 10, 50)]
            same(await told(Loss(lost_after, How.CUT)), whole)

    run_loop(main(), LIMIT_S)

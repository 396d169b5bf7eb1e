"""Hooks that return nonsense over a real engine process: each ends its own generation only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rkserve.board.answer.hooks import Action, Continue, Decoded, Pause, Replace
from rkserve.core.errors import HookFailed
from rkserve.core.messages import GenerateRequest
from tests.support.boards.board_bench import text_of
from tests.support.sim.sim_board import GREEDY, Sim, ask, chat

ODD: Any = object()
PROMPT = chat("Tell me a story.")


class Nonsense:
    """Says one thing at the second piece."""

    def __init__(self, action: Action) -> None:
        self.action = action

    def on_piece(self, piece: Decoded) -> Action:
        return self.action if piece.index == 1 and not piece.replayed else Continue()

    def on_end(self) -> str:
        return ""


async def test_a_malformed_action_reaches_neither_the_engine_nor_other_generations(
    tmp_path: Path,
) -> None:
    async with Sim(tmp_path).board() as board:
        before = text_of(await ask(board, PROMPT, max_tokens=12, sampling=GREEDY))
        for action in (
            Replace((1,), ODD),
            Replace((ODD,), "x"),
            Replace((1,), "x", last=ODD),
            Replace((), "x", last=ODD, in_context=False),
            Replace((2**31,), "x"),
            Pause(reason=ODD),
            Continue(ODD),
            ODD,
        ):
            asked = GenerateRequest("r", "sim-chat", PROMPT, 30, sampling=GREEDY)
            nonsense = Nonsense(action)

            def factory(_: GenerateRequest, made: Nonsense = nonsense) -> Nonsense:
                return made

            with pytest.raises(HookFailed):
                async for _ in board.generate(asked, [factory]):
                    pass
        assert text_of(await ask(board, PROMPT, max_tokens=12, sampling=GREEDY)) == before
        assert board.report().engine_starts == 1

"""Random pauses, edits, aborts, hang-ups and engine deaths: every answer stays its own.

The model's next word depends on every id of its context, so a token that is lost, doubled, foreign
or computed from a wrong context changes all words after it. What each client must read is computed
beside the board and compared at every step.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from rkserve.board.engine.protocol import RunCommand
from rkserve.core.board_report import BoardState, GenerationInfo, GenerationState
from rkserve.core.errors import BoardFailed, GenerationNotFound, RequestError, StateConflict
from rkserve.core.messages import ControlAction, Edit, FinishReason, GenerateRequest
from tests.support.boards.board_bench import PATIENCE, SETTINGS, Bench, Listener, talker
from tests.support.boards.fakes import EOS, Script
from tests.support.boards.own_time import Loop

T = TypeVar("T")
LENGTH, MAX_TOKENS, CONTEXT = 9, 24, 96
MODEL = talker(LENGTH)
ALLOWED = {
    ControlAction.PAUSE: {GenerationState.GENERATING},
    ControlAction.EDIT: {GenerationState.PAUSED},
    ControlAction.RESUME: {GenerationState.PAUSED},
    ControlAction.ABORT: set(GenerationState) - {GenerationState.ENDED},
}


@dataclass
class Reader:
    """One client, and what it must read: what is settled, then what the model goes on to say.

    ``context`` is that of the last edit, ``said`` the answer's text and ``tokens`` its length then.
    """

    number: int
    listener: Listener
    context: list[int]
    said: list[str] = field(default_factory=list)
    aborted: bool = False
    left: bool = False

    def whole(self, tokens: int = MAX_TOKENS) -> tuple[list[int], list[str]]:
        """Return the context and the words once the answer has so many tokens, if it gets there."""
        context, said = list(self.context), list(self.said)
        while len(said) < tokens:
            token_id, word = MODEL(0, tuple(context))
            context.append(token_id)
            if token_id == EOS:
                break
            said.append(word.decode())
        return context, said

    def expected(self) -> str:
        return "".join(self.whole()[1])


class MachineBench(Bench):
    """Every run thinks; ``late`` tokens come after each abort."""

    def __init__(self, late: int, **extra: Any) -> None:
        super().__init__(**extra)
        self._late = late

    def _next(self, command: RunCommand) -> Script:
        return Script([], model=MODEL, late=self._late)


class BoardMachine(RuleBasedStateMachine):
    """One board and its clients."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = Loop()
        self.unheard: list[Mapping[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.unheard.append(context))
        self.bench: MachineBench | None = None
        self.readers: list[Reader] = []
        self.deaths = 0

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    @property
    def board(self) -> Any:
        assert self.bench is not None
        return self.bench.board

    # -- what happens -------------------------------------------------------------------------

    @initialize(
        n_batch=st.sampled_from([1, 1, 2, 4]),
        per_run=st.booleans(),
        late=st.integers(0, 2),
        quirks=st.fixed_dictionaries(
            {
                name: st.booleans()
                for name in ("pause_with_history", "stop_by_pause", "kv_valid_after_abort")
            }
        ),
    )
    def open(self, n_batch: int, per_run: bool, late: int, quirks: dict[str, bool]) -> None:
        limits = replace(
            SETTINGS,
            context_len=CONTEXT,
            n_batch=n_batch,
            batch_window_s=0.001,
            pause_hold_s=0.005,
            patience=replace(PATIENCE, first_token_s=5.0, token_s=5.0, abort_s=5.0),
            crash_limit=999,
        )

        async def start() -> MachineBench:
            bench = MachineBench(late, settings=limits, per_run=per_run, quirks=quirks)
            await bench.board.start()
            return bench

        self.bench = self.do(start())

    @precondition(lambda self: len(self.readers) < 8)
    @rule(native=st.booleans())
    def come(self, native: bool) -> None:
        number = len(self.readers)
        prompt = (number + 3, 40, number + 3)

        async def listen() -> Listener:
            asked = GenerateRequest(f"c{number}/0", "m", prompt, MAX_TOKENS, native_pause=native)
            return Listener(self.board, asked)

        self.readers.append(Reader(number, self.do(listen()), list(prompt)))

    @rule(turns=st.integers(1, 30))
    def go_on(self, turns: int) -> None:
        async def turn() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.do(turn())

    @rule()
    def wait(self) -> None:
        self.do(asyncio.sleep(0.01))

    @precondition(lambda self: self.readers)
    @rule(
        pick=st.integers(0, 7),
        action=st.sampled_from(ControlAction),
        take_back=st.integers(0, 3),
        ids=st.lists(st.integers(500, 599), max_size=2),
        clear=st.none() | st.tuples(st.integers(0, 20), st.integers(0, 3)),
    )
    def control(
        self,
        pick: int,
        action: ControlAction,
        take_back: int,
        ids: list[int],
        clear: tuple[int, int] | None,
    ) -> None:
        reader = self.readers[pick % len(self.readers)]
        edit = (
            None
            if action is not ControlAction.EDIT
            else Edit(
                replace_last=take_back,
                ids=tuple(ids),
                text="".join(f"<{token_id}>" for token_id in ids),
                clear=((clear[0], sum(clear)),) if clear is not None else (),
            )
        )

        async def act() -> tuple[GenerationInfo | None, GenerationInfo | Exception]:
            before = await self._info(reader)  # in the same turn of the loop as the call
            try:
                return before, (await self.board.control(f"c{reader.number}", action, edit))[0]
            except RequestError as exc:
                return before, exc

        before, after = self.do(act())
        allowed = before is not None and before.state in ALLOWED[action]
        if isinstance(after, StateConflict | GenerationNotFound):
            raced = action is ControlAction.PAUSE and "ended" in after.message
            assert not allowed or raced, (before, action)
            return
        if isinstance(after, Exception):
            assert action is ControlAction.EDIT
            assert self.do(self._info(reader)) == before
            return
        assert allowed, (before, action)
        reader.aborted |= action is ControlAction.ABORT
        if action is ControlAction.PAUSE:
            assert after.state is GenerationState.PAUSED
            assert after.partial_output == "".join(reader.whole(after.tokens)[1])
        if edit is not None:
            assert before is not None
            self._apply(reader, before, edit, after)

    @precondition(lambda self: self.readers)
    @rule(pick=st.integers(0, 7))
    def hang_up(self, pick: int) -> None:
        reader = self.readers[pick % len(self.readers)]
        reader.left = True
        self.do(reader.listener.hang_up())

    @precondition(lambda self: self.deaths < 2)
    @rule()
    def die(self) -> None:
        assert self.bench is not None
        self.deaths += 1
        self.bench.engine.die("SIGSEGV")

    @rule()
    def clear(self) -> None:
        try:
            self.do(self.board.clear_kv(keep_system_prompt=False))
        except BoardFailed:
            assert self.deaths

    # -- what must hold -----------------------------------------------------------------------

    @invariant()
    def everyone_reads_their_own_words(self) -> None:
        for reader in self.readers:
            assert reader.expected().startswith(reader.listener.text), reader
            if reader.listener.error is not None:
                assert self.deaths, reader.listener.error
                assert isinstance(reader.listener.error, BoardFailed)
            finished = reader.listener.finished
            if finished is not None and finished.reason is not FinishReason.ABORT:
                assert reader.listener.text == reader.expected()
            elif finished is not None:
                assert reader.aborted

    def teardown(self) -> None:
        if self.bench is not None:
            self.do(self._farewell())
            self.everyone_reads_their_own_words()
            self.do(self.board.stop())
        gc.collect()
        self.loop.close()
        assert not self.unheard, self.unheard

    async def _farewell(self) -> None:
        """Nothing is stuck: whoever is paused can go on, and all come to an end."""
        while any(not reader.listener.task.done() for reader in self.readers):
            for info in self.board.generations():
                if info.state is GenerationState.PAUSED:
                    name = info.request_id.partition("/")[0]
                    await self.board.control(name, ControlAction.RESUME)
            await asyncio.sleep(0.001)
        bench = self.bench
        assert bench is not None
        while not self._is_idle(bench):  # noqa: ASYNC110 - the board owes nobody an event
            await asyncio.sleep(0.001)
        assert not bench.engine.paused
        assert (self.board.report().paused, self.board.generations()) == (0, [])
        last = Listener(self.board, GenerateRequest("last/0", "m", (99,), MAX_TOKENS))
        assert (await last.end())[0] == Reader(0, last, [99]).expected()

    def _is_idle(self, bench: MachineBench) -> bool:
        report = bench.board.report()
        busy = report.running or report.queued  # a clear may wait for its turn, too
        return report.state is BoardState.READY and not busy

    # -- edits --------------------------------------------------------------------------------

    async def _info(self, reader: Reader) -> GenerationInfo | None:
        name = f"c{reader.number}/0"
        found = [info for info in self.board.generations() if info.request_id == name]
        return replace(found[0], age_s=0.0, paused_s=0.0) if found else None

    def _apply(
        self, reader: Reader, before: GenerationInfo, edit: Edit, after: GenerationInfo
    ) -> None:
        context, said = reader.whole(before.tokens)
        cleared = {at for start, end in edit.clear for at in range(start, end)}
        live = [at not in cleared for at in range(len(context))]
        if edit.replace_last:
            live = live[: len(live) - edit.replace_last]
            said = said[: len(said) - edit.replace_last]
        context = [token_id for token_id, stays in zip(context, live, strict=False) if stays]
        reader.context = [*context, *edit.ids]
        # The words of an edit are shown with its last id.
        reader.said = [*said, *[""] * (len(edit.ids) - 1), *([edit.text] if edit.ids else [])]
        assert after.partial_output == "".join(reader.said)
        assert after.context_tokens == len(reader.context)


TestBoardMachine = BoardMachine.TestCase
TestBoardMachine.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

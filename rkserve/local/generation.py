"""A running generation of a local board, its pieces and answer; for coroutines and without."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from rkserve.api.admin.generations import EditCall, edit_of, parse_edit
from rkserve.api.admin.query import ControlRequest
from rkserve.api.common.answer import AnswerOrigin, AnyCall
from rkserve.api.common.calls import ChatCall
from rkserve.api.common.logprobs import ChoiceTokens
from rkserve.api.common.renderer import Renderer
from rkserve.api.json.fields import JsonObject
from rkserve.api.openai import answers
from rkserve.board.answer.hooks import Action, Continue, Decoded, HookFactory, Pause
from rkserve.board.board import Board
from rkserve.core.board_report import GenerationInfo
from rkserve.core.errors import StateConflict
from rkserve.core.messages import (
    Accepted,
    ControlAction,
    Delta,
    Event,
    Finished,
    GenerateRequest,
    Paused,
    QueueChange,
    Timings,
    Usage,
)

PAUSE_WHEN = "pause_when"


Messages = str | Sequence[JsonObject]


# Called with each piece of the answer; a true result pauses after it, a string is the reason.
PauseWhen = Callable[[Decoded], object]


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """The growth of an answer.

    An edit may retract text: the last ``retract`` characters of the text so far, before ``text`` is
    appended. A piece with ``paused`` has no text: the generation has paused.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    retract: int = 0
    paused: Paused | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class LocalAnswer:
    """A finished answer.

    ``text`` is all generated text, with reasoning and tool calls in the model's own form. ``body``
    is the same as OpenAI's object, with these apart, and log-probabilities.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
    body: JsonObject = field(repr=False)

    @property
    def message(self) -> JsonObject:
        """The message of a chat's answer, to be appended to its conversation."""
        choice = self.body["choices"][0]
        message: JsonObject = choice.get("message") or {
            "role": "assistant",
            "content": choice["text"],
        }
        return {key: value for key, value in message.items() if value is not None}


class PauseCondition:
    """The hook of ``pause_when``."""

    def __init__(self, when: PauseWhen) -> None:
        self._when = when

    def on_piece(self, piece: Decoded) -> Action:
        """Pause if the condition holds."""
        found = self._when(piece)
        if not found:
            return Continue()
        return Pause(reason=found if isinstance(found, str) else PAUSE_WHEN)

    def on_end(self) -> str:
        """Return nothing, because no text is held back."""
        return ""


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """One call, ready for the board."""

    call: AnyCall
    request: GenerateRequest
    stamp: Callable[[Accepted], AnswerOrigin]
    hooks: tuple[HookFactory, ...]


class AsyncGeneration:
    """A running generation. Iterate it for its pieces; close it to abort it.

    While it is paused, or iterated elsewhere, ``pause``, ``edit``, ``resume`` and ``abort`` control
    it. ``on_pause`` is called at each pause; afterwards the generation is resumed, unless that was
    done already.
    """

    def __init__(
        self,
        board: Board,
        renderer: Renderer,
        asked: PreparedCall,
        on_pause: Callable[[AsyncGeneration], Awaitable[None] | None] | None = None,
    ) -> None:
        self._board, self._renderer, self._asked = board, renderer, asked
        self._on_pause = on_pause
        self._events: Any = board.generate(asked.request, asked.hooks)
        self._tokens = ChoiceTokens()
        self._tally: answers.ChatAnswer | answers.CompletionAnswer
        self._finished: Finished | None = None
        self.accepted: Accepted
        self.paused: Paused | None = None  # while it is paused
        self.text = ""  # so far

    @property
    def id(self) -> str:
        """The generation's ID on the board."""
        return self._asked.request.request_id.rpartition("/")[0]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the answer so far."""
        return tuple(token_id for token_id, _ in self._tokens.chosen)

    async def open(self) -> None:
        """Start it on the board. Raises as ``Board.generate``."""
        accepted: Event = await anext(self._events)
        assert isinstance(accepted, Accepted)  # the first event of every generation
        self.accepted = accepted
        kind = answers.CHAT if isinstance(self._asked.call, ChatCall) else answers.COMPLETION
        stamp = self._asked.stamp(accepted)
        self._tally = kind.answer(self._asked.call, self.id, int(time.time()), stamp)  # type: ignore[assignment] # one of these two dialects

    def __aiter__(self) -> AsyncIterator[LocalPiece]:
        return self

    async def __anext__(self) -> LocalPiece:
        while True:
            event = await anext(self._events, None)
            if isinstance(event, Delta):
                return self._grown(event)
            if isinstance(event, QueueChange):
                continue
            if isinstance(event, Paused):
                self.paused = event
                if self._on_pause is None:
                    return LocalPiece(paused=event)
                await self._handled(self._on_pause)
            else:
                if isinstance(event, Finished):
                    self._finished = event
                    self._tally.end(0, event)
                    await self.aclose()
                raise StopAsyncIteration

    def _grown(self, delta: Delta) -> LocalPiece:
        self._tally.add(0, delta)
        self._tokens.add(delta)
        if not delta.paused:
            self.paused = None
        self.text = self.text[: len(self.text) - delta.retract] + delta.text
        return LocalPiece(delta.text, delta.token_ids, delta.retract)

    async def _handled(self, on_pause: Callable[[AsyncGeneration], Awaitable[None] | None]) -> None:
        done = on_pause(self)
        if inspect.isawaitable(done):
            await done
        if self.paused is not None:
            await self.resume()

    async def answer(self) -> LocalAnswer:
        """Wait for the end and return the answer.

        Raises:
            RkserveError: the generation failed, or was closed.
        """
        async for _ in self:
            pass
        end = self._finished
        if end is None:
            raise StateConflict("answer", "ended", "The generation was closed before its end.")
        body = self._tally.whole()
        return LocalAnswer(
            self.text, self.token_ids, end.reason.value, end.usage, end.timings, body
        )

    async def info(self) -> GenerationInfo | None:
        """Return the board's view of it: state, positions in the KV cache; None after its end."""
        mine = self._asked.request.request_id
        return next((one for one in self._board.generations() if one.request_id == mine), None)

    async def pause(self) -> GenerationInfo:
        """Pause it after the token that is being generated. Raises ``StateConflict``."""
        return await self._control(ControlAction.PAUSE)

    async def resume(self) -> GenerationInfo:
        """Continue it, with its edits. Raises ``StateConflict``."""
        done = await self._control(ControlAction.RESUME)
        self.paused = None
        return done

    async def abort(self) -> GenerationInfo:
        """End it; its answer has the finish reason ``abort``. Raises ``StateConflict``."""
        done = await self._control(ControlAction.ABORT)
        self.paused = None
        return done

    async def edit(
        self,
        text: str | None = None,
        *,
        replace_last: int = 0,
        token_ids: Sequence[int] | None = None,
        role: str | None = None,
        clear: Sequence[tuple[int, int]] = (),
    ) -> GenerationInfo:
        """Change a paused generation, as ``POST /v1/generations/{id}/edit`` does.

        ``replace_last`` tokens are removed, then ``text`` or ``token_ids`` are appended: as part of
        the assistant's answer, or with ``role="tool"`` as a tool's result in the form of the
        model's template. ``clear`` removes ranges of positions from the context.

        Raises:
            StateConflict: it is not paused.
            RequestError: the edit cannot be made.
        """
        given: JsonObject = {"replace_last": replace_last or None, "text": text, "role": role}
        given["token_ids"] = None if token_ids is None else list(token_ids)
        given["clear"] = [list(one) for one in clear] or None
        call: EditCall = parse_edit(ControlRequest(body=json.dumps(given).encode()))
        edit = edit_of(call, self._renderer, self._board.settings.context_len)
        return (await self._board.control(self.id, ControlAction.EDIT, edit))[0]

    async def aclose(self) -> None:
        """Abort it if it still runs, and free the board."""
        await self._events.aclose()

    async def __aenter__(self) -> AsyncGeneration:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _control(self, action: ControlAction) -> GenerationInfo:
        return (await self._board.control(self.id, action))[0]


T = TypeVar("T")
P = ParamSpec("P")
Inner = TypeVar("Inner")


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rkserve.local", daemon=True
        )
        self._thread.start()

    @property
    def closed(self) -> bool:
        """True from the end of the loop."""
        return self._loop.is_closed()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop and wait for it; an interrupted caller cancels it."""
        if self.closed or threading.current_thread() is self._thread:
            work.close()
            why = "it is closed" if self.closed else "this is its own thread"
            raise RuntimeError(f"The board cannot be called: {why}.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class Blocking(Generic[Inner]):
    """The synchronous counterpart of ``inner``, which lives on the loop of a thread."""

    def __init__(self, inner: Inner, thread: LoopThread) -> None:
        self._inner, self._thread = inner, thread


def blocking(
    method: Callable[Concatenate[Inner, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Blocking[Inner], P], T]:
    """Return a method of the counterpart that waits for the coroutine's result."""

    @wraps(method)
    def call(self: Blocking[Inner], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.call(method(self._inner, *args, **kwargs))

    return call


class LocalGeneration(Blocking[AsyncGeneration]):
    """A running generation, for synchronous code. See ``AsyncGeneration``.

    A ``with`` block closes it. Its control calls may come from any thread. ``on_pause`` is called
    in the thread that iterates it.
    """

    def __init__(
        self,
        inner: AsyncGeneration,
        thread: LoopThread,
        on_pause: Callable[[LocalGeneration], None] | None,
    ) -> None:
        super().__init__(inner, thread)
        self._on_pause = on_pause

    @property
    def id(self) -> str:
        """The generation's id."""
        return self._inner.id

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._inner.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the answer so far."""
        return self._inner.token_ids

    @property
    def paused(self) -> Paused | None:
        """The state of its pause: the cause, the tokens so far, and the fate of the KV cache."""
        return self._inner.paused

    info = blocking(AsyncGeneration.info)
    pause = blocking(AsyncGeneration.pause)
    resume = blocking(AsyncGeneration.resume)
    abort = blocking(AsyncGeneration.abort)
    edit = blocking(AsyncGeneration.edit)
    close = blocking(AsyncGeneration.aclose)

    def __iter__(self) -> Iterator[LocalPiece]:
        return self

    def __next__(self) -> LocalPiece:
        while True:
            piece = self._thread.call(_next(self._inner))
            if piece is None:
                raise StopIteration
            if piece.paused is None or self._on_pause is None:
                return piece
            # In the caller's thread: a handler may be slow, such as one that calls a tool.
            self._on_pause(self)
            if self.paused is not None:
                self.resume()

    def answer(self) -> LocalAnswer:
        """Wait for the end and return the answer."""
        for _ in self:
            pass
        return self._thread.call(self._inner.answer())

    def __enter__(self) -> LocalGeneration:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _next(generation: AsyncGeneration) -> LocalPiece | None:
    return await anext(generation, None)

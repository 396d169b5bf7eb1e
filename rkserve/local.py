"""One board in this process, without Ray: generate, stream, pause on a condition, edit, resume.

The public entry point for programs without a cluster. ``open_board`` is for synchronous code,
``AsyncLocalBoard`` for code with an event loop of its own; both have the same calls. The library
still runs in an engine process, so that its crash ends an answer and not the program.
docs/how-to/local.md is the guide.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import secrets
import tempfile
import threading
import time
import uuid
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Sequence,
)
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from pydantic import ValidationError

from rkserve.api.admin.caches import ids_of, parse_build
from rkserve.api.admin.generations import EditCall, edit_of, parse_edit
from rkserve.api.admin.query import ControlRequest
from rkserve.api.common.answer import AnswerOrigin
from rkserve.api.common.calls import ChatCall, CompletionCall
from rkserve.api.common.dialect import AnyCall
from rkserve.api.common.logprobs import ChoiceTokens, TokenTexts
from rkserve.api.common.plan import held, plan, prompt_texts, reading
from rkserve.api.common.renderer import Renderer
from rkserve.api.common.version_policy import ResolvedModel
from rkserve.api.json.body import JsonObject
from rkserve.api.openai import answers
from rkserve.api.openai.embeddings import chunks_of, finished_vector, texts_of
from rkserve.board.answer.hooks import Action, Continue, Decoded, Hook, HookFactory, Pause
from rkserve.board.board import Board
from rkserve.board.storage.node_slots import claim_slot
from rkserve.config.board_group import BoardGroupConfig
from rkserve.config.explain import explain
from rkserve.config.router import ImagesConfig
from rkserve.config.serve_config import default_state_dir, resolve_folder
from rkserve.core.board_report import BoardReport, CacheEntry, GenerationInfo, KvReport
from rkserve.core.errors import (
    ConfigError,
    EmbeddingUnsupported,
    RequestError,
    StateConflict,
    UnsupportedParameter,
)
from rkserve.core.messages import (
    FIRST_LABEL,
    Accepted,
    AdapterRef,
    ControlAction,
    Delta,
    Embedded,
    Event,
    Finished,
    GenerateRequest,
    Paused,
    Timings,
    Usage,
)
from rkserve.deployments.board_factory import BoardLocation, assemble
from rkserve.models.adapters import adapters, resolve
from rkserve.models.folder import ModelFolder, open_model_folder
from rkserve.reference.asking import SCHEMAS
from rkserve.router.images.inputs import ImageInputs

__all__ = [
    "Answer",
    "AsyncGeneration",
    "AsyncLocalBoard",
    "Decoded",
    "Generation",
    "LocalBoard",
    "Piece",
    "open_board",
]

GROUP = "local"
BOARDS = 16  # the number of boards that may share a state folder; each locks one slot of it
PAUSE_WHEN = "pause_when"
Messages = str | Sequence[JsonObject]
# Called with each piece of the answer; a true result pauses after it, a string is the reason.
PauseWhen = Callable[[Decoded], object]
T = TypeVar("T")

# Not accepted here: one prompt has one answer, and the method decides about streaming.
_NOT_HERE = frozenset(
    {"model", "messages", "prompt", "n", "best_of", "stream", "stream_options", "priority"}
    | {"timeout", "user", "prompt_cache_key", "keep_version"}
)


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


class _Condition:
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
class _Call:
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
        asked: _Call,
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


class AsyncLocalBoard:
    """A board for programs with an event loop. Build it with ``open``; close it when done."""

    def __init__(self, board: Board, folder: ModelFolder, renderer: Renderer) -> None:
        self._board, self._folder, self._renderer = board, folder, renderer
        self._sight = ImageInputs(ImagesConfig())
        self._exits = AsyncExitStack()

    @classmethod
    async def open(
        cls, model: str | Path, *, state_dir: Path | None = None, **settings: Any
    ) -> AsyncLocalBoard:
        """Load a model folder and return its board; ``open_board`` describes the arguments.

        Raises:
            ConfigError: a setting or the model folder is wrong.
            NativeError: the library cannot load the model.
        """
        group = _group(model, settings)
        folder = open_model_folder(resolve_folder(group.model))
        async with AsyncExitStack() as exits:
            if state_dir is None and group.simulated is not None:
                made = tempfile.TemporaryDirectory(prefix="rkserve-local-")
                exits.callback(made.cleanup)
                state_dir = Path(made.name)
            state = (state_dir or default_state_dir()).expanduser()
            slot = claim_slot(state, GROUP, BOARDS)
            exits.callback(slot.release)
            place = BoardLocation(f"{GROUP}-{slot.index}", GROUP, state)
            # Digests of models and libraries take a while.
            platform = os.uname().machine if group.simulated is None else "simulated"
            board = await asyncio.to_thread(assemble, group, place, platform, governed=False)
            renderer = await asyncio.to_thread(Renderer, folder)
            exits.push_async_callback(board.stop)
            await board.start()
            opened = cls(board, folder, renderer)
            opened._exits = exits.pop_all()
            return opened

    @property
    def model(self) -> str:
        """The model's id: its folder's name."""
        return self._folder.id

    async def start(
        self,
        messages: Messages | None = None,
        *,
        prompt: str | Sequence[int] | None = None,
        adapter: str | None = None,
        pause_when: PauseWhen | None = None,
        on_pause: Callable[[AsyncGeneration], Awaitable[None] | None] | None = None,
        hooks: Sequence[HookFactory] = (),
        **parameters: Any,
    ) -> AsyncGeneration:
        """Start a generation and return it; ``LocalBoard.start`` has the arguments.

        Raises:
            RequestError: the board cannot serve the request.
            RkserveError: as ``Board.generate``.
        """
        _check_names(parameters, "ChatRequest" if prompt is None else "CompletionRequest")
        if pause_when is not None and self._board.settings.n_batch == 1:
            parameters = {"native_pause": True, **parameters}  # as requests with pause_on
        body = {**_prompt(messages, prompt), **parameters}
        ref = await self._adapter(adapter)
        asked = await self._asked(body, ref, (*hooks, *_condition(pause_when)))
        generation = AsyncGeneration(self._board, self._renderer, asked, on_pause)
        await generation.open()
        return generation

    async def generate(self, messages: Messages | None = None, **options: Any) -> LocalAnswer:
        """Return a whole answer; see ``start``."""
        _check_handler(options)
        async with await self.start(messages, **options) as generation:
            return await generation.answer()

    async def stream(
        self, messages: Messages | None = None, **options: Any
    ) -> AsyncIterator[LocalPiece]:
        """Yield an answer piece by piece; see ``start``. Closing the iterator aborts it."""
        _check_handler(options)
        async with await self.start(messages, **options) as generation:
            async for piece in generation:
                yield piece

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return a vector for each text. Raises ``EmbeddingUnsupported``."""
        settings = self._folder.settings.embedding
        if settings is None:
            raise EmbeddingUnsupported(
                f"The model '{self.model}' makes no embeddings: the rkserve.yaml of its folder "
                "has no 'embedding' section."
            )
        paths = [f"texts[{index}]" for index in range(len(texts))]
        prompts = texts_of(texts, paths, self._renderer, self._board.settings.context_len)
        made: list[list[float]] = [[] for _ in texts]
        for chunk in chunks_of(prompts, ResolvedModel(self.model), settings, uuid.uuid4().hex):
            async for event in self._board.embed(chunk.request):
                if isinstance(event, Embedded):
                    for at, vector in zip(chunk.at, event.vectors, strict=True):
                        made[at] = finished_vector(vector, settings, None).tolist()
        return made

    async def kv(self) -> KvReport:
        """Return the contents of the KV cache."""
        return await self._board.kv()

    async def clear_kv(self, *, keep_system_prompt: bool = True) -> KvReport:
        """Empty the KV cache, except for the system prompt's part if that is kept."""
        return await self._board.clear_kv(keep_system_prompt)

    async def adapters(self) -> list[str]:
        """Return the adapters of the model folder, as ``name@version``."""
        found = await asyncio.to_thread(adapters, self._folder.path)
        return [one.label for one in found if not one.broken]

    async def build_cache(
        self,
        name: str,
        messages: Messages | None = None,
        *,
        prompt: str | Sequence[int] | None = None,
        adapter: str | None = None,
    ) -> CacheEntry:
        """Store the KV cache of a prompt's prefix as a file, for ``use_cache``.

        Raises:
            CacheUnsupported: this board has no prompt caches.
            RequestError: the name or the prompt cannot be used.
        """
        given = {"cache_name": name, **_prompt(messages, prompt)}
        call = parse_build(ControlRequest(body=json.dumps(given).encode()))
        ids = ids_of(call, self._renderer, self._board.settings.context_len)
        return await self._board.build_cache(name, ids, await self._adapter(adapter))

    async def caches(self) -> list[CacheEntry]:
        """Return the prompt caches on this board's disk, in its state folder."""
        return self._board.caches()

    async def delete_cache(self, name: str) -> bool:
        """Delete a named prompt cache; False if there is none."""
        return await self._board.delete_cache(name)

    async def generations(self) -> list[GenerationInfo]:
        """Return the generations that have not ended."""
        return self._board.generations()

    async def report(self) -> BoardReport:
        """Return the board's state and counters."""
        return self._board.report()

    async def aclose(self) -> None:
        """End the engine and all generations; repeated calls have no effect."""
        await self._exits.aclose()

    async def __aenter__(self) -> AsyncLocalBoard:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _adapter(self, name: str | None) -> AdapterRef | None:
        """Return an adapter of the model folder. Raises ``ModelNotFound``, ``AdapterBroken``."""
        if name is None:
            return None
        found = await asyncio.to_thread(adapters, self._folder.path)
        return resolve(f"{self.model}:{name}", {self.model: found}).adapter

    async def _asked(
        self, body: JsonObject, ref: AdapterRef | None, hooks: tuple[HookFactory, ...]
    ) -> _Call:
        dialect = answers.COMPLETION if "prompt" in body else answers.CHAT
        parsed = dialect.parse(json.dumps({**body, "model": self.model}).encode())
        call = held(parsed, self._renderer)
        images = call.images if isinstance(call, ChatCall) else ()
        settings = self._folder.settings
        request = plan(
            call,
            ResolvedModel(self.model, adapter=ref, named=ref is not None),
            self._renderer,
            defaults=settings.sampling.values(),
            context_len=settings.context_length,
            completion=f"local-{uuid.uuid4().hex}",
            dice=secrets.randbits(63),
            pictures=await self._sight.pictures(images, settings.vision),
        )[0]
        lexicon = self._lexicon(call, request)

        def stamp(accepted: Accepted) -> AnswerOrigin:
            key = None if ref is None else ref.key
            return AnswerOrigin(
                self.model,
                accepted.release,
                (accepted.version or FIRST_LABEL,),
                lambda version: key if ref is not None and version == ref.label else None,
                len(request.prompt_ids) or request.counted,
                reading(call, self._renderer, request),
                lexicon,
            )

        return _Call(call, request, stamp, hooks)

    def _lexicon(self, call: AnyCall, request: GenerateRequest) -> TokenTexts | None:
        """Return the token texts, if the request asks for tokens of the answer or the prompt."""
        echo = isinstance(call, CompletionCall) and call.echo
        if call.steps.top_logprobs is None and not echo:
            return None
        texts = prompt_texts(call)
        known = call.steps.top_logprobs is not None or None in texts
        vocabulary = self._renderer.vocabulary() if known else None
        return TokenTexts(vocabulary, (request.prompt_ids,), texts)


class LocalGeneration:
    """A running generation, for synchronous code. See ``AsyncGeneration``.

    A ``with`` block closes it. Its control calls may come from any thread.
    """

    def __init__(
        self,
        inner: AsyncGeneration,
        call: Callable[[Coroutine[Any, Any, Any]], Any],
        on_pause: Callable[[LocalGeneration], None] | None,
    ) -> None:
        self._inner, self._call, self._on_pause = inner, call, on_pause

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

    def __iter__(self) -> Iterator[LocalPiece]:
        return self

    def __next__(self) -> LocalPiece:
        while True:
            piece: LocalPiece | None = self._call(_next(self._inner))
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
        found: LocalAnswer = self._call(self._inner.answer())
        return found

    def info(self) -> GenerationInfo | None:
        """Return the board's view of it; None after its end."""
        found: GenerationInfo | None = self._call(self._inner.info())
        return found

    def pause(self) -> GenerationInfo:
        """Pause it after the token that is being generated."""
        return self._controlled(self._inner.pause())

    def resume(self) -> GenerationInfo:
        """Continue it, with its edits."""
        return self._controlled(self._inner.resume())

    def abort(self) -> GenerationInfo:
        """End it; its answer has the finish reason ``abort``."""
        return self._controlled(self._inner.abort())

    def edit(
        self,
        text: str | None = None,
        *,
        replace_last: int = 0,
        token_ids: Sequence[int] | None = None,
        role: str | None = None,
        clear: Sequence[tuple[int, int]] = (),
    ) -> GenerationInfo:
        """Change it while it is paused; see ``AsyncGeneration.edit``."""
        edit = self._inner.edit(
            text, replace_last=replace_last, token_ids=token_ids, role=role, clear=clear
        )
        return self._controlled(edit)

    def close(self) -> None:
        """Abort it if it still runs, and free the board."""
        self._call(self._inner.aclose())

    def __enter__(self) -> LocalGeneration:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _controlled(self, work: Coroutine[Any, Any, GenerationInfo]) -> GenerationInfo:
        found: GenerationInfo = self._call(work)
        return found


class LocalBoard:
    """A board for synchronous code, which may use it from several threads.

    Its event loop runs in a thread of its own. Build it with ``open_board``, in a ``with`` block.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        """Load the model. Raises as ``AsyncLocalBoard.open``."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rkserve.local", daemon=True
        )
        self._thread.start()
        try:
            self._inner = self._call(AsyncLocalBoard.open(model, **settings))
        except BaseException:
            self._end_loop()
            raise

    @property
    def model(self) -> str:
        """The model's id: its folder's name."""
        return self._inner.model

    def start(
        self,
        messages: Messages | None = None,
        *,
        on_pause: Callable[[LocalGeneration], None] | None = None,
        **options: Any,
    ) -> LocalGeneration:
        """Start a generation, and return it for iteration and control.

        ``messages`` is a conversation, or the text of one user message. ``prompt`` replaces it: a
        text or token IDs that are used without a template. ``adapter`` is ``name`` or
        ``name@version`` of the model folder's. ``pause_when`` is called with each ``Decoded`` piece
        of the answer, in the board's thread, and a true result pauses after it. At each pause, also
        those of ``pause_on``, ``on_pause`` is called with the generation, in this thread;
        afterwards it is resumed, unless that was done already. ``hooks`` are those of
        docs/how-to/interrupting.md. Other arguments are parameters of OpenAI's call, as in
        docs/reference/api.md, such as ``temperature``, ``max_tokens``, ``stop``, ``seed``,
        ``response_format`` and ``tools``.

        Raises:
            RequestError: the board cannot serve the request.
            RkserveError: as ``Board.generate``.
        """
        inner: AsyncGeneration = self._call(self._inner.start(messages, **options))
        return LocalGeneration(inner, self._call, on_pause)

    def generate(self, messages: Messages | None = None, **options: Any) -> LocalAnswer:
        """Return a whole answer; see ``start``."""
        _check_handler(options)
        with self.start(messages, **options) as generation:
            return generation.answer()

    def stream(
        self, messages: Messages | None = None, **options: Any
    ) -> Generator[LocalPiece, None, None]:
        """Yield an answer piece by piece; see ``start``. Leaving the loop aborts it."""
        _check_handler(options)
        with self.start(messages, **options) as generation:
            yield from generation

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return a vector for each text."""
        found: list[list[float]] = self._call(self._inner.embed(texts))
        return found

    def kv(self) -> KvReport:
        """Return the contents of the KV cache."""
        found: KvReport = self._call(self._inner.kv())
        return found

    def clear_kv(self, *, keep_system_prompt: bool = True) -> KvReport:
        """Empty the KV cache, except for the system prompt's part if that is kept."""
        cleared = self._inner.clear_kv(keep_system_prompt=keep_system_prompt)
        found: KvReport = self._call(cleared)
        return found

    def adapters(self) -> list[str]:
        """Return the adapters of the model folder, as ``name@version``."""
        found: list[str] = self._call(self._inner.adapters())
        return found

    def build_cache(
        self, name: str, messages: Messages | None = None, **options: Any
    ) -> CacheEntry:
        """Store the KV cache of a prompt's prefix as a file, for ``use_cache``."""
        found: CacheEntry = self._call(self._inner.build_cache(name, messages, **options))
        return found

    def caches(self) -> list[CacheEntry]:
        """Return the prompt caches on this board's disk, in its state folder."""
        found: list[CacheEntry] = self._call(self._inner.caches())
        return found

    def delete_cache(self, name: str) -> bool:
        """Delete a named prompt cache; False if there is none."""
        return bool(self._call(self._inner.delete_cache(name)))

    def generations(self) -> list[GenerationInfo]:
        """Return the generations that have not ended."""
        found: list[GenerationInfo] = self._call(self._inner.generations())
        return found

    def report(self) -> BoardReport:
        """Return the board's state and counters."""
        found: BoardReport = self._call(self._inner.report())
        return found

    def close(self) -> None:
        """End the engine and all generations; repeated calls have no effect."""
        if self._loop.is_closed():
            return
        try:
            self._call(self._inner.aclose())
        finally:
            self._end_loop()

    def __enter__(self) -> LocalBoard:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it on the board's loop and wait for it; an interrupted caller cancels it."""
        if self._loop.is_closed() or threading.current_thread() is self._thread:
            work.close()
            why = "it is closed" if self._loop.is_closed() else "this is its own thread"
            raise RuntimeError(f"The board cannot be called: {why}.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


def open_board(model: str | Path, *, state_dir: Path | None = None, **settings: Any) -> LocalBoard:
    """Load a model folder into a board of this process. Use it in a ``with`` block.

    Exactly one of ``library="/usr/lib/librkllmrt.so"`` and ``simulated={}`` is required;
    ``simulated`` has the keys of that block in serve_config.yaml, and ``settings`` those of a group
    of boards (docs/reference/configuration.md). ``state_dir`` holds lock files and prompt caches;
    the default is the cluster's own for a real board, so that their locks on the NPU exclude each
    other, and a temporary folder for a simulated one.

    Raises:
        ConfigError: a setting or the model folder is wrong.
        NativeError: the library cannot load the model.
    """
    return LocalBoard(model, state_dir=state_dir, **settings)


async def _next(generation: AsyncGeneration) -> LocalPiece | None:
    return await anext(generation, None)


def _condition(pause_when: PauseWhen | None) -> tuple[HookFactory, ...]:
    if pause_when is None:
        return ()

    def condition(_request: GenerateRequest) -> Hook:
        return _Condition(pause_when)

    return (condition,)


def _group(model: str | Path, settings: dict[str, Any]) -> BoardGroupConfig:
    given = {"name": GROUP, "model": model, **settings}
    try:
        return BoardGroupConfig.model_validate(given)
    except ValidationError as exc:
        raise ConfigError(explain(exc, BoardGroupConfig)) from exc


def _prompt(messages: Messages | None, prompt: str | Sequence[int] | None) -> JsonObject:
    if (messages is None) == (prompt is None):
        raise RequestError("Give exactly one of 'messages' and 'prompt'.", "messages")
    if prompt is not None:
        return {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    if isinstance(messages, str):
        return {"messages": [{"role": "user", "content": messages}]}
    return {"messages": list(messages or ())}


def _check_names(parameters: dict[str, Any], schema: str) -> None:
    """Refuse parameters that HTTP would ignore, so that a mistyped one is noticed."""
    known = SCHEMAS[schema]["properties"].keys() - _NOT_HERE
    for name in parameters:
        if name not in known:
            raise UnsupportedParameter(f"Unsupported parameter: '{name}' is not known here.", name)


def _check_handler(options: dict[str, Any]) -> None:
    """Refuse a generation that would pause and never be resumed."""
    if options.get("on_pause") is None and (options.get("pause_on") or options.get("pause_when")):
        raise RequestError(
            "A generation that pauses needs 'on_pause', or 'start' and a loop that resumes it.",
            "on_pause",
        )


# The public names; the classes are named apart from those of the board and the API.
Answer = LocalAnswer
Generation = LocalGeneration
Piece = LocalPiece

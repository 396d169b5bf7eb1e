"""A local board: for code with an event loop of its own, and for synchronous code."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rkserve.api.admin.caches import ids_of, parse_build
from rkserve.api.admin.query import ControlRequest
from rkserve.api.common.answer import AnswerOrigin, AnyCall
from rkserve.api.common.calls import ChatRequest, CompletionCall, CompletionRequest
from rkserve.api.common.logprobs import TokenTexts
from rkserve.api.common.plan import held, plan, prompt_texts, reading
from rkserve.api.common.renderer import Renderer
from rkserve.api.common.version_policy import ResolvedModel
from rkserve.api.json.fields import JsonObject
from rkserve.api.json.schemas import RequestModel
from rkserve.api.openai import answers
from rkserve.api.openai.embeddings import chunks_of, finished_vector, texts_of
from rkserve.board.answer.hooks import HookFactory
from rkserve.board.board import Board
from rkserve.config.board_group import BoardGroupConfig
from rkserve.config.router import ImagesConfig
from rkserve.config.serve_config import default_state_dir, explain, resolve_folder
from rkserve.core.board_report import BoardReport, CacheEntry, GenerationInfo, KvReport
from rkserve.core.errors import (
    ConfigError,
    EmbeddingUnsupported,
    RequestError,
    UnsupportedParameter,
)
from rkserve.core.messages import FIRST_LABEL, Accepted, AdapterRef, Embedded, GenerateRequest
from rkserve.core.run_params import Picture
from rkserve.deployments.board_factory import BoardLocation, assemble, claim_slot
from rkserve.local.generation import (
    AsyncGeneration,
    Blocking,
    LocalAnswer,
    LocalGeneration,
    LocalPiece,
    LoopThread,
    Messages,
    PauseCondition,
    PauseWhen,
    PreparedCall,
    blocking,
)
from rkserve.models.adapters import adapters, resolve
from rkserve.models.folder import ModelFolder, open_model_folder
from rkserve.router.images import ImageInputs

GROUP = "local"


BOARDS = 16  # the number of boards that may share a state folder; each locks one slot of it


# Not accepted here: one prompt has one answer, and the method decides about streaming.
_NOT_HERE = frozenset(
    {"model", "messages", "prompt", "n", "best_of", "stream", "stream_options", "priority"}
    | {"timeout", "user", "prompt_cache_key", "keep_version"}
)


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
        async with AsyncExitStack() as exits:
            if state_dir is None and group.simulated is not None:
                made = tempfile.TemporaryDirectory(prefix="rkserve-local-")
                exits.callback(made.cleanup)
                state_dir = Path(made.name)
            state = (state_dir or default_state_dir()).expanduser()
            folder = await asyncio.to_thread(open_model_folder, resolve_folder(group.model), state)
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
        _check_names(parameters, ChatRequest if prompt is None else CompletionRequest)
        if pause_when is not None and self._board.settings.n_batch == 1:
            parameters = {"native_pause": True, **parameters}  # as requests with pause_on
        body = {**_prompt(messages, prompt), **parameters}
        ref = await self._adapter(adapter)
        if pause_when is not None:
            hooks = (*hooks, lambda _: PauseCondition(pause_when))
        asked = await self._asked(body, ref, tuple(hooks))
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
        return self._board.kv()

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
    ) -> PreparedCall:
        dialect = answers.COMPLETION if "prompt" in body else answers.CHAT
        parsed = dialect.parse(json.dumps({**body, "model": self.model}).encode())
        call = held(parsed, self._renderer)
        settings = self._folder.settings
        pictures: tuple[Picture, ...] = ()
        if call.images:
            pictures = await self._sight.pictures(call.images, settings.vision)
        request = plan(
            call,
            ResolvedModel(self.model, adapter=ref, named=ref is not None),
            self._renderer,
            defaults=settings.sampling.values(),
            context_len=settings.context_length,
            completion=f"local-{uuid.uuid4().hex}",
            dice=secrets.randbits(63),
            pictures=pictures,
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

        return PreparedCall(call, request, stamp, hooks)

    def _lexicon(self, call: AnyCall, request: GenerateRequest) -> TokenTexts | None:
        """Return the token texts, if the request asks for tokens of the answer or the prompt."""
        echo = isinstance(call, CompletionCall) and call.echo
        if call.steps.top_logprobs is None and not echo:
            return None
        texts = prompt_texts(call)
        known = call.steps.top_logprobs is not None or None in texts
        vocabulary = self._renderer.vocabulary() if known else None
        return TokenTexts(vocabulary, (request.prompt_ids,), texts)


class LocalBoard(Blocking[AsyncLocalBoard]):
    """A board for synchronous code, which may use it from several threads.

    Its event loop runs in a thread of its own. Build it with ``open_board``, in a ``with`` block.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        """Load the model. Raises as ``AsyncLocalBoard.open``."""
        thread = LoopThread()
        try:
            super().__init__(thread.call(AsyncLocalBoard.open(model, **settings)), thread)
        except BaseException:
            thread.close()
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
        inner = self._thread.call(self._inner.start(messages, **options))
        return LocalGeneration(inner, self._thread, on_pause)

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

    embed = blocking(AsyncLocalBoard.embed)
    kv = blocking(AsyncLocalBoard.kv)
    clear_kv = blocking(AsyncLocalBoard.clear_kv)
    adapters = blocking(AsyncLocalBoard.adapters)
    build_cache = blocking(AsyncLocalBoard.build_cache)
    caches = blocking(AsyncLocalBoard.caches)
    delete_cache = blocking(AsyncLocalBoard.delete_cache)
    generations = blocking(AsyncLocalBoard.generations)
    report = blocking(AsyncLocalBoard.report)

    def close(self) -> None:
        """End the engine and all generations; repeated calls have no effect."""
        if self._thread.closed:
            return
        try:
            self._thread.call(self._inner.aclose())
        finally:
            self._thread.close()

    def __enter__(self) -> LocalBoard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def _group(model: str | Path, settings: dict[str, Any]) -> BoardGroupConfig:
    given = {"name": GROUP, "model": model, **settings}
    try:
        group = BoardGroupConfig.model_validate(given)
    except ValidationError as exc:
        raise ConfigError(explain(exc, BoardGroupConfig)) from exc
    if group.upstream is not None:
        raise ConfigError("An upstream is no board: ask it by its own URL.")
    return group


def _prompt(messages: Messages | None, prompt: str | Sequence[int] | None) -> JsonObject:
    if (messages is None) == (prompt is None):
        raise RequestError("Give exactly one of 'messages' and 'prompt'.", "messages")
    if prompt is not None:
        return {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    if isinstance(messages, str):
        return {"messages": [{"role": "user", "content": messages}]}
    return {"messages": list(messages or ())}


def _check_names(parameters: dict[str, Any], schema: type[RequestModel]) -> None:
    """Refuse parameters that HTTP would ignore, so that a mistyped one is noticed."""
    known = schema.keys().keys() - _NOT_HERE
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

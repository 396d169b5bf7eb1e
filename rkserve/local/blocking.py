"""A local board and its generations for synchronous code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import (
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Sequence,
)
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from rkserve.core.board_report import BoardReport, CacheEntry, GenerationInfo, KvReport
from rkserve.core.messages import (
    Paused,
)
from rkserve.local.board import AsyncLocalBoard, check_handler
from rkserve.local.generation import AsyncGeneration, LocalAnswer, LocalPiece, Messages

T = TypeVar("T")


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
        check_handler(options)
        with self.start(messages, **options) as generation:
            return generation.answer()

    def stream(
        self, messages: Messages | None = None, **options: Any
    ) -> Generator[LocalPiece, None, None]:
        """Yield an answer piece by piece; see ``start``. Leaving the loop aborts it."""
        check_handler(options)
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

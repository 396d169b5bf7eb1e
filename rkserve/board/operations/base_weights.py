"""Which base weights a board's engine is loaded with: the file, its marker, and those that failed.

Every load goes through here, whatever it is for: it takes the weights that the board has, or is to
have, and where these cannot be loaded those that were good last. When other ones are loaded, and
what becomes of requests then, is not decided here (rebasing).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rkserve.board.engine.protocol import Engine
from rkserve.board.rules.obligations import Obligations
from rkserve.board.run.prompt_caching import PromptCaching
from rkserve.board.run.run import loop_time_s
from rkserve.board.storage.base_weights import StagedWeights
from rkserve.core.board_report import HASHING, UNREADABLE
from rkserve.core.desired_state import BaseVersion
from rkserve.core.durable_files import sync, write_private
from rkserve.core.errors import RkserveError
from rkserve.core.file_digests import CachedDigest

log = logging.getLogger(__name__)

# Weights that could not be loaded are tried again, asked for again, after a rest; then after one
# that is twice as long, and so on up to this. Each try ends an engine that works.
LONGEST_REST_S = 600.0

# Starts an engine from a file; None is the one in the model folder.
StartEngine = Callable[[Path | None], Awaitable[Engine]]


@dataclass(slots=True)
class Refusal:
    """Weights that could not be loaded: why, how often, and when they may be tried again."""

    reason: str
    count: int
    rest_s: float
    until_s: float


def same(one: BaseVersion | None, other: BaseVersion | None) -> bool:
    """Whether it is the same content, whatever it is called; None is the model folder's file."""
    return _digest(one) == _digest(other)


def _digest(base: BaseVersion | None) -> str:
    return "" if base is None else base.digest


class ModelFileDigest:
    """The base model in the model folder: its size, and its sha256 once that is computed."""

    def __init__(self, file: Path | None, record: Path | None) -> None:
        self._kept = None if file is None else CachedDigest(file, record)
        self.digest = "" if file is None else HASHING
        self.size_bytes = 0

    async def look(self) -> None:
        """Compute the digest in a thread: of gigabytes it takes half a minute."""
        if self._kept is None:
            return
        try:
            self.size_bytes = (await asyncio.to_thread(self._kept.file.stat)).st_size
            self.digest = await asyncio.to_thread(self._kept.get)
        except OSError as exc:
            self.digest = UNREADABLE
            log.warning("the sha256 of %s cannot be computed: %s", self._kept.file, exc)

    def stop(self) -> None:
        """End the computation, if there is one."""
        if self._kept is not None:
            self._kept.stop()


class BaseWeights:
    """The base weights of one board, from load to load. Use it from the board's loop."""

    def __init__(
        self,
        staged: StagedWeights,
        charge: Obligations,
        caching: PromptCaching,
        start_engine: StartEngine,
        *,
        marker: Path | None,
        rest_s: float,
    ) -> None:
        """``start_engine`` takes a file, or None for that of the model folder. ``marker`` is where
        a restarted replica finds what to load at once. ``rest_s`` is the first rest after a load
        that failed.
        """
        self._rest_s = rest_s
        self._staged = staged
        self._charge = charge
        self._caching = caching
        self._start_engine = start_engine
        self._marker = marker
        self._good: BaseVersion | None = None
        self._trial: list[BaseVersion | None] = []  # one, or none
        self._on_trial = False  # it is, or was, loaded for that
        self._marked: tuple[BaseVersion | None] | None = None  # what the marker says
        self._refusals: dict[str, Refusal] = {}
        self.failures = 0  # how often weights were refused
        self.base: BaseVersion | None = None
        charge.weights_here(self.here)

    @property
    def digest(self) -> str:
        """What the engine has, or the next one will: empty is the model folder's file."""
        return _digest(self.base)

    @property
    def staged(self) -> tuple[str, ...]:
        """The keys of what is on the disk whole; see ``BaseVersion.key``."""
        return self._staged.keys

    def here(self, base: BaseVersion | None) -> bool:
        """Whether the file is on the disk."""
        return base is None or self._staged.path(base) is not None

    def uses(self, base: BaseVersion) -> bool:
        """Whether a load may need the file."""
        target = self._charge.target
        wanted = [self.base, self._good, *self._trial, target.base if target is not None else None]
        return any(same(base, one) for one in wanted)

    async def open(self) -> None:
        """Find what is staged, and what the marker says to begin with. Raises ``ConfigError``."""
        await asyncio.to_thread(self._staged.open)
        said = await asyncio.to_thread(self._read_marker)
        if said is not None and self.here(said):
            # Until it is loaded, the folder's file is what can be relied on.
            await self.note(said)

    async def load(self) -> Engine:
        """Start an engine. Raises what starting one with the last choice raises."""
        if self._trial and self._on_trial:
            self.refuse(self._trial[0], "the engine ended in their trial")
        choices: list[BaseVersion | None] = []
        for one in (*self._trial, self.base, self._good):
            if not any(same(one, other) for other in choices):
                choices.append(one)
        for one in choices[:-1]:
            try:
                return await self._load(one)
            except (RkserveError, OSError) as exc:
                self.refuse(one, f"they cannot be loaded: {exc}")
        return await self._load(choices[-1])

    async def _load(self, base: BaseVersion | None) -> Engine:
        path = None
        if base is not None:
            path = self._staged.path(base)
            if path is None:
                raise FileNotFoundError(f"the staged file of {base.title} is missing")
        self._on_trial = any(same(base, one) for one in self._trial)
        engine = await self._start_engine(path)
        if self._on_trial:
            return engine  # nothing is said of it before it has passed
        try:
            await self._settle(base, good=True)
        except BaseException:
            await engine.stop()
            raise
        return engine

    # -- other ones ---------------------------------------------------------------------------

    def try_next(self, base: BaseVersion | None) -> None:
        """The next load takes these, for a trial: ``prove`` or ``refuse`` them then."""
        self._trial, self._on_trial = [base], False

    @property
    def on_trial(self) -> bool:
        """Whether the engine has weights that are on trial."""
        return bool(self._trial) and self._on_trial

    async def prove(self) -> None:
        """Those that are loaded for a trial are good."""
        (base,) = self._trial
        self._trial = []
        await self._settle(base, good=True)

    def give_up(self) -> None:
        """There will be no trial."""
        self._trial = []

    def refuse(self, base: BaseVersion | None, reason: str) -> None:
        """These cannot be used: the next load takes what was good before."""
        self._trial = [one for one in self._trial if not same(one, base)]
        if same(self.base, base):
            self.base = self._good
        before = self._refusals.get(_digest(base))
        count = 1 if before is None else before.count + 1
        rest_s = min(self._rest_s * 2.0 ** (count - 1), LONGEST_REST_S)
        self._refusals[_digest(base)] = Refusal(reason, count, rest_s, loop_time_s() + rest_s)
        self.failures += 1
        self._charge.refused(f"its weights are not loaded: {reason}")
        log.error("the weights %s are refused: %s", _words(base), reason)

    def rest(self, base: BaseVersion | None) -> None:
        """From now on it rests from trying these, if they were refused."""
        refusal = self._refusals.get(_digest(base))
        if refusal is not None:
            refusal.until_s = loop_time_s() + refusal.rest_s

    def refused(self, base: BaseVersion | None) -> Refusal | None:
        """Return why these were refused, and when they may be tried again."""
        return self._refusals.get(_digest(base))

    def forgive(self, *, but: BaseVersion | None) -> None:
        """Others than ``but`` are not asked for now; when they are, they are tried."""
        kept = {d: one for d, one in self._refusals.items() if d == _digest(but)}
        if self._refusals and not kept:
            self._charge.refused("")
        self._refusals = kept

    async def note(self, base: BaseVersion | None) -> None:
        """Without an engine: the next load takes these, and what was good if it cannot."""
        await self._settle(base, good=False)

    async def _settle(self, base: BaseVersion | None, *, good: bool) -> None:
        """These are what the board has from now on; ``good`` says that it has loaded them."""
        self._refusals.pop(_digest(base), None)
        self.base = base
        if good:
            self._good = base
        self._charge.loaded(base)
        await self._caching.reseal(_digest(base))
        if self._marked is None or not same(base, self._marked[0]):
            await asyncio.to_thread(self._write_marker, base)

    # -- for the next process -----------------------------------------------------------------

    def _read_marker(self) -> BaseVersion | None:
        if self._marker is None:
            return None
        try:
            return _base(json.loads(self._marker.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as exc:
            log.warning("the marker %s is ignored: %s", self._marker, exc)
            return None

    def _write_marker(self, base: BaseVersion | None) -> None:
        if self._marker is None:
            return
        fresh = self._marker.with_suffix(".base.new")
        self._marked = (base,)
        try:
            if base is None:
                self._marker.unlink(missing_ok=True)
                return
            write_private(fresh, json.dumps(asdict(base)))
            sync(fresh)
            fresh.replace(self._marker)
        except OSError as exc:  # it costs the next process a load, and nothing else
            log.warning("%s could not be written: %s", self._marker, exc)


def _base(said: Any) -> BaseVersion:
    """Raises ``TypeError`` for what was not written here."""
    found = BaseVersion(**said)
    texts = (found.model, found.version, found.digest)
    if not all(isinstance(text, str) for text in texts) or not isinstance(found.size_bytes, int):
        raise TypeError("it has values of other types")
    return found


def _words(base: BaseVersion | None) -> str:
    return "of the model folder" if base is None else f"{base.title} ({base.digest[:12]})"

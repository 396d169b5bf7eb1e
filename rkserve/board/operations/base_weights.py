"""The base weights of a board's engine: the file to load, its marker, and refused ones.

Every load goes through here: it takes the current or the next weights, and where these cannot be
loaded the last good ones. When other weights are loaded, and the effect on requests, is decided in
``swap_weights``.
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
from rkserve.board.storage.staged_artifacts import StagedWeights
from rkserve.core.board_report import HASHING, UNREADABLE
from rkserve.core.desired_state import BaseVersion
from rkserve.core.errors import RkserveError
from rkserve.core.files import CachedDigest, sync, write_private

log = logging.getLogger(__name__)

# Weights that could not be loaded are tried again on request after a rest, then after one twice as
# long, and so on up to this limit. Each try ends a working engine.
LONGEST_REST_S = 600.0

# Starts an engine from a model file; None is the one in the model folder.
StartEngine = Callable[[Path | None], Awaitable[Engine]]


@dataclass(slots=True)
class Refusal:
    """Weights that could not be loaded: reason, count, and the earliest time of the next try."""

    reason: str
    count: int
    rest_s: float
    until_s: float


def same(one: BaseVersion | None, other: BaseVersion | None) -> bool:
    """Return whether both have the same content; None is the model folder's file."""
    return _digest(one) == _digest(other)


def _digest(base: BaseVersion | None) -> str:
    return "" if base is None else base.digest


class ModelFileDigest:
    """Size and sha256 of the base model in the model folder, computed in the background."""

    def __init__(self, file: Path | None, record: Path | None) -> None:
        self._kept = None if file is None else CachedDigest(file, record)
        self.digest = "" if file is None else HASHING
        self.size_bytes = 0

    async def look(self) -> None:
        """Compute the digest in a thread: it takes half a minute for gigabytes."""
        if self._kept is None:
            return
        try:
            self.size_bytes = (await asyncio.to_thread(self._kept.file.stat)).st_size
            self.digest = await asyncio.to_thread(self._kept.get)
        except OSError as exc:
            self.digest = UNREADABLE
            log.warning("the sha256 of %s cannot be computed: %s", self._kept.file, exc)

    def stop(self) -> None:
        """Cancel the computation."""
        if self._kept is not None:
            self._kept.stop()


class BaseWeights:
    """The base weights of one board, from load to load. Use it from the board's loop."""

    def __init__(
        self,
        staged: StagedWeights,
        obligations: Obligations,
        caching: PromptCaching,
        start_engine: StartEngine,
        *,
        marker: Path | None,
        rest_s: float,
    ) -> None:
        """``start_engine`` takes a file, or None for that of the model folder. ``marker`` is the
        file that names the weights to load first after a restart. ``rest_s`` is the first rest
        after a failed load.
        """
        self._rest_s = rest_s
        self._staged = staged
        self._obligations = obligations
        self._caching = caching
        self._start_engine = start_engine
        self._marker = marker
        self._good: BaseVersion | None = None
        self._trial: list[BaseVersion | None] = []  # one element, or none
        self._on_trial = False  # the trial's weights are, or were, loaded
        self._marked: tuple[BaseVersion | None] | None = None  # the content of the marker
        self._refusals: dict[str, Refusal] = {}
        self.failures = 0  # number of refusals
        self.base: BaseVersion | None = None
        obligations.weights_here(self.here)

    @property
    def digest(self) -> str:
        """Digest of the weights of the current or next engine; empty is the model folder's file."""
        return _digest(self.base)

    @property
    def staged(self) -> tuple[str, ...]:
        """Keys of the complete files on the disk; see ``BaseVersion.key``."""
        return self._staged.keys

    def here(self, base: BaseVersion | None) -> bool:
        """Return whether the file is on the disk."""
        return base is None or self._staged.path(base) is not None

    def uses(self, base: BaseVersion) -> bool:
        """Return whether a load may need the file."""
        target = self._obligations.target
        wanted = [self.base, self._good, *self._trial, target.base if target is not None else None]
        return any(same(base, one) for one in wanted)

    async def open(self) -> None:
        """Read the staged files and the marker. Raises ``ConfigError``."""
        await asyncio.to_thread(self._staged.open)
        said = await asyncio.to_thread(self._read_marker)
        if said is not None and self.here(said):
            # Until it is loaded, only the folder's file is known to be good.
            await self.note(said)

    async def load(self) -> Engine:
        """Start an engine. Raises the error of the last choice."""
        if self._trial and self._on_trial:
            self.refuse(self._trial[0], "the engine ended in its trial run")
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
            return engine  # it is not noted before it has passed
        try:
            await self._settle(base, good=True)
        except BaseException:
            await engine.stop()
            raise
        return engine

    # -- trial and refusal ------------------------------------------------------------------------

    def try_next(self, base: BaseVersion | None) -> None:
        """Use these weights for the next load, as a trial: ``prove`` or ``refuse`` them then."""
        self._trial, self._on_trial = [base], False

    @property
    def on_trial(self) -> bool:
        """True where the engine has weights on trial."""
        return bool(self._trial) and self._on_trial

    async def prove(self) -> None:
        """Note that the weights on trial are good."""
        (base,) = self._trial
        self._trial = []
        await self._settle(base, good=True)

    def give_up(self) -> None:
        """Cancel the trial."""
        self._trial = []

    def refuse(self, base: BaseVersion | None, reason: str) -> None:
        """Mark these weights as unusable: the next load takes the last good ones."""
        self._trial = [one for one in self._trial if not same(one, base)]
        if same(self.base, base):
            self.base = self._good
        before = self._refusals.get(_digest(base))
        count = 1 if before is None else before.count + 1
        rest_s = min(self._rest_s * 2.0 ** (count - 1), LONGEST_REST_S)
        self._refusals[_digest(base)] = Refusal(reason, count, rest_s, loop_time_s() + rest_s)
        self.failures += 1
        self._obligations.refused(f"its weights are not loaded: {reason}")
        log.error("the weights %s are refused: %s", _words(base), reason)

    def rest(self, base: BaseVersion | None) -> None:
        """Start the rest before the next try, if these were refused."""
        refusal = self._refusals.get(_digest(base))
        if refusal is not None:
            refusal.until_s = loop_time_s() + refusal.rest_s

    def refused(self, base: BaseVersion | None) -> Refusal | None:
        """Return the refusal of these weights, if any."""
        return self._refusals.get(_digest(base))

    def forgive(self, *, but: BaseVersion | None) -> None:
        """Drop the refusals of all weights but these, so that they are tried when requested."""
        kept = {d: one for d, one in self._refusals.items() if d == _digest(but)}
        if self._refusals and not kept:
            self._obligations.refused("")
        self._refusals = kept

    async def note(self, base: BaseVersion | None) -> None:
        """Use these weights for the next load of a board without an engine."""
        await self._settle(base, good=False)

    async def _settle(self, base: BaseVersion | None, *, good: bool) -> None:
        """Note the board's current weights; ``good`` after they were loaded."""
        self._refusals.pop(_digest(base), None)
        self.base = base
        if good:
            self._good = base
        self._obligations.loaded(base)
        await self._caching.reseal(_digest(base))
        if self._marked is None or not same(base, self._marked[0]):
            await asyncio.to_thread(self._write_marker, base)

    # -- the marker -------------------------------------------------------------------------------

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
        except OSError as exc:  # it only costs the next process a load
            log.warning("%s could not be written: %s", self._marker, exc)


def _base(said: Any) -> BaseVersion:
    """Parse a marker. Raises ``TypeError`` for a foreign one."""
    found = BaseVersion(**said)
    texts = (found.model, found.version, found.digest)
    if not all(isinstance(text, str) for text in texts) or not isinstance(found.size_bytes, int):
        raise TypeError("it has values of other types")
    return found


def _words(base: BaseVersion | None) -> str:
    return "of the model folder" if base is None else f"{base.title} ({base.digest[:12]})"

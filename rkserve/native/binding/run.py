"""One run between the owner's thread, the callback and an aborting thread.

Plain fields and no lock: each field has one writer, and the order in which they are written is
what keeps an abort from being lost. It makes no call into the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rkserve.native.runtime import Matrix, Mode, Perf, RunEnd, RunOutcome, RunParams, Sink

Ended = Callable[[RunOutcome | BaseException], None]


@dataclass(slots=True, eq=False)
class Run:
    """One run for as long as the library can see it, or may resume it.

    Written by the thread in the callback, except for ``abort_wanted`` and ``abort_owed``. What only
    an asynchronous run has: ``ended``, a list that whoever tells the end empties first, so that it
    is told once; ``told``; and ``quiet``, the tokens and the time of a look that found it silent.
    """

    userdata: Any  # a number: a stale pointer could not be told apart
    params: RunParams
    sink: Sink
    mode: Mode | None = None  # what is evaluated; None generates
    last: bool = False  # of what is evaluated only the last row is wanted
    ended: list[Ended] | None = None
    keep: list[Any] = field(default_factory=list)  # what C points to
    tokens: int = 0
    inside: int | None = None  # the thread that is in the sink
    pausing: bool = False  # the callback returns 1, or has just done so
    paused_on: tuple[int, ...] = ()  # the ids of the step that paused it, one per entry
    abort_wanted: bool = False
    abort_owed: bool = False  # the library may not have noticed: tell it at the next token
    abort_made: bool = False  # the library was told
    finished: bool = False
    error: bool = False
    perf: Perf = field(default_factory=Perf)
    matrix: Matrix | None = None
    failure: BaseException | None = None
    told: bool = False
    quiet: tuple[int, float] | None = None

    @property
    def silent(self) -> bool:
        """Whether the library never called back, so that it may not have begun."""
        return not (self.tokens or self.finished or self.error)

    def end(self, code: int) -> RunEnd:
        """Say how the run ended, from what the library showed."""
        if self.error:
            return RunEnd.FAILED
        if self.mode is not None:
            # FINISH was seen not to come in these modes: such a run is over when it returns.
            return RunEnd.FINISHED if code == 0 else RunEnd.FAILED
        if self.finished:
            # What an aborted run returns is nowhere documented; its FINISH is.
            return RunEnd.FINISHED if code == 0 or self.abort_wanted else RunEnd.FAILED
        if self.pausing:
            return RunEnd.PAUSED
        # Without FINISH a run was refused or cut off, whatever it returned.
        return RunEnd.FINISHED if self.abort_wanted and code == 0 else RunEnd.FAILED


def perf_of(result: Any) -> Perf:
    """Return the figures of a FINISH callback, which speaks of a whole batch in entry 0."""
    perf = result.perf
    return Perf(
        prefill_ms=perf.prefill_time_ms,
        prefill_tokens=perf.prefill_tokens,
        decode_ms=perf.generate_time_ms,
        decode_tokens=perf.generate_tokens,
        memory_mb=perf.memory_usage_mb,
    )

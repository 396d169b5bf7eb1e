"""One run between the owner's thread, the callback and an aborting thread.

Plain fields and no lock: each field has one writer, and the order in which they are written is
what keeps an abort from being lost. It makes no call into the library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rkserve.native.runtime import Perf, RunEnd, RunParams, Sink


@dataclass(slots=True, eq=False)
class Run:
    """One run for as long as the library can see it, or may resume it.

    Written by the thread in the callback, except for ``abort_wanted`` and ``abort_owed``.
    """

    cookie: int  # the run's userdata: a number, because a stale pointer could not be told apart
    params: RunParams
    sink: Sink
    keep: list[Any] = field(default_factory=list)  # what C points to
    tokens: int = 0
    inside: int | None = None  # the thread that is in the sink
    pausing: bool = False  # the callback returns 1, or has just done so
    abort_wanted: bool = False
    abort_owed: bool = False  # the library may not have noticed: tell it at the next token
    finished: bool = False
    error: bool = False
    perf: Perf = field(default_factory=Perf)
    failure: BaseException | None = None

    def end(self, code: int) -> RunEnd:
        """Say how the run ended, from what the library showed."""
        if self.error:
            return RunEnd.FAILED
        if self.finished:
            # What an aborted run returns is nowhere documented; its FINISH is.
            return RunEnd.FINISHED if code == 0 or self.abort_wanted else RunEnd.FAILED
        if self.pausing:
            return RunEnd.PAUSED
        # Without FINISH a run was refused or cut off, whatever it returned.
        return RunEnd.FINISHED if self.abort_wanted and code == 0 else RunEnd.FAILED


def perf_of(result: Any) -> Perf:
    """Return the figures of a FINISH callback."""
    perf = result.perf
    return Perf(
        prefill_ms=perf.prefill_time_ms,
        prefill_tokens=perf.prefill_tokens,
        decode_ms=perf.generate_time_ms,
        decode_tokens=perf.generate_tokens,
        memory_mb=perf.memory_usage_mb,
    )

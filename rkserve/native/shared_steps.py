"""Steps that several runs share: the tokens that each of them wants next, computed at once.

Continuous batching for a library that computes tokens of several sequences in one call. Runs are
threads that block in ``compute``; one thread of its own makes the calls, because an OpenMP library
keeps worker threads for each thread that calls it. It knows no library.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

S = TypeVar("S")
R = TypeVar("R")

# A step waits so long for a run that is choosing its token, or as long as the step before took if
# that is longer: one without it would read all weights again for that run alone.
PATIENCE_S = 0.02
# A step with tokens of prompts takes about this time, as far as these numbers allow it: fewer would
# cost as much, because all weights are read for them, and more gain little.
STEP_S, LEAST_PROMPT, MOST_PROMPT = 0.25, 16, 128


class Part(Generic[S, R]):
    """Tokens that one run wants computed next, behind the last position of its ``sequence``.

    The tokens from ``first_output`` on have an output.
    """

    __slots__ = ("error", "first_output", "ids", "outputs", "ready", "sequence")

    def __init__(self, sequence: S, ids: Sequence[int], first_output: int) -> None:
        self.sequence, self.ids, self.first_output = sequence, ids, first_output
        self.outputs: list[R] = []
        self.error: Exception | None = None
        self.ready = threading.Event()


class SharedSteps(Generic[S, R]):
    """Gathers parts of runs into steps, and computes them on its own thread.

    A step has the single tokens of all runs that are decoded, and at most ``prompt`` tokens of
    prompts, the prompt that waits longest first. So a prompt that joins delays the tokens of the
    others by one part of it for each of their tokens.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Part[S, R]]], None],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``compute`` fills in the outputs or the error of each part."""
        self._compute, self._clock_s = compute, clock_s
        self.prompt = LEAST_PROMPT  # by the speed of the last step that had as many
        self._changed = threading.Condition()
        self.waiting: list[tuple[int, Part[S, R]]] = []  # by entry, in the order of arrival
        self._runs: set[int] = set()
        self._awaited: set[int] = set()  # entries that the last step answered
        self._patient_until_s = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="steps", daemon=True)
        self._thread.start()

    @property
    def alone(self) -> bool:
        """True while at most one run goes on."""
        return len(self._runs) <= 1

    @contextmanager
    def run(self, entry: int) -> Iterator[None]:
        """Take part in steps with the run of this entry."""
        with self._changed:
            self._runs.add(entry)
        try:
            yield
        finally:
            with self._changed:
                self._runs.discard(entry)
                self._awaited.discard(entry)
                self._changed.notify()

    def compute(self, entry: int, part: Part[S, R]) -> list[R]:
        """Compute a part in one of the next steps; return its outputs. Raises its error."""
        with self._changed:
            self.waiting.append((entry, part))
            self._awaited.discard(entry)
            self._changed.notify()
        part.ready.wait()
        if part.error is not None:
            raise part.error
        return part.outputs

    def close(self) -> None:
        """End the thread; no run may go on."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _serve(self) -> None:
        while (step := self._next()) is not None:
            began_s = self._clock_s()
            parts = [part for _, part in step]
            try:
                self._compute(parts)
            except Exception as exc:  # noqa: BLE001 - ``compute`` raises it in each run
                for part in parts:
                    part.error = exc
            now_s = self._clock_s()
            self._measure(sum(len(part.ids) for part in parts), now_s - began_s)
            with self._changed:
                self._awaited = {entry for entry, _ in step if entry in self._runs}
                self._patient_until_s = now_s + max(PATIENCE_S, now_s - began_s)
            for part in parts:
                part.ready.set()

    def _measure(self, tokens: int, took_s: float) -> None:
        """Fit the parts of prompts to the speed of a step that was long enough to tell it."""
        if tokens >= LEAST_PROMPT:
            fitting = int(tokens * STEP_S / max(took_s, 1e-6))
            self.prompt = max(LEAST_PROMPT, min(MOST_PROMPT, fitting))

    def _next(self) -> list[tuple[int, Part[S, R]]] | None:
        """Wait for the next step to be due; None at the end."""
        with self._changed:
            while not self._closed:
                if not self.waiting:
                    self._changed.wait()
                    continue
                left_s = self._patient_until_s - self._clock_s()
                if not self._awaited or left_s <= 0:
                    return self._take()
                self._changed.wait(left_s)
            return None

    def _take(self) -> list[tuple[int, Part[S, R]]]:
        """Take the parts of the next step."""
        step, later, room = [], [], self.prompt
        for entry, part in self.waiting:
            size = len(part.ids)
            whole = room == self.prompt  # the first may exceed it: it was made for another size
            if size == 1 or size <= room or whole:
                step.append((entry, part))
                room -= size if size > 1 else 0
            else:
                later.append((entry, part))
        self.waiting = later
        return step

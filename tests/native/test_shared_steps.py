"""Steps that several runs share, on a library that only counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from rkserve.native import shared_steps
from rkserve.native.shared_steps import LEAST_PROMPT as PROMPT
from rkserve.native.shared_steps import MOST_PROMPT, STEP_S, Part, SharedSteps

WAIT_S = 60.0
Steps = SharedSteps[str, int]


class Library:
    """Notes each step as the ids of its parts; a step waits while the ``gate`` is closed."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, ...]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.fails = False

    def compute(self, parts: Sequence[Part[str, int]]) -> None:
        self.entered.release()
        assert self.gate.wait(WAIT_S)
        self.steps.append([tuple(part.ids) for part in parts])
        if self.fails:
            raise ZeroDivisionError
        for part in parts:
            part.outputs = [one * 10 for one in part.ids[part.first_output :]]


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def steps(library: Library) -> Iterator[Steps]:
    made = Steps(library.compute)
    yield made
    library.gate.set()
    made.close()


class Asked:
    """A part that a thread of its own waits for."""

    def __init__(self, steps: Steps, entry: int, ids: Sequence[int], first: int = 0) -> None:
        self.outputs: list[int] | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._ask, args=(steps, entry, ids, first))
        self._thread.start()

    def _ask(self, steps: Steps, entry: int, ids: Sequence[int], first: int) -> None:
        try:
            self.outputs = steps.compute(entry, Part(f"sequence {entry}", ids, first))
        except ZeroDivisionError as exc:
            self.error = exc

    def answer(self) -> list[int] | None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.outputs


def waiting(steps: Steps, count: int) -> None:
    """Wait until so many parts are queued."""
    while len(steps.waiting) < count:
        threading.Event().wait(0.001)


def test_a_run_alone_gets_the_outputs_that_it_wants(steps: Steps, library: Library) -> None:
    assert steps.alone
    with steps.run(0):
        assert steps.alone
        assert steps.compute(0, Part("a", (1, 2, 3), 1)) == [20, 30]
        assert steps.compute(0, Part("a", (4,), 1)) == []
    assert library.steps == [[(1, 2, 3)], [(4,)]]


def test_what_waits_during_a_step_shares_the_next(steps: Steps, library: Library) -> None:
    library.gate.clear()
    with ExitStack() as runs:
        for entry in range(3):
            runs.enter_context(steps.run(entry))
        assert not steps.alone
        first = Asked(steps, 0, (1,))
        library.entered.acquire()
        others = [Asked(steps, entry, (entry + 1,)) for entry in (1, 2)]
        waiting(steps, 2)
        library.gate.set()
        assert [one.answer() for one in (first, *others)] == [[10], [20], [30]]
    assert [sorted(step) for step in library.steps] == [[(1,)], [(2,), (3,)]]


def test_a_step_waits_for_the_runs_that_the_last_one_answered(
    steps: Steps, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_steps, "PATIENCE_S", WAIT_S)
    library.gate.clear()
    with ExitStack() as runs:
        for entry in range(2):
            runs.enter_context(steps.run(entry))
        with steps.run(2):
            blocker = Asked(steps, 2, (9,))
            library.entered.acquire()
            pair = [Asked(steps, entry, (entry,)) for entry in (0, 1)]
            waiting(steps, 2)
            library.gate.set()
            assert blocker.answer() == [90]
        assert [one.answer() for one in pair] == [[0], [10]]
        quick = Asked(steps, 0, (5,))  # entry 1 is choosing its token
        waiting(steps, 1)
        slow = Asked(steps, 1, (6,))
        assert (quick.answer(), slow.answer()) == ([50], [60])
    assert sorted(library.steps[-1]) == [(5,), (6,)]


def test_a_run_that_leaves_is_not_waited_for(
    steps: Steps, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_steps, "PATIENCE_S", WAIT_S)
    with steps.run(0):
        with steps.run(1):
            assert steps.compute(1, Part("b", (7,), 0)) == [70]
            asked = Asked(steps, 0, (8,))
            waiting(steps, 1)
        assert asked.answer() == [80]
    assert library.steps == [[(7,)], [(8,)]]


def test_a_run_that_takes_long_is_not_waited_for_for_ever(steps: Steps, library: Library) -> None:
    with steps.run(0), steps.run(1):
        assert steps.compute(1, Part("b", (7,), 0)) == [70]
        assert [steps.compute(0, Part("a", (n,), 0)) for n in range(3)] == [[0], [10], [20]]
    assert library.steps == [[(7,)], [(0,)], [(1,)], [(2,)]]


def test_prompts_take_turns_beside_tokens(steps: Steps, library: Library) -> None:
    library.gate.clear()
    with ExitStack() as runs:
        for entry in range(4):
            runs.enter_context(steps.run(entry))
        blocker = Asked(steps, 0, (9,))
        library.entered.acquire()
        asked = []
        for entry, ids in ((1, range(PROMPT)), (2, range(20, 26)), (3, (5,))):
            asked.append(Asked(steps, entry, tuple(ids)))
            waiting(steps, len(asked))
        library.gate.set()
        for one in (blocker, *asked):
            assert one.answer() is not None
    assert library.steps == [[(9,)], [tuple(range(PROMPT)), (5,)], [tuple(range(20, 26))]]


def test_a_part_that_was_made_alone_is_computed_whole(steps: Steps, library: Library) -> None:
    with steps.run(0):
        assert len(steps.compute(0, Part("a", range(3 * PROMPT), 0))) == 3 * PROMPT
    assert len(library.steps) == 1


def test_an_error_of_the_library_is_that_of_each_run(steps: Steps, library: Library) -> None:
    library.fails = True
    with steps.run(0), pytest.raises(ZeroDivisionError):
        steps.compute(0, Part("a", (1,), 0))
    library.fails = False
    with steps.run(0):
        assert steps.compute(0, Part("a", (1,), 0)) == [10]


def test_parts_of_prompts_fit_the_speed_of_steps() -> None:
    now_s, token_s = 0.0, STEP_S / 50

    def compute(parts: Sequence[Part[str, int]]) -> None:
        nonlocal now_s
        now_s += token_s * sum(len(part.ids) for part in parts)

    steps = Steps(compute, lambda: now_s)
    assert steps.prompt == PROMPT
    for speed_s, fitting in ((STEP_S / 50, 50), (STEP_S, PROMPT), (STEP_S / 1000, MOST_PROMPT)):
        for ids, each_s in ((range(PROMPT), speed_s), ((1,), 1.0)):  # a single token tells nothing
            token_s = each_s
            with steps.run(0):
                steps.compute(0, Part("a", ids, 0))
            assert abs(steps.prompt - fitting) <= 1
    steps.close()

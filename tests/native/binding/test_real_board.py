r"""A real board, asked by the binding alone: does it do what rkserve takes for granted?

Run it on the board:

    pytest tests/native/binding/test_real_board.py --board --board-library=/usr/lib/librkllmrt.so \
        --board-model=models/<id>

Every test holds one sentence of docs/explanation/unproven.md to the hardware and notes what it
saw; the notes are printed at the end, whether the tests pass or not. The model folder needs its
tokenizer.json.
Nothing here knows the simulator; its library is just another path, good for trying these tests.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rkserve.api.common.renderer import Renderer
from rkserve.core.run_params import Sampling
from rkserve.models.folder import ModelFolder, open_model_folder
from rkserve.native.binding.library import detect
from rkserve.native.binding.preconditions import HandleState
from rkserve.native.binding.releases import RELEASES
from rkserve.native.binding.runtime import Binding, open_runtime
from rkserve.native.runtime import (
    LoadParams,
    RunEnd,
    RunOutcome,
    RunParams,
    Sink,
    SinkAction,
    Step,
    TokenInput,
)

pytestmark = pytest.mark.board

T = TypeVar("T")
Ids = tuple[int, ...]
Note = Callable[[str], None]

LOAD_S, CALL_S = 600.0, 180.0
NEW_TOKENS = 32
ABORT_AFTER = 8
# Penalties would make the choice depend on more than the context.
GREEDY = Sampling(temperature=0.0, top_k=1, repeat_penalty=1.0)
STORY = "Tell me a long story about a lighthouse, in many sentences."  # beyond the limit
SHORT = "Repeat after me: yes"  # to its own end, well before the limit
QUESTION = "What is the story about? Answer at length."


class Owner:
    """The one thread that owns the handle.

    A call may never return, and nothing can end it: then its test fails, those after it do not
    try, and the thread is left behind.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._stuck_in = ""
        threading.Thread(target=self._work, name="owner of the handle", daemon=True).start()

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Make the call in the thread, and go on meanwhile."""
        assert not self._stuck_in, f"the library is still inside {self._stuck_in}"
        outcome: Future[T] = Future()
        self._calls.put((call, outcome))
        return outcome

    def result(self, outcome: Future[T], what: str, timeout_s: float = CALL_S) -> T:
        """Wait for a call's result."""
        try:
            return outcome.result(timeout_s)
        except NotInTime:
            self._stuck_in = what
            raise AssertionError(f"{what} did not return within {timeout_s:.0f} s") from None

    def call(self, call: Callable[[], T], what: str, timeout_s: float = CALL_S) -> T:
        """Make the call and wait for its result."""
        return self.result(self.start(call), what, timeout_s)

    def _work(self) -> None:
        while True:
            call, outcome = self._calls.get()
            try:
                outcome.set_result(call())
            except BaseException as exc:  # noqa: BLE001 - for whoever asked
                outcome.set_exception(exc)


@dataclass
class Answer:
    """One run: its tokens and when they came, how it ended, and what the cache held after it."""

    ids: list[int] = field(default_factory=list)
    text: bytes = b""
    came_s: list[float] = field(default_factory=list)
    outcome: RunOutcome | None = None
    kv_positions: int = 0

    @property
    def end(self) -> RunOutcome:
        """How it ended."""
        assert self.outcome is not None
        return self.outcome


@dataclass
class RealBoard:
    """The loaded model, and the conversation that the tests have with it."""

    runtime: Binding
    folder: ModelFolder
    owner: Owner
    load_s: float

    def start(self, ids: Ids, *, clear: bool = True, sink: Sink | None = None) -> Future[Answer]:
        """Make a run with history, after clearing what was there or upon it."""
        per_run = self.runtime.per_run_sampling
        params = RunParams(
            (TokenInput(ids),),
            keep_history=True,
            sampling=GREEDY if per_run else None,
            max_new_tokens=NEW_TOKENS if per_run else None,
        )
        answer = Answer()

        def take(step: Step) -> SinkAction:
            (piece,) = step
            assert piece is not None  # of a batch of one
            answer.came_s.append(time.monotonic())
            answer.ids.append(piece.token_id)
            answer.text += piece.text
            return sink(step) if sink is not None else SinkAction.CONTINUE

        def work() -> Answer:
            if clear:
                self.runtime.clear_kv_cache()
            answer.outcome = self.runtime.run(params, take)
            (answer.kv_positions,) = self.runtime.kv_cache_sizes()
            return answer

        return self.owner.start(work)

    def ask(self, ids: Ids, *, clear: bool = True) -> Answer:
        """Make a run and wait for its end."""
        answer = self.owner.result(self.start(ids, clear=clear), "rkllm_run")
        assert answer.end.end is RunEnd.FINISHED, f"rkllm_run returned {answer.end.return_code}"
        assert answer.ids, "a run without a token"
        return answer

    def held(self, prompt: Ids, answer: Answer) -> Ids:
        """What the cache should hold after an answer: all but an EOS."""
        ids = tuple(answer.ids)
        if ids[-1] in self.folder.settings.eos_token_ids:
            ids = ids[:-1]
        return (*prompt, *ids)


# -- what is asked, and where the notes go --------------------------------------------------------


@pytest.fixture(scope="module")
def library(pytestconfig: pytest.Config) -> Path:
    """The library of --board-library."""
    return Path(pytestconfig.getoption("--board-library"))


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config) -> ModelFolder:
    """The model folder of --board-model."""
    found = open_model_folder(Path(pytestconfig.getoption("--board-model")))
    assert found.tokenizer_file is not None, f"{found.path} needs a tokenizer.json for these tests"
    assert found.settings.eos_token_ids, f"{found.path}/rkserve.yaml needs eos_token_ids"
    return found


@pytest.fixture(scope="module")
def prompts(folder: ModelFolder) -> Callable[[str], Ids]:
    """Render one turn of a user."""
    renderer = Renderer(folder)
    return lambda text: renderer.chat([{"role": "user", "content": text}]).ids


@pytest.fixture
def note(board_notes: list[str]) -> Note:
    """Keep a sentence for the end of the session."""
    return board_notes.append


@pytest.fixture
def assume(note: Note) -> Callable[..., None]:
    """Compare an assumption of docs/explanation/unproven.md with the measurement; note both."""

    def hold(assumption: str, *, holds: bool, seen: str) -> None:
        note(f"{'holds' if holds else 'DOES NOT HOLD'}: {assumption} ({seen})")
        assert holds, f"{assumption}: {seen}"

    return hold


@pytest.fixture(scope="module")
def board(library: Path, folder: ModelFolder) -> Iterator[RealBoard]:
    """The model, loaded once for all tests and freed after the last one."""
    owner = Owner()
    params = LoadParams(
        model_path=str(folder.require_weights()),
        max_context_len=folder.settings.context_length,
        max_new_tokens=NEW_TOKENS,  # before 1.3.0 nothing else limits a run
        sampling=GREEDY,
    )
    runtime = owner.call(lambda: open_runtime(library), "opening the library")
    began_s = time.monotonic()
    owner.call(lambda: runtime.load(params), "rkllm_init", LOAD_S)
    yield RealBoard(runtime, folder, owner, time.monotonic() - began_s)
    if runtime.state is not HandleState.DESTROYED:
        owner.call(runtime.destroy, "rkllm_destroy")


# -- the tests, in the order in which a board is used ---------------------------------------------


def test_the_string_and_the_layout_agree_on_an_accepted_release(library: Path, note: Note) -> None:
    found = detect(library)

    note(f"{library.name}: RKLLM {found.version}, declared by {found.declarations}")
    assert found.version in RELEASES


def test_the_model_loads_and_holds_nothing(board: RealBoard, note: Note) -> None:
    sizes = board.owner.call(board.runtime.kv_cache_sizes, "rkllm_get_kv_cache_size")

    note(f"{board.folder.id} was loaded in {board.load_s:.1f} s")
    assert sizes == (0,)
    assert not board.runtime.is_running()


def test_a_greedy_answer_is_the_same_twice(
    board: RealBoard, prompts: Callable[[str], Ids], note: Note
) -> None:
    first, again = board.ask(prompts(STORY)), board.ask(prompts(STORY))

    perf = first.end.perf
    note(
        f"{perf.prefill_tokens} tokens were prefilled in {perf.prefill_ms:.0f} ms, "
        f"{perf.decode_tokens} generated in {perf.decode_ms:.0f} ms; {perf.memory_mb:.0f} MB"
    )
    first.text.decode()  # all of it: nothing was cut within a character for good
    assert first.text
    assert (again.ids, again.text) == (first.ids, first.text)


def test_a_run_ends_at_its_limit_and_every_token_is_counted(
    board: RealBoard, prompts: Callable[[str], Ids], assume: Callable[..., None]
) -> None:
    answer = board.ask(prompts(STORY))

    assume(
        "a run ends at max_new_tokens",
        holds=len(answer.ids) == NEW_TOKENS,
        seen=f"{len(answer.ids)} tokens, limit {NEW_TOKENS}",
    )
    assume(
        "every token calls back once and with its id, WAITING too",
        holds=answer.end.perf.decode_tokens in (len(answer.ids), len(answer.ids) - 1)
        and min(answer.ids) >= 0,
        seen=f"{len(answer.ids)} callbacks, {answer.end.perf.decode_tokens} by the library's count",
    )


def test_an_abort_from_another_thread_ends_the_run_with_finish(
    board: RealBoard, prompts: Callable[[str], Ids], assume: Callable[..., None], note: Note
) -> None:
    whole = board.ask(prompts(STORY))
    assert len(whole.ids) > 2 * ABORT_AFTER, "the answer is too short to be aborted"
    enough, tokens = threading.Event(), 0

    def count(_: Step) -> SinkAction:
        nonlocal tokens
        tokens += 1
        if tokens == ABORT_AFTER:
            enough.set()
        return SinkAction.CONTINUE

    running = board.start(prompts(STORY), sink=count)
    assert enough.wait(CALL_S), f"{ABORT_AFTER} tokens did not come within {CALL_S:.0f} s"
    aborted_s = time.monotonic()
    board.runtime.abort()
    answer = board.owner.result(running, "rkllm_run after rkllm_abort")
    ended_s = time.monotonic()

    late = sum(at_s > aborted_s for at_s in answer.came_s)
    step_s = (whole.came_s[-1] - whole.came_s[0]) / (len(whole.ids) - 1)
    note(
        f"an abort: the run returned after {(ended_s - aborted_s) * 1e3:.0f} ms and {late} more "
        f"tokens; one decode step is {step_s * 1e3:.0f} ms; the cache held {answer.kv_positions} "
        f"positions after {len(prompts(STORY))} of the prompt and {len(answer.ids)} tokens"
    )
    assume(
        "an abort from another thread ends the run within two tokens, with FINISH",
        holds=answer.end.end is RunEnd.FINISHED and late <= 2 and len(answer.ids) < len(whole.ids),
        seen=f"{answer.end.end.value}, {late} more tokens",
    )
    after = board.ask(prompts(STORY))
    assume(
        "an abort does no harm to the next run once the cache was cleared",
        holds=after.ids == whole.ids,
        seen="the same answer" if after.ids == whole.ids else "another answer than before",
    )


@pytest.mark.parametrize(
    ("text", "by_itself"),
    [pytest.param(STORY, False, id="at the limit"), pytest.param(SHORT, True, id="with EOS")],
)
def test_the_cache_holds_prompt_and_answer_without_eos(
    board: RealBoard,
    prompts: Callable[[str], Ids],
    assume: Callable[..., None],
    text: str,
    by_itself: bool,
) -> None:
    prompt = prompts(text)
    answer = board.ask(prompt)

    assert (len(answer.ids) < NEW_TOKENS) == by_itself
    expected = len(board.held(prompt, answer))
    assume(
        "the cache size counts prompt and generated tokens, EOS not, the last one perhaps not",
        holds=answer.kv_positions in (expected - 1, expected),
        seen=f"{answer.kv_positions}; {len(prompt)} of the prompt, {len(answer.ids)} generated, "
        f"{len(prompt) + len(answer.ids) - expected} of them EOS",
    )


def test_a_second_turn_is_appended_and_only_its_own_tokens_are_prefilled(
    board: RealBoard, prompts: Callable[[str], Ids], assume: Callable[..., None], note: Note
) -> None:
    prompt = prompts(STORY)
    first = board.ask(prompt)
    # What the library says it holds is taken to be there, as by board/answer/transcript.py.
    transcript = board.held(prompt, first)
    held, rest = transcript[: first.kv_positions], transcript[first.kv_positions :]
    closing = board.folder.settings.eos_token_ids[:1]
    turn = (*rest, *closing, *prompts(QUESTION))
    second = board.ask(turn, clear=False)
    fresh = board.ask((*held, *turn))

    assume(
        "token input with keep_history=1 is appended verbatim to the live context",
        # One more or less: the answers may differ, and one of them end with EOS.
        holds=abs(second.kv_positions - len(second.ids) - fresh.kv_positions + len(fresh.ids)) <= 1,
        seen=f"{second.kv_positions} positions after {len(held)} held, {len(turn)} sent and "
        f"{len(second.ids)} generated; {fresh.kv_positions} with {len(fresh.ids)} when all was "
        "sent at once",
    )
    assume(
        "perf.prefill_tokens leaves out what the cache held",
        holds=(second.end.perf.prefill_tokens, fresh.end.perf.prefill_tokens)
        == (len(turn), len(held) + len(turn)),
        seen=f"{second.end.perf.prefill_tokens} for {len(turn)} that were sent, "
        f"{fresh.end.perf.prefill_tokens} for all {len(held) + len(turn)}",
    )
    # Not an assumption of rkserve: the same context computed in other batches may round otherwise.
    same = "the same" if second.ids == fresh.ids else "ANOTHER"
    note(f"a second turn upon the held context got {same} answer as one with all tokens sent")
    note(
        f"its first token: {second.end.perf.prefill_ms:.0f} ms of prefill upon the held context, "
        f"{fresh.end.perf.prefill_ms:.0f} ms without"
    )


def test_clearing_empties_the_cache(board: RealBoard, prompts: Callable[[str], Ids]) -> None:
    assert board.ask(prompts(QUESTION)).kv_positions > 0
    board.owner.call(board.runtime.clear_kv_cache, "rkllm_clear_kv_cache")

    sizes = board.owner.call(board.runtime.kv_cache_sizes, "rkllm_get_kv_cache_size")
    assert sizes == (0,)


def test_the_handle_is_destroyed(board: RealBoard, note: Note) -> None:
    began_s = time.monotonic()
    board.owner.call(board.runtime.destroy, "rkllm_destroy")

    note(f"rkllm_destroy took {time.monotonic() - began_s:.1f} s")
    assert board.runtime.state is HandleState.DESTROYED
    assert not board.runtime.is_running()
    assert board.runtime.late_callbacks == 0

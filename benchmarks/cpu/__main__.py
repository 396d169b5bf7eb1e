"""A board that computes on its CPU beside the bare library, by turns, for some numbers of answers.

``make bench-cpu`` writes docs/benchmarks/cpu.md. The bare library decodes as many sequences in this
process as the board answers requests, and chooses the likeliest tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.cpu.model import Shape, write_model
from benchmarks.harness import command
from benchmarks.harness.command import REPORTS, ProgressLine, add_outputs
from benchmarks.harness.figures import machine_line
from rkserve.bench.processes import BenchFailed
from rkserve.bench.results import figure, machine, table
from rkserve.board.board import Board
from rkserve.board.engine.process import EngineProcess
from rkserve.board.engine.protocol import EngineSpec
from rkserve.board.run.settings import BoardSettings
from rkserve.core.messages import Delta, GenerateRequest
from rkserve.core.run_params import Sampling
from rkserve.native.library_file import llama_cpp_library
from rkserve.native.llama_cpp import LlamaLibrary, ffi
from rkserve.native.runtime import LoadParams

REPORT = REPORTS / "cpu.md"
GREEDY = Sampling(temperature=0, repeat_penalty=1.0)
NO_END = 1 << 24  # beyond the vocabulary
FIRST_ID, STRIDE, IDS = 300, 7, 20000
COUNTS = (1, 2, 4)
COMPLETE = 2  # marks of a measurement: its begin and its end
TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # of the CPU time of other processes


@dataclass(frozen=True)
class Asked:
    """The options of the command line."""

    rounds: int
    threads: int
    prompt: int
    tokens: int


@dataclass(frozen=True)
class Speed:
    """One measurement: of all answers of one kind that go on at the same time.

    ``wall`` and ``cpu`` are tokens per second after the first one, by the clock and by the CPU time
    of the process that computes. ``first_ms`` is the time to the first token of an answer alone.
    """

    wall: float
    cpu: float
    first_ms: float


@dataclass(frozen=True)
class Round:
    """The measurements of one round, by the number of answers."""

    bare: dict[int, Speed]
    board: dict[int, Speed]


def prompt_of(number: int, length: int) -> tuple[int, ...]:
    """Return a prompt that shares no beginning with that of another number."""
    first = FIRST_ID + number * 977
    return tuple(FIRST_ID + (first + at * STRIDE) % IDS for at in range(length))


def cores_of(asked: Asked) -> tuple[int, ...]:
    """Return the cores that compute, of those that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0))[: asked.threads])


class BareLibrary:
    """The library itself: one context for each number of sequences."""

    def __init__(self, path: Path, asked: Asked) -> None:
        self._library = LlamaLibrary(llama_cpp_library())
        self._lib, self._asked = self._library.lib, asked
        model = self._lib.llama_model_load_from_file(
            str(path).encode(), self._library.model_params()
        )
        self._vocabulary = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(model))
        self._contexts = {count: self._context(model, count) for count in COUNTS}
        self._batch = self._lib.llama_batch_init(asked.prompt + max(COUNTS), 0, 1)

    def _context(self, model: Any, count: int) -> Any:
        given = self._library.context_params()
        given.n_ctx = count * (self._asked.prompt + self._asked.tokens + 8)
        given.n_seq_max, given.pooling_type = count, 0
        given.n_threads = given.n_threads_batch = self._asked.threads
        return self._lib.llama_init_from_model(model, given)

    def measure(self, count: int, number: int) -> Speed:
        """Decode ``count`` sequences, on the cores of the board."""
        free = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores_of(self._asked))
        try:
            return self._measure(count, number)
        finally:
            os.sched_setaffinity(0, free)

    def _measure(self, count: int, number: int) -> Speed:
        asked, context = self._asked, self._contexts[count]
        self._lib.llama_memory_clear(self._lib.llama_get_memory(context), True)
        began_s = time.monotonic()
        chosen: list[int] = []
        for at in range(count):
            ids = prompt_of(number + at, asked.prompt)
            last = len(ids) - 1
            self._decode(context, [(at, i, token, i == last) for i, token in enumerate(ids)])
            chosen.append(self._likeliest(context, last))
        first_ms = (time.monotonic() - began_s) / count * 1e3
        wall_s, cpu_s = time.monotonic(), time.process_time()
        for step in range(asked.tokens - 1):
            tokens = [(at, asked.prompt + step, one, True) for at, one in enumerate(chosen)]
            self._decode(context, tokens)
            chosen = [self._likeliest(context, at) for at in range(count)]
        made = count * (asked.tokens - 1)
        took_s, cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
        return Speed(made / took_s, made / cpu_s, first_ms)

    def _decode(self, context: Any, tokens: Sequence[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (sequence, position, token, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        code = self._lib.llama_decode(context, batch)
        assert code == 0, f"llama_decode returned {code}"

    def _likeliest(self, context: Any, index: int) -> int:
        row = ffi.buffer(self._lib.llama_get_logits_ith(context, index), self._vocabulary * 4)
        return int(np.argmax(np.frombuffer(row, np.float32)))


class MeasuredBoard:
    """A board with its engine process."""

    def __init__(self, path: Path, folder: Path, asked: Asked) -> None:
        self._asked = asked
        context = asked.prompt + asked.tokens + 8
        cpus = cores_of(asked)
        params = LoadParams(str(path), context, context, GREEDY, cpus=cpus, n_batch=max(COUNTS))
        library, fence = str(llama_cpp_library()), str(folder / "fence")
        spec = EngineSpec(library, params, fence, cpu=True, pin_cpus=cpus)

        async def start(_: Path | None) -> EngineProcess:
            return await EngineProcess.start("bench", spec)

        eos = frozenset({NO_END})
        settings = BoardSettings("bench", "m", context, eos, n_batch=params.n_batch)
        self.board = Board(settings, start)

    async def measure(self, count: int, number: int) -> Speed:
        """Answer ``count`` requests at the same time."""
        firsts: list[float] = []
        given = [0] * count
        marks: list[tuple[float, float, int]] = []  # clock, CPU time, tokens: while all go on

        def note(*, due: bool) -> None:
            if due:
                marks.append((time.monotonic(), self._cpu_s(), sum(given)))

        async def answer(at: int) -> None:
            ids, began_s = prompt_of(number + at, self._asked.prompt), time.monotonic()
            asked = GenerateRequest(f"c{number + at}/0", "m", ids, self._asked.tokens, GREEDY)
            async with aclosing(self.board.generate(asked)) as events:
                async for event in events:
                    if not isinstance(event, Delta) or not event.token_ids:
                        continue
                    if not given[at]:
                        firsts.append((time.monotonic() - began_s) * 1e3)
                    given[at] += len(event.token_ids)
                    note(due=not marks and all(given))
            note(due=len(marks) == 1)

        await asyncio.gather(*(answer(at) for at in range(count)))
        if len(marks) < COMPLETE:
            raise BenchFailed(f"{count} answers of {self._asked.tokens} tokens did not overlap")
        (began_s, began_cpu_s, before), (ended_s, ended_cpu_s, after) = marks
        made, cpu_s = after - before, max(ended_cpu_s - began_cpu_s, TICK_S)
        first_ms = firsts[0] if count == 1 else 0.0
        return Speed(made / (ended_s - began_s), made / cpu_s, first_ms)

    def _cpu_s(self) -> float:
        stat = Path(f"/proc/{self.board.report().engine_pid}/stat").read_text(encoding="ascii")
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) * TICK_S


async def measure(path: Path, folder: Path, asked: Asked, progress: ProgressLine) -> list[Round]:
    """Measure both by turns."""
    bare, measured = BareLibrary(path, asked), MeasuredBoard(path, folder, asked)
    await measured.board.start()
    rounds: list[Round] = []
    number = 0
    try:
        bare.measure(1, 0)  # the first runs are slower
        await measured.measure(1, 0)
        for at in range(asked.rounds):
            progress.begin(f"round {at + 1} of {asked.rounds}")
            made = Round({}, {})
            for count in COUNTS:
                number += max(COUNTS)
                for library in (True, False) if at % 2 else (False, True):
                    if library:
                        made.bare[count] = bare.measure(count, number)
                    else:
                        made.board[count] = await measured.measure(count, number)
            rounds.append(made)
            progress.end(f"{made.board[1].wall:.1f} tokens/s alone")
    finally:
        await measured.board.stop()
    return rounds


def render(rounds: Sequence[Round], asked: Asked, shape: Shape) -> str:
    """Return the report."""
    rows = []
    for count in COUNTS:
        pairs = [(one.bare[count], one.board[count]) for one in rounds]
        alone = [(one.bare[1], one.board[1]) for one in rounds]
        gains = [bare.cpu / first.cpu for (bare, _), (first, _) in zip(pairs, alone, strict=True)]
        ours = [board.cpu / first.cpu for (_, board), (_, first) in zip(pairs, alone, strict=True)]
        rows.append(
            [
                str(count),
                figure(median(bare.wall for bare, _ in pairs)),
                figure(median(board.wall for _, board in pairs)),
                figure(median(board.wall / bare.wall for bare, board in pairs), 2),
                figure(median(board.cpu / bare.cpu for bare, board in pairs), 2),
                _middle_half([board.cpu / bare.cpu for bare, board in pairs], 2),
                figure(median(gains), 2),
                figure(median(ours), 2),
            ]
        )
    head = [
        "answers",
        "library, tokens/s",
        "board, tokens/s",
        "board / library",
        "by CPU time",
        "half of the rounds",
        "gain, library",
        "gain, board",
    ]
    added_ms = [one.board[1].first_ms - one.bare[1].first_ms for one in rounds]
    return (
        "# Boards that compute on their CPU\n\n"
        f"A llama of random weights in q8_0 ({shape.layers} layers, {shape.size} wide), "
        f"{asked.threads} thread{'s' * (asked.threads > 1)}, prompts of {asked.prompt} tokens, "
        f"answers of {asked.tokens}. The library decodes the sequences in one process without "
        "rkserve; the board answers requests through its engine process, on the same cores. Tokens "
        "count while all answers go on. Medians of "
        f"{asked.rounds} rounds, in which both are measured by turns; ratios are of one round. The "
        "gain is that over one answer, by the CPU time of the process that computes, which changes "
        "less than the clock where others use the machine.\n\n"
        + machine_line(machine())
        + "\n"
        + table(head, rows)
        + f"\nA board adds {figure(median(added_ms))} ms ({_middle_half(added_ms)} in half of the "
        "rounds) to the time to the first token of an answer alone.\n\n"
        "`make bench-cpu` repeats it.\n"
    )


def _middle_half(values: Sequence[float], digits: int = 1) -> str:
    """Return the lower and the upper quartile."""
    low, high = np.quantile(values, [0.25, 0.75])
    return f"{figure(low, digits)} to {figure(high, digits)}"


def main() -> int:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    add_outputs(parser, REPORT)
    given = parser.parse_args()
    asked = Asked(given.rounds, given.threads, given.prompt, given.tokens)

    def work(folder: Path) -> None:
        shape, path = Shape(), folder / "model.gguf"
        write_model(path, shape)
        rounds = asyncio.run(measure(path, folder, asked, ProgressLine()))
        figures = [asdict(one) for one in rounds]
        command.deliver(render(rounds, asked, shape), figures, given.output, given.json)

    return command.run(work)


if __name__ == "__main__":
    sys.exit(main())

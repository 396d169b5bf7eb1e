"""Cases (e) to (g), about one board: parked conversations, pauses and batches.

Nothing is computed here; see ``oneboard_figures``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.harness.exchange import Exchange, InterruptedAnswer
from benchmarks.harness.figures import flaws
from benchmarks.harness.processes import ANSWER_S, BenchCrew, chat_body
from benchmarks.harness.prompts import PROMPT_TOKENS, SMALL_PROFILE, messages_of_length, step_ms
from benchmarks.serving.oneboard_figures import (
    HISTORY_TOKENS,
    BatchCost,
    Batches,
    BatchPace,
    BatchRun,
    ParkedRound,
    flaws_of_batch,
    flaws_of_interrupted,
    flaws_of_parked,
)
from rkserve.bench.processes import CommandProcess, CpuUse, Json, hold
from rkserve.bench.results import cores
from rkserve.bench.systems import SimulatedDeployment

PARKED_ANSWER = 8  # tokens
CALM_S = 1.5  # until a board has nothing left to do about the conversation before
# Boards park by the chance of a return, and learn it from those that they have seen: the second and
# third round of a new deployment compute the conversation again.
LEARNING_ROUNDS = 4
NEXT_TURN = "Write 4000 tokens more."

PAUSES_EACH = 8
PAUSED_ANSWER = 48  # tokens: what the pauses leave of it is read to its end
REST_S = 0.1  # from a pause to its resumption: a token that is late would be seen

BATCHES = (1, 2, 4, 8)
GAINS = ("none", "modest", "bound")
COST_TOKENS, COST_RUNS = 3900, 7
PACE_TOKENS = 24


class OneBoard:
    """The cases on a crew. (f) stops runs, after which a board loads no parked conversation.

    ``cpu`` is what the machine did meanwhile, by case.
    """

    def __init__(self, crew: BenchCrew) -> None:
        self._crew = crew
        self.cpu: dict[str, CpuUse] = {}
        self._numbers = iter(range(1_000_000, 2_000_000))  # no prompt of the other cases

    # -- (e) ----------------------------------------------------------------------------------

    def parked(self, rounds: int) -> tuple[list[ParkedRound], list[ParkedRound]]:
        """Let conversations lose the board and come back, ``rounds`` times.

        Return the rounds, and those before them from which the board has learned.
        """
        self._crew.deploy(SimulatedDeployment(SMALL_PROFILE, prefix_reuse=False))
        self._ask(self._short(), PARKED_ANSWER)  # the first answer of a deployment is slower
        learning = self._rounds(LEARNING_ROUNDS, "learning round")
        with self._metered("(e)"):
            found = self._rounds(rounds, "round")
        hold(flaws_of_parked(found, PROMPT_TOKENS, PARKED_ANSWER))
        return found, learning

    def _rounds(self, count: int, name: str) -> list[ParkedRound]:
        found = []
        for number in range(count):
            self._crew.note(f"{name} {number + 1} of {count}")
            found.append(self._one_round())
        return found

    def _one_round(self) -> ParkedRound:
        history = self._prompt(HISTORY_TOKENS)
        first, said = self._ask(history, PARKED_ANSWER)
        displacing, _ = self._ask(self._short(), PARKED_ANSWER)
        turns = [
            *history,
            {"role": "assistant", "content": said},
            {"role": "user", "content": NEXT_TURN},
        ]
        returned, _ = self._ask(turns, PARKED_ANSWER)
        time.sleep(CALM_S)
        calm, _ = self._ask(self._short(), PARKED_ANSWER)
        return ParkedRound(first, displacing, returned, calm)

    # -- (f) ----------------------------------------------------------------------------------

    def interrupted(self, answers: int, *, kept: bool) -> list[InterruptedAnswer]:
        """Pause and resume ``answers`` at random moments of a decode step.

        With ``kept`` the runtime itself pauses; otherwise runs are stopped and continued.
        """
        self._crew.deploy(SimulatedDeployment(SMALL_PROFILE, prefix_reuse=False))
        rng = random.Random(0)
        prompts = [self._short() for _ in range(answers)]
        found, kv = [], "kept" if kept else "recomputed"
        with self._metered(f"(f) {kv}"):
            for number, prompt in enumerate(prompts):
                self._crew.note(f"answer {number + 1} of {answers}")
                body = chat_body(self._crew.model.id, prompt, PAUSED_ANSWER, native_pause=kept)
                step_s = step_ms(SMALL_PROFILE) / 1e3
                pauses_s = [rng.uniform(0, step_s) for _ in range(PAUSES_EACH)]
                found.append(self._crew.interrupt(body, pauses_s, REST_S))
        undisturbed = [self._ask(prompt, PAUSED_ANSWER) for prompt in prompts]
        hold(flaws([answer for answer, _ in undisturbed], PROMPT_TOKENS, PAUSED_ANSWER))
        texts = [text for _, text in undisturbed]
        hold(flaws_of_interrupted(found, texts, PAUSED_ANSWER, kv))
        return found

    # -- (g) ----------------------------------------------------------------------------------

    def batches(self) -> Batches:
        """Measure what tokens of batches cost, and how fast batches are with which gain."""
        costs = [self._cost(n_batch) for n_batch in BATCHES]
        paces = [self._pace(1, GAINS[0])]
        paces += [self._pace(n_batch, gain) for n_batch in BATCHES[1:] for gain in GAINS]
        return Batches(costs, paces)

    def _cost(self, n_batch: int) -> BatchCost:
        self._crew.note(f"n_batch {n_batch}, CPU")
        crew = self._crew
        with crew.batching_binding(SMALL_PROFILE, n_batch, time_scale=0.0, gain="none") as child:
            self._batch(child, n_batch, COST_TOKENS)  # warms up
            runs = tuple(self._batch(child, n_batch, COST_TOKENS) for _ in range(COST_RUNS))
        return BatchCost(n_batch, runs)

    def _pace(self, n_batch: int, gain: str) -> BatchPace:
        self._crew.note(f"n_batch {n_batch}, gain {gain}")
        crew = self._crew
        with crew.batching_binding(SMALL_PROFILE, n_batch, time_scale=1.0, gain=gain) as child:
            return BatchPace(n_batch, gain, self._batch(child, n_batch, PACE_TOKENS))

    def _batch(self, child: CommandProcess, n_batch: int, max_tokens: int) -> BatchRun:
        prompts = [self._crew.renderer.chat(self._short()).ids for _ in range(n_batch)]
        command = {"do": "batch", "prompts": prompts, "max_tokens": max_tokens}
        run = BatchRun(**child.ask(command, ANSWER_S))
        hold(flaws_of_batch([run], n_batch, max_tokens))
        return run

    @contextmanager
    def _metered(self, case: str) -> Iterator[None]:
        before = self._crew.read()
        yield
        self.cpu[case] = CpuUse(cores())
        self.cpu[case].add(before, self._crew.read())

    # -- prompts ------------------------------------------------------------------------------

    def _short(self) -> list[Json]:
        return self._prompt(PROMPT_TOKENS)

    def _prompt(self, tokens: int) -> list[Json]:
        """Return a new conversation."""
        return messages_of_length(self._crew.renderer, tokens, next(self._numbers))

    def _ask(self, messages: list[Json], new_tokens: int) -> tuple[Exchange, str]:
        return self._crew.answer(chat_body(self._crew.model.id, messages, new_tokens))

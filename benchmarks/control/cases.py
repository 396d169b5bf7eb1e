"""The cases of the control benchmark: pauses, switches, staging and rounds under load.

Nothing is computed here; see ``figures``, ``checks`` and ``growth``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.control.answers import Answer, Call
from benchmarks.control.checks import Truth, flaws_of_truth, truth
from benchmarks.control.figures import ATOMIC, PAUSE, RESUME
from benchmarks.harness.growth import Sample, sample
from benchmarks.harness.processes import BenchCrew, chat_body
from benchmarks.harness.prompts import PROFILE, messages_of_length
from benchmarks.serving.cases import SETTLE_S
from rkserve.bench.processes import PROC, CpuUse, Json, OnProgress, hold
from rkserve.bench.results import cores
from rkserve.bench.systems import SimulatedDeployment
from rkserve.native.sim import models

BOARDS, STREAMS = 8, 64
PROMPTS = 16
# Of answers that pauses interrupt, and of the shorter ones that switches come between: each
# resumption prefills them again, and an answer is to begin between two switches.
PAUSED_PROMPT, PAUSED_ANSWER = 128, 64
SWITCHED_PROMPT, SWITCHED_ANSWER = 48, 24
WARM_S, AFTER_S = 6.0, 2.0
STAGGER_S = 4.0  # over which the clients begin
BETWEEN_S = (0.5, 1.5)  # from a resumption, or a switch, to what comes next
REST_S = 0.25  # from a pause to its resumption: a token that is late would be seen
ROUND_S = (0.3, 0.5)
SAMPLES = 40
LINE, VERSIONS = "tone", ("a", "b")
LARGE, LARGE_BYTES = "large", 32 << 20
SIMULATED_MS_PER_MIB = 10.0  # RKSIM_LORA_MS_PER_MB where it is not set
UPLOAD_S, CALL_S = 300.0, 10.0
SPEAKERS = {"a": "Ada Lovelace", "b": "Blaise Pascal"}
ADAPTERS = "/v1/lora_adapters"
KEEP: Json = {"mode": "keep", "clear_cache": False}


@dataclass
class Played:
    """The results of a plan that was played under load."""

    answers: list[Answer]
    calls: list[Call]
    said: Truth
    samples: list[Sample] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Staged:
    """One adapter on its way to all boards."""

    took_ms: float
    said: dict[str, Any] = field(hash=False)


class ControlBench:
    """The cases on a crew. ``cpu`` is what the machine did meanwhile, by case."""

    def __init__(self, crew: BenchCrew) -> None:
        self._crew = crew
        self._random = random.Random(0)
        self._numbers = iter(range(1_000_000))
        self.cpu: dict[str, CpuUse] = {}

    def deploy(self) -> None:
        """Have the boards serve, with room for all clients on one of them."""
        self._crew.deploy(SimulatedDeployment(PROFILE, BOARDS, queue_limit=STREAMS))

    # -- pauses -------------------------------------------------------------------------------

    def pauses(self, count: int) -> Played:
        """Pause the whole cluster ``count`` times at random moments, and resume it."""
        bodies = self._bodies(self._crew.model.id, PAUSED_PROMPT, PAUSED_ANSWER)
        said = self._truth([bodies])
        plan = []
        for _ in range(count):
            plan.append(self._step(PAUSE, "/pause", KEEP, BETWEEN_S))
            plan.append(self._step(RESUME, "/resume", {}, (REST_S, REST_S)))
        return self._play("pauses", plan, bodies, said)

    # -- switches -----------------------------------------------------------------------------

    def prepare_switches(self) -> None:
        """Bring both versions to all boards; the first one is served when it returns."""
        for seed, version in enumerate(reversed(VERSIONS), start=1):
            content = models.render_adapter(SPEAKERS[version], seed=seed, base="any")
            self._upload(LINE, version, content)

    def switches(self, strategy: str, count: int, **more: Any) -> Played:
        """Switch all boards from one version to the other ``count`` times, the first one last.

        The versions that were switched to are those of ``VERSIONS``, in turns.
        """
        bodies, said = self._spoken()
        path = f"{ADAPTERS}/{LINE}/rollout"
        plan = [
            self._step(version, path, {"version": version, "strategy": strategy, **more}, BETWEEN_S)
            for version in self._in_turns(count)
        ]
        return self._play(f"{strategy} switches", plan, bodies, said)

    def rounds(self, count: int) -> Played:
        """Pause, switch and resume ``count`` times, and look at the processes meanwhile."""
        bodies, said = self._spoken()
        plan = []
        for version in self._in_turns(count):
            rollout = {"version": version, "strategy": ATOMIC}
            plan.append(self._step(PAUSE, "/pause", KEEP, ROUND_S))
            plan.append(self._step(version, f"{ADAPTERS}/{LINE}/rollout", rollout, (0.0, 0.0)))
            plan.append(self._step(RESUME, "/resume", {}, (0.0, 0.0)))
        samples: list[Sample] = []
        every = max(1, count // SAMPLES)

        def look(told: Json) -> None:
            rounds, rest = divmod(told["done"], 3)
            if not rest and not rounds % every:
                samples.append(sample(PROC, self._crew.pids(), rounds))

        found = self._play("rounds", plan, bodies, said, look)
        found.samples = samples
        return found

    def _in_turns(self, count: int) -> list[str]:
        """Begin with the version that is not served, which every case leaves the same."""
        assert count % 2 == 0
        return [VERSIONS[(number + 1) % 2] for number in range(count)]

    def _spoken(self) -> tuple[list[Json], Truth]:
        bodies = self._bodies(LINE, SWITCHED_PROMPT, SWITCHED_ANSWER)
        named = [
            [{**body, "model": f"{LINE}@{version}"} for body in bodies] for version in VERSIONS
        ]
        return bodies, self._truth(named)

    # -- staging ------------------------------------------------------------------------------

    def staged(self, count: int) -> list[Staged]:
        """Upload ``count`` large versions, each of them served by all boards when it returns."""
        found = []
        with self._metered("staging"):
            for number in range(count):
                self._crew.note(f"version {number + 1} of {count}")
                content = models.render_adapter("Somebody", seed=100 + number, size=LARGE_BYTES)
                found.append(self._upload(LARGE, f"v{number}", content))
        return found

    def _upload(self, name: str, version: str, content: bytes) -> Staged:
        query = {"name": name, "version": version, "size": len(content), "strategy": ATOMIC}
        started_s = time.monotonic()
        said = self._crew.post(ADAPTERS, query, content, UPLOAD_S)
        return Staged((time.monotonic() - started_s) * 1e3, said)

    # -- the load -----------------------------------------------------------------------------

    def _bodies(self, model: str, prompt: int, new_tokens: int) -> list[Json]:
        """Return streamed, greedy calls that are new."""
        renderer = self._crew.renderer
        return [
            chat_body(
                model,
                messages_of_length(renderer, prompt, next(self._numbers)),
                new_tokens,
                return_weight_versions=True,
            )
            for _ in range(PROMPTS)
        ]

    def _truth(self, sets: Sequence[Sequence[Json]]) -> Truth:
        """Ask everything once while the cluster rests. Raises ``BenchFailed``."""
        said: dict[tuple[str, int], Any] = {}
        for bodies in sets:
            self._crew.note("asking what is right")
            answers, _ = self._load(bodies, clients=len(bodies), requests_each=1)
            hold(flaws_of_truth(answers))
            said |= truth(answers)
        return said

    def _play(
        self,
        case: str,
        plan: list[Json],
        bodies: list[Json],
        said: Truth,
        look: OnProgress = lambda _: None,
    ) -> Played:
        def heard(told: Json) -> None:
            self._crew.note(f"call {told['done']} of {told['of']}, {told['answers']} answers")
            look(told)

        with self._metered(case):
            answers, calls = self._load(bodies, plan, heard, clients=STREAMS)
        return Played(answers, calls, said)

    def _load(
        self,
        bodies: Sequence[Json],
        plan: Sequence[Json] = (),
        heard: OnProgress = lambda _: None,
        **command: Any,
    ) -> tuple[list[Answer], list[Call]]:
        timeout_s = UPLOAD_S + CALL_S * len(plan)
        times = {"stagger_s": STAGGER_S, "warm_s": WARM_S, "after_s": AFTER_S}
        found = self._crew.control(
            timeout_s, heard, bodies=list(bodies), plan=list(plan), **times, **command
        )
        answers = [Answer.from_json(one) for one in found["answers"]]
        return answers, [Call(**one) for one in found["calls"]]

    def _step(self, what: str, path: str, body: Json, wait_s: tuple[float, float]) -> Json:
        """Return a step of a plan, at a moment that is random within ``wait_s``."""
        return {
            "what": what,
            "path": path,
            "body": body,
            "wait_s": self._random.uniform(*wait_s),
        }

    @contextmanager
    def _metered(self, case: str) -> Iterator[None]:
        self._crew.sleep_until(time.monotonic() + SETTLE_S, "settling")
        use, before = CpuUse(cores()), self._crew.read()
        yield
        use.add(before, self._crew.read())
        self.cpu[case] = use

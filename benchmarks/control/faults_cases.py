"""Trials of faults on a cluster of their own, and the checks after each.

Every trial begins with a cluster that is whole and ends with one that must have recovered by
itself, while clients ask all the time. ``faults_list`` has the faults, ``faults`` the judgement.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from benchmarks.control.answers import Answer
from benchmarks.control.checks import Said, check, flaws_of_truth
from benchmarks.control.faults import (
    Done,
    FaultFigures,
    Lost,
    Trial,
    active_version,
    behind,
    labels_of,
    labels_said,
    late_texts,
    lost,
    of_one_weights,
    pauses_left,
    record_flaws,
    served_after,
    summed,
)
from benchmarks.control.faults_boards import CHUNK_BYTES
from benchmarks.control.faults_list import FAULTS, Fault
from benchmarks.control.faults_site import ADAPTERS, Scene, Site, wait_for
from benchmarks.control.load import ask_once, streams
from benchmarks.harness.processes import BenchCrew, chat_body
from benchmarks.harness.prompts import PROFILE, messages_of_length
from rkserve.bench.connection import OK
from rkserve.bench.processes import BenchFailed, Json, hold
from rkserve.bench.systems import SimulatedDeployment
from rkserve.native.sim import models

BOARDS, CLIENTS = 3, 9
TIME_SCALE = 0.3
GROUP, LINE = "sim", "faulty"
CONTENT_BYTES = 6 * CHUNK_BYTES
# Of each the bare name's prompts, and those for the base model.
PROMPTS, BASE_PROMPTS = 4, 2
PROMPT, ANSWER = 48, 24
WARM_S, AFTER_S = 0.7, 0.7
LIMIT_S = 60.0  # for the cluster to be whole again
LOOK_S = 0.15
TRIES = 4  # for each time that a moment is to be hit
LETTERS = {"a": "Ada Lovelace", "b": "Blaise Pascal"}
_SETTINGS = SimulatedDeployment(
    PROFILE,
    BOARDS,
    TIME_SCALE,
    queue_limit=CLIENTS,
    crash_limit=1_000,  # engines are killed over and over; a quarantine would be right
    health_check_timeout_s=60.0,  # boards that stand still must not be taken for dead
)


class FaultBench:
    """The trials on a crew's cluster."""

    def __init__(self, crew: BenchCrew) -> None:
        self._crew = crew
        self._site = Site(crew.address, crew.folder, crew.pids)
        self._boards = [f"{GROUP}-{number}" for number in range(BOARDS)]
        self._numbers = iter(range(1_000_000))
        self._contents = {
            letter: models.render_adapter(title, seed=seed, base="any", size=CONTENT_BYTES)
            for seed, (letter, title) in enumerate(LETTERS.items(), start=1)
        }
        self._bodies: list[Json] = []
        self._letters: dict[str, dict[int, Said]] = {}

    def deploy(self) -> None:
        """Have few boards serve, with an adapter, and learn what its versions say."""
        self._crew.deploy(_SETTINGS)
        renderer = self._crew.renderer
        asked = [messages_of_length(renderer, PROMPT, n) for n in range(PROMPTS + BASE_PROMPTS)]
        models = [LINE] * PROMPTS + [self._crew.model.id] * BASE_PROMPTS
        self._bodies = [
            chat_body(model, messages, ANSWER, return_weight_versions=True)
            for model, messages in zip(models, asked, strict=True)
        ]
        for letter in reversed(LETTERS):
            self._push(letter, activate=True)
            self._settle(Done(True, time.monotonic()))
            self._letters[letter] = self._said(self._bodies[:PROMPTS], 0)
        self._letters[""] = self._said(self._bodies[PROMPTS:], PROMPTS)

    def _said(self, bodies: list[Json], first: int) -> dict[int, Said]:
        self._crew.note("asking what is right")
        answers = ask_once(self._site.address, bodies)
        hold(flaws_of_truth(answers))
        return {
            first + one.prompt: Said(one.text, one.exchange.completion_tokens) for one in answers
        }

    def tried(self, fault: Fault, times: int) -> FaultFigures:
        """Try a fault until its moment was hit so many times, within reason.

        Raises ``BenchFailed`` where the cluster does not recover even with help.
        """
        trials: list[Trial] = []
        hits = 0
        while hits < times and len(trials) < TRIES * times:
            self._crew.note(f"{hits} of {times} times, {len(trials)} tries")
            trials.append(self._survived(fault, len(trials)))
            hits += trials[-1].hit
        return summed(fault.name, trials)

    def _survived(self, fault: Fault, number: int) -> Trial:
        """Try it once; what broke the trial itself is one of its flaws."""
        try:
            trial = self._trial(fault, number)
        except BenchFailed as exc:
            trial = Trial(False, None, (), (), False, 0, 0, 0, Lost(), (f"broken off: {exc}",))
        self._tidy()
        return trial

    def _trial(self, fault: Fault, number: int) -> Trial:
        with ThreadPoolExecutor(4) as pool:
            scene = self._scene(fault, number, pool)
            before = active_version(self._adapters(), LINE)
            answers: list[Answer] = []
            with streams(self._site.address, self._bodies, CLIENTS, answers):
                time.sleep(WARM_S)
                done = fault.make(scene)
                settled_s, left = self._settle(done)
                whole_s = time.monotonic()
                time.sleep(AFTER_S)
        trial = self._judged(done, before, answers, whole_s)
        took_s = done.settled_s if done.settled_s is not None else settled_s
        return replace(trial, settled_s=None if left else took_s, behind=tuple(left))

    def _scene(self, fault: Fault, number: int, pool: ThreadPoolExecutor) -> Scene:
        served = active_version(self._adapters(), LINE) or ""
        letter = next(one for one in LETTERS if not served.startswith(one))
        staged = [self._push(letter, activate=False) for _ in range(fault.staged)]
        boards = random.Random(f"{fault.name} {number}").sample(self._boards, BOARDS)
        return Scene(
            site=self._site,
            number=number,
            boards=boards,
            line=LINE,
            model=self._crew.model.id,
            staged=staged,
            fresh=self._fresh(letter),
            content=self._contents[letter],
            pool=pool,
        )

    def _fresh(self, letter: str) -> str:
        return f"{letter}{next(self._numbers)}"

    def _push(self, letter: str, *, activate: bool) -> str:
        version = self._fresh(letter)
        query = {"name": LINE, "version": version, "activate": str(activate).lower()}
        reply = self._site.upload(query, self._contents[letter])
        if reply.status != OK:
            raise BenchFailed(f"{version} was not taken: HTTP {reply.status}: {reply.body}")
        return version

    def _adapters(self) -> Json:
        return wait_for("the adapters", lambda: self._site.get(ADAPTERS))

    def _settle(self, done: Done) -> tuple[float, list[str]]:
        """Wait for the cluster to be whole; return how long it took, and what never came right."""
        left: list[str] = []

        def whole() -> bool:
            left[:] = behind(self._site.sight(done.operations), self._boards, done.dead)
            return not left

        with suppress(BenchFailed):
            wait_for("the cluster to be whole", whole, LIMIT_S, LOOK_S)
        return max(0.0, time.monotonic() - done.over_s), left

    def _judged(
        self, done: Done, before: str | None, answers: list[Answer], whole_s: float
    ) -> Trial:
        sight = self._site.sight(done.operations)
        served = active_version(sight.adapters or {"data": []}, LINE)
        label = (self._site.get("/weight_info") or {}).get("weight_version", "")
        labels = labels_of(answers)
        times = served_after(labels, {f"{LINE}@{served}", label}, whole_s)
        said = labels_said(self._letters, labels)
        checked = check([of_one_weights(one) for one in answers], said, times)
        flaws = [*done.flaws, *record_flaws(done, sight, LINE, before)]
        flaws += late_texts(answers, done.quiet_s)
        if checked.unstamped:
            flaws.append(f"{checked.unstamped} answers without their version")
        return Trial(
            hit=done.hit,
            settled_s=None,
            behind=(),
            states=tuple(_ended(one) for one in sight.operations.values()),
            left_paused=sight.paused is None or bool(pauses_left(sight.paused)),
            answers=len(answers),
            mixed=max(checked.wrong, checked.mixed),
            stale=check(answers, said, times).stale,
            lost=lost(answers, done.killed),
            flaws=tuple(flaws),
        )

    def _tidy(self) -> None:
        """Resume what was left paused, so that it counts once; drop what is not served."""
        self._site.post("/resume")
        for line in self._adapters()["data"]:
            for row in line["versions"]:
                if row["role"] == "kept":
                    self._site.delete(f"{ADAPTERS}/{LINE}/{row['version']}")
        _, left = self._settle(Done(True, time.monotonic()))
        if left:
            raise BenchFailed(f"the cluster does not recover: {'; '.join(left)}")


def _ended(record: Json | None) -> str:
    if record is None:
        return "unknown"
    return f"{record['kind'].removeprefix('adapter_')} {record['state']}"


def chosen(words: Sequence[str]) -> tuple[Fault, ...]:
    """Return the faults whose name has one of these in it."""
    return tuple(fault for fault in FAULTS if any(one in fault.name for one in words))

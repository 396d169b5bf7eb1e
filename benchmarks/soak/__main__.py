"""A whole cluster under all kinds of traffic and faults, for hours; every answer is judged.

A command of its own, ``python -m benchmarks.soak --hours 24``. It exits with 1 where a rule was
broken, or too many faults did not fire. Ctrl-C ends it in order, with a report of what it found.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path

from benchmarks.control.faults_site import Site
from benchmarks.harness import command
from benchmarks.harness.board_nodes import BoardNodes
from benchmarks.harness.command import REPORTS, ProgressLine, add_outputs
from benchmarks.harness.victims import Ground
from benchmarks.soak.clients import Access, Asker, Clients
from benchmarks.soak.ending import left_over, orphans, settled
from benchmarks.soak.faults import Faults
from benchmarks.soak.judge import Ending, Judge
from benchmarks.soak.operator import SEEDS, Operator
from benchmarks.soak.questions import ordinary_questions
from benchmarks.soak.report import CALM, END_STATE, ORPHANS, SoakRun, render
from benchmarks.soak.resources import ResourceSampler, figures_of
from benchmarks.soak.script import Script, answers, with_adapter_truths, with_truths
from rkserve.bench.processes import BenchFailed, Json
from rkserve.bench.results import machine
from rkserve.bench.systems import MODEL
from rkserve.config.serve_config import resolve_folder

HOUR_S = 3600.0
PUBLISHED_HOURS = 0.4  # as few as make a report that is published
ROUTERS = 2
TELL_S = 1.0
REPORT = REPORTS / "soak.md"
# What a model that also makes embeddings says of it.
EMBEDDING = "embedding:\n  pooling: last\n  normalize: true\n"
GROUP: Json = {
    # Its boards fail far more often than it allows for.
    "crash_limit": 100_000,
    "queue_limit": 64,
    "health_check_period_s": 1.0,
}


@dataclass(frozen=True)
class Asked:
    """The options of the command line."""

    hours: float
    boards: int
    streams: int
    fault_every: float
    seed: int
    tokens: int
    time_scale: float
    only: list[str] | None
    output: Path | None
    json: Path | None


def options(arguments: Sequence[str]) -> Asked:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--boards", type=int, default=4, help="each on a node of its own")
    parser.add_argument("--streams", type=int, default=16, help="clients with one request each")
    parser.add_argument("--fault-every", type=float, default=30.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer, at most")
    parser.add_argument("--time-scale", type=float, default=0.5, help="of the boards' clocks")
    parser.add_argument(
        "--only", action="append", help="only faults with this in their name; again"
    )
    add_outputs(parser, REPORT)
    asked = Asked(**vars(parser.parse_args(arguments)))
    if asked.output is None and asked.hours >= PUBLISHED_HOURS and not asked.only:
        asked = replace(asked, output=REPORT)
    return asked


@dataclass
class Found:
    """Findings of a run so far, which are reported also where it ends early."""

    judge: Judge = field(default_factory=Judge)
    sampler: ResourceSampler | None = None
    clients: Clients | None = None
    begun_s: float | None = None
    took_s: float = 0.0
    loads: list[float] = field(default_factory=list)
    interrupted: bool = False


def main(arguments: Sequence[str]) -> int:
    """Run it; return the exit code: 1 where a rule was broken, or the run failed."""
    asked, found = options(arguments), Found()
    code = command.run(lambda folder: soak(asked, folder, ProgressLine(), found))
    if found.begun_s is None:  # it has not begun to break anything
        return code
    result = result_of(asked, found)
    publish = code == 0 and not found.interrupted
    judge = found.judge
    figures = {
        "flaws": dict(judge.flaws),
        "examples": judge.examples,
        "faults": {name: asdict(one) for name, one in judge.faults.items()},
        "kinds": {
            kind: {ending.value: count for ending, count in one.endings.items()}
            for kind, one in judge.kinds.items()
        },
        "calls": {what: dict(counts) for what, counts in judge.calls.items()},
        "roles": [asdict(one) for one in result.roles],
    }
    command.deliver(render(result), figures, asked.output if publish else None, asked.json)
    if code or not result.passed:
        return code or command.FAILED
    return command.INTERRUPTED if found.interrupted else 0


def result_of(asked: Asked, found: Found) -> SoakRun:
    """Sum a run up."""
    sampler, clients = found.sampler, found.clients
    roles = (
        []
        if sampler is None
        else figures_of(sampler.traces.values(), sampler.zombies, found.took_s)
    )
    how = (
        f"{asked.streams} clients, {asked.boards} boards of one place each on nodes of their own, "
        f"{ROUTERS} Routers behind HAProxy, answers of {asked.tokens} tokens at "
        f"{asked.time_scale:g} times the time of a real board, a fault every "
        f"{asked.fault_every:g} s, seed {asked.seed}."
    )
    load = sum(found.loads) / len(found.loads) if found.loads else 0.0
    seen = {} if clients is None else clients.seen
    return SoakRun(machine(), found.judge, roles, how, found.took_s, load, seen, found.interrupted)


def soak(asked: Asked, folder: Path, progress: ProgressLine, found: Found) -> None:
    """Run all of it; add to ``found`` what it comes to. Raises ``BenchFailed``."""
    try:
        with ExitStack() as stack:
            _soak(asked, folder, progress, found, stack)
    finally:
        for one in left_over(folder):
            found.judge.flaw(ORPHANS, f"after the cluster's end: {one}")


@dataclass(frozen=True)
class Stage:
    """A cluster that serves, with all that is done to it."""

    asked: Asked
    folder: Path
    site: Site
    access: Access
    operator: Operator
    script: Script
    faults: Faults


def _soak(
    asked: Asked, folder: Path, progress: ProgressLine, found: Found, stack: ExitStack
) -> None:
    progress.begin("cluster")
    stage = _stage(asked, folder, progress, found.judge, stack)
    progress.end(f"{asked.boards} boards answer {len(stage.script.plain)} questions")
    found.clients = Clients(stage.access, stage.script, found.judge, asked.streams, asked.seed)
    found.sampler = ResourceSampler(folder)
    found.begun_s = time.monotonic()
    stack.callback(found.sampler.stop)
    for part in (found.sampler, found.clients, stage.operator):
        part.start()
    progress.begin("soak")
    try:
        _break(asked, stage.faults, found, progress)
    except KeyboardInterrupt:
        found.interrupted = True
    finally:
        found.took_s = time.monotonic() - found.begun_s
        progress.note("ending clients and calls")
        found.clients.stop()
        stage.operator.stop()
    progress.note("looking at the state in the end")
    _judge_end(stage, found.judge, found.clients.seen)
    progress.end(_summary(found))


def _stage(
    asked: Asked, folder: Path, progress: ProgressLine, judge: Judge, stack: ExitStack
) -> Stage:
    """Start everything, and ask for all truths. Raises ``BenchFailed``."""
    progress.note("starting the nodes")
    admin = secrets.token_hex(16)
    model = _model(folder)
    cluster = BoardNodes(folder, front=True)
    stack.callback(cluster.close)
    cluster.start(
        name="soak",
        model=str(model),
        boards=asked.boards,
        time_scale=asked.time_scale,
        load_ms=500.0,
        group=GROUP,
        router={"replicas": ROUTERS, "admin_key_file": str(_key_file(folder, admin))},
    )
    progress.note("waiting for the boards")
    site = Site(cluster.address, folder, lambda: [cluster.pid], admin)
    ground = Ground(site, cluster, asked.boards, random.Random(f"boards {asked.seed}"))
    ground.all_back()
    access = Access(*cluster.address, _infer_key(site), admin)
    operator = Operator(site, judge, asked.seed)
    progress.note("asking what must be answered")
    script = _script(asked, access, operator, model.name)
    rng = random.Random(f"faults {asked.seed}")
    faults = Faults(site, ground, judge, rng, routers=ROUTERS, only=asked.only or ())
    return Stage(asked, folder, site, access, operator, script, faults)


def _break(asked: Asked, faults: Faults, found: Found, progress: ProgressLine) -> None:
    """Make faults for so long. Raises ``BenchFailed`` where the cluster is beyond them."""
    assert found.begun_s is not None
    assert found.clients is not None
    until_s = found.begun_s + asked.hours * HOUR_S
    due_s = found.begun_s + asked.fault_every / 2
    while time.monotonic() < until_s:
        if time.monotonic() >= due_s:
            name = faults.draw()
            progress.note(f"{_summary(found)}; now: {name}")
            faults.make(name)
            due_s = max(due_s + asked.fault_every, time.monotonic())
        if not found.clients.alive:
            raise BenchFailed("the clients have ended")
        found.loads.append(os.getloadavg()[0])
        for flaw in found.judge.fresh():
            progress.end(flaw)
        left_s = until_s - time.monotonic()
        progress.note(f"{_summary(found)}; {left_s / 60:.1f} min to go")
        time.sleep(max(0.0, min(TELL_S, due_s - time.monotonic(), left_s)))


def _summary(found: Found) -> str:
    judge, clients = found.judge, found.clients
    got = 0 if clients is None else clients.answers
    missed = sum(one.missed for one in judge.faults.values())
    flaws = sum(judge.flaws.values())
    return f"{got} answers, {judge.fired} faults ({missed} not fired), {flaws} broken rules"


def _judge_end(stage: Stage, judge: Judge, seen: Mapping[str, int]) -> None:
    """Hold the cluster to what it must be once nothing is done to it any more."""
    site, operator = stage.site, stage.operator
    for flaw in settled(site, stage.asked.boards, operator.adapters):
        judge.flaw(END_STATE, flaw)
    for one in orphans(site, stage.folder):
        judge.flaw(ORPHANS, f"without a parent: {one}")
    for kind in [kind for kind, size in seen.items() if not size]:
        judge.flaw("one of those who look received nothing", kind)
    operator.push()
    ask = partial(Asker.once, stage.access)
    everything = [*stage.script.plain, *stage.script.adapter]
    for outcome in asyncio.run(answers(ask, stage.script, everything)):
        if outcome.ending is not Ending.WHOLE or outcome.found != outcome.truth:
            judge.flaw(CALM, f"{outcome.kind}: {outcome.ending.value}, {outcome.detail}")


def _script(asked: Asked, access: Access, operator: Operator, model: str) -> Script:
    """Ask everything before the first fault. Raises ``BenchFailed``."""
    ask = partial(Asker.once, access)
    questions = ordinary_questions(model, asked.tokens)
    script = Script.untried(questions, operator.adapters.seed_of)
    script = asyncio.run(with_truths(ask, script, model, asked.tokens))
    for _ in range(SEEDS):
        if not operator.push():
            raise BenchFailed("an adapter was not served before the first fault")
        seed = operator.adapters.seeds[operator.adapters.active[0]]
        script = asyncio.run(with_adapter_truths(ask, script, seed))
    return script


def _model(folder: Path) -> Path:
    """Copy the model, which makes embeddings too, and has room for versions of an adapter."""
    model = folder / MODEL.name
    shutil.copytree(resolve_folder(MODEL), model)
    with (model / "rkserve.yaml").open("a", encoding="utf-8") as file:
        file.write(EMBEDDING)
    return model


def _key_file(folder: Path, key: str) -> Path:
    path = folder / "admin_key"
    path.touch(mode=0o600)
    path.write_text(f"{key}\n", encoding="utf-8")
    return path


def _infer_key(site: Site) -> str:
    """Make the clients' key. Raises ``BenchFailed`` where keys are not asked for."""
    made = site.post("/v1/keys", name="clients", scopes=["infer"])
    if made.status != HTTPStatus.OK:
        raise BenchFailed(f"no key for the clients: HTTP {made.status}: {made.body}")
    bare = Site(site.address, Path(), site.roots)
    status, _, _ = bare.call("GET", "/v1/models")
    if status != HTTPStatus.UNAUTHORIZED:
        raise BenchFailed(f"a call without a key was answered by HTTP {status}")
    return str(made.body["value"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The kill run: boards are lost one after the other under load, and every answer is checked.

A command of its own, ``python -m benchmarks.kills``: it takes long, and everything
else that is measured on the machine would suffer from it. It exits with 1 where a request or a
character was lost, or came twice, or a replica ended with its library.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.control.answers import Answer
from benchmarks.control.faults_site import Site
from benchmarks.control.load import Streams, ask_once
from benchmarks.harness import command
from benchmarks.harness.board_nodes import BoardNodes
from benchmarks.harness.command import REPORTS, ProgressLine, add_outputs
from benchmarks.harness.exchange import Truth
from benchmarks.harness.processes import chat_body
from benchmarks.harness.victims import Ground, Victim, strike, ways, ways_of_any_kind
from benchmarks.kills.report import (
    KillFigures,
    KillRun,
    MixedTruths,
    Phase,
    Truths,
    judge,
    render,
    truth_of,
)
from rkserve.bench.processes import BenchFailed, Json
from rkserve.bench.results import machine
from rkserve.bench.systems import MODEL, RELEASE
from rkserve.config.serve_config import resolve_folder
from rkserve.models.folder import open_model_folder
from tests.support.values.tiny_gguf import tiny_folder

# A replica takes seconds of CPU to come back, and an engine a fraction of one.
SHARES = {"abort() in the library": 55, "replica, SIGKILL": 15, "library hangs": 25, "node": 5}
MIXED_SHARES = {
    "engine, SIGKILL": 50,
    "engine, SIGSTOP": 20,
    "replica, SIGKILL": 20,
    "node": 10,
}
# Each NPU of a mixed fleet has a board of both NPU groups.
MIXED_GROUPS: list[Json] = [
    {"name": "npu-a", "rknpu": 0.5, "base_domain_id": 0},
    {"name": "npu-b", "rknpu": 0.5, "base_domain_id": 1},
    {"name": "cpu", "cpu": {"threads": 1}},
]
MIXED_NPUS, MIXED_CPUS = 2, 2
PROMPTS = 24
LIMIT_S = 7200.0
REPORT = REPORTS / "kills.md"
MIXED_REPORT = REPORTS / "kills-mixed.md"
FULL_STREAMS = 64
# As few as make a full run, whose report is published.
FULL_KILLS, FULL_MIXED_KILLS = 1000, 200
ROUTER: Json = {"report_s": 0.3, "max_continuations": 20}
GROUP: Json = {
    # A hang is noticed after this: what is measured is the cluster, and not the patience.
    "patience": {"first_token_s": 5.0, "token_s": 2.0, "abort_s": 0.2},
    "crash_limit": 100_000,
    "queue_limit": 64,
    "health_check_period_s": 1.0,
}


@dataclass(frozen=True)
class Asked:
    """The options of the command line."""

    kills: int
    streams: int
    boards: int
    tokens: int
    time_scale: float
    seed: int
    mixed: bool
    output: Path | None
    json: Path | None

    @property
    def nodes(self) -> int:
        """The nodes with boards; those of a mixed fleet are given."""
        return MIXED_NPUS + MIXED_CPUS if self.mixed else self.boards


def options(arguments: Sequence[str]) -> Asked:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--kills", type=int, help=f"default: {FULL_KILLS}, or {FULL_MIXED_KILLS}")
    parser.add_argument("--streams", type=int, default=FULL_STREAMS)
    parser.add_argument("--boards", type=int, default=6, help="each on a node of its own")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--time-scale", type=float, default=0.2, help="of the boards' clocks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--mixed",
        action="store_true",
        help=f"{MIXED_NPUS} nodes with a board of two NPU groups each, and {MIXED_CPUS} that "
        "compute a tiny model of the same vocabulary on their CPU, in place of --boards",
    )
    add_outputs(parser, REPORT)
    given = vars(parser.parse_args(arguments))
    full = FULL_MIXED_KILLS if given["mixed"] else FULL_KILLS
    kills = full if given["kills"] is None else given["kills"]
    boards = 2 * MIXED_NPUS + MIXED_CPUS if given["mixed"] else given["boards"]
    asked = Asked(**{**given, "kills": kills, "boards": boards})
    if asked.output is None and asked.kills >= full and asked.streams >= FULL_STREAMS:
        asked = replace(asked, output=MIXED_REPORT if asked.mixed else REPORT)
    return asked


def main(arguments: Sequence[str]) -> int:
    """Run it; return the exit code: 1 where an answer was lost or wrong, or the run failed."""
    asked = options(arguments)
    found: list[KillFigures] = []
    begun_s = time.monotonic()
    code = command.run(lambda folder: kill_boards(asked, folder, ProgressLine(), found))
    if found:  # a run that did not come to its end shows what it has found
        deliver(asked, found, time.monotonic() - begun_s, publish=code == 0)
    return code or (0 if all(one.clean for one in found) else command.FAILED)


def kill_boards(
    asked: Asked, folder: Path, progress: ProgressLine, found: list[KillFigures]
) -> None:
    """Kill as often as was asked for, and add to ``found`` what each way of it came to.

    Raises ``BenchFailed``.
    """
    rng = random.Random(asked.seed)
    with ExitStack() as stack:
        progress.begin("cluster")
        progress.note("starting the nodes")
        cluster = BoardNodes(folder)
        stack.callback(cluster.close)
        mixed: Json = {"groups": MIXED_GROUPS, "npus": MIXED_NPUS} if asked.mixed else {}
        cluster.start(
            name="kills",
            model=str(_mixed_model(folder) if asked.mixed else resolve_folder(MODEL)),
            boards=asked.nodes,
            time_scale=asked.time_scale,
            load_ms=100.0,
            group=GROUP,
            router=ROUTER,
            **mixed,
        )
        site = Site(cluster.address, folder, lambda: [cluster.pid])
        ground = Ground(site, cluster, asked.boards, rng)
        ground.all_back()
        bodies = _bodies(asked.tokens)
        progress.note("asking what must be answered")
        truths = _mixed_truths(site, asked) if asked.mixed else _truths(site.address, bodies)
        progress.end(f"{asked.boards} boards answer")
        shares = MIXED_SHARES if asked.mixed else SHARES
        for name, way in (ways_of_any_kind if asked.mixed else ways)(ground).items():
            times = round(asked.kills * shares[name] / 100)
            if times > 0:
                progress.begin(name)
                begun_s = time.monotonic()
                streams = Streams(site.address, bodies, asked.streams, LIMIT_S)
                answers = _struck(streams, ground, way, times, progress.note)
                ended = ground.replicas_ended()
                found.append(judge(Phase(name, times, tuple(answers), ended), truths))
                ground.all_back()
                progress.end(f"{times} kills in {time.monotonic() - begun_s:.0f} s")


def _struck(
    streams: Streams,
    ground: Ground,
    way: Callable[[Victim], bool],
    times: int,
    say: Callable[[str], None],
) -> list[Answer]:
    """Lose so many boards while clients ask; return what they got. Raises ``BenchFailed``."""
    streams.start()
    try:
        for done in strike(ground, way, times):
            say(f"{done} of {times}")
    finally:
        answers = streams.stop()
    return answers


def _bodies(tokens: int) -> list[Json]:
    """Different prompts; those of several languages have characters of several tokens."""
    said = ["Write 4000 tokens about story number {}.", "Greet me in many languages, number {}."]
    return [
        chat_body(MODEL.name, [{"role": "user", "content": said[n % len(said)].format(n)}], tokens)
        for n in range(PROMPTS)
    ]


def _mixed_model(folder: Path) -> Path:
    """Make a folder of the simulated chat model with a GGUF file of the same vocabulary beside."""
    made = tiny_folder(folder / MODEL.name)
    weights = open_model_folder(resolve_folder(MODEL)).require_weights()
    (made / weights.name).symlink_to(weights)
    return made


def _mixed_truths(site: Site, asked: Asked) -> MixedTruths:
    told = (site.get("/v1/boards") or {"data": []})["data"]
    npus = [one["id"] for one in told if one["release"] == RELEASE]
    if len(npus) != 2 * MIXED_NPUS:
        raise BenchFailed(f"of the boards {npus} are NPUs, and there should be {2 * MIXED_NPUS}")
    return MixedTruths(npus, asked.tokens)


def _truths(address: tuple[str, int], bodies: Sequence[Json]) -> Truths:
    """Ask twice while nothing is killed. Raises ``BenchFailed`` where that differs."""
    first, second = (_told(ask_once(address, bodies)) for _ in range(2))
    if first != second:
        raise BenchFailed("the same prompts were answered differently before the first kill")
    return Truths(first)


def _told(answers: Sequence[Answer]) -> dict[int, Truth]:
    for one in answers:
        if one.exchange.error or not one.whole or one.continued:
            raise BenchFailed(f"an answer broke before the first kill: {one.exchange.error}")
    return {one.prompt: truth_of(one) for one in answers}


def deliver(
    asked: Asked, found: Sequence[KillFigures], took_s: float, *, publish: bool = True
) -> None:
    """Print the report, and put it where it was asked for if it is to be published."""
    where = (
        f"{asked.boards} boards of one place each on {asked.nodes} nodes ({MIXED_NPUS} with a "
        f"board of two NPU groups each, {MIXED_CPUS} that compute a tiny model on the CPU)"
        if asked.mixed
        else f"{asked.boards} boards of one place each on nodes of their own"
    )
    how = (
        f"{asked.streams} clients, {where}, "
        f"answers of {asked.tokens} tokens at {asked.time_scale:g} times the time of a "
        f"real board, seed {asked.seed}. More than half of the boards serve whenever one is "
        f"killed; one that hangs is given {GROUP['patience']['token_s']:g} s. The nodes are "
        "processes of one machine, so that a lost one's connections end at once."
    )
    text = render(KillRun(machine(), found, how, took_s, asked.mixed))
    figures = [asdict(one) for one in found]
    command.deliver(text, figures, asked.output if publish else None, asked.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

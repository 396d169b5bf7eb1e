"""What is measured, and how: the cases as steps on children that others made.

It knows when to load, when to read the processes and for how long. It computes nothing; see
``figures``.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rkserve.bench.child import BenchFailed, Child, Json
from rkserve.bench.figures import CpuUse, flaws, flaws_of_hang_ups
from rkserve.bench.procfs import PROC, Memory, memory, read
from rkserve.bench.prompts import messages_of_length
from rkserve.bench.stream import Exchange, HangUp
from rkserve.config import BoardGroupConfig, SimulatedConfig, engine_environ, resolve_folder
from rkserve.modelfolder import open_model_folder
from rkserve.native.sim.build import ensure_built
from rkserve.native.sim.profiles import Profile
from rkserve.native.sim.profiles import load as load_profiles
from rkserve.wire.renderer import Renderer

HOST = "127.0.0.1"
MODEL = Path("models/sim-chat")
PROFILE = "rk3588-qwen2.5-1.5b-w8a8"
RELEASE = "1.3.0"
PROMPT_TOKENS = 128
NEW_TOKENS = 64
PROMPTS = 16
WARM_UPS = 2
CLIENTS_PER_BOARD = 4
LEFT_TOKENS = 2000  # of an answer that its client leaves: two minutes of a board
LEFT_AFTER = (2, 8)  # events, of which the first brings no text
NEXT_TOKENS = 2  # of the answer that waits behind it
SETTLE_S = 2.0  # after a deployment: Ray's start-up work is not the work of idling
ANSWER_S = 60.0  # more than one paced answer takes, with a queue in front of it
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Load:
    """One load of cases (c) and (d)."""

    boards: int
    clients: int
    time_scale: float
    new_tokens: int = NEW_TOKENS

    @property
    def name(self) -> str:
        """What it is called in tables."""
        parts = [
            "1 board" if self.boards == 1 else f"{self.boards} boards",
            "1 client" if self.clients == 1 else f"{self.clients} clients",
        ]
        if self.new_tokens != NEW_TOKENS:
            parts.append(f"{self.new_tokens} tokens")
        if 0 < self.time_scale < 1:
            parts.append(f"{1 / self.time_scale:.0f} times as fast")
        return ", ".join(parts)

    @property
    def case(self) -> str:
        """The case that it belongs to."""
        return "(c)" if self.time_scale == 1 else "(d)"


@dataclass
class Pair:
    """Cases (a) and (b): the same runs without and through the cluster, in turns."""

    alone: list[Exchange] = field(default_factory=list)
    through: list[Exchange] = field(default_factory=list)
    cpu: CpuUse = field(default_factory=lambda: CpuUse(cores()))


@dataclass
class Loaded:
    """A load of cases (c) and (d). The window is from ``start_s`` to ``end_s``."""

    load: Load
    exchanges: list[Exchange]
    start_s: float
    end_s: float
    load_end_s: float
    cpu: CpuUse
    memories: dict[str, list[Memory]]
    idle: CpuUse


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def profile() -> Profile:
    """The profile whose speed is imitated."""
    return next(p for p in load_profiles() if p.name == PROFILE)


def cycle_s() -> float:
    """Seconds of one run on a board: prefill and every further token."""
    board = profile()
    context = range(PROMPT_TOKENS + 1, PROMPT_TOKENS + NEW_TOKENS)
    decode_ms = sum(board.decode_ms(length) for length in context)
    return (board.prefill_ms(PROMPT_TOKENS) + decode_ms) / 1e3


def step_ms() -> float:
    """Milliseconds of one decode step, at the length of the prompt."""
    return profile().decode_ms(PROMPT_TOKENS)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class Bench:
    """The children, and what can be measured with them. Close it: that ends them."""

    def __init__(self, folder: Path, say: Say) -> None:
        self._folder, self._say = folder, say
        self._stack = ExitStack()
        self._port = free_port()
        self._model = open_model_folder(resolve_folder(MODEL))
        renderer = Renderer(self._model)
        self._messages = [
            messages_of_length(renderer, PROMPT_TOKENS, number) for number in range(PROMPTS)
        ]
        self._ids = [renderer.chat(_as_parsed(messages)).ids for messages in self._messages]
        self._alone: Child | None = None
        self._client: Child | None = None
        self._cluster: Child | None = None
        self._deployed: tuple[int, float] | None = None

    def close(self) -> None:
        """End all children and what they started."""
        self._stack.close()

    # -- the cases ----------------------------------------------------------------------------

    def pair(self, rounds: int, *, through: bool) -> Pair:
        """Make ``rounds`` runs alone and as many through the cluster, in turns."""
        found = Pair()
        if through:
            self._deploy(boards=1, time_scale=1.0)
            for warm_up in range(WARM_UPS):
                self._one_answer(warm_up)
        for warm_up in range(WARM_UPS):
            self._one_run(warm_up)
        for number in range(rounds):
            self._say(f"round {number + 1} of {rounds}")
            # The order changes so that what drifts within a round hits both alike.
            for is_alone in (number % 2 == 0, number % 2 == 1):
                if is_alone:
                    found.alone.append(self._one_run(number))
                elif through:
                    found.through.append(self._metered_answer(number, found.cpu))
        return found

    def hang_ups(self, rounds: int) -> list[HangUp]:
        """Leave ``rounds`` answers of a single board, each at another moment of a decode step."""
        self._deploy(boards=1, time_scale=1.0)
        rng = random.Random(0)
        found = []
        for number in range(rounds):
            self._say(f"hang-up {number + 1} of {rounds}")
            found.append(self._one_hang_up(number, rng))
        faults = flaws_of_hang_ups(found, PROMPT_TOKENS, NEXT_TOKENS)
        if faults:
            raise BenchFailed(f"not fit for measuring: {'; '.join(faults)}")
        return found

    def loaded(self, load: Load, seconds: float, idle_s: float) -> Loaded:
        """Keep boards saturated and measure a window of ``seconds``."""
        self._deploy(load.boards, load.time_scale)
        idle = self._idle(idle_s) if idle_s else CpuUse(cores())
        warm_s = max(2.0, 2.0 * cycle_s() * load.time_scale)
        tail_s = max(0.5, 1.5 * cycle_s() * load.time_scale)
        start_s = time.monotonic() + warm_s + 0.5
        end_s = start_s + seconds
        self._send(
            clients=load.clients,
            stagger_s=cycle_s() * load.time_scale,
            until_s=end_s + tail_s,
            new_tokens=load.new_tokens,
        )
        cpu = CpuUse(cores())
        self._sleep_until(start_s, "warming up")
        before = read(PROC, self._pids())
        self._sleep_until(end_s, "measuring")
        cpu.add(before, read(PROC, self._pids()))
        memories = memory(PROC, self._pids())
        exchanges = self._exchanges(tail_s + ANSWER_S)
        _hold_to(exchanges, load.new_tokens)
        return Loaded(load, exchanges, before.at_s, end_s, end_s + tail_s, cpu, memories, idle)

    # -- one answer ---------------------------------------------------------------------------

    def _one_run(self, number: int) -> Exchange:
        ids = self._ids[number % PROMPTS]
        command = {"do": "run", "ids": ids, "max_tokens": NEW_TOKENS}
        return Exchange.from_json(self._alone_child().ask(command, ANSWER_S))

    def _one_answer(self, number: int) -> Exchange:
        # As the loads of (c), so that nothing differs but the number of clients.
        self._send(
            clients=1,
            stagger_s=0.0,
            until_s=time.monotonic() + ANSWER_S,
            new_tokens=NEW_TOKENS,
            requests_each=1,
            first=number,
        )
        exchanges = self._exchanges(ANSWER_S + 5)
        _hold_to(exchanges, NEW_TOKENS)
        return exchanges[0]

    def _one_hang_up(self, number: int, rng: random.Random) -> HangUp:
        leaving, waiting = (self._messages[(number + k) % PROMPTS] for k in range(2))
        command = {
            "do": "hang up",
            "host": HOST,
            "port": self._port,
            "leaving": _body(leaving, self._model.id, LEFT_TOKENS),
            "waiting": _body(waiting, self._model.id, NEXT_TOKENS),
            "events": rng.randrange(*LEFT_AFTER),
            "pause_s": rng.uniform(0, step_ms() / 1e3),
            "until_s": time.monotonic() + ANSWER_S,
        }
        return HangUp.from_json(self._client_child().ask(command, ANSWER_S + 5))

    def _metered_answer(self, number: int, cpu: CpuUse) -> Exchange:
        before = read(PROC, self._pids())
        answer = self._one_answer(number)
        cpu.add(before, read(PROC, self._pids()))
        return answer

    def _idle(self, seconds: float) -> CpuUse:
        cpu = CpuUse(cores())
        self._sleep_until(time.monotonic() + SETTLE_S, "settling")
        before = read(PROC, self._pids())
        self._sleep_until(before.at_s + seconds, "idling")
        cpu.add(before, read(PROC, self._pids()))
        return cpu

    # -- the children -------------------------------------------------------------------------

    def _send(self, *, new_tokens: int, first: int = 0, **command: float) -> None:
        order = [(first + index) % PROMPTS for index in range(PROMPTS)]
        bodies = [_body(self._messages[index], self._model.id, new_tokens) for index in order]
        to = {"do": "load", "host": HOST, "port": self._port, "bodies": bodies}
        self._client_child().send({**to, **command})

    def _exchanges(self, timeout_s: float) -> list[Exchange]:
        answer = self._client_child().receive(timeout_s)
        return [Exchange.from_json(value) for value in answer["exchanges"]]

    def _deploy(self, boards: int, time_scale: float) -> None:
        if self._deployed == (boards, time_scale):
            return
        self._say(f"deploying {boards} boards" if boards > 1 else "deploying 1 board")
        self._deployed = None
        self._cluster_child().ask(
            {
                "do": "deploy",
                "boards": boards,
                "time_scale": time_scale,
                "profile": PROFILE,
                "release": RELEASE,
                "model": str(self._model.path),
                "folder": str(self._folder),
                "port": self._port,
            },
            timeout_s=300.0,
        )
        self._deployed = (boards, time_scale)

    def _alone_child(self) -> Child:
        if self._alone is None:
            simulated = SimulatedConfig(profile=PROFILE, release=RELEASE)
            group = BoardGroupConfig(name="alone", model=MODEL, simulated=simulated)
            self._alone = self._child("rkserve.bench.alone", engine_environ(group, "alone"))
            model, library = str(self._model.path), str(ensure_built(RELEASE))
            self._alone.ask({"do": "load", "model": model, "library": library}, ANSWER_S)
        return self._alone

    def _client_child(self) -> Child:
        if self._client is None:
            self._client = self._child("rkserve.bench.client")
        return self._client

    def _cluster_child(self) -> Child:
        if self._cluster is None:
            self._say("starting Ray")
            quiet = {"RAY_USAGE_STATS_ENABLED": "0"}
            self._cluster = self._child("rkserve.bench.cluster", quiet)
            folder, port = str(self._folder), self._port
            self._cluster.ask({"do": "start", "folder": folder, "port": port}, 120.0)
        return self._cluster

    def _child(self, module: str, environ: dict[str, str] | None = None) -> Child:
        child = Child(module, self._folder / f"{module.rpartition('.')[2]}.log", environ)
        self._stack.callback(child.close)
        return child

    def _pids(self) -> list[int]:
        return [child.pid for child in (self._cluster, self._client) if child is not None]

    def _sleep_until(self, at_s: float, doing: str) -> None:
        while (left_s := at_s - time.monotonic()) > 0:
            self._say(f"{doing}, {left_s:.0f} s to go")
            time.sleep(min(left_s, 1.0))


def _as_parsed(messages: Sequence[Json]) -> list[Json]:
    return [dict(message) for message in messages]


def _body(messages: Sequence[Json], model: str, new_tokens: int) -> Json:
    return {
        "model": model,
        "messages": list(messages),
        "max_tokens": new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _hold_to(exchanges: Sequence[Exchange], new_tokens: int) -> None:
    """Raise ``BenchFailed`` where an answer was not what is measured here."""
    found = flaws(exchanges, PROMPT_TOKENS, new_tokens)
    if found or not exchanges:
        raise BenchFailed(f"not fit for measuring: {'; '.join(found) or 'no answer at all'}")

"""Runs one after the other against what is there, until they are over or Ctrl-C; keeps all of them.

It knows the order of things, and neither what is asked nor what is made of the answers.
"""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rkserve.bench.figures import figures
from rkserve.bench.monitors import BoardMonitor
from rkserve.bench.player import OnRunProgress, PlayedRun, Player, PlayOptions, RunProgress
from rkserve.bench.results import RunResult
from rkserve.bench.slo import Slo
from rkserve.bench.systems import SystemUnderTest
from rkserve.bench.target import Target
from rkserve.bench.trace import Trace

Show = Callable[[str, RunProgress], None]
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Bench:
    """Plays traces and keeps what came of them in ``runs``, also where it is interrupted."""

    site: SystemUnderTest
    slo: Slo = field(default_factory=Slo)
    show: Show = lambda _name, _told: None
    runs: list[RunResult] = field(default_factory=list)
    interrupted: bool = False

    def run(self, target: Target, trace: Trace, plan: PlayOptions, name: str = "") -> RunResult:
        """Play a trace. Raises ``BenchFailed`` where it cannot even begin."""
        name = name or target.name
        watch = self.site.watch()
        if watch is not None:
            watch.start()
        boards = BoardMonitor(target) if plan.capture else None
        if boards is not None:
            boards.start()
        played = play(replace(target, name=name), trace, plan, lambda told: self.show(name, told))
        found = figures(played, self.slo)
        result = (
            RunResult(played, found) if watch is None else RunResult(played, found, *watch.stop())
        )
        if boards is not None:
            result = replace(result, boards=boards.stop())
        self.runs.append(result)
        self.interrupted = self.interrupted or played.interrupted
        return result

    def judged_by(self, slo: Slo) -> None:
        """Hold all runs to other limits."""
        self.slo = slo
        self.runs = [replace(one, figures=figures(one.played, slo)) for one in self.runs]

    def targets(self) -> Iterator[Target]:
        """Come to one target after the other, until Ctrl-C."""
        for name in self.site.names:
            if self.interrupted:
                return
            yield self.site.enter(name)


def play(target: Target, trace: Trace, plan: PlayOptions, tell: OnRunProgress) -> PlayedRun:
    """Play a trace; Ctrl-C or an ordinary kill ends it, and what there was is returned."""

    _allow_many_sockets()

    async def whole() -> PlayedRun:
        player = Player(target, trace, plan)
        with _stopped_by_signals(player):
            return await player.play(tell)

    return asyncio.run(whole())


def _allow_many_sockets() -> None:
    """An open loop has as many connections as a slow server makes it have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextmanager
def _stopped_by_signals(player: Player) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        loop.add_signal_handler(number, player.stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

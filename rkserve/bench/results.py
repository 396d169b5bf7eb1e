"""The results of a benchmark, as JSON and as lines of outcomes. Pure.

They name neither date, host, path nor key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rkserve.bench.child import Json
from rkserve.bench.figures import Comparison, Slo, TraceFigures
from rkserve.bench.outcome import OutcomeKind, RequestOutcome
from rkserve.bench.player import PlayedRun
from rkserve.bench.processes import CpuUse, ProcessMemory
from rkserve.bench.tables import Machine, TargetVerdict
from rkserve.bench.target import BoardSample


@dataclass(frozen=True)
class RunResult:
    """One run, what the processes that were watched took for it, and the boards' own figures where
    it captures.
    """

    played: PlayedRun
    figures: TraceFigures
    cpu: CpuUse | None = None
    memories: Mapping[str, Sequence[ProcessMemory]] = field(default_factory=dict)
    boards: Sequence[BoardSample] = ()


@dataclass(frozen=True)
class BenchResults:
    """All runs. ``about`` says in a few words each what was played, and on what.

    ``appendix`` is what else the report says, as Markdown, and ``more`` the same as JSON.
    """

    title: str
    machine: Machine
    about: Mapping[str, str]
    slo: Slo
    runs: Sequence[RunResult]
    comparisons: Sequence[Comparison] = ()
    verdicts: Sequence[TargetVerdict] = ()
    complete: bool = True
    appendix: str = ""
    more: Json = field(default_factory=dict)

    @property
    def answered(self) -> int:
        """Answers of all runs together."""
        return sum(run.figures.answered for run in self.runs)

    @property
    def error_share(self) -> float:
        """Requests of all runs that ended in an error, by those that ended."""
        errors = sum(sum(run.figures.errors.values()) for run in self.runs)
        ended = sum(run.figures.asked - run.figures.cut for run in self.runs)
        return errors / ended if ended else 0.0

    @property
    def unreachable(self) -> bool:
        """True if no request reached a server."""
        kinds = {one.kind for run in self.runs for one in run.played.outcomes}
        return kinds == {OutcomeKind.CONNECT}

    @property
    def missed(self) -> list[TargetVerdict]:
        """Targets that were not reached."""
        return [one for one in self.verdicts if not one.reached]

    def to_json(self) -> Json:
        """Return everything but the single outcomes."""
        return {
            "title": self.title,
            "complete": self.complete,
            "machine": _plain(asdict(self.machine)),
            "about": dict(self.about),
            "slo": asdict(self.slo),
            "runs": [_run(run) for run in self.runs],
            "comparisons": [_plain(asdict(one)) for one in self.comparisons],
            "targets": [{**asdict(one), "reached": one.reached} for one in self.verdicts],
            **self.more,
        }


def outcome_lines(runs: Sequence[RunResult]) -> Iterator[str]:
    """Yield each request of all runs as a line of JSON; times count from the start of its run."""
    for run in runs:
        for one in run.played.outcomes:
            yield json.dumps(_outcome(one, run.played), ensure_ascii=False)


def _run(run: RunResult) -> Json:
    prefix, generator = run.figures.prefix, run.figures.generator
    said: Json = _plain(asdict(run.figures))
    said["prefix"] |= {"ratio": prefix.ratio, "of_reusable": prefix.of_reusable}
    said["generator"]["doubt"] = generator.doubt
    said["processes"] = {
        name: {
            "cpu_ms": None if run.cpu is None else run.cpu.by_part_ms.get(name),
            "processes": len(run.memories.get(name, ())),
            "rss_bytes": sum(one.rss for one in run.memories.get(name, ())),
            "pss_bytes": sum(one.pss for one in run.memories.get(name, ())),
        }
        for name in {**(run.cpu.by_part_ms if run.cpu else {}), **run.memories}
    }
    return said


def _outcome(one: RequestOutcome, played: PlayedRun) -> Json:
    since_s = played.start_s
    said: Json = _plain(asdict(replace(one, captured=None)))
    asked = said.pop("asked")
    del said["captured"]  # it has a file of its own
    times = {
        name: None if value is None else round(value - since_s, 6)
        for name, value in (
            ("due_s", one.asked.due_s),
            ("sent_s", one.asked.sent_s),
            ("head_s", one.head_s),
            ("end_s", one.end_s),
            ("over_s", one.over_s),
        )
    }
    texts = [round(at_s - since_s, 6) for at_s in one.text_s]
    who = {"run": played.target, "session": asked["session"], "turn": asked["turn"]}
    return {**who, **said, **times, "text_s": texts}


def _plain(value: Any) -> Any:
    """Return the value as plain JSON types."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value

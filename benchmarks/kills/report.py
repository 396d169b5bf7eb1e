"""The outcome of a kill run: lost and wrong answers, times of silence, and its report. Pure.

It contains no date, no host name and no path, so that two reports differ in figures only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.control.answers import Answer
from benchmarks.harness.exchange import Truth
from benchmarks.harness.figures import machine_line
from rkserve.bench.results import Machine, figure, table

_HEAD = [
    "killed",
    "times",
    "answers",
    "went on",
    "times",
    "lost",
    "wrong",
    "silence p50, ms",
    "p99, ms",
    "next token p50, ms",
    "p99, ms",
]

_WRONG = {
    False: "its text, its finish reason or its usage is not what the same cluster said before the "
    "first kill",
    True: "its usage is not what it must be, or its text, if NPUs alone gave it, not that of their "
    "other answers to the prompt",
}


@dataclass(frozen=True)
class Phase:
    """One kind of kill: how often, and what clients got meanwhile.

    ``replicas_ended`` counts replicas that ended though only their library had failed.
    """

    name: str
    kills: int
    answers: tuple[Answer, ...]
    replicas_ended: int = 0


@dataclass(frozen=True, slots=True)
class KillFigures:
    """The figures of one phase.

    ``silences_ms`` are the longest between two pieces of text of each answer that went on once;
    ``waits_ms`` are the times from when the Router noticed a loss to the next token, of the same.
    ``flaws`` name the first answers that are not what they must be.
    """

    name: str
    kills: int
    answers: int
    continued: int
    continuations: int
    lost: int
    wrong: int
    silences_ms: tuple[float, ...]
    waits_ms: tuple[float, ...]
    calm_ms: tuple[float, ...]
    flaws: tuple[str, ...]
    replicas_ended: int = 0

    @property
    def clean(self) -> bool:
        """True if no request and no character was lost or came twice, and no replica ended with
        its library.
        """
        return self.lost == self.wrong == self.replicas_ended == 0


@dataclass
class MixedTruths:
    """The references of a mixed fleet, whose kinds of board answer the same prompt differently.

    Every answer is held to its usage: a prompt of the same length, and as many as ``tokens`` where
    its limit ended it. The first answer to a prompt that ``exact`` boards gave alone is the
    reference of their others. CPUs are not exact: floats are added up in another order where a part
    of the prompt is in the KV cache, and a model of random weights has likeliest tokens that are
    nearly equal.
    """

    exact: Collection[str]
    tokens: int
    _known: dict[int, Truth] = field(default_factory=dict)
    _prompts: dict[int, int] = field(default_factory=dict)

    def flaw(self, answer: Answer) -> str:
        """Return why an answer is wrong; an empty string where it is not."""
        found = truth_of(answer)
        if set(answer.exchange.board.split(",")) <= set(self.exact):
            truth = self._known.setdefault(answer.prompt, found)
            if found != truth:
                return truth.difference(found)
        prompt = self._prompts.setdefault(answer.prompt, found.prompt_tokens)
        whole = {"length": (self.tokens,), "stop": range(1, self.tokens + 1)}
        if found.prompt_tokens == prompt and found.completion_tokens in whole[found.finish]:
            return ""
        return f": {found}, and its prompt has {prompt}"


@dataclass(frozen=True)
class Truths:
    """The references of a fleet of one kind, by the number of the prompt."""

    known: Mapping[int, Truth]

    def flaw(self, answer: Answer) -> str:
        """Return why an answer is wrong; an empty string where it is not."""
        truth, found = self.known[answer.prompt], truth_of(answer)
        return "" if found == truth else truth.difference(found)


def judge(phase: Phase, truths: Truths | MixedTruths) -> KillFigures:
    """Hold every answer of a phase to what it must be, by its prompt."""
    lost = [one for one in phase.answers if one.exchange.error or not one.whole]
    whole = [one for one in phase.answers if not one.exchange.error and one.whole]
    wrong = [flaw for one in whole if (flaw := truths.flaw(one))]
    moved = [one for one in whole if one.continued]
    once = [one for one in moved if one.continued == 1]
    flaws = [f"lost: {one.exchange.error or 'no end'}" for one in lost]
    flaws += [f"wrong{flaw}" for flaw in wrong]
    return KillFigures(
        phase.name,
        phase.kills,
        len(phase.answers),
        len(moved),
        sum(one.continued for one in moved),
        len(lost),
        len(wrong),
        tuple(silence for one in once if (silence := longest_silence_ms(one)) is not None),
        tuple(one.lost_ms for one in once),
        tuple(
            silence
            for one in whole
            if not one.continued and (silence := longest_silence_ms(one)) is not None
        ),
        tuple(flaws[:5]),
        phase.replicas_ended,
    )


def longest_silence_ms(answer: Answer) -> float | None:
    """Return the longest time between two pieces of an answer's text; None of fewer pieces."""
    gaps = (after - before for before, after in pairwise(answer.exchange.content_s))
    longest_s = max(gaps, default=None)
    return None if longest_s is None else longest_s * 1e3


def truth_of(answer: Answer) -> Truth:
    """Return an answer as the reference of others to the same prompt."""
    usage = answer.exchange
    return Truth(answer.text, answer.finish, usage.prompt_tokens, usage.completion_tokens)


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which this share of them is; None of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def total(found: Iterable[KillFigures]) -> KillFigures:
    """Return what all phases came to together."""
    every = list(found)
    return KillFigures(
        "all",
        sum(one.kills for one in every),
        sum(one.answers for one in every),
        sum(one.continued for one in every),
        sum(one.continuations for one in every),
        sum(one.lost for one in every),
        sum(one.wrong for one in every),
        tuple(ms for one in every for ms in one.silences_ms),
        tuple(ms for one in every for ms in one.waits_ms),
        tuple(ms for one in every for ms in one.calm_ms),
        (),
        sum(one.replicas_ended for one in every),
    )


@dataclass(frozen=True, slots=True)
class KillRun:
    """The results of a run, and its description."""

    machine: Machine
    found: Sequence[KillFigures]
    how: str
    took_s: float
    mixed: bool = False


def render(run: KillRun) -> str:
    """Return the report."""
    every = total(run.found)
    bars = [
        ["board kills", "", str(every.kills), ""],
        ["requests lost", "0", str(every.lost), _verdict(every.lost)],
        ["answers with a character lost or doubled", "0", str(every.wrong), _verdict(every.wrong)],
        [
            "board replicas that ended with their library",
            "0",
            str(every.replicas_ended),
            _verdict(every.replicas_ended),
        ],
    ]
    return (
        f"# Benchmark of kills{' in a mixed fleet' if run.mixed else ''}\n\n"
        f"Written by `make bench-kills{'-mixed' if run.mixed else ''}`, which starts a Ray cluster "
        f"of its own with {'simulated NPUs and CPUs' if run.mixed else 'simulated boards'}, ends "
        "one after the other of them while clients stream, and holds every answer to "
        f"what it must be; {run.took_s / 60:.0f} minutes. What is done about a board that is lost "
        "is in [continuing.md](../explanation/continuing.md).\n\n"
        f"{machine_line(run.machine)}\n"
        "## What it must reach\n\n"
        f"{table(['what', 'target', 'measured', 'verdict'], bars)}\n"
        f"{_kinds(run, every)}"
    )


def _verdict(found: int) -> str:
    return "missed" if found else "reached"


def _kinds(run: KillRun, every: KillFigures) -> str:
    return (
        "## By what was killed\n\n"
        f"{table(_HEAD, [_row(one) for one in [*run.found, every]])}\n"
        f"{run.how} An answer is *lost* if it ended with an error or not at all, and *wrong* if "
        f"{_WRONG[run.mixed]}. *Silence* is the longest time between two pieces of text that the "
        "client of an answer saw which went on once; of one that never had to, it is "
        f"{figure(quantile(every.calm_ms, 0.5), 0)} ms (p50) and "
        f"{figure(quantile(every.calm_ms, 0.99), 0)} ms (p99). *Next token* is what of it is left "
        "once the Router has noticed the loss: the wait for a place at another board, and the "
        "prefill there.\n"
        f"{_flaws(run.found)}"
    )


def _row(one: KillFigures) -> list[str]:
    counts = (one.kills, one.answers, one.continued, one.continuations, one.lost, one.wrong)
    times = (
        quantile(one.silences_ms, 0.5),
        quantile(one.silences_ms, 0.99),
        quantile(one.waits_ms, 0.5),
        quantile(one.waits_ms, 0.99),
    )
    return [one.name, *map(str, counts), *(figure(ms, 0) for ms in times)]


def _flaws(found: Sequence[KillFigures]) -> str:
    lines = [f"- {one.name}: {flaw}\n" for one in found for flaw in one.flaws]
    return "\n" + "".join(lines) if lines else ""

"""The state after a fault, compared with the state that it must have. Pure.

Each fault is tried several times. A trial records whether its moment was hit, when the cluster had
recovered by itself, and the answers and operations meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.control.answers import ABORTED, Answer
from benchmarks.control.checks import SHOWN, Era, Said, Truth
from rkserve.bench.processes import Json
from rkserve.bench.results import TargetVerdict

ENDED = ("succeeded", "failed", "undone")
READY = "ready"
# In these, what an operation of that kind asks for is served.
STANDING = ("succeeded", "partial")
ROLLOUT = "adapter_rollout"


@dataclass(frozen=True, slots=True)
class Sight:
    """The cluster's own reports at one moment: the answers of four routes.

    ``operations`` are those that a trial has to do with; an answer that did not come is None.
    """

    boards: Json | None
    paused: Json | None
    adapters: Json | None
    operations: Mapping[str, Json | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done:
    """A fault that was made. ``over_s`` is when the last of it was over, on the clients' clock.

    ``killed`` are the boards of which a process was killed, ``dead`` those processes. ``version``
    is what must be served if the last of ``operations`` says that it stands. ``hit`` says whether
    it happened at its moment, ``flaws`` what was seen to be wrong meanwhile. Between the moments of
    ``quiet_s`` no text may arrive. ``settled_s`` is how long it took, where that was looked at.
    """

    hit: bool
    over_s: float
    operations: tuple[str, ...] = ()
    killed: tuple[str, ...] = ()
    dead: tuple[int, ...] = ()
    version: str | None = None
    flaws: tuple[str, ...] = ()
    quiet_s: tuple[float, float] | None = None
    settled_s: float | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """Answers that ended with an error, or not at all.

    Those ``of_killed`` boards were in their prefill or decode there, one for each killed process at
    most; ``beyond`` are all others.
    """

    of_killed: int = 0
    beyond: int = 0
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """One time that a fault was tried. ``settled_s`` of None: not within the limit, see ``behind``.

    ``mixed`` answers have tokens of several versions, or others than their version's; ``stale``
    ones began after the cluster was whole with a version that was not served any more.
    """

    hit: bool
    settled_s: float | None
    behind: tuple[str, ...]
    states: tuple[str, ...]
    left_paused: bool
    answers: int
    mixed: int
    stale: int
    lost: Lost
    flaws: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FaultFigures:
    """All trials of one fault. Durations in seconds, of those that hit the moment."""

    name: str
    hits: int
    tries: int
    settled_s: tuple[float, ...]
    states: Mapping[str, int]
    unsettled: int
    left_paused: int
    answers: int
    mixed: int
    stale: int
    lost: int
    lost_of_killed: int
    flaws: Sequence[str]
    errors: Sequence[str]
    trials: Sequence[Trial] = ()

    @property
    def p50_s(self) -> float | None:
        """The middle of the times in which the cluster was whole again."""
        return median(self.settled_s) if self.settled_s else None

    @property
    def max_s(self) -> float | None:
        """The longest of them."""
        return max(self.settled_s, default=None)


# -- is it whole again? ---------------------------------------------------------------------------


def behind(sight: Sight, boards: Collection[str], dead: Collection[int] = ()) -> list[str]:
    """Return the differences from the desired state; empty once the cluster is whole.

    Each of ``boards`` must be ready at the epoch of now, with all versions that are named, and with
    none of the processes that are ``dead``: what is last known of a board may be older than its
    death.
    """
    if sight.boards is None or sight.paused is None or sight.adapters is None:
        return ["it does not answer"]
    found = [*_running(sight.operations), *pauses_left(sight.paused)]
    known = {one["id"]: one for one in sight.boards["data"]}
    epoch = sight.paused["epoch"]
    for board in boards:
        one = known.get(board)
        found += [f"{board} is not there"] if one is None else _board_behind(one, epoch, dead)
    for line in sight.adapters["data"]:
        found += _line_behind(line, boards)
    return found


def pauses_left(paused: Json) -> list[str]:
    """Return the paused boards: by the desired state, and by the boards' own reports."""
    found = [
        f"{board} is paused"
        for board, one in paused["boards"].items()
        if one["paused"] or one["reported"]
    ]
    return found + [f"adapter {name} is paused" for name in paused["adapters"]]


def _running(operations: Mapping[str, Json | None]) -> list[str]:
    return [
        f"operation {'unknown' if one is None else one['kind'] + ' is ' + one['state']}"
        for one in operations.values()
        if one is None or one["state"] not in ENDED
    ]


def _board_behind(board: Json, epoch: int, dead: Collection[int]) -> list[str]:
    name = board["id"]
    if {board["pid"], board["engine_pid"]} & set(dead):
        return [f"{name} is known as it was before it died"]
    found = []
    if board["state"] != READY:
        found.append(f"{name} is {board['state']}: {board['reason']}")
    if board["epoch"] != epoch:
        found.append(f"{name} obeys epoch {board['epoch']} and not {epoch}")
    if board["missing"]:
        found.append(f"{name} lacks {board['missing']} versions")
    return found


def _line_behind(line: Json, boards: Collection[str]) -> list[str]:
    return [
        f"{board} has not {row['label']}"
        for row in line["versions"]
        for board in boards
        if not row["boards"].get(board, {}).get("staged")
    ]


# -- what the records say -------------------------------------------------------------------------


def record_flaws(done: Done, sight: Sight, line: str, active: str | None) -> list[str]:
    """Note where records deny what is served, or do not say what happened.

    ``active`` is the version of the ``line`` that was served before.
    """
    found = [flaw for one in sight.operations.values() if one for flaw in _reason_flaws(one)]
    if done.version is None or sight.adapters is None:
        return found
    served = active_version(sight.adapters, line)
    rollouts = [one for one in sight.operations.values() if one and one["kind"] == ROLLOUT]
    stands = any(
        one["state"] in STANDING and one["params"].get("version") == done.version
        for one in rollouts
    )
    if stands != (served == done.version):
        found.append(f"{served} is served, and the record of {done.version} says otherwise")
    elif not stands and served != active:
        found.append(f"{served} is served instead of {active}, which was not requested")
    return found


def active_version(adapters: Json, line: str) -> str | None:
    """Return the version that an adapter's bare name gets; None where there is no such adapter."""
    found = (one["active"] for one in adapters["data"] if one["name"] == line)
    return next(found, None)


def _reason_flaws(operation: Json) -> list[str]:
    """An operation that did not succeed says why; one that did names every board as done."""
    kind, state, error = operation["kind"], operation["state"], operation["error"]
    if state in ("failed", "undone"):
        told = bool(error and error["code"] and error["message"])
        return [] if told else [f"{kind} is {state} and does not say why"]
    return [f"{kind} is {state} with an error"] if error else []


# -- what became of answers -----------------------------------------------------------------------


def labels_said(letters: Mapping[str, Mapping[int, Said]], labels: Iterable[str]) -> Truth:
    """Return what versions say whose contents are known by a letter.

    A version of an adapter is called ``name@<letter><number>``; all other labels are names for the
    base model's weights, whose letter is empty.
    """
    return {
        (label, prompt): said
        for label in labels
        for prompt, said in letters[label.partition("@")[2][:1]].items()
    }


def labels_of(answers: Iterable[Answer]) -> set[str]:
    """Return every version that answers name."""
    return {span.version for one in answers for span in one.spans} | {
        one.version for one in answers if one.version
    }


def of_one_weights(one: Answer) -> Answer:
    """Return an answer of the base model as if its weights had one label, as the last says.

    A new label renames what runs from its next token on; the weights are the same.
    """
    spans = one.spans
    whole = all(this.end == after.start for this, after in pairwise(spans))
    if not spans or not whole or any("@" in span.version for span in spans):
        return one
    return replace(one, spans=(replace(spans[-1], start=spans[0].start),))


def served_after(labels: Iterable[str], served: Collection[str], settled_s: float) -> list[Era]:
    """Return when which version may begin an answer: each until then, and from then on these."""
    return [Era(label) if label in served else Era(label, until_s=settled_s) for label in labels]


def lost(answers: Iterable[Answer], killed: Iterable[str]) -> Lost:
    """Note which answers were lost, and of which of them a killed board was in the middle."""
    left = Counter(killed)
    of_killed, errors = 0, Counter[str]()
    # What had begun to speak there was surely the one that it was in the middle of.
    for one in sorted(filter(_is_lost, answers), key=lambda one: not one.exchange.content_s):
        exchange = one.exchange
        if left[exchange.board]:
            left[exchange.board] -= 1
            of_killed += 1
        else:
            text = "text" if exchange.content_s else "no text"
            errors[f"{exchange.board or 'no board'}, {text}: {exchange.error or ABORTED}"] += 1
    return Lost(of_killed, errors.total(), tuple(errors.elements()))


def _is_lost(one: Answer) -> bool:
    return bool(one.exchange.error) or not one.whole or one.finish == ABORTED


def late_texts(answers: Iterable[Answer], quiet_s: tuple[float, float] | None) -> list[str]:
    """Note how many texts arrived between two moments between which none may."""
    from_s, until_s = quiet_s or (0.0, 0.0)
    late = sum(from_s < at_s < until_s for one in answers for at_s in one.exchange.content_s)
    return [f"{late} texts while paused"] if late else []


# -- sums -----------------------------------------------------------------------------------------


def summed(name: str, trials: Sequence[Trial]) -> FaultFigures:
    """Sum up the trials of one fault. What is wrong counts also where the moment was missed."""
    flaws = Counter(flaw for one in trials for flaw in (*one.flaws, *one.behind))
    errors = Counter(error for one in trials for error in one.lost.errors)
    hits = [one for one in trials if one.hit]
    return FaultFigures(
        name=name,
        hits=len(hits),
        tries=len(trials),
        settled_s=tuple(one.settled_s for one in hits if one.settled_s is not None),
        states=dict(Counter(state for one in hits for state in one.states).most_common()),
        unsettled=sum(one.settled_s is None for one in trials),
        left_paused=sum(one.left_paused for one in trials),
        answers=sum(one.answers for one in trials),
        mixed=sum(one.mixed for one in trials),
        stale=sum(one.stale for one in trials),
        lost=sum(one.lost.beyond for one in trials),
        lost_of_killed=sum(one.lost.of_killed for one in trials),
        flaws=[f"{n} x {flaw}" for flaw, n in flaws.most_common(SHOWN)],
        errors=[f"{n} x {error}" for error, n in errors.most_common(SHOWN)],
        trials=trials,
    )


def fault_verdicts(found: Sequence[FaultFigures], times: int) -> list[TargetVerdict]:
    """Hold all faults together to what must be left of them: nothing."""
    counts: dict[str, Any] = {
        f"without {times} hits of their moment": sum(one.hits < times for one in found),
        "clusters not whole again by themselves": sum(one.unsettled for one in found),
        "clusters with a generation left paused": sum(one.left_paused for one in found),
        "answers of a mixture": sum(one.mixed for one in found),
        "answers lost beyond those of killed boards": sum(one.lost for one in found),
        "answers of a version that was gone": sum(one.stale for one in found),
        "records that hide what happened, and other flaws": sum(bool(one.flaws) for one in found),
    }
    return [
        TargetVerdict(f"faults: {what}", count, 0.0, at_most=True, unit="of them")
        for what, count in counts.items()
    ]

"""Verdicts from observations: pure, without the library and without processes.

A verdict is True, False, or None with the reason for which it is inconclusive. A crash or a hang is
an answer only where the tried behaviour caused it: before, the experiment is inconclusive. Verdicts
that compare counts or answers need a baseline in which these can be trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Figures = Mapping[str, Any]

LIBRARY_ERRORS = frozenset({"LoadFailed", "CallFailed", "NothingComputed"})
TRIAL = "trial"  # as ``experiments.TRIAL``
FEW = 8  # equal tokens that make two answers the same; fewer only where an answer is shorter
FASTER = 0.8  # the share of a time or count that counts as less
PAUSED, FINISHED = "paused", "finished"


@dataclass(frozen=True, slots=True)
class Observation:
    """The outcome of one experiment's process: figures, or the way in which it ended without.

    ``crash`` names the signal or exit code, ``hang_s`` is the time limit that was exceeded, and
    ``refused`` is an error of the library; ``stage`` is the last one reached before.
    """

    figures: Figures | None = None
    crash: str = ""
    hang_s: float = 0.0
    refused: str = ""
    error: str = ""  # the class of that error
    stage: str = "start"
    log: str = ""  # the library's last error lines
    seconds: float = 0.0

    @property
    def ending(self) -> str:
        """The end of an experiment without figures, in words."""
        last = f"; the library logged: {self.log}" if self.log else ""
        if self.crash:
            return f"crashed: {self.crash}{last}"
        if self.hang_s:
            return f"hung: nothing within {self.hang_s:g} s"
        return f"refused: {self.refused}{last}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The value of a quirk or an assumption; None is inconclusive, and ``why`` has the reason."""

    value: bool | None
    evidence: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The sound measures of this library: greedy answers repeat, sizes and counts are right."""

    repeats: bool = True
    kv: bool = True
    prefill: bool = True


Judge = Callable[[Figures], Verdict]


@dataclass(frozen=True, slots=True)
class Endings:
    """The values that an ending without figures proves; None proves nothing."""

    crash: bool | None = False
    hang: bool | None = False
    refused: bool | None = False


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    """One experiment: the quirk or assumption that it settles, and the reading of its outcome.

    ``needs`` names sound measures of the baseline.
    """

    name: str
    about: str
    judge: Judge
    quirk: bool = True
    needs: tuple[str, ...] = ()
    endings: Endings = Endings()


def verdict_of(plan: ExperimentPlan, seen: Observation, baseline: Baseline | None) -> Verdict:
    """Return the verdict of an experiment; without a ``baseline`` nothing is settled."""
    if seen.figures is None:
        return _of_ending(plan, seen, baseline)
    missing = [name for name in plan.needs if baseline is None or not getattr(baseline, name)]
    shown = figures_text(seen.figures)
    if missing:
        return Verdict(None, shown, f"the baseline does not hold: {', '.join(missing)}")
    try:
        return plan.judge(seen.figures)
    except (KeyError, TypeError, ValueError) as exc:
        return Verdict(None, shown, f"the figures are incomplete: {type(exc).__name__} {exc}")


def _of_ending(plan: ExperimentPlan, seen: Observation, baseline: Baseline | None) -> Verdict:
    endings = plan.endings
    if baseline is None:
        return Verdict(None, seen.ending, "the baseline failed")
    if seen.refused and seen.error not in LIBRARY_ERRORS:
        return Verdict(None, seen.ending, "the experiment could not be made")
    if seen.stage != TRIAL:
        return Verdict(None, seen.ending, f"it ended before the trial, at stage '{seen.stage}'")
    value = endings.crash if seen.crash else endings.hang if seen.hang_s else endings.refused
    if value is None:
        return Verdict(None, seen.ending, "this ending says nothing about the question")
    return Verdict(value, seen.ending)


def combined(plan: ExperimentPlan, verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of a repeated experiment.

    Where repetitions differ, the value of a crash counts, which is the cautious one: a single
    failure forbids. Facts, which have none, are inconclusive.
    """
    last, times = verdicts[-1], len(verdicts)
    if times == 1:
        return last
    values = [one.value for one in verdicts]
    cautious = plan.endings.crash
    if len(set(values)) == 1:
        return Verdict(last.value, f"{times} of {times} times: {last.evidence}", last.why)
    if cautious is not None and cautious in values:
        chosen = verdicts[values.index(cautious)]
        return Verdict(cautious, f"{values.count(cautious)} of {times} times: {chosen.evidence}")
    other = next(one for one in verdicts if one.value is not last.value)
    evidence = f"{last.evidence}; another time: {other.evidence}"
    return Verdict(None, evidence, f"{times} repetitions differ")


def figures_text(figures: Figures) -> str:
    """Return figures as ``name value`` pairs."""
    return ", ".join(f"{name} {_shown(value)}" for name, value in figures.items())


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " and ".join(map(str, value))
    return str(value)


def _settled(value: bool, figures: Figures) -> Verdict:
    return Verdict(value, figures_text(figures))


def _open(figures: Figures, why: str) -> Verdict:
    return Verdict(None, figures_text(figures), why)


def _alike(same: int, whole: int) -> bool:
    return same >= min(FEW, whole)


# -- the baseline ----------------------------------------------------------------------------------


def baseline_of(seen: Observation) -> Baseline | None:
    """Return the measures that the baseline found sound; None if it failed."""
    figures = seen.figures
    if figures is None or figures["end"] != FINISHED or not figures["tokens"]:
        return None
    off = figures["kv"] - figures["sent"] - figures["kept"]
    return Baseline(
        repeats=figures["repeated"],
        kv=off in (0, -1) and figures["kv_cleared"] == 0,
        prefill=figures["prefill_tokens"] == figures["sent"],
    )


def _baseline(figures: Figures) -> Verdict:
    sound = baseline_of(Observation(figures))
    limited = not figures["limits"] or figures["limited"] <= 5  # noqa: PLR2004 - as ordered
    good = sound == Baseline() and limited
    return _settled(good, figures)


# -- pauses ----------------------------------------------------------------------------------------


def _resumed(figures: Figures) -> Verdict:
    if figures["end"] != PAUSED:
        return _settled(False, figures)
    held = figures.get("held", -1)  # of a batch the binding cannot say it for each entry
    same = figures["same"] >= min(2 * FEW, figures["whole"])
    return _settled(figures["resumed"] == FINISHED and held == -1 and same, figures)


def _resumed_with_other(figures: Figures) -> Verdict:
    if figures["end"] != PAUSED:
        return _open(figures, "the run could not be paused")
    same = _alike(figures["same"], figures["whole"])
    return _settled(figures["resumed"] == FINISHED and same, figures)


def _logits_after_drain(figures: Figures) -> Verdict:
    if figures["end"] != PAUSED:
        return _open(figures, "the run could not be paused")
    return _settled(figures["agrees"], figures)


def _load_after_kill(figures: Figures) -> Verdict:
    if not figures["running"]:
        return _open(figures, "the other process made no run")
    return _settled(figures["end"] == FINISHED and figures["tokens"] > 0, figures)


def _range(figures: Figures) -> Verdict:
    if figures["end"] != PAUSED:
        return _open(figures, "the run could not be paused")
    if figures["after"] != figures["before"] - figures["range"]:
        return _settled(False, figures)
    return _settled(
        figures["resumed"] == FINISHED and _alike(figures["same"], figures["rest"]), figures
    )


def _drain(figures: Figures) -> Verdict:
    if not figures["limits"]:
        return Verdict(False, "the release has no limit per run")
    if figures["end"] != PAUSED:
        return _open(figures, "the run could not be paused")
    ended = figures["resumed"] == FINISHED and figures["tokens"] <= 1
    return _settled(ended and figures["next_same"], figures)


def _stop(figures: Figures) -> Verdict:
    if figures["end"] != PAUSED or not figures["next_same"]:
        return _settled(False, figures)
    abort_ms, pause_ms = figures["abort_median_ms"], figures["pause_median_ms"]
    if pause_ms >= FASTER * abort_ms:
        return _settled(False, figures)
    if max(figures["pause_ms"]) >= min(figures["abort_ms"]):
        return _open(figures, "the times overlap")
    return _settled(True, figures)


def _resume_prompt(figures: Figures) -> Verdict:
    if figures["end"] != PAUSED or figures["resumed"] != PAUSED:
        return _open(figures, "the run could not be paused")
    added, raw = figures["added"], figures["raw"]
    if figures["wrapped"] <= raw:
        return _open(figures, "the model's chat template adds nothing")
    if added == raw:
        return _settled(True, figures)
    return _settled(False, figures)


def _running(figures: Figures) -> Verdict:
    if figures["end"] != PAUSED:
        return _open(figures, "the run could not be paused")
    return _settled(figures["running"], figures)


# -- aborts ----------------------------------------------------------------------------------------


def _aborted(figures: Figures) -> Verdict:
    early = figures["more"] <= FEW or figures["more"] < figures["whole"] // 2
    return _settled(figures["end"] == FINISHED and early and figures["next_same"], figures)


def _kv_after_abort(figures: Figures) -> Verdict:
    if figures["end"] != FINISHED:
        return _open(figures, "the run was not aborted")
    if figures["held"] not in (0, -1):
        return _settled(False, figures)
    return _settled(_alike(figures["same"], figures["whole"]), figures)


# -- prompt caches and the KV cache ----------------------------------------------------------------


def _shortened(figures: Figures, prefill: int, sent: int) -> Verdict:
    if prefill < sent / 2:
        return _settled(True, figures)
    if prefill >= FASTER * sent:
        return _settled(False, figures)
    return _open(figures, f"{prefill} of {sent} tokens were prefilled: neither all nor few")


def _cache_after_abort(figures: Figures) -> Verdict:
    if not figures["file"]:
        return _open(figures, "no prompt cache was written")
    return _settled(figures["end"] == FINISHED and figures["same"], figures)


def _cache_load(figures: Figures) -> Verdict:
    if not figures["file"]:
        return _open(figures, "no prompt cache was written")
    if figures["single"] >= figures["sent"] / 2:
        return _open(figures, "a prompt cache does not shorten single turns either")
    return _shortened(figures, figures["prefill"], figures["sent"])


def _cache_save(figures: Figures) -> Verdict:
    if not figures["file"]:
        return _settled(False, figures)
    return _shortened(figures, figures["prefill"], figures["sent"])


def _cache_portable(figures: Figures) -> Verdict:
    if figures["file"] == "written":
        return _open(figures, "the file is written: run the probe with it on another board")
    if not figures["file"]:
        return _open(figures, "it takes two boards: run the probe with --cache-file FILE on one")
    if not figures["elsewhere"]:
        return _open(figures, "the file was written on this board: copy it to another one")
    if figures["end"] != FINISHED or not figures["same"]:
        return _settled(False, figures)
    return _shortened(figures, figures["prefill"], figures["sent"])


def _cache_ids(figures: Figures) -> Verdict:
    if not figures["file"]:
        return _open(figures, "no prompt cache was written")
    return _settled(figures["same"], figures)


def _prefix(figures: Figures) -> Verdict:
    return _shortened(figures, figures["again"], figures["first"])


def _append(figures: Figures) -> Verdict:
    if figures["end"] != FINISHED:
        return _settled(False, figures)
    same = _alike(figures["same"], figures["whole"])
    # Answers of equal length leave equal sizes, whether or not the last token is counted.
    return _settled(same and figures["kv_appended"] == figures["kv_at_once"], figures)


# -- tokens, rows and the rest ---------------------------------------------------------------------


def _waiting(figures: Figures) -> Verdict:
    if not figures["waiting"]:
        return _open(figures, "no WAITING callback came")
    return _settled(figures["match"], figures)


def _hidden(figures: Figures) -> Verdict:
    hidden, logits = figures["hidden_finish"], figures["logits_finish"]
    if hidden != logits:
        return _open(figures, "FINISH came in one of the two modes only")
    return _settled(hidden, figures)


def _logits(figures: Figures) -> Verdict:
    once = figures["callbacks"] <= 2  # noqa: PLR2004 - one without data may come first
    return _settled(figures["rows"] == figures["sent"] and figures["agrees"] and once, figures)


def _logits_history(figures: Figures) -> Verdict:
    sent = figures["sent"]
    sizes = figures["kv_0"] == sent and figures["kv_1"] == sent + 1
    return _settled(sizes and figures["agrees_0"] and figures["agrees_1"], figures)


def _eos(figures: Figures) -> Verdict:
    at, tokens = figures["eos_at"], figures["tokens"]
    if figures["end"] != FINISHED or not tokens:
        return _open(figures, "the run failed")
    if 0 <= at < tokens - 1:
        return _settled(True, figures)
    if tokens < figures["cap"]:
        return _settled(False, figures)
    return _open(figures, "the answer reached the limit without an end token")


def _thinking(figures: Figures) -> Verdict:
    if not figures["opened"] and not figures["closed"]:
        return _open(figures, "the model did not think")
    if figures["closed"] and figures["after"]:
        return _settled(False, figures)
    if figures["end"] != FINISHED or figures["tokens"] >= figures["cap"]:
        return _open(figures, "the thoughts did not end within the limit")
    return _settled(True, figures)


def _frees(figures: Figures) -> Verdict:
    size = figures["bytes"]
    if figures["kept"] < size / 2:
        return _open(figures, "the library keeps no buffer after a plain return, either")
    return _settled(figures["freed"] < size / 2, figures)


def _cpus(figures: Figures) -> Verdict:
    cores = figures.get("cores", 0)
    if not figures["loaded"] or cores < 2:  # noqa: PLR2004 - one CPU is not fewer than one core
        return _open(figures, "the model uses one NPU core, or the library did not log how many")
    return _settled(True, figures)


def _init(figures: Figures) -> Verdict:
    return _open(figures, "the library loaded half a file")


def _async(figures: Figures) -> Verdict:
    return _settled(figures["end"] == FINISHED and figures["same"], figures)


def _template(figures: Figures) -> Verdict:
    return _settled(figures["prefill"] == figures["sent"] and figures["same"], figures)


def _detected(figures: Figures) -> Verdict:
    return Verdict(True, f"release {figures['release']}")


def _assumption(name: str, about: str, judge: Judge, **more: Any) -> ExperimentPlan:
    return ExperimentPlan(name, about, judge, quirk=False, **more)


_COMPARED = ("repeats",)
_SIZED = ("repeats", "kv")
# Of a fact, rather than a permission, neither a crash nor a hang says the value.
_FACT = Endings(None, None, None)

DETECTED, BASELINE = "detected", "baseline"
PLANS: Sequence[ExperimentPlan] = (
    _assumption(DETECTED, "Version string and struct probe agree on a known release.", _detected),
    _assumption(
        BASELINE,
        "Greedy answers repeat; KV size, prefill count and token limit are right.",
        _baseline,
    ),
    _assumption(
        "load_after_kill",
        "The model loads after another process was killed in its run.",
        _load_after_kill,
    ),
    _assumption(
        "pause_single_turn",
        "A paused single turn holds everything before the token of the pause, and resumes.",
        _resumed,
        needs=_SIZED,
    ),
    _assumption(
        "resume_with_other_token",
        "A paused single turn resumes with another token than that of the pause.",
        _resumed_with_other,
        needs=_COMPARED,
    ),
    ExperimentPlan(
        "pause_with_history", "A run with keep_history pauses and resumes.", _resumed, needs=_SIZED
    ),
    ExperimentPlan("pause_with_batch", "A batch pauses and resumes.", _resumed, needs=_COMPARED),
    _assumption(
        "batch_of_two",
        "A batch of two gives the answers of two single runs.",
        lambda figures: _settled(
            figures["end"] == FINISHED and _alike(figures["same"], figures["whole"]), figures
        ),
        needs=_COMPARED,
    ),
    _assumption(
        "clear_range_single_turn",
        "A range clear of a paused single turn cuts positions, and it resumes.",
        _range,
        needs=_SIZED,
    ),
    ExperimentPlan(
        "clear_range_with_history",
        "A range clear of a paused run with keep_history cuts positions, and it resumes.",
        _range,
        needs=_SIZED,
    ),
    ExperimentPlan(
        "drain_by_limit",
        "A resumption with a limit of 1 ends a paused run.",
        _drain,
        needs=_COMPARED,
    ),
    ExperimentPlan(
        "stop_by_pause",
        "A pause that is drained ends a run faster than an abort.",
        _stop,
        needs=_COMPARED,
    ),
    ExperimentPlan(
        "resume_with_prompt",
        "PROMPT text resumes a run without a template.",
        _resume_prompt,
        needs=("kv",),
    ),
    _assumption(
        "abort_from_thread",
        "An abort from another thread ends the run, and the next one is as before.",
        _aborted,
        needs=_COMPARED,
    ),
    ExperimentPlan(
        "abort_in_callback",
        "An abort inside the callback ends the run.",
        _aborted,
        needs=_COMPARED,
    ),
    ExperimentPlan(
        "prompt_cache_after_abort",
        "A prompt cache loads after an aborted run.",
        _cache_after_abort,
        needs=_COMPARED,
    ),
    ExperimentPlan(
        "prompt_cache_load_with_history",
        "A prompt cache shortens runs with keep_history.",
        _cache_load,
        needs=("prefill",),
    ),
    ExperimentPlan(
        "prompt_cache_save_with_history",
        "A run with keep_history saves its whole context.",
        _cache_save,
        needs=("kv", "prefill"),
    ),
    ExperimentPlan(
        "prompt_cache_portable",
        "A prompt cache of another board loads, and shortens the prefill.",
        _cache_portable,
        needs=(*_COMPARED, "prefill"),
    ),
    _assumption(
        "cache_compares_ids",
        "Another prompt on a loaded prompt cache is answered as without one.",
        _cache_ids,
        needs=_COMPARED,
    ),
    ExperimentPlan("run_async", "rkllm_run_async answers as rkllm_run.", _async, needs=_COMPARED),
    ExperimentPlan(
        "prefix_reuse_in_ram",
        "The same single turn again is prefilled from where it differs.",
        _prefix,
        needs=("prefill",),
        endings=_FACT,
    ),
    ExperimentPlan(
        "append_tokens_with_history",
        "Token input is appended verbatim to the live context.",
        _append,
        needs=_SIZED,
    ),
    ExperimentPlan(
        "kv_valid_after_abort",
        "An aborted run leaves exactly what was delivered.",
        _kv_after_abort,
        needs=_SIZED,
    ),
    ExperimentPlan(
        "waiting_token_id_valid",
        "The IDs of WAITING callbacks spell the text.",
        _waiting,
        endings=_FACT,
    ),
    _assumption(
        "finish_in_hidden_modes", "FINISH follows hidden states and logits.", _hidden, endings=_FACT
    ),
    _assumption(
        "logits_rows",
        "Logits have a row for each token, agree with greedy generation, and end there.",
        _logits,
        needs=_COMPARED,
    ),
    _assumption(
        "logits_after_drain",
        "Logits agree on a handle whose paused run was drained.",
        _logits_after_drain,
        needs=_COMPARED,
    ),
    ExperimentPlan(
        "logits_with_history",
        "Logits with keep_history keep exactly the tokens sent.",
        _logits_history,
        needs=_SIZED,
    ),
    ExperimentPlan(
        "eos_uint32_misread", "An answer goes on after its end token.", _eos, endings=_FACT
    ),
    ExperimentPlan(
        "thinking_ends_run", "A run ends at the end of the thoughts.", _thinking, endings=_FACT
    ),
    _assumption(
        "is_running_while_paused", "rkllm_is_running is 1 while paused.", _running, endings=_FACT
    ),
    ExperimentPlan("return_2_frees_buffer", "Return value 2 frees the rows at once.", _frees),
    ExperimentPlan("fewer_cpus_than_cores", "The model loads with one CPU.", _cpus),
    _assumption(
        "init_may_crash",
        "A model file that is cut short crashes rkllm_init.",
        _init,
        endings=Endings(crash=True, hang=None),
    ),
    _assumption(
        "empty_template",
        "With an emptied template rendered text is tokenized with its control tokens.",
        _template,
        needs=("repeats", "prefill"),
    ),
)


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """One experiment of a report: its verdict, the seconds that it took, and what it is about."""

    plan: ExperimentPlan
    verdict: Verdict
    seconds: float


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Everything that may be shared: no prompt, no answer, no path, no name of a host."""

    simulated: bool
    board: Mapping[str, Any]
    library: Mapping[str, Any]
    model: Mapping[str, Any]
    results: tuple[ExperimentResult, ...]
    known: Mapping[str, bool]  # the values of the quirk table for this release
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())

    @property
    def quirks(self) -> dict[str, bool]:
        """The settled values by name."""
        return {
            one.plan.name: one.verdict.value
            for one in self.results
            if one.plan.quirk and one.verdict.value is not None
        }

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {
            "format": REPORT_FORMAT,
            "simulated": self.simulated,
            "board": dict(self.board),
            "library": dict(self.library),
            "model": dict(self.model),
            "seconds": round(self.seconds, 1),
            "notes": list(self.notes),
            "experiments": [
                {
                    "name": one.plan.name,
                    "kind": "quirk" if one.plan.quirk else "assumption",
                    "about": one.plan.about,
                    "value": one.verdict.value,
                    "table": self.known.get(one.plan.name) if one.plan.quirk else None,
                    "evidence": one.verdict.evidence,
                    "inconclusive": one.verdict.why,
                    "seconds": round(one.seconds, 2),
                }
                for one in self.results
            ],
        }

    def as_markdown(self) -> str:
        """Return the report as a page."""
        facts = {**self.board, **self.library, **self.model}
        settled = sum(one.verdict.value is not None for one in self.results)
        lines = [
            f"# Probe of RKLLM {self.library.get('release', '(unknown release)')}"
            f"{' (simulated library)' if self.simulated else ''}",
            "",
            *(f"- {name.replace('_', ' ')}: {value}" for name, value in facts.items() if value),
            "",
            f"{settled} of {len(self.results)} experiments settled in {self.seconds:.0f} s.",
            "",
            *(f"Note: {note}\n" for note in self.notes),
            *self._table("Quirks", quirk=True),
            *self._table("Other assumptions", quirk=False),
        ]
        return "\n".join(lines).rstrip() + "\n"

    def _table(self, title: str, *, quirk: bool) -> list[str]:
        rows = [one for one in self.results if one.plan.quirk is quirk]
        if not rows:
            return []
        name = "quirk" if quirk else "assumption"
        head = [f"| {name} | value | table | s | evidence |", "| --- | --- | --- | --- | --- |"]
        return [f"## {title}", "", *head, *(self._row(one) for one in rows), ""]

    def _row(self, one: ExperimentResult) -> str:
        verdict = one.verdict
        value = "inconclusive" if verdict.value is None else str(verdict.value).lower()
        known = self.known.get(one.plan.name) if one.plan.quirk else None
        table = "" if known is None else str(known).lower()
        if verdict.value is not None and known is not None and known is not verdict.value:
            value = f"**{value}**"
        why = f"{verdict.why}; " if verdict.why else ""
        text = f"{why}{verdict.evidence}".replace("|", "\\|")
        return f"| {one.plan.name} | {value} | {table} | {one.seconds:.1f} | {text} |"


REPORT_FORMAT = "rkserve-probe-1"

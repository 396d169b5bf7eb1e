"""The probe of a runtime: each experiment in a child process with a time limit, and the report.

The library is never opened in this process. A child that crashes or hangs is a result; one that
survives SIGKILL, inside a stuck driver, ends the probe with the results so far.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from rkserve.api.common.renderer import Renderer
from rkserve.board.engine.telemetry import read_telemetry
from rkserve.core.child_process import clean_environ
from rkserve.core.errors import ConfigError
from rkserve.core.files import file_digest, replace_text, sync
from rkserve.models.folder import ModelFolder
from rkserve.native.quirks import NAMES, QUIRKS_FORMAT
from rkserve.probe.experiments import PROMPTS, WORD, ExperimentOrder
from rkserve.probe.verdicts import (
    BASELINE,
    DETECTED,
    PLANS,
    Baseline,
    ExperimentPlan,
    ExperimentResult,
    Observation,
    ProbeReport,
    Verdict,
    baseline_of,
    combined,
    verdict_of,
)

ROOT = Path("/")
# Memory that is freed returns to the system at once, so that its return can be measured.
ALLOCATOR: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
FIRST = (DETECTED, BASELINE)  # made once, whatever else is wanted
GRACE_S = 5.0  # from SIGKILL to the end of the process
LOOK_S = 0.01
LOG_BYTES = 1 << 20
THINKING = ("<think>", "</think>")
_PATH = re.compile(r"(?<![\w.])~?/[^\s'\",;:()]+")
_ERROR_LINE = re.compile(r"(?m)^(?:E (?:rkllm|RKNN)[^:]*: .*|GGML_ASSERT.*)$")
# Of the library's own lines at a load.
_FACTS: Mapping[str, re.Pattern[str]] = {
    "driver": re.compile(r"rknpu driver version: ([\w.]+)"),
    "platform": re.compile(r"platform: (\w+)"),
    "toolkit": re.compile(r"rkllm-toolkit version: ([\w.]+)"),
    "npu_cores": re.compile(r"npu_core_num: (\d+)"),
    "quantisation": re.compile(r"model_dtype: (\w+)"),
}

OnResult = Callable[[ExperimentResult], None]


OF_TWO_BOARDS = "prompt_cache_portable"


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """The library and model to probe. ``environ`` is added to that of the children.

    ``cache_file`` is a prompt cache of another board, or the one to write for it.
    """

    library: Path
    folder: ModelFolder
    simulated: bool = False
    allow_unlisted: bool = False
    only: Sequence[str] = ()
    limit_s: float = 120.0
    repeat: int = 1
    environ: Mapping[str, str] = field(default_factory=dict)
    cache_file: Path | None = None


class Stuck(Exception):
    """A child that SIGKILL does not end."""


class ProbeRun:
    """One probe: the children's orders, and the library's lines."""

    def __init__(self, options: ProbeOptions) -> None:
        self._options = options
        self._order = _order(options)
        self.facts: dict[str, str] = {}
        self.release: dict[str, Any] = {}
        self.results: list[ExperimentResult] = []
        self.notes: list[str] = []

    def make_all(self, on_result: OnResult) -> None:
        """Make the experiments in order, until one shows that none can be settled.

        Raises:
            Stuck: a child does not end.
        """
        options, baseline = self._options, None
        for plan in _wanted(options):
            times = 1 if plan.name in FIRST else options.repeat
            observed = [self.observe(plan.name) for _ in range(times)]
            seen = observed[-1]
            if plan.name == BASELINE:
                baseline = baseline_of(seen)
            if plan.name == DETECTED:
                self.release = dict(seen.figures or {})
            verdict = combined(plan, [_verdict(plan, one, baseline) for one in observed])
            result = ExperimentResult(plan, verdict, sum(one.seconds for one in observed))
            self.results.append(result)
            on_result(result)
            if (reason := _hopeless(plan, seen, baseline)) is not None:
                self.notes.append(reason)
                return

    def observe(self, name: str) -> Observation:
        """Make one experiment in a child process. Raises ``Stuck``."""
        began_s = time.monotonic()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
            code = self._child(name, out, log)
            lines, logged = _json_lines(out), _text(log)
        self._note(logged)
        seen = _observation(lines, code, self._options.limit_s)
        if seen.figures is not None and name == "fewer_cpus_than_cores":
            cores = int(self.facts.get("npu_cores", 0))
            seen = replace(seen, figures={**seen.figures, "cores": cores})
        return replace(
            seen,
            refused=self._scrubbed(seen.refused),
            log=self._scrubbed(_last_errors(logged)) if seen.figures is None else "",
            seconds=time.monotonic() - began_s,
        )

    def _child(self, name: str, out: IO[bytes], log: IO[bytes]) -> int | None:
        """Run a child to its end and return its code; None beyond the time limit."""
        with tempfile.TemporaryFile() as order:
            order.write(json.dumps(asdict(replace(self._order, experiment=name))).encode())
            order.seek(0)
            # With a session of its own, Ctrl-C ends the probe, and the probe ends the child.
            child = subprocess.Popen(
                (sys.executable, "-m", "rkserve.probe.experiments"),
                stdin=order,
                stdout=out,
                stderr=log,
                env={**clean_environ(), **ALLOCATOR, **self._options.environ},
                start_new_session=True,
            )
        try:
            return child.wait(self._options.limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(child)

    def _note(self, logged: str) -> None:
        for name, pattern in _FACTS.items():
            if (found := pattern.search(logged)) is not None:
                self.facts.setdefault(name, found[1])

    def _scrubbed(self, text: str) -> str:
        """Return a text without paths and without this machine's name."""
        text = _PATH.sub("(path)", text)
        node = os.uname().nodename
        return text.replace(node, "(host)") if node else text


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)  # and a process that it has started
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        raise Stuck(f"a child survives SIGKILL for {GRACE_S:g} s: the driver is stuck") from None


def _order(options: ProbeOptions) -> ExperimentOrder:
    folder = options.folder
    renderer = Renderer(folder)
    if renderer.tokenizer is None or folder.tokenizer_file is None:
        raise ConfigError(
            f"{folder.path} has no tokenizer.json: the experiments compare token IDs. Add the file."
        )
    if not folder.settings.eos_token_ids:
        raise ConfigError(f"{folder.path}: eos_token_ids of rkserve.yaml are not set.")
    chats = {
        name: renderer.chat([{"role": "user", "content": text}]) for name, text in PROMPTS.items()
    }
    marks = folder.settings.thinking.marks or THINKING
    return ExperimentOrder(
        experiment="",
        library=str(options.library),
        model_file=str(folder.require_weights()),
        context_len=folder.settings.context_length,
        prompts={name: prompt.ids for name, prompt in chats.items()},
        word=renderer.tokenizer.encode(WORD, add_special_tokens=False),
        story_text=renderer.tokenizer.whole_text(chats["story"].ids),
        eos=tuple(folder.settings.eos_token_ids),
        tokenizer_file=str(folder.tokenizer_file),
        thinking=marks,
        allow_unlisted=options.allow_unlisted,
        simulated=options.simulated,
        cache_file="" if options.cache_file is None else str(options.cache_file),
    )


def _json_lines(file: IO[bytes]) -> list[dict[str, Any]]:
    """Return the complete lines of a child; a crash may have cut the last one off."""
    found = []
    for line in _text(file).splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return [one for one in found if isinstance(one, dict)]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(LOG_BYTES).decode(errors="replace")


def _last_errors(logged: str) -> str:
    return "; ".join(line.strip() for line in _ERROR_LINE.findall(logged)[-2:])


def _observation(
    lines: Sequence[Mapping[str, Any]], code: int | None, limit_s: float
) -> Observation:
    stages = [str(line["stage"]) for line in lines if "stage" in line]
    stage = stages[-1] if stages else "none"
    for line in lines:
        if "figures" in line:
            return Observation(figures=line["figures"], stage=stage)
        if "refused" in line:
            return Observation(refused=line["refused"], error=line["error"], stage=stage)
    if code is None:
        return Observation(hang_s=limit_s, stage=stage)
    return Observation(crash=ending(code), stage=stage)


def ending(code: int) -> str:
    """Return the end of a process in words: the signal's name, or the exit code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def check_names(only: Sequence[str]) -> None:
    """Raise ``ConfigError`` for a name that no experiment has."""
    known = sorted(plan.name for plan in PLANS)
    for name in only:
        if name not in known:
            raise ConfigError(f"--only: unknown experiment '{name}'; known are {', '.join(known)}.")


def run_probe(options: ProbeOptions, on_result: OnResult | None = None) -> ProbeReport:
    """Make the experiments and return the report, whatever the library does, and after Ctrl-C.

    Raises:
        ConfigError: the model folder has no tokenizer or no weights, or a name is unknown.
    """
    check_names(options.only)
    began_s = time.monotonic()
    probe = ProbeRun(options)
    try:
        probe.make_all(on_result or _ignore)
    except (Stuck, KeyboardInterrupt) as exc:
        why = str(exc) or "interrupted"
        probe.notes.append(f"{why}; the remaining experiments were not made")
    simulated = options.simulated or _is_simulated(options.library)
    release = probe.release
    return ProbeReport(
        simulated=simulated,
        board=_board(probe.facts, simulated=simulated),
        library=_library(options.library, release),
        model=_model(options.folder, probe.facts),
        results=tuple(probe.results),
        known={name: bool(release["quirks"][name]) for name in NAMES} if release else {},
        seconds=time.monotonic() - began_s,
        notes=tuple(probe.notes),
    )


def _ignore(_: ExperimentResult) -> None:
    """Do nothing with a result before the report."""


def _wanted(options: ProbeOptions) -> list[ExperimentPlan]:
    """Return the experiments to make; one that takes two boards only where it is asked for."""
    if options.only:
        return [plan for plan in PLANS if plan.name in (*FIRST, *options.only)]
    skipped = () if options.cache_file is not None else (OF_TWO_BOARDS,)
    return [plan for plan in PLANS if plan.name not in skipped]


def _verdict(plan: ExperimentPlan, seen: Observation, baseline: Baseline | None) -> Verdict:
    if plan.name in FIRST:
        # The others stand on these two, which fail with every ending.
        return verdict_of(plan, seen, Baseline()) if seen.figures else Verdict(False, seen.ending)
    return verdict_of(plan, seen, baseline)


def _hopeless(plan: ExperimentPlan, seen: Observation, baseline: Baseline | None) -> str | None:
    """Return the reason for which no further experiment can be settled, None if there is none."""
    if plan.name == DETECTED and seen.figures is None:
        return f"the library was not accepted ({seen.ending}); nothing else was tried"
    if plan.name == BASELINE and baseline is None:
        return "the baseline failed, so nothing else was tried"
    return None


def _is_simulated(library: Path) -> bool:
    try:
        return b"rksim-source:" in library.read_bytes()
    except OSError:
        return False


def _board(facts: Mapping[str, str], *, simulated: bool) -> dict[str, Any]:
    read = None if simulated else read_telemetry(ROOT)
    return {
        "soc": (read.soc if read else "") or facts.get("platform", ""),
        "npu_driver": (read.driver_version if read else "") or facts.get("driver", ""),
        "kernel": os.uname().release,
        "machine": os.uname().machine,
    }


def _library(path: Path, release: Mapping[str, Any]) -> dict[str, Any]:
    try:
        digest = file_digest(path)
    except OSError:
        digest = ""
    return {"release": release.get("release", ""), "library_sha256": digest}


def _model(folder: ModelFolder, facts: Mapping[str, str]) -> dict[str, Any]:
    return {
        "model_digest": folder.content_digest(),
        "model_bytes": folder.require_weights().stat().st_size,
        "context": folder.settings.context_length,
        **{name: facts.get(name, "") for name in ("quantisation", "toolkit", "npu_cores")},
    }


def write_report(report: ProbeReport, folder: Path) -> None:
    """Write quirks.json, report.json and report.md, each as a whole. Raises ``OSError``."""
    folder.mkdir(parents=True, exist_ok=True)
    sync(folder.resolve().parent)
    texts = {
        "quirks.json": json.dumps(quirks_file(report), indent=2),
        "report.json": json.dumps(report.as_json(), indent=2, ensure_ascii=False),
        "report.md": report.as_markdown().rstrip(),
    }
    for name, text in texts.items():
        # Boards read the first one at their starts, and lose their power at any time.
        replace_text(folder / name, f"{text}\n")


def quirks_file(report: ProbeReport) -> dict[str, Any]:
    """Return the contents of a quirks file: the settled values, and the library's digest."""
    return {
        "format": QUIRKS_FORMAT,
        "release": report.library["release"],
        "library_sha256": report.library["library_sha256"],
        "model_digest": report.model["model_digest"],
        "quirks": report.quirks,
    }

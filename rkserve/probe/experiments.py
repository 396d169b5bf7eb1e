"""The experiments, each in a process of its own: ``python -m rkserve.probe.experiments``.

The process reads its order (``ExperimentOrder``) as JSON from stdin and writes lines of JSON: the
stage that it has reached, then the figures that it observed. A crash or a hang is the parent's to
see; the stage tells it whether the tried behaviour caused it. Only the pure ``verdicts`` interpret
figures. The binding is opened with every permission, so that what it refuses by default is tried.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rkserve.core.errors import CallFailed, NativeError
from rkserve.core.run_params import Sampling
from rkserve.native.binding.library import detect
from rkserve.native.binding.runtime import Binding, open_runtime
from rkserve.native.quirks import quirks_for
from rkserve.native.runtime import (
    EvaluateMode,
    LoadParams,
    Perf,
    PromptInput,
    RunEnd,
    RunInput,
    RunOutcome,
    RunParams,
    SinkAction,
    Step,
    TokenInput,
)

GREEDY = Sampling(temperature=0.0, top_k=1, repeat_penalty=1.0)
STORY = "Tell me a long story about a lighthouse, in many sentences."
OTHER = "Explain at length how a ship is built, from the keel to the mast."
SHORT = "Repeat after me: yes"
SIGNS = "Repeat after me: 漢字 ñ é 🙂🚀 Ω"
QUESTION = "How many legs has a spider?"
WORD = "yes"
LONG = " ".join([STORY, OTHER] * 8)
PROMPTS: Mapping[str, str] = {
    "story": STORY,
    "other": OTHER,
    "short": SHORT,
    "signs": SIGNS,
    "long": LONG,
    "word": WORD,
}

TRIAL = "trial"  # the stage in which the behaviour in question is tried
CAP = 48  # tokens of an answer
THINKING_CAP = 512
PAUSE_AT = 6
STOP_AT = 8
RANGE = 4  # positions
ROUNDS = 3
HEAD_BYTES = 1 << 20  # of a model file that is cut short
LANDING_S = 5.0  # of an abort, where the library answers it during a callback
DECODING_S = 0.001  # from a callback's token until the library decodes
ASYNC_S = 20.0
DATA_ROWS = 128  # rows of logits whose memory is measured
FLOAT = 4
# What the binding refuses by default, so that it can be tried.
PERMISSIONS = dict.fromkeys(
    (
        "pause_with_history",
        "pause_with_batch",
        "clear_range_with_history",
        "resume_with_prompt",
        "prompt_cache_after_abort",
        "prompt_cache_load_with_history",
        "prompt_cache_save_with_history",
        "run_async",
        "logits_with_history",
        "kv_valid_after_abort",
        "waiting_token_id_valid",
        "fewer_cpus_than_cores",
    ),
    True,
)

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ExperimentOrder:
    """The parameters of one experiment; ``prompts`` are token IDs within the chat template."""

    experiment: str
    library: str
    model_file: str
    context_len: int
    prompts: Mapping[str, Sequence[int]]
    word: Sequence[int]  # the IDs of ``WORD`` alone
    story_text: str  # the rendered prompt, for an emptied template
    eos: Sequence[int]
    tokenizer_file: str
    thinking: Sequence[str]  # the marks of reasoning
    allow_unlisted: bool = False
    simulated: bool = False
    cache_file: str = ""  # a prompt cache of another board, or the one to write for it


@dataclass(slots=True)
class Answer:
    """One run: the delivered tokens, its end and its figures. ``kv`` is the cache's size then."""

    ids: list[int] = field(default_factory=list)
    text: bytes = b""
    waiting: int = 0
    end: str = ""
    perf: Perf = field(default_factory=Perf)
    kv: int = -1
    first_ms: float = 0.0
    last_s: float = 0.0  # the time of the last token, by the monotonic clock


OnAnswer = Callable[[Answer], "SinkAction | None"]


class Lab:
    """One handle of the library, and what experiments do with it."""

    def __init__(self, order: ExperimentOrder, send: Callable[[Figures], None]) -> None:
        self.order, self._send = order, send
        self.eos = frozenset(order.eos)
        self.runtime: Binding
        self._trying = False

    def stage(self, name: str) -> None:
        """Report progress: a crash from here on belongs to this stage."""
        self._send({"stage": name})

    def trial(self) -> None:
        """Report that the behaviour in question is tried from here on."""
        self._trying = True
        self.stage(TRIAL)

    def ids(self, name: str) -> tuple[int, ...]:
        """Return the token IDs of a prompt."""
        return tuple(self.order.prompts[name])

    def open(self, quirks: Mapping[str, bool] | None = None, **changes: Any) -> Binding:
        """Load the model into a new handle."""
        self.runtime = open_runtime(
            Path(self.order.library),
            PERMISSIONS | dict(quirks or {}),
            allow_unlisted=self.order.allow_unlisted,
        )
        self.runtime.load(self.params(**changes))
        return self.runtime

    def params(self, **changes: Any) -> LoadParams:
        """Return the parameters of a load."""
        values: dict[str, Any] = {
            "model_path": self.order.model_file,
            "max_context_len": self.order.context_len,
            "max_new_tokens": CAP,
            "sampling": GREEDY,
        }
        return LoadParams(**(values | changes))

    def run(
        self,
        given: Sequence[int] | RunInput,
        *,
        clear: bool = False,
        limit: int | None = None,
        on_token: OnAnswer | None = None,
        **more: Any,
    ) -> Answer:
        """Make one run and note its tokens; ``limit`` has an effect from 1.3.0 on."""
        runtime, answer = self.runtime, Answer()
        if clear:
            runtime.clear_kv_cache()
        if not isinstance(given, PromptInput):
            given = TokenInput(tuple(given))  # type: ignore[arg-type] # ids: texts went above
        began_s = time.monotonic()

        def take(step: Step) -> SinkAction:
            (piece,) = step
            assert piece is not None
            answer.last_s = time.monotonic()
            answer.first_ms = answer.first_ms or (answer.last_s - began_s) * 1e3
            answer.ids.append(piece.token_id)
            answer.text += piece.text
            answer.waiting += piece.waiting
            return (on_token and on_token(answer)) or SinkAction.CONTINUE

        outcome = runtime.run(self.run_params((given,), limit, **more), take)
        answer.end, answer.perf = outcome.end.value, outcome.perf
        if outcome.end is not RunEnd.FAILED:
            answer.kv = runtime.kv_cache_sizes()[0]
        elif not self._trying:
            raise CallFailed("rkllm_run", outcome.return_code)  # nothing to compare with
        return answer

    def run_params(
        self, inputs: tuple[RunInput, ...], limit: int | None = None, **more: Any
    ) -> RunParams:
        """Return the parameters of a greedy run."""
        per_run = self.runtime.per_run_sampling
        return RunParams(
            inputs,
            sampling=GREEDY if per_run else None,
            max_new_tokens=(limit or CAP) if per_run else None,
            **more,
        )

    def kept(self, answer: Answer) -> list[int]:
        """Return the tokens of an answer that belong into the KV cache: all but its end token."""
        ended = bool(answer.ids) and answer.ids[-1] in self.eos
        return answer.ids[:-1] if ended else answer.ids

    def stop_ids(self) -> list[int]:
        """Return the ID that ends a turn."""
        return list(self.order.eos[:1])

    def aborted(
        self, *, history: bool, inside: bool = False, decoding: bool = False
    ) -> tuple[Answer, float]:
        """Abort a run at a token; return it, and the milliseconds from that token to its return.

        The abort is made by the callback (``inside``), by another thread while the library decodes
        (``decoding``), or by another thread while the callback waits for it, before the next token.
        """
        asked_s: list[float] = []

        def stop(answer: Answer) -> None:
            if len(answer.ids) == STOP_AT:
                asked_s.append(time.monotonic())
                if inside:
                    self.runtime.abort()
                else:
                    other = threading.Timer(DECODING_S if decoding else 0, self.runtime.abort)
                    other.daemon = True
                    other.start()
                    other.join(0 if decoding else LANDING_S)

        answer = self.run(self.ids("story"), keep_history=history, clear=True, on_token=stop)
        return answer, (time.monotonic() - asked_s[0]) * 1e3 if asked_s else 0.0

    def paused(self, *, history: bool = False, at: int = PAUSE_AT) -> Answer:
        """Pause a run at a token; a run that goes on regardless has another end."""
        return self.run(
            self.ids("story"),
            keep_history=history,
            clear=True,
            on_token=lambda answer: SinkAction.PAUSE if len(answer.ids) >= at else None,
        )


def agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning of two answers."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


# -- experiments -----------------------------------------------------------------------------------


def detected(lab: Lab) -> Figures:
    """The release by version string and layout."""
    release = detect(Path(lab.order.library), allow_unlisted=lab.order.allow_unlisted)
    return {"release": release.version, "quirks": dict(quirks_for(release.quirks))}


def baseline(lab: Lab) -> Figures:
    """Counts, limits and repeatability: the base of the other verdicts."""
    began_s = time.monotonic()
    lab.open()
    load_s, sent = time.monotonic() - began_s, len(lab.ids("story"))
    one = lab.run(lab.ids("story"), clear=True)
    other = lab.run(lab.ids("story"), clear=True)
    history = lab.run(lab.ids("story"), clear=True, keep_history=True)
    lab.runtime.clear_kv_cache()
    cleared = lab.runtime.kv_cache_sizes()[0]
    limited = lab.run(lab.ids("story"), clear=True, limit=5)
    return {
        "load_s": round(load_s, 2),
        "sent": sent,
        "end": one.end,
        "tokens": len(one.ids),
        "cap": CAP,
        "repeated": one.ids == other.ids,
        "ends_by_eos": bool(one.ids) and one.ids[-1] in lab.eos,
        "kv": history.kv,
        "kept": len(lab.kept(history)),
        "kv_single": one.kv,
        "kv_cleared": cleared,
        "limited": len(limited.ids),
        "limits": lab.runtime.per_run_sampling,
        "ids_digest": digest(repr(one.ids).encode()),
        "prefill_tokens": one.perf.prefill_tokens,
        "decode_tokens": one.perf.decode_tokens,
        "prefill_per_s": rate(one.perf.prefill_tokens, one.perf.prefill_ms),
        "decode_per_s": rate(one.perf.decode_tokens, one.perf.decode_ms),
    }


def digest(content: bytes) -> str:
    """Return a short digest, by which reports of two boards are compared."""
    return hashlib.sha256(content).hexdigest()[:12]


def rate(tokens: int, ms: float) -> float:
    """Return tokens per second, 0 where nothing was measured."""
    return round(tokens / ms * 1e3, 1) if ms > 0 else 0.0


def _resumed(lab: Lab, *, history: bool) -> Figures:
    lab.open()
    whole = lab.run(lab.ids("story"), clear=True, keep_history=history)
    lab.trial()
    one = lab.paused(history=history)
    figures: Figures = {"end": one.end, "delivered": len(one.ids), "whole": len(whole.ids)}
    if one.end == RunEnd.PAUSED.value:
        rest = lab.run(one.ids[-1:], keep_history=history, resume=True)
        figures |= {
            "held": one.kv - len(lab.ids("story")) - len(one.ids),
            "resumed": rest.end,
            "same": agreement(one.ids + rest.ids, whole.ids),
        }
    return figures


def pause_with_history(lab: Lab) -> Figures:
    return _resumed(lab, history=True)


def pause_single_turn(lab: Lab) -> Figures:
    return _resumed(lab, history=False)


def resume_with_other_token(lab: Lab) -> Figures:
    lab.open()
    sent = lab.ids("story")
    one = lab.paused()
    figures: Figures = {"end": one.end}
    if one.end != RunEnd.PAUSED.value:
        return figures
    lab.trial()
    rest = lab.run(lab.ids("other")[-1:], resume=True)
    whole = lab.run((*sent, *one.ids[:-1], *lab.ids("other")[-1:]), clear=True)
    return figures | {
        "resumed": rest.end,
        "same": agreement(rest.ids, whole.ids),
        "whole": len(whole.ids),
    }


def logits_after_drain(lab: Lab) -> Figures:
    lab.open()
    sent = lab.ids("story")
    one = lab.paused()
    figures: Figures = {"end": one.end}
    if one.end != RunEnd.PAUSED.value:
        return figures
    lab.trial()
    lab.runtime.drain()
    lab.runtime.clear_kv_cache()
    matrix = lab.runtime.evaluate(TokenInput(sent), EvaluateMode.LOGITS, last=True)
    return figures | {"agrees": best(matrix.data, matrix.columns) == one.ids[0]}


def load_after_kill(lab: Lab) -> Figures:
    """A load after another process was killed in its run: the kernel has freed the NPU."""
    order = json.dumps(asdict(replace(lab.order, experiment=_held_run.__name__)))
    with subprocess.Popen(
        (sys.executable, "-m", "rkserve.probe.experiments"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(order)
        other.stdin.close()
        running = any(TRIAL in line for line in other.stdout)
        other.kill()
    if not running:
        return {"running": False}
    lab.trial()
    began_s = time.monotonic()
    lab.open()
    load_s = time.monotonic() - began_s
    answer = lab.run(lab.ids("story"), clear=True)
    return {
        "running": True,
        "load_s": round(load_s, 2),
        "end": answer.end,
        "tokens": len(answer.ids),
    }


def _held_run(lab: Lab) -> Figures:
    """Be killed in the first token of a run."""
    lab.open()

    def hold(_: Answer) -> None:
        lab.trial()
        time.sleep(ASYNC_S)

    lab.run(lab.ids("story"), clear=True, on_token=hold)
    return {}


def _batch(
    lab: Lab, inputs: Sequence[Sequence[int]], *, pause: bool, **more: Any
) -> tuple[str, list[list[int]], float]:
    """Make a run of two inputs; return its end, the tokens of each, and its seconds."""
    answers: list[list[int]] = [[] for _ in inputs]

    def take(step: Step) -> SinkAction:
        for entry, piece in enumerate(step):
            if piece is not None:
                answers[entry].append(piece.token_id)
        stops = pause and len(answers[0]) >= PAUSE_AT
        return SinkAction.PAUSE if stops else SinkAction.CONTINUE

    given = tuple(TokenInput(tuple(ids)) for ids in inputs)
    began_s = time.monotonic()
    outcome = lab.runtime.run(lab.run_params(given, **more), take)
    return outcome.end.value, answers, time.monotonic() - began_s


def pause_with_batch(lab: Lab) -> Figures:
    inputs = [lab.ids("story"), lab.ids("other")]
    lab.open(n_batch=2)
    _, whole, _ = _batch(lab, inputs, pause=False)
    lab.runtime.clear_kv_cache()
    lab.trial()
    end, begun, _ = _batch(lab, inputs, pause=True)
    figures: Figures = {"end": end, "whole": min(map(len, whole))}
    if end == RunEnd.PAUSED.value:
        last = [ids[-1:] for ids in begun]
        resumed, rest, _ = _batch(lab, last, pause=False, resume=True)
        joined = [a + b for a, b in zip(begun, rest, strict=True)]
        same = [agreement(a, b) for a, b in zip(joined, whole, strict=True)]
        figures |= {"resumed": resumed, "same": min(same)}
    return figures


def batch_of_two(lab: Lab) -> Figures:
    names, alone, seconds = ("story", "other"), [], 0.0
    lab.open()
    for name in names:
        began_s = time.monotonic()
        alone.append(lab.run(lab.ids(name), clear=True).ids)
        seconds += time.monotonic() - began_s
    lab.runtime.destroy()
    lab.trial()
    lab.open(n_batch=2)
    end, both, together_s = _batch(lab, [lab.ids(name) for name in names], pause=False)
    same = [agreement(a, b) for a, b in zip(alone, both, strict=True)]
    return {
        "end": end,
        "same": min(same),
        "whole": min(map(len, alone)),
        "gain": round(seconds / together_s, 2) if together_s > 0 else 0.0,
    }


def _cleared_range(lab: Lab, *, history: bool) -> Figures:
    lab.open()
    whole = lab.run(lab.ids("story"), clear=True, keep_history=history)
    one = lab.paused(history=history)
    figures: Figures = {"end": one.end, "range": RANGE}
    if one.end != RunEnd.PAUSED.value:
        return figures
    lab.trial()
    lab.runtime.clear_kv_range([(one.kv - RANGE, one.kv)])
    left = lab.runtime.kv_cache_sizes()[0]
    figures |= {"before": one.kv, "after": left}
    if left == one.kv - RANGE:
        again = len(one.ids) - 1 - RANGE  # the token whose position was the first to be cut
        rest = lab.run(one.ids[again : again + 1], keep_history=history, resume=True)
        figures |= {
            "resumed": rest.end,
            "same": agreement(rest.ids, whole.ids[again + 1 :]),
            "rest": len(whole.ids) - again - 1,
        }
    return figures


def clear_range_with_history(lab: Lab) -> Figures:
    return _cleared_range(lab, history=True)


def clear_range_single_turn(lab: Lab) -> Figures:
    return _cleared_range(lab, history=False)


def drain_by_limit(lab: Lab) -> Figures:
    lab.open()
    if not lab.runtime.per_run_sampling:
        return {"limits": False}
    whole = lab.run(lab.ids("other"), clear=True)
    one = lab.paused()
    figures: Figures = {"limits": True, "end": one.end}
    if one.end != RunEnd.PAUSED.value:
        return figures

    def stop(answer: Answer) -> None:
        if len(answer.ids) == ROUNDS:  # the limit had no effect
            threading.Thread(target=lab.runtime.abort, daemon=True).start()

    lab.trial()
    rest = lab.run(one.ids[-1:], resume=True, limit=1, on_token=stop)
    after = lab.run(lab.ids("other"), clear=True)
    return figures | {
        "resumed": rest.end,
        "tokens": len(rest.ids),
        "next_same": after.ids == whole.ids,
    }


def stop_by_pause(lab: Lab) -> Figures:
    lab.open({"drain_by_limit": True})
    whole = lab.run(lab.ids("other"), clear=True)
    aborts, pauses, end = [], [], RunEnd.PAUSED.value
    for _ in range(ROUNDS):
        answer, ms = lab.aborted(history=False, decoding=True)  # as boards abort
        aborts.append(ms)
    lab.trial()
    for _ in range(ROUNDS):
        answer = lab.paused(at=STOP_AT)
        end = answer.end
        if end != RunEnd.PAUSED.value:
            break
        lab.runtime.drain()
        pauses.append((time.monotonic() - answer.last_s) * 1e3)
    after = lab.run(lab.ids("other"), clear=True)
    return {
        "end": end,
        "abort_ms": [round(ms, 1) for ms in aborts],
        "pause_ms": [round(ms, 1) for ms in pauses],
        "abort_median_ms": round(statistics.median(aborts), 1),
        "pause_median_ms": round(statistics.median(pauses), 1) if pauses else 0.0,
        "next_same": after.ids == whole.ids,
    }


def resume_with_prompt(lab: Lab) -> Figures:
    lab.open()
    one = lab.paused()
    figures: Figures = {"end": one.end}
    if one.end != RunEnd.PAUSED.value:
        return figures
    lab.trial()
    rest = lab.run(PromptInput(WORD), resume=True, on_token=lambda _: SinkAction.PAUSE)
    # A pause holds all positions before the token of the pause, which was not sent here.
    return figures | {
        "resumed": rest.end,
        "added": rest.kv - one.kv - (len(rest.ids) - 1),
        "raw": len(lab.order.word),
        "wrapped": len(lab.ids("word")),
    }


def abort_in_callback(lab: Lab) -> Figures:
    return _aborted_run(lab, inside=True)


def abort_from_thread(lab: Lab) -> Figures:
    return _aborted_run(lab, inside=False)


def _aborted_run(lab: Lab, *, inside: bool) -> Figures:
    lab.open({"abort_in_callback": inside})
    whole = lab.run(lab.ids("story"), clear=True)
    lab.trial()
    answer, ms = lab.aborted(history=False, inside=inside)
    after = lab.run(lab.ids("story"), clear=True)
    return {
        "end": answer.end,
        "more": len(answer.ids) - STOP_AT,
        "whole": len(whole.ids),
        "ms": round(ms, 1),
        "next_same": after.ids == whole.ids,
    }


def prompt_cache_after_abort(lab: Lab) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/cache.bin"
        lab.open()
        whole = lab.run(lab.ids("story"), clear=True, limit=STOP_AT, save_cache=file)
        if not Path(file).exists():
            return {"file": False}
        lab.aborted(history=False)
        lab.runtime.clear_kv_cache()
        lab.trial()
        lab.runtime.load_prompt_cache(file)
        answer = lab.run(lab.ids("story"), limit=STOP_AT)
        return {"file": True, "end": answer.end, "same": answer.ids == whole.ids}


def prompt_cache_load_with_history(lab: Lab) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        file, sent = f"{folder}/cache.bin", lab.ids("long")
        lab.open()
        lab.run(sent, clear=True, limit=4, save_cache=file)
        if not Path(file).exists():
            return {"file": False}
        lab.runtime.clear_kv_cache()
        lab.runtime.load_prompt_cache(file)
        single = lab.run(sent, limit=4)
        lab.trial()
        answer = lab.run(sent, clear=True, limit=4, keep_history=True)
        return {
            "file": True,
            "sent": len(sent),
            "single": single.perf.prefill_tokens,
            "end": answer.end,
            "prefill": answer.perf.prefill_tokens,
            "single_ms": round(single.first_ms, 1),
            "first_ms": round(answer.first_ms, 1),
        }


def prompt_cache_save_with_history(lab: Lab) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/cache.bin"
        lab.open()
        first = lab.run(lab.ids("long"), clear=True, limit=STOP_AT, keep_history=True)
        whole = (*lab.ids("long"), *lab.kept(first))
        turn = (*whole[first.kv :], *lab.stop_ids(), *lab.ids("other"))
        lab.trial()
        second = lab.run(turn, limit=STOP_AT, keep_history=True, save_cache=file)
        if not Path(file).exists():
            return {"end": second.end, "file": False}
        lab.runtime.clear_kv_cache()
        lab.runtime.load_prompt_cache(file)
        sent = (*whole[: first.kv], *turn, *lab.kept(second), *lab.ids("short"))
        answer = lab.run(sent, limit=STOP_AT)
        return {
            "end": second.end,
            "file": True,
            "bytes": Path(file).stat().st_size,
            "sent": len(sent),
            "prefill": answer.perf.prefill_tokens,
        }


def prompt_cache_portable(lab: Lab) -> Figures:
    """Write a prompt cache for another board, or load the one of another board."""
    order = lab.order
    if not order.cache_file:
        return {"file": ""}
    file = Path(order.cache_file)
    note = file.with_name(f"{file.name}.json")
    lab.open()
    if not file.exists():
        first = lab.run(lab.ids("story"), clear=True, limit=STOP_AT, save_cache=str(file))
        if not file.exists():
            return {"file": ""}
        ids = [*lab.ids("story"), *lab.kept(first)]
        note.write_text(json.dumps({"machine": _machine(), "ids": ids}), encoding="utf-8")
        return {"file": "written"}
    known = json.loads(note.read_text(encoding="utf-8"))
    sent = (*known["ids"], *lab.stop_ids(), *lab.ids("short"))
    whole = lab.run(sent, clear=True, limit=STOP_AT)
    lab.runtime.clear_kv_cache()
    lab.trial()
    lab.runtime.load_prompt_cache(str(file))
    answer = lab.run(sent, limit=STOP_AT)
    return {
        "file": "loaded",
        "elsewhere": order.simulated or known["machine"] != _machine(),
        "end": answer.end,
        "same": answer.ids == whole.ids,
        "sent": len(sent),
        "prefill": answer.perf.prefill_tokens,
    }


def _machine() -> str:
    """Return a name of this machine that no other one has."""
    try:
        return Path("/etc/machine-id").read_text(encoding="utf-8").strip()
    except OSError:
        return os.uname().nodename


def cache_compares_ids(lab: Lab) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        file, other = f"{folder}/cache.bin", lab.ids("other")
        lab.open()
        whole = lab.run(other, clear=True)
        lab.run(lab.ids("story"), clear=True, limit=4, save_cache=file)
        if not Path(file).exists():
            return {"file": False}
        lab.runtime.clear_kv_cache()
        lab.trial()
        lab.runtime.load_prompt_cache(file)
        answer = lab.run(other)
        return {
            "file": True,
            "same": answer.ids == whole.ids,
            "sent": len(other),
            "prefill": answer.perf.prefill_tokens,
        }


def run_async(lab: Lab) -> Figures:
    ended, ids = threading.Event(), list[int]()
    outcomes: list[RunOutcome | BaseException] = []
    lab.open()
    whole = lab.run(lab.ids("story"), clear=True)

    def take(step: Step) -> SinkAction:
        ids.extend(piece.token_id for piece in step if piece is not None)
        return SinkAction.CONTINUE

    def note(outcome: RunOutcome | BaseException) -> None:
        outcomes.append(outcome)
        ended.set()

    lab.trial()
    params = lab.run_params((TokenInput(lab.ids("story")),))
    lab.runtime.run_async(params, take, note)
    give_up_s = time.monotonic() + ASYNC_S
    while not ended.wait(0.02) and time.monotonic() < give_up_s:
        lab.runtime.poll_async()
    last = outcomes[0] if outcomes else None
    end = last.end.value if isinstance(last, RunOutcome) else "never" if last is None else "failed"
    return {"end": end, "tokens": len(ids), "same": ids == whole.ids}


def prefix_reuse_in_ram(lab: Lab) -> Figures:
    lab.open()
    long = lab.ids("long")
    tail = len(lab.ids("word"))
    first = lab.run(long, clear=True, limit=4)
    lab.trial()
    again = lab.run(long, limit=4)
    other = lab.run((*long[:-tail], *lab.ids("word")), limit=4)
    cleared = lab.run(long, clear=True, limit=4)
    return {
        "first": first.perf.prefill_tokens,
        "again": again.perf.prefill_tokens,
        "other_end": other.perf.prefill_tokens,
        "cleared": cleared.perf.prefill_tokens,
        "first_ms": round(first.first_ms, 1),
        "again_ms": round(again.first_ms, 1),
    }


def append_tokens_with_history(lab: Lab) -> Figures:
    lab.open()
    sent = lab.ids("story")
    first = lab.run(sent, clear=True, keep_history=True, limit=16)
    whole = (*sent, *lab.kept(first))
    turn = (*whole[first.kv :], *lab.stop_ids(), *lab.ids("other"))
    lab.trial()
    second = lab.run(turn, keep_history=True)
    at_once = lab.run((*whole[: first.kv], *turn), clear=True, keep_history=True)
    return {
        "end": second.end,
        "kv_appended": second.kv,
        "kv_at_once": at_once.kv,
        "same": agreement(second.ids, at_once.ids),
        "whole": len(at_once.ids),
        "prefill": second.perf.prefill_tokens,
        "turn": len(turn),
    }


def kv_valid_after_abort(lab: Lab) -> Figures:
    lab.open()
    sent = lab.ids("story")
    lab.trial()
    answer, _ = lab.aborted(history=True)
    held = answer.kv - len(sent) - len(answer.ids)
    figures: Figures = {"end": answer.end, "delivered": len(answer.ids), "held": held}
    if held in (0, -1):
        context = (*sent, *answer.ids)
        turn = (*context[answer.kv :], *lab.stop_ids(), *lab.ids("other"))
        second = lab.run(turn, keep_history=True)
        at_once = lab.run((*context[: answer.kv], *turn), clear=True, keep_history=True)
        figures |= {"same": agreement(second.ids, at_once.ids), "whole": len(at_once.ids)}
    return figures


def waiting_token_id_valid(lab: Lab) -> Figures:
    from rkserve.api.prompting.tokenizer import Tokenizer  # late: 0.3 s of imports

    lab.open()
    lab.trial()
    answer = lab.run(lab.ids("signs"), clear=True)
    spelled = Tokenizer(Path(lab.order.tokenizer_file)).text(lab.kept(answer))
    text = answer.text.decode(errors="replace")
    return {
        "tokens": len(answer.ids),
        "waiting": answer.waiting,
        "match": spelled.strip() == text.strip(),
    }


def finish_in_hidden_modes(lab: Lab) -> Figures:
    lab.open()
    sent, figures = lab.ids("story"), Figures()
    for mode in EvaluateMode:
        lab.trial()
        matrix = lab.runtime.evaluate(TokenInput(sent), mode)
        run = lab.runtime.last_run
        assert run is not None
        name = mode.name.lower()
        figures |= {f"{name}_finish": run.finished, f"{name}_rows": matrix.rows}
    return figures | {"sent": len(sent), "kv": lab.runtime.kv_cache_sizes()[0]}


def best(data: bytes, columns: int) -> int:
    """Return the index of the largest value of the last row of float32."""
    row = array("f", data[-columns * FLOAT :])
    return max(range(columns), key=row.__getitem__)


def logits_with_history(lab: Lab) -> Figures:
    lab.open()
    sent = lab.ids("story")
    whole = lab.run(sent, clear=True)
    lab.runtime.clear_kv_cache()
    lab.trial()
    figures: Figures = {"sent": len(sent)}
    for step, ids in enumerate((sent, (whole.ids[0],))):
        matrix = lab.runtime.evaluate(
            TokenInput(ids), EvaluateMode.LOGITS, keep_history=True, last=True
        )
        figures |= {
            f"agrees_{step}": best(matrix.data, matrix.columns) == whole.ids[step],
            f"kv_{step}": lab.runtime.kv_cache_sizes()[0],
        }
    return figures


def logits_rows(lab: Lab) -> Figures:
    lab.open()
    sent = lab.ids("story")
    whole = lab.run(sent, clear=True)
    lab.runtime.clear_kv_cache()
    lab.trial()
    began_s = time.monotonic()
    matrix = lab.runtime.evaluate(TokenInput(sent), EvaluateMode.LOGITS)
    ms = (time.monotonic() - began_s) * 1e3
    run = lab.runtime.last_run
    assert run is not None
    return {
        "sent": len(sent),
        "rows": matrix.rows,
        "agrees": best(matrix.data, matrix.columns) == whole.ids[0],
        "callbacks": run.tokens,
        "row_digest": digest(matrix.data[-matrix.columns * FLOAT :]),
        "ms": round(ms, 1),
        "first_ms": round(whole.first_ms, 1),
        "kv": lab.runtime.kv_cache_sizes()[0],
    }


def eos_uint32_misread(lab: Lab) -> Figures:
    lab.open()
    lab.trial()
    answer = lab.run(lab.ids("short"), clear=True)
    at = next((at for at, one in enumerate(answer.ids) if one in lab.eos), -1)
    return {"end": answer.end, "tokens": len(answer.ids), "cap": CAP, "eos_at": at}


def thinking_ends_run(lab: Lab) -> Figures:
    lab.open(max_new_tokens=THINKING_CAP)
    begin, close = lab.order.thinking
    lab.trial()
    answer = lab.run(PromptInput(QUESTION, enable_thinking=True), clear=True, limit=THINKING_CAP)
    text = answer.text.decode(errors="replace")
    _, closed, after = text.partition(close)
    return {
        "end": answer.end,
        "tokens": len(answer.ids),
        "cap": THINKING_CAP,
        "opened": begin in text,
        "closed": bool(closed),
        "after": len(after.strip()),
    }


def is_running_while_paused(lab: Lab) -> Figures:
    lab.open()
    answer = lab.paused()
    lab.trial()
    return {"end": answer.end, "running": lab.runtime.is_running()}


def return_2_frees_buffer(lab: Lab) -> Figures:
    sent = (lab.ids("long") * 4)[:DATA_ROWS]
    figures: Figures = {"rows": len(sent)}
    for name, frees in (("kept", False), ("freed", True)):
        lab.open({"return_2_frees_buffer": frees})
        lab.run(lab.ids("story"), clear=True)  # what is allocated once
        if frees:
            lab.trial()
        before = anonymous_bytes()
        matrix = lab.runtime.evaluate(TokenInput(sent), EvaluateMode.LOGITS, last=True)
        figures |= {name: anonymous_bytes() - before, "bytes": len(sent) * matrix.columns * FLOAT}
        lab.runtime.destroy()
    return figures


def anonymous_bytes() -> int:
    """Return the size of this process's own memory, without files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def fewer_cpus_than_cores(lab: Lab) -> Figures:
    lab.trial()
    cpus = os.cpu_count() or 1
    lab.open(cpus=(4 if cpus > 4 else 0,))  # noqa: PLR2004 - the first big core of an RK3588
    return {"loaded": True}


def init_may_crash(lab: Lab) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        file, whole = Path(folder) / "model.rkllm", Path(lab.order.model_file)
        with whole.open("rb") as model:
            file.write_bytes(model.read(min(HEAD_BYTES, whole.stat().st_size // 2)))
        lab.trial()
        lab.open(model_path=str(file))
        return {"loaded": True}


def empty_template(lab: Lab) -> Figures:
    lab.open()
    sent = lab.ids("story")
    whole = lab.run(sent, clear=True)
    lab.trial()
    lab.runtime.set_chat_template("", "", "")
    answer = lab.run(PromptInput(lab.order.story_text), clear=True)
    return {
        "sent": len(sent),
        "prefill": answer.perf.prefill_tokens,
        "same": answer.ids == whole.ids,
    }


EXPERIMENTS: Mapping[str, Callable[[Lab], Figures]] = {
    one.__name__: one
    for one in (
        detected,
        baseline,
        load_after_kill,
        pause_single_turn,
        resume_with_other_token,
        pause_with_history,
        pause_with_batch,
        batch_of_two,
        clear_range_single_turn,
        clear_range_with_history,
        drain_by_limit,
        stop_by_pause,
        resume_with_prompt,
        abort_from_thread,
        abort_in_callback,
        prompt_cache_after_abort,
        prompt_cache_load_with_history,
        prompt_cache_save_with_history,
        prompt_cache_portable,
        cache_compares_ids,
        run_async,
        prefix_reuse_in_ram,
        append_tokens_with_history,
        kv_valid_after_abort,
        waiting_token_id_valid,
        finish_in_hidden_modes,
        logits_rows,
        logits_after_drain,
        logits_with_history,
        eos_uint32_misread,
        thinking_ends_run,
        is_running_while_paused,
        return_2_frees_buffer,
        fewer_cpus_than_cores,
        init_may_crash,
        empty_template,
        _held_run,
    )
}


def main() -> None:
    """Carry out the order on stdin; the lines on stdout are the parent's."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the vendor's library prints to stdout

    def send(line: Figures) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    order = ExperimentOrder(**json.load(sys.stdin))
    send({"stage": "start"})
    try:
        send({"figures": EXPERIMENTS[order.experiment](Lab(order, send))})
    except NativeError as exc:
        send({"refused": str(exc), "error": type(exc).__name__})
    except Exception as exc:  # noqa: BLE001 - no end of the library's, and reported as such
        traceback.print_exception(exc)
        send({"refused": repr(exc), "error": type(exc).__name__})
    os._exit(0)  # threads inside the library cannot be joined


if __name__ == "__main__":
    main()

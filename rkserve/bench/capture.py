"""Exchanges as they were: each prompt with its answer and figures, and two answers side by side.

Side by side, the second one gets the history with the first one's answers, so that both answer the
same prompt in every turn. It judges nothing: how much differs is measured by words, which of the
two is better is for the reader to judge.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rkserve.bench.outcome import CapturedExchange, RequestOutcome
from rkserve.bench.player import NO_ANSWER
from rkserve.bench.processes import Json
from rkserve.bench.results import MISSING, RunResult, figure, percent, table
from rkserve.bench.target import BoardSample
from rkserve.bench.trace import Trace, TraceSession

Place = tuple[str, int]  # session and turn
WORDS = re.compile(r"\s+|[^\W_]+|.", re.DOTALL)
LONGEST_PROMPT = 400
MOST_WORDS = 4000  # beyond this comparing takes minutes


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt. ``first_at`` is the character from which on they differ.

    ``prompt`` is the user's turn, ``system`` the system prompt before the first one.
    """

    session: str
    turn: int
    prompt: str
    answers: tuple[str, str]
    errors: tuple[str, str]
    reasons: tuple[str, str]
    tokens: tuple[int, int]
    first_at: int | None
    alike: float
    system: str = ""

    @property
    def same(self) -> bool:
        """True if there are two answers and they are equal."""
        return self.first_at is None and not any(self.errors)


def with_answers(trace: Trace, outcomes: Sequence[RequestOutcome]) -> Trace:
    """Return a trace whose conversations go on with these answers."""
    answers = {_place(one): one.text or NO_ANSWER for one in outcomes}

    def answered(session: TraceSession) -> TraceSession:
        turns = (
            replace(turn, answer=answers.get((session.name, number), NO_ANSWER))
            for number, turn in enumerate(session.turns)
        )
        return replace(session, turns=tuple(turns))

    return replace(trace, sessions=tuple(answered(one) for one in trace.sessions))


def pairs(
    trace: Trace, first: Sequence[RequestOutcome], second: Sequence[RequestOutcome]
) -> list[Pair]:
    """Put the answers beside each other; a prompt that one of them was not asked is left out."""
    ours, theirs = ({_place(one): one for one in side} for side in (first, second))
    return [
        replace(_pair(prompt, place, (ours[place], theirs[place])), system=system)
        for place, prompt, system in _prompts(trace)
        if place in ours and place in theirs
    ]


def render(names: tuple[str, str], found: Sequence[Pair], *, whole: bool = False) -> str:
    """Return the comparison as Markdown: what differs, or the ``whole`` with all prompts, uncut."""
    same = sum(one.same for one in found)
    failed = sum(any(one.errors) for one in found)
    both = [one for one in found if not any(one.errors)]
    alike = sum(one.alike for one in both) / len(both) if both else 0.0
    rows = [
        ["prompts", figure(len(found), 0)],
        ["the same answer", figure(same, 0)],
        ["not answered by both", figure(failed, 0)],
        ["words in common, mean", percent(alike) if both else MISSING],
    ]
    parts = [
        f"## {names[0]} beside {names[1]}\n",
        table(["", "n"], rows),
        f"What only {names[0]} says is between `[-` and `-]`, what only {names[1]} says between "
        "`{+` and `+}`.\n",
        *(_block(names, one, whole=whole) for one in found if whole or not one.same),
    ]
    return "\n".join(parts)


def to_json(names: tuple[str, str], found: Sequence[Pair]) -> Json:
    """Return the comparison as what JSON can say."""
    return {
        "targets": list(names),
        "prompts": len(found),
        "same": sum(one.same for one in found),
        "failed": sum(any(one.errors) for one in found),
        "pairs": [_json(names, one) for one in found],
    }


def marked(first: str, second: str) -> str:
    """Return both texts in one, with what only one of them has in brackets."""
    return "".join(_marked(first, second))


def _marked(first: str, second: str) -> Iterator[str]:
    ours, theirs = WORDS.findall(first), WORDS.findall(second)
    for tag, a, b, c, d in _matcher(ours, theirs).get_opcodes():
        if tag == "equal":
            yield "".join(ours[a:b])
            continue
        if a != b:
            yield f"[-{''.join(ours[a:b])}-]"
        if c != d:
            yield f"{{+{''.join(theirs[c:d])}+}}"
    # What is too long to be compared word by word is shown all the same.
    rest, other = "".join(ours[MOST_WORDS:]), "".join(theirs[MOST_WORDS:])
    if rest == other:
        yield rest
        return
    yield f"[-{rest}-]" if rest else ""
    yield f"{{+{other}+}}" if other else ""


def _matcher(ours: Sequence[str], theirs: Sequence[str]) -> difflib.SequenceMatcher[str]:
    return difflib.SequenceMatcher(None, ours[:MOST_WORDS], theirs[:MOST_WORDS], autojunk=False)


def _pair(prompt: str, place: Place, both: tuple[RequestOutcome, RequestOutcome]) -> Pair:
    first, second = both
    return Pair(
        session=place[0],
        turn=place[1],
        prompt=prompt,
        answers=(first.text, second.text),
        errors=_two(both, lambda one: "" if one.ok else one.label),
        reasons=_two(both, lambda one: one.finish_reason),
        tokens=(first.completion_tokens, second.completion_tokens),
        first_at=_first_difference(first.text, second.text),
        alike=_matcher(WORDS.findall(first.text), WORDS.findall(second.text)).ratio(),
    )


def _first_difference(first: str, second: str) -> int | None:
    if first == second:
        return None
    pairs_of = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs_of if a != b), min(len(first), len(second)))


def _block(names: tuple[str, str], one: Pair, *, whole: bool) -> str:
    cut = not whole and len(one.prompt) > LONGEST_PROMPT
    prompt = f"{one.prompt[:LONGEST_PROMPT]} ..." if cut else one.prompt
    lines = [
        f"{name}: {error or f'{tokens} tokens, {reason}'}"
        for name, error, tokens, reason in zip(
            names, one.errors, one.tokens, one.reasons, strict=True
        )
    ]
    head = f"### {one.session}, turn {one.turn + 1}\n\n{'; '.join(lines)}"
    system = f"system:\n\n{fenced(one.system)}\n" if whole and one.system else ""
    return f"{head}\n\n{system}{fenced(prompt)}\n{fenced(marked(*one.answers))}"


def fenced(text: str) -> str:
    """Return a block of code around a text, whatever is in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}\n"


def _json(names: tuple[str, str], one: Pair) -> Json:
    sides: Mapping[str, Json] = {
        name: {"text": text, "error": error, "finish_reason": reason, "tokens": tokens}
        for name, text, error, reason, tokens in zip(
            names, one.answers, one.errors, one.reasons, one.tokens, strict=True
        )
    }
    fields = {"session": one.session, "turn": one.turn, "prompt": one.prompt}
    measured = {"same": one.same, "first_at": one.first_at, "alike": one.alike}
    return {**fields, **measured, "answers": sides}


def _prompts(trace: Trace) -> Iterator[tuple[Place, str, str]]:
    for session in trace.sessions:
        system = "" if session.system is None else trace.systems[session.system]
        for number, turn in enumerate(session.turns):
            yield (session.name, number), turn.user, "" if number else system


def _place(one: RequestOutcome) -> Place:
    return one.asked.session, one.asked.turn


def _two(
    both: tuple[RequestOutcome, RequestOutcome], of: Callable[[RequestOutcome], str]
) -> tuple[str, str]:
    return of(both[0]), of(both[1])


# -- exchanges ------------------------------------------------------------------------------------

_PROMPT = ("messages", "prompt")
_UNTOLD = (*_PROMPT, "model", "stream", "stream_options")  # of a body, beside the settings


def exchange_lines(runs: Sequence[RunResult]) -> Iterator[str]:
    """Yield each request of all runs, whole, as a line of JSON."""
    for run in runs:
        for one in _in_order(run):
            yield json.dumps(exchange(run, one), ensure_ascii=False)


def exchange(run: RunResult, one: RequestOutcome) -> Json:
    """Return a request with its prompt, its answer, its figures, and those of its board."""
    kept = one.captured or CapturedExchange({})
    return {
        "run": run.played.target,
        "model": kept.body.get("model", ""),
        "session": one.asked.session,
        "turn": one.asked.turn,
        "settings": _settings(kept.body),
        **{name: kept.body[name] for name in _PROMPT if name in kept.body},
        "answer": one.text,
        "thoughts": kept.thoughts,
        "tool_calls": list(kept.tool_calls),
        "finish_reason": one.finish_reason,
        "error": "" if one.ok else f"{one.label}: {one.detail}".rstrip(": "),
        "usage": kept.usage,
        "timings": kept.timings,
        "ttft_ms": round(one.ttft_ms, 3) if one.text_s else None,
        "e2e_ms": None if one.end_s is None else round(one.e2e_ms, 3),
        "tokens_per_s": _rounded(_tokens_per_s(one)),
        "board": one.board,
        "board_figures": _board_figures(run.boards, one),
    }


def render_exchanges(title: str, runs: Sequence[RunResult]) -> str:
    """Return all requests as Markdown that a person reads: per run, figures and then the texts."""
    return "\n".join([f"# {title}: prompts and answers\n", *map(_render_run, runs)])


def _render_run(run: RunResult) -> str:
    outcomes = _in_order(run)
    exchanges = [exchange(run, one) for one in outcomes]
    models = ", ".join(dict.fromkeys(str(one["model"]) for one in exchanges))
    common = _common([one["settings"] for one in exchanges])
    rows = [
        [f"{one['session']}, turn {one['turn'] + 1}", *_row(one), one["error"] or "-"]
        for one in exchanges
    ]
    head = [
        *("", "TTFT, ms", "tokens/s", "prompt tokens", "cached", "tokens", "end-to-end, ms"),
        *("board", "NPU load", "NPU peak", "memory, MB", "error"),
    ]
    return "\n".join(
        [
            f"## {run.played.target}\n",
            f"- model: {models}\n- settings: {_as_text(common)}\n",
            table(head, rows),
            ""
            if run.boards
            else "The server lists no boards (`/v1/boards`), so their load is not known.\n",
            *(_render_exchange(one, common) for one in exchanges),
        ]
    )


def _row(fields: Json) -> list[str]:
    usage, board = fields["usage"], fields["board_figures"] or {}
    details = usage.get("prompt_tokens_details") or {}
    load, peak = board.get("npu_load_mean"), board.get("npu_load_peak")
    return [
        figure(fields["ttft_ms"]),
        figure(fields["tokens_per_s"]),
        figure(usage.get("prompt_tokens"), 0),
        figure(details.get("cached_tokens"), 0),
        figure(usage.get("completion_tokens"), 0),
        figure(fields["e2e_ms"]),
        fields["board"] or MISSING,
        MISSING if load is None else f"{figure(load, 0)} %",
        MISSING if peak is None else f"{figure(peak, 0)} %",
        figure(board.get("memory_mb"), 0),
    ]


def _render_exchange(fields: Json, common: Json) -> str:
    parts = [f"### {fields['session']}, turn {fields['turn'] + 1}\n"]
    own = {name: value for name, value in fields["settings"].items() if name not in common}
    if own:
        parts.append(f"settings: {_as_text(own)}\n")
    if "messages" in fields:
        for message in fields["messages"]:
            parts += [f"{message.get('role', '')}:\n", fenced(_content(message))]
    elif "prompt" in fields:
        parts += ["prompt:\n", fenced(str(fields["prompt"]))]
    if fields["thoughts"]:
        parts += ["thoughts:\n", fenced(fields["thoughts"])]
    calls = [json.dumps(one, ensure_ascii=False) for one in fields["tool_calls"]]
    if calls:
        parts += ["calls of tools:\n", fenced("\n".join(calls))]
    ended = fields["error"] or fields["finish_reason"]
    parts += [f"**answer** ({ended}):\n", fenced(fields["answer"])]
    return "\n".join(parts)


def _content(message: Json) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _common(settings: Sequence[Json]) -> Json:
    """Return the settings that all requests have alike."""
    first: Json = settings[0] if settings else {}
    return {
        name: value
        for name, value in first.items()
        if all(name in one and one[name] == value for one in settings)
    }


def _as_text(settings: Json) -> str:
    lines = [f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in settings.items()]
    return ", ".join(lines) or "none"


def _settings(body: Json) -> Json:
    return {name: value for name, value in body.items() if name not in _UNTOLD}


def _in_order(run: RunResult) -> list[RequestOutcome]:
    return sorted(run.played.outcomes, key=lambda one: one.asked.due_s)


def _tokens_per_s(one: RequestOutcome) -> float | None:
    """The board's own rate, where the server tells it, else that of the stream."""
    rate = None if one.captured is None else one.captured.timings.get("tokens_per_s")
    if isinstance(rate, int | float):
        return rate
    return 1e3 / one.token_ms if one.token_ms else None


def _board_figures(samples: Sequence[BoardSample], one: RequestOutcome) -> Json | None:
    """Return the figures of a request's board while it was served; None where none are known."""
    boards = frozenset(one.board.split(", "))
    mine = [sample for sample in samples if sample.board in boards]
    until_s = one.over_s if one.end_s is None else one.end_s
    if not mine or until_s is None:
        return None
    during = [sample for sample in mine if one.asked.sent_s <= sample.at_s <= until_s]
    # A short answer may lie between two readings: then the nearest one tells of it.
    during = during or [min(mine, key=lambda sample: abs(sample.at_s - until_s))]
    loads = [sample.npu_load for sample in during if sample.npu_load is not None]
    last = during[-1]
    return {
        "readings": len(during),
        "npu_load_mean": round(fmean(loads), 1) if loads else None,
        "npu_load_peak": round(max(loads), 1) if loads else None,
        "npu_mhz": _rounded(last.npu_mhz),
        "memory_mb": _rounded(last.memory_mb),
        "memory_available_mb": _rounded(last.memory_available_mb),
        "temperature_c": _rounded(last.temperature_c),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)

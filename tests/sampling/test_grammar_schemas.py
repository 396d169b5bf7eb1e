"""A thousand JSON schemas of rising nastiness, through what Routers and engines do with them.

Each is tried in the compiler's process and, if it is accepted, followed by an engine's stepwise run
whose library says nonsense. `--schemas-every 1` takes all of them.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import jsonschema
import numpy as np
import pytest

from rkserve.api.common.calls import parse_chat
from rkserve.api.parsing.sampling import Named
from rkserve.core.errors import RequestError, StepsRefused
from rkserve.core.run_params import Guide, Sampling, Stepwise
from rkserve.native import engine_frames
from rkserve.native.engine.stepwise import StepwiseRuns
from rkserve.native.engine_frames import FrameKind, FrameReader, StepParams
from rkserve.native.runtime import Matrix, Runtime
from rkserve.router.off_loop import GrammarChecker
from tests.support.boards.fakes import run_loop
from tests.support.values.grammar_walk import EOS, TOKENS, VOCABULARY
from tests.support.values.hard_schemas import HOSTILE, schemas

pytestmark = pytest.mark.slow

COUNT = 1000
LONGEST = 160
HANG_S = 60.0
# Those that this judge knows as they are meant today.
FORMATS = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])
ANY = Sampling(temperature=1.0, top_k=0, top_p=1.0, repeat_penalty=1.0)
_CLOSING = np.array(
    [VOCABULARY.piece(at)[:1] in (b'"', b"]", b"}") for at in range(len(VOCABULARY))]
)
_ENDS = np.array([at in EOS for at in range(len(VOCABULARY))])


class Nonsense:
    """A library whose logits are chance, and lean to ends the longer it talks."""

    def __init__(self, seed: int) -> None:
        self._chance = np.random.default_rng(seed)
        self._said = 0

    def evaluate(self, *_: Any, **__: Any) -> Matrix:
        row = self._chance.standard_normal(len(VOCABULARY), np.float32)
        row += _CLOSING * (self._said / 12) + _ENDS * (2 + self._said / 6)
        self._said += 1
        return Matrix(1, len(row), row.astype(np.float32).tobytes())

    def kv_cache_sizes(self) -> tuple[int, ...]:
        return (0,)


@dataclass
class Found:
    """What became of them; ``wrong`` are the schemas at fault with what is wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[int, str]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, number: int, kind: str, *wrong: str) -> None:
        self.counts[kind] += 1
        self.wrong += [(number, one) for one in wrong]


def said(steps: StepwiseRuns, told: list[bytes], guide: Guide, seed: int) -> tuple[str, bool]:
    """Follow a grammar as an engine does; return the text, and whether it came to its end."""
    told.clear()
    params = StepParams(TOKENS, ANY, Stepwise(seed, guide=guide), EOS, LONGEST)
    command = {"steps": params.as_json(), "keep_history": True, "adapter": None}
    steps.run(cast(Runtime, Nonsense(seed)), 1, command, (1, 2), lambda: False)
    tokens = [
        engine_frames.unpack_token(data)
        for kind, data in FrameReader().feed(b"".join(told))
        if kind is FrameKind.TOKEN
    ]
    text = b"".join(one[3] for one in tokens).decode("utf-8", "replace")
    return text, len(tokens) < LONGEST or tokens[-1][2] in EOS


def asked(schema: Any) -> Named:
    """Read it as a Router does. Raises ``RequestError``."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "response_format": form}
    named = parse_chat(json.dumps(body).encode()).steps.guide
    assert named is not None
    return named


def judged(schema: Any) -> Any:
    """Return it with the patterns in Python's words, which has no classes of letters."""
    return json.loads(json.dumps(schema).replace(r"\\p{L}", r"[^\\W\\d_]"))


def _number(digits: str) -> float:
    return int(digits) if len(digits) < 16 else float(digits)


def flaw(text: str, schema: Any) -> str | None:
    """What is wrong with an answer that came to its end."""
    try:
        # A number is what it is however it is written, but not to Python beyond 2**53.
        value = json.loads(text, parse_int=_number)
    except ValueError as exc:
        return f"no JSON: {exc}: {text[:200]!r}"
    try:
        judge = jsonschema.Draft202012Validator(judged(schema), format_checker=FORMATS)
        judge.validate(value)
    except jsonschema.ValidationError as exc:
        return f"not valid: {exc.message[:200]}"
    return None


async def tried(found: Found, chosen: list[tuple[int, Any]]) -> None:
    """Try each, and follow what was accepted."""
    guiding, told = GrammarChecker(), list[bytes]()
    steps = StepwiseRuns(told.append)
    try:
        for number, schema in chosen:
            try:
                param, guide = asked(schema)
                await asyncio.wait_for(guiding.check(guide, param), HANG_S)
            except RequestError as exc:
                refused(found, number, exc)
                continue
            try:
                text, whole = said(steps, told, guide, number)
            except StepsRefused as exc:
                found.add(number, "stopped", f"an accepted one is refused later: {exc}")
                continue
            wrong = flaw(text, schema) if whole else None
            kind = "wrong" if wrong else "followed" if whole else "cut"
            found.add(number, kind, *([wrong] if wrong else []))
    finally:
        await guiding.close()


def refused(found: Found, number: int, exc: RequestError) -> None:
    reason = exc.message.removeprefix("Invalid 'response_format': ")
    too_long = "longer than 2 s" in reason or "too much memory" in reason
    if "busy with other things" in reason:  # so is the machine, with other tests
        found.add(number, "not tried")
        return
    named = (exc.param or "").startswith("response_format") and len(reason.split()) > 1
    found.reasons[reason[:60]] += 1
    found.add(number, "too long" if too_long else "refused", *(() if named else (reason,)))


def cpu_s() -> float:
    """Of this process and of the compilers' that have ended."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def test_each_of_a_thousand_schemas_is_followed_or_refused_with_a_reason(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    every = request.config.getoption("--schemas-every")
    chosen = list(enumerate(schemas(COUNT)))
    # All of the hostile ones, which are the last.
    chosen = [*chosen[:-HOSTILE:every], *chosen[-HOSTILE:]]
    found, begun_s = Found(), cpu_s()
    run_loop(tried(found, chosen))
    took = f"{cpu_s() - begun_s:.1f} s of CPU"
    report = ", ".join(f"{count} {kind}" for kind, count in sorted(found.counts.items()))
    with capsys.disabled():
        print(f"\n{len(chosen)} schemas: {report}; {took}")  # noqa: T201 - figures are its point
    (tmp_path / "reasons.json").write_text(json.dumps(found.reasons.most_common(), indent=1))
    assert found.wrong == []
    assert sum(found.counts.values()) == len(chosen)
    # Else a compiler that refuses all of them, or a generator that has gone tame, would pass.
    assert found.counts["followed"] > len(chosen) // 3
    assert found.counts["refused"] > len(chosen) // 10
    assert found.counts["too long"] >= 1

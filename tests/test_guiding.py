"""Grammars are tried in a process of their own: what takes too long or too much is a 400."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fakes import run_loop

from rkserve.deployments.guiding import KEPT, Guiding
from rkserve.errors import RequestError
from rkserve.runvalues import Guide, GuideKind
from rkserve.sampling import trial
from rkserve.sampling.asking import MAX_CHARS, PROGRAM, READY, ask


def schema(value: Any) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(value))


GOOD = schema({"type": "integer"})
BAD = schema({"not": {}})
# An intersection whose parts llguidance multiplies out.
HOSTILE = schema({"allOf": [{"type": "string", "pattern": f"a{n}"} for n in range(200)]})


@asynccontextmanager
async def guiding() -> AsyncIterator[Guiding]:
    made = Guiding()
    try:
        yield made
    finally:
        await made.close()


def test_each_grammar_gets_its_own_answer() -> None:
    async def body() -> None:
        async with guiding() as made:

            async def ask(guide: Guide) -> bool:
                try:
                    await made.check(guide, "x")
                except RequestError as exc:
                    return exc.param != "x"
                return True

            asked = [GOOD, BAD, GOOD, *(schema({"const": n}) for n in range(KEPT + 3)), BAD]
            found = await asyncio.gather(*map(ask, asked))
            assert found == [guide != BAD for guide in asked]

    run_loop(body())


def test_what_takes_too_long_is_refused_and_the_next_one_is_not() -> None:
    async def body() -> None:
        async with guiding() as made:
            with pytest.raises(RequestError, match=r"longer than 2 s|memory") as caught:
                await made.check(HOSTILE, "response_format")
            assert caught.value.param == "response_format"
            await made.check(GOOD, "response_format")
            with pytest.raises(RequestError, match=r"longer than 2 s|memory"):
                await made.check(HOSTILE, "response_format")  # remembered

    run_loop(body())


def test_who_leaves_while_a_grammar_is_tried_leaves_no_answer_to_the_next() -> None:
    async def body() -> None:
        async with guiding() as made:
            leaves = asyncio.create_task(made.check(HOSTILE, "x"))
            await asyncio.sleep(0)
            leaves.cancel()
            await asyncio.wait({leaves})
            assert leaves.cancelled()
            with pytest.raises(RequestError, match="Unimplemented"):
                await made.check(BAD, "x")
            await made.check(GOOD, "x")

    run_loop(body())


def test_a_grammar_that_is_too_long_is_not_even_tried() -> None:
    async def body() -> None:
        async with guiding() as made:
            with pytest.raises(RequestError, match="characters"):
                await made.check(Guide(GuideKind.REGEX, "a" * (MAX_CHARS + 1)), "x")

    run_loop(body())


def test_the_process_says_that_it_is_ready_and_answers_line_by_line() -> None:
    out = io.StringIO()
    trial.serve(io.StringIO(ask(GOOD) + ask(BAD)), out)
    ready, good, bad = map(json.loads, out.getvalue().splitlines())
    assert (ready, good) == (READY, None)
    assert "Unimplemented" in bad


def test_neither_engines_nor_routers_load_a_compiler_that_nobody_asked_for() -> None:
    code = (
        "import sys, rkserve.native.engine, rkserve.native.binding, rkserve.deployments.guiding;"
        "print([name for name in ('numpy', 'llguidance') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
    assert trial.__name__ == PROGRAM

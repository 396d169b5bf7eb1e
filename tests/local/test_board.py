"""The board without Ray: ``rkserve.local``, and the examples of its page."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rkserve.core.errors import (
    ConfigError,
    NativeError,
)
from rkserve.core.messages import Embedded, EmbedRequest
from rkserve.core.run_params import Pooling
from rkserve.local import (
    Answer,
    AsyncGeneration,
    AsyncLocalBoard,
    Decoded,
    LocalBoard,
    open_board,
)
from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow

MODEL = PROJECT / "models" / "sim-chat"
SIMULATED = {"strict": True, "time_scale": 0.02}
PAGE = (PROJECT / "docs" / "how-to" / "local.md").read_text(encoding="utf-8")
TUTORIAL = (PROJECT / "docs" / "tutorial" / "first-board.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)^```$", PAGE, re.S | re.M))
COUNTED = "1, 2, 3, 4, 5, 6, 7, 8."


@pytest.fixture(scope="module")
def board() -> Iterator[LocalBoard]:
    with open_board(MODEL, simulated=SIMULATED) as opened:
        yield opened


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, check=False,
        cwd=PROJECT, env=dict(os.environ),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# -- the page and the example -----------------------------------------------------------------


def test_every_example_of_the_page_is_found() -> None:
    assert sorted(EXAMPLES) == ["handler", "local"]
    assert PAGE.count("```python") == len(EXAMPLES)


def test_the_program_of_the_tutorial_prints_what_the_page_shows() -> None:
    (program,) = re.findall(r"^```python\n((?!# Needs).*?)^```$", TUTORIAL, re.S | re.M)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", TUTORIAL, re.S | re.M)
    assert run("-c", program) == shown


def test_the_first_example_of_the_page_runs() -> None:
    first, second = run("-c", EXAMPLES["local"]).splitlines()
    assert first == "1, 2, 3, 4, 5. stop 11"
    assert second == "1, 2, 3."


def test_the_example_of_a_handler_runs() -> None:
    told, answer = run("-c", EXAMPLES["handler"]).splitlines()
    assert told == "paused after '1, 2, 3, 4, 5, 6, 7, 8' by pause_when"
    assert answer == "1, 2, 3, 4, 5, 6 and so on. abort"


def test_the_example_program_runs() -> None:
    said = run("examples/local_board.py")
    assert f"{COUNTED} (17 tokens, stop)" in said
    assert "paused with the KV cache kept" in said
    assert " (the rest is left out)" in said
    assert "calling get_weather with {'city': 'Oslo'}" in said
    assert '{"temperature": 21, "sky": "clear"}' in said


def test_neither_ray_nor_fastapi_is_imported() -> None:
    check = "import sys, rkserve.local; print({'ray', 'fastapi', 'starlette'} & set(sys.modules))"
    assert run("-c", check) == "set()\n"


# -- generating -------------------------------------------------------------------------------


def test_an_answer_has_text_ids_usage_and_openais_object(board: LocalBoard) -> None:
    answer = board.generate("Count to 8", temperature=0, logprobs=True)
    assert (answer.text, answer.finish_reason) == (COUNTED, "stop")
    assert answer.message == {"role": "assistant", "content": COUNTED}
    assert len(answer.token_ids) == answer.usage.completion_tokens
    logged = answer.body["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in logged).startswith(COUNTED)


# -- pausing ----------------------------------------------------------------------------------


def at_five(piece: Decoded) -> str | None:
    return "five is there" if piece.answer.endswith("5") else None


def test_adapters_of_the_folder_change_the_answer(tmp_path: Path) -> None:
    from rkserve.native.sim import models as sim_models

    folder = tmp_path / "sim-chat"
    folder.mkdir()
    for file in MODEL.iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file)
    place = folder / "adapters" / "fr" / "v1"
    place.mkdir(parents=True)
    sim_models.write_adapter(place / "adapter.rkllm", "fr", seed=3)
    with open_board(folder, simulated=SIMULATED) as opened:
        assert opened.adapters() == ["fr@v1"]
        plain = opened.generate("Tell me something", temperature=0, max_tokens=30)
        tuned = opened.generate("Tell me something", temperature=0, max_tokens=30, adapter="fr")
        assert plain.text != tuned.text
        assert tuned.body["weight_version"] == "fr@v1"


def test_a_wrong_setting_is_named() -> None:
    before = {one for one in threading.enumerate() if one.name == "rkserve.local"}
    with pytest.raises(ConfigError, match="n_batches"):
        open_board(MODEL, simulated=SIMULATED, n_batches=2)
    with pytest.raises(ConfigError, match="exactly one of"):
        open_board(MODEL)
    with pytest.raises(ConfigError, match="does not exist"):
        open_board("models/nobody", simulated={})
    assert {one for one in threading.enumerate() if one.name == "rkserve.local"} == before


def test_a_closed_board_says_so_and_leaves_nothing() -> None:
    opened = open_board(MODEL, simulated=SIMULATED)
    generation = opened.start("Count to 500", temperature=0)
    pid = opened.report().engine_pid
    opened.close()
    opened.close()
    with pytest.raises(RuntimeError, match="closed"):
        opened.kv()
    with pytest.raises(RuntimeError, match="closed"):
        next(generation)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_coroutines_have_the_same_calls() -> None:
    async def ask() -> Answer:
        async with await AsyncLocalBoard.open(MODEL, simulated=SIMULATED) as opened:

            async def handler(generation: AsyncGeneration) -> None:
                await generation.edit(" five", replace_last=1)

            text = ""
            async for piece in opened.stream("Count to 8", temperature=0):
                text += piece.text
            assert text == COUNTED
            return await opened.generate(
                "Count to 8", temperature=0, pause_when=at_five, on_pause=handler
            )

    assert asyncio.run(ask()).text.startswith("1, 2, 3, 4, five")


# -- settings of the runtime --------------------------------------------------------------------


def folder_with(folder: Path, more: str) -> Path:
    """A copy of the simulated model with more settings."""
    made = folder / "sim-chat"
    made.mkdir()
    for file in MODEL.iterdir():
        if file.is_file():
            (made / file.name).write_bytes(file.read_bytes())
    with (made / "rkserve.yaml").open("a", encoding="utf-8") as settings:
        settings.write(more)
    return made


def told_at_load(model: Path, caplog: pytest.LogCaptureFixture, **settings: Any) -> str:
    with caplog.at_level(logging.INFO), open_board(model, simulated=SIMULATED, **settings):
        return caplog.text


def test_settings_of_the_runtime_reach_the_library(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RKLLM_LOG_LEVEL", "2")
    more = "  mirostat: 2\n  mirostat_tau: 3.5\n  mirostat_eta: 0.2\n"
    model = folder_with(tmp_path, more)
    assert "Embed Flash: 1" in told_at_load(MODEL, caplog), "left to the library"
    caplog.clear()
    told = told_at_load(model, caplog, embed_flash=False)
    assert "Embed Flash: 0" in told
    assert "Mirostat: 2, Tau: 3.500000, Eta: 0.200000" in told


def test_the_library_goes_on_past_its_end_where_the_folder_says_so(tmp_path: Path) -> None:
    model = folder_with(tmp_path, "ignore_eos_token: true\n")
    with open_board(model, simulated=SIMULATED) as opened:
        answer = opened.generate("Count to 8", temperature=0, max_tokens=40)
        assert answer.text.startswith(f"{COUNTED} ")
        assert (answer.usage.completion_tokens, answer.finish_reason) == (40, "length")


def test_a_release_that_cannot_ignore_its_end_says_so(tmp_path: Path) -> None:
    model = folder_with(tmp_path, "ignore_eos_token: true\n")
    with pytest.raises(NativeError, match=r"RKLLM 1\.2\.3 has no ignore_eos_token"):
        open_board(model, simulated={**SIMULATED, "release": "1.2.3"})


def test_all_rows_of_hidden_states_end_with_the_vector_of_the_last_token() -> None:
    with open_board(MODEL.parent / "sim-embed", simulated=SIMULATED) as opened:

        async def made(pooling: Pooling) -> bytes:
            asked = EmbedRequest("r/0", "sim-embed", (), 0, inputs=((5, 6, 7),), pooling=pooling)
            events = [event async for event in opened._inner._board.embed(asked)]
            (found,) = [event for event in events if isinstance(event, Embedded)]
            return found.vectors[0]

        rows, last = opened._thread.call(made(Pooling.ALL)), opened._thread.call(made(Pooling.LAST))
        assert len(rows) == 3 * len(last)
        assert rows[-len(last) :] == last
        assert sum(opened.kv().entries) == 0

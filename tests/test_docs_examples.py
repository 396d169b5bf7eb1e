"""The examples of the README and docs, run as they stand there, against what `serve run` starts
with the file of the project, in a process of its own.

Those of docs/how-to/interrupting.md have their own boards, and their answers are looked at.
docs/how-to/local.md and docs/tutorial/first-board.md have tests of their own, because their
examples need no cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from compat.application import serve_run
from rkserve.core.child_process import free_port
from rkserve.native.sim import models
from tests.support.cluster.local_cluster import (
    NO_TLS,
    START_S,
    App,
    expect_no_process_of,
    wait_for,
)
from tests.support.cluster.varied import EXAMPLES, FILTERED, HOOKS, PAGE, PLAIN, of
from tests.support.http.talk import CHAT, MODEL, chat_body
from tests.support.paths import PROJECT

pytestmark = [pytest.mark.ray, pytest.mark.slow]
pytest_plugins = ["tests.support.cluster.varied_fixtures"]

HOST = "http://127.0.0.1:8000"
NEEDS = "# Needs "
PAGES = (PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md")))
TUTORIALS = ("first-cluster.md", "first-rollout.md")
ELSEWHERE = ("interrupting.md", "local.md", "first-board.md")
# What examples take away is given back before the next one.
# The first key closes a cluster to all who have none; tests of their own make keys.
CLOSES = "/v1/keys"
UNDO = {
    "/pause": "/resume",
    "/pause_generation": "/resume",
    "/sleep": "/wake_up",
    "/v1/models/unload": "/wake_up",
}


@dataclass(frozen=True)
class Block:
    """A fenced block: the page and line that it begins at, and its text."""

    place: str
    language: str
    text: str

    @property
    def needs(self) -> str:
        """The needs that its first line names."""
        first = self.text.partition("\n")[0]
        return first.removeprefix(NEEDS) if first.startswith(NEEDS) else ""

    def commands(self) -> Iterator[list[str]]:
        """The words of every ``curl`` in it, with an empty admin key as where none is set."""
        text = self.text.replace("\\\n", " ").replace("$RKSERVE_ADMIN_KEY", "")
        text = re.sub(r"(^|[ \t]+)# .*$", "", text, flags=re.M)
        lexer = shlex.shlex(text, posix=True, punctuation_chars="\n")
        lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
        words: list[str] = []
        for word in [*lexer, "\n"]:
            if word.strip("\n"):
                words.append(word)
            elif words:
                if words[0] == "curl":
                    yield words[1:]
                words = []


def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.S | re.M):
            line = text.count("\n", 0, match.start()) + 1
            if match[1] in languages:
                found.append(Block(f"{page.name}:{line}", match[1], match[2]))
    return found


CURLS = [block for block in blocks("sh") if any(block.commands())]
PYTHON = [block for block in blocks("python") if block.place.partition(":")[0] not in ELSEWHERE]


def request_of(words: list[str]) -> tuple[str, str, dict[str, Any]]:
    """Return method, path and httpx's arguments of a curl command."""
    method, path, headers, body = None, "", {}, None
    rest = iter(words)
    for word in rest:
        if word == "-X":
            method = next(rest)
        elif word == "-H":
            name, _, value = next(rest).partition(":")
            headers[name.strip()] = value.strip()
        elif word == "-N":  # streamed answers are read to their end here
            continue
        elif word in ("-d", "--data-binary", "-T"):
            text = next(rest)
            is_file = text.startswith("@") or word == "-T"
            body = models.render_adapter("Tone") if is_file else text.encode()
            headers.setdefault("content-type", "application/x-www-form-urlencoded")
        else:
            assert word.startswith(f"{HOST}/"), f"{word}: the test knows no such option of curl"
            path = word.removeprefix(HOST)
    given = {"headers": headers, "content": body}
    return method or ("GET" if body is None else "POST"), path, given


def test_every_block_of_every_page_is_one_that_this_file_knows() -> None:
    assert len(CURLS) > 90
    assert {block.place.partition(":")[0] for block in CURLS} >= {
        *("README.md", "api.md", "api-reference.md", "admission.md", "control.md", "vision.md")
    }
    for block in CURLS:
        text = block.text.replace("\\\n", " ")
        assert len([*block.commands()]) == len(re.findall(r"^\s*curl ", text, re.M)), block.place


@dataclass(frozen=True)
class Demo:
    """``serve run`` with the file that the project ships."""

    process: subprocess.Popen[bytes]
    folder: Path
    url: str

    @property
    def log(self) -> Path:
        """What it has printed."""
        return self.folder / "serve.log"

    def http(self) -> httpx.Client:
        """A client; paths are relative to the application."""
        return httpx.Client(base_url=self.url, timeout=START_S, verify=NO_TLS)

    def has_started(self) -> bool:
        """Return whether every model has a board, or the process has ended."""
        if self.process.poll() is not None:
            return True
        try:
            with self.http() as http:
                return http.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def end(self) -> None:
        """End it as Ctrl-C does, and by force if that takes a minute."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=60)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        expect_no_process_of(self.folder)

    def ready_boards(self) -> list[str]:
        """Return the boards of the chat model that serve."""
        with self.http() as http:
            boards = http.get(f"/v1/models/{MODEL}").json()["rkserve"]["boards"]
        return [board["id"] for board in boards if board["state"] == "ready"]


def shipped_config(folder: Path, port: int) -> Path:
    """Write serve_config.yaml with faster boards, and so that it disturbs no other Ray."""
    config = yaml.safe_load((PROJECT / "serve_config.yaml").read_text(encoding="utf-8"))
    config["http_options"]["port"] = port
    args = config["applications"][0]["args"]
    for group in args["boards"]:
        group["simulated"] |= {"time_scale": 0.05, "load_s": 0.2}
    args["state_dir"] = str(folder / "state")
    args["coordinator"] = {"data_dir": str(folder / "data")}
    file = folder / "serve_config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return file


# `make demo`, too, starts once more where Ray itself did not start on a busy machine.
ATTEMPTS = 2


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    """The boards of serve_config.yaml, all ready; no process of it outlives the tests."""
    # Short, for the paths of Ray's sockets.
    with tempfile.TemporaryDirectory(prefix="rk-", dir="/tmp", ignore_cleanup_errors=True) as name:
        started = _serve_run(Path(name), ATTEMPTS)
        try:
            boards = ["sim-0", "sim-1", "sim-2"]
            wait_for("three boards", lambda: started.ready_boards() == boards, START_S)
            yield started
        finally:
            started.end()


def _serve_run(parent: Path, attempts: int) -> Demo:
    folder, port = parent / str(attempts), free_port()
    folder.mkdir()
    with (folder / "serve.log").open("wb") as log:
        process = serve_run(shipped_config(folder, port), folder, log.fileno())
    started = Demo(process, folder, f"http://127.0.0.1:{port}")
    try:
        wait_for("`serve run` to serve", started.has_started, START_S)
    except BaseException:
        started.end()
        raise
    if process.poll() is None:
        return started
    started.end()
    sys.stdout.write(started.log.read_text(errors="replace"))
    assert attempts > 1, f"`serve run` ended with {process.returncode}"
    return _serve_run(parent, attempts - 1)


@pytest.mark.long
def test_serve_run_serves_with_the_file_of_the_project(demo: Demo) -> None:
    with demo.http() as http:
        answer = http.post(CHAT, json=chat_body("Repeat after me: served")).json()
    assert answer["choices"][0]["message"]["content"] == "served"


@pytest.mark.long
def test_every_example_is_answered_with_200_or_says_what_it_needs(demo: Demo) -> None:
    wrong = []
    with demo.http() as http:
        for block in CURLS:
            for words in block.commands():
                if any("$" in word for word in words):  # to be put in place, or another program's
                    assert block.needs, f"{block.place} does not say what it needs"
                    continue
                method, path, given = request_of(words)
                if path.startswith(CLOSES):
                    continue
                answer = http.request(method, demo.url + path, **given)
                if answer.status_code != httpx.codes.OK and not block.needs:
                    wrong.append(f"{block.place} {method} {path}: {answer.text[:200]}")
                assert answer.status_code < httpx.codes.INTERNAL_SERVER_ERROR, answer.text
                if undo := UNDO.get(path.partition("?")[0]):
                    assert http.post(demo.url + undo).status_code == httpx.codes.OK
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
@pytest.mark.parametrize("name", TUTORIALS)
def test_the_commands_of_a_tutorial_print_what_it_shows(
    demo: Demo, name: str, tmp_path: Path
) -> None:
    text = (PROJECT / "docs" / "tutorial" / name).read_text(encoding="utf-8")
    steps = re.findall(r"^```sh\n(.*?)^```$(?:\s*^```text\n(.*?)^```$)?", text, re.S | re.M)
    assert steps
    commands = Path(sys.executable).parent
    environment = {
        **os.environ,
        "RKSERVE_URL": demo.url,
        "PATH": f"{commands}:{os.environ['PATH']}",
    }
    for script, shown in steps:
        if script.startswith(NEEDS) or script == "make demo\n":  # the fixture has started it
            continue
        done = subprocess.run(
            ["sh", "-e", "-c", script.replace(HOST, demo.url).replace("$PWD/.venv/bin:", "")],
            capture_output=True, text=True, timeout=START_S, check=False,
            cwd=tmp_path, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}{done.stderr}"
        printed = " ".join(done.stdout.split())
        for line in shown.splitlines():
            assert " ".join(line.split()) in printed, f"{script}{done.stdout}"


@pytest.mark.long
@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.place)
def test_every_example_in_python_runs_or_says_what_it_needs(
    demo: Demo, block: Block, tmp_path: Path
) -> None:
    compile(block.text, block.place, "exec")
    if block.needs:
        return
    script = tmp_path / "example.py"
    script.write_text(block.text.replace(HOST, demo.url), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=START_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.long
def test_serve_run_ends_with_ctrl_c_and_leaves_no_process(demo: Demo) -> None:
    os.killpg(demo.process.pid, signal.SIGINT)  # what a terminal does at Ctrl-C
    demo.process.wait(timeout=START_S)
    expect_no_process_of(demo.folder)


def test_every_example_is_found() -> None:
    assert sorted(EXAMPLES) == ["edit", "filter", "function"]
    assert len(HOOKS) == 1
    assert PAGE.count("```python") == len(EXAMPLES)


@pytest.fixture(scope="module")
def app(varied: App) -> App:
    """A board for the examples, and one whose answers are filtered by the page's own hook."""
    of(varied, FILTERED)
    return of(varied, PLAIN)


def run(example: str, app: App) -> str:
    """Run an example in a process of its own, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLES[example]],
        env={**os.environ, "RKSERVE_URL": app.url},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_the_example_of_an_edit_runs(app: App) -> None:
    told, answer = run("edit", app).splitlines()
    assert re.fullmatch(r"paused after '1, 2, 3, .*'.* kept", told)
    assert answer.startswith("1, 2, 3, 4")
    assert " (the rest is left out)" in answer


def test_the_example_of_a_function_call_in_mid_stream_runs(app: App) -> None:
    told, answer = run("function", app).split("\n", 1)
    assert re.fullmatch(r"calling get_weather with \{'city': .*\}", told)
    call, _, rest = answer.partition("</tool_call>")
    assert "<tool_call>" in call
    assert "21" in rest, "the answer goes on with what the tool has said"
    assert "tool_response" not in rest


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_the_example_of_a_filter_masks_what_it_has_to(app: App, stream: bool) -> None:
    text = "card 1234 5678 9012 3456, and 12 34 is none, 1111 2222 3333 4444"
    body = {**chat_body(f"Repeat after me: {text}", stream=stream), "model": FILTERED}
    with app.http_sync() as http:
        response = http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    if stream:
        chunks = [
            json.loads(line.removeprefix("data: "))
            for line in response.text.splitlines()
            if line.startswith("data: {")
        ]
        found = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        assert not any(
            re.search(r"\d{4} \d{4} \d", c["choices"][0]["delta"].get("content") or "")
            for c in chunks
        )
    else:
        found = response.json()["choices"][0]["message"]["content"]
    assert found == "card [card number], and 12 34 is none, [card number]"

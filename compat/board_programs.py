"""``make compat-programs``: other people's programs for boards, unmodified, on the simulator.

    python -m compat.board_programs --vendor PATH     a checkout of the vendor's repository
    python -m compat.board_programs --server PATH     a checkout of GatekeeperZA/RKLLM-API-Server

Nothing of these programs is part of this repository; the folder of their sources is an argument.
The library runs with ``RKSIM_STRICT=1``, under which each misuse of the C API ends the process, so
that a program that comes to its end has used the library as it may be used, and has taken its
callbacks for those of a board. Servers get an environment of their own in ``.compat``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from compat.suite import WORK
from rkserve.native.sim.build import ensure_built, ensure_encoder_built

MODELS = Path(__file__).resolve().parents[1] / "models"
TIME_SCALE = "0.05"
START_S, ANSWER_S, END_S = 120.0, 60.0, 30.0
BUSY = 503
VENDOR_URL = "http://127.0.0.1:8080"  # the vendor's servers have no option for it
VIOLATION = re.compile(r"violation: (\w+)")
# At SIGTERM the vendor's servers destroy their handle twice: a misuse of their own.
TWICE_DESTROYED = {"unknown_handle"}
# The struct that 1.3.0 brought; a header without it is that of 1.2.x.
NEW_STRUCT = "RKLLMCallback"
FLASK = ("flask==3.1.2",)
GRADIO = {"1.2.3": ("gradio==5.50.0",), "1.3.0": ("gradio==6.31.0",)}  # of the demo's own year
SERVER = ("flask==3.1.2", "flask-cors==6.0.1", "numpy", "Pillow", "prometheus-client",
          "prometheus-flask-exporter")  # fmt: skip


# The vendor's servers raise the limit of open files beyond what an account or a container may have.
CAPPED_LIMITS = """
import resource
raise_to = resource.setrlimit
def capped(kind, limits):
    hard = resource.getrlimit(kind)[1]
    raise_to(kind, tuple(min(one, hard) if hard >= 0 else one for one in limits))
resource.setrlimit = capped
"""


class CheckFailed(Exception):
    """A program did something else than on a board; the text is its evidence."""


@dataclass(frozen=True)
class Sources:
    """The vendor's checkout, and the release of the library that its header declares."""

    folder: Path
    release: str

    @classmethod
    def at(cls, folder: Path) -> Sources:
        """Recognise a checkout. Raises ``SystemExit`` where it is none."""
        header = folder / "rkllm-runtime/Linux/librkllm_api/include/rkllm.h"
        if not header.is_file():
            raise SystemExit(f"{folder} is no checkout of the vendor's repository: no {header}")
        return cls(folder, "1.3.0" if NEW_STRUCT in header.read_text() else "1.2.3")

    @property
    def include(self) -> Path:
        """The folder of the vendor's header."""
        return self.folder / "rkllm-runtime/Linux/librkllm_api/include"

    @property
    def examples(self) -> Path:
        """The folder of the vendor's examples."""
        return self.folder / "examples"


class Work:
    """A program's own folder, with the libraries under the names that programs load."""

    def __init__(self, name: str, release: str) -> None:
        self.folder = WORK / f"programs-{name}-{release}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.lib = self.folder / "lib"
        self.lib.mkdir(parents=True)
        shutil.copy2(ensure_built(release), self.lib / "librkllmrt.so")
        shutil.copy2(ensure_encoder_built(), self.lib / "librknnrt.so")
        self.log = self.folder / "log"
        (self.lib / "sitecustomize.py").write_text(CAPPED_LIMITS)

    def environ(self, **more: str) -> dict[str, str]:
        """Return an environment in which any misuse of the library ends the process."""
        own = {
            "RKSIM_STRICT": "1",
            "RKSIM_TIME_SCALE": TIME_SCALE,
            # The vendor's document allows NULL, and its own programs do not test for it.
            "RKSIM_NO_NULL_TEXT": "1",
            "RKSIM_LOAD_MS": "100",
            "LD_LIBRARY_PATH": str(self.lib),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(self.lib),
        }
        return {**os.environ, **own, **more}

    def python(self, packages: Sequence[str]) -> Path:
        """Return the interpreter of an environment with these packages."""
        venv = WORK / f"venv-{'-'.join(packages[:2])}"
        stamp = venv / "packages"
        if not stamp.exists() or stamp.read_text() != repr(packages):
            check_call([sys.executable, "-m", "venv", str(venv)])
            pip = [str(venv / "bin/python"), "-m", "pip", "-q", "--disable-pip-version-check"]
            check_call([*pip, "install", *packages])
            stamp.write_text(repr(packages))
        return venv / "bin/python"

    def require_no_violation(self) -> None:
        """Raise ``CheckFailed`` where the library named a misuse."""
        found = set(VIOLATION.findall(self.log.read_text(errors="replace"))) - TWICE_DESTROYED
        if found:
            raise CheckFailed(f"misuse of the library: {', '.join(sorted(found))}; {self.log}")


def check_call(words: Sequence[str]) -> None:
    """Run a command. Raises ``CheckFailed`` where it fails."""
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise CheckFailed(f"{' '.join(words[:4])} ...: {(done.stderr or done.stdout)[-400:]}")


def compile_program(work: Work, name: str, words: Sequence[str]) -> Path:
    """Compile a C++ program against the library; return its file."""
    target = work.folder / name
    library = ["-L", str(work.lib), "-lrkllmrt", f"-Wl,-rpath,{work.lib}"]
    check_call(["g++", "-std=c++11", "-O1", *words, "-o", str(target), *library])
    return target


def run_program(work: Work, words: Sequence[str], lines: Sequence[str]) -> str:
    """Run a program with lines typed into it; return what it printed."""
    with work.log.open("w") as log:
        done = subprocess.run(
            words, input="".join(f"{one}\n" for one in lines), stdout=subprocess.PIPE, stderr=log,
            text=True, check=False, timeout=ANSWER_S + START_S, env=work.environ(), cwd=work.folder,
        )  # fmt: skip
    work.require_no_violation()
    if done.returncode:
        raise CheckFailed(f"exit code {done.returncode}; {work.log}")
    return done.stdout


@contextmanager
def serving(
    work: Work, words: Sequence[str], url: str, environ: Mapping[str, str]
) -> Iterator[None]:
    """Run a server until the block ends, and end it as systemd would, by SIGTERM."""
    with work.log.open("w") as log:
        process = subprocess.Popen(
            words,
            stdout=log,
            stderr=log,
            env=dict(environ),
            cwd=work.folder,
            start_new_session=True,
        )
        try:
            deadline_s = time.monotonic() + START_S
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise CheckFailed(f"{url} does not answer; {work.log}")
                time.sleep(0.2)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def post(url: str, body: Mapping[str, Any]) -> str:
    """Send JSON, again while the server is busy; return the whole text of the answer.

    Raises ``CheckFailed`` for another error, or a server that stays busy.
    """
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    deadline_s = time.monotonic() + ANSWER_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as exc:
            if exc.code != BUSY or time.monotonic() > deadline_s:
                raise CheckFailed(f"{url}: {exc.code} {exc.read().decode()[:300]}") from None
            time.sleep(0.2)


def chat(text: str, **more: Any) -> dict[str, Any]:
    """Return the body of a chat request."""
    return {"model": "sim-chat", "messages": [{"role": "user", "content": text}], **more}


def content_of(answer: str) -> str:
    """Return the text of a chat completion. Raises ``CheckFailed`` where it has none."""
    text = json.loads(answer)["choices"][0]["message"]["content"]
    if not text:
        raise CheckFailed(f"an empty answer: {answer[:300]}")
    return str(text)


def streamed(events: str) -> str:
    """Return the text of a streamed chat completion. Raises ``CheckFailed`` where it has none."""
    found = [line[6:] for line in events.splitlines() if line.startswith("data: {")]
    texts = [json.loads(one)["choices"][0]["delta"].get("content") or "" for one in found]
    if not "".join(texts):
        raise CheckFailed(f"an empty stream: {events[:300]}")
    return "".join(texts)


def try_chat_demo(sources: Sources) -> str:
    """The vendor's C++ chat: three turns, a cleared KV cache between them, and its end."""
    work = Work("chat", sources.release)
    source = sources.examples / "rkllm_api_demo/deploy/src/llm_demo.cpp"
    demo = compile_program(work, "llm_demo", ["-I", str(sources.include), str(source)])
    model = str(MODELS / "sim-chat/model.rkllm")
    lines = ["0", "Count to three.", "clear", "And again?", "exit"]
    printed = run_program(work, [str(demo), model, "64", "512"], lines)
    answers = [one.strip() for one in re.findall(r"robot: (.*)", printed)]
    if len(answers) != 3 or not all(answers):  # noqa: PLR2004 - as many as were asked
        raise CheckFailed(f"3 answers were expected: {printed[-400:]!r}")
    return f"{len(answers)} answers, exit code 0"


def try_multimodal_demo(sources: Sources) -> str:
    """The vendor's C++ program that sees: a picture through the encoder, one turn about it."""
    folder = sources.examples / "multimodal_model_demo"
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "opencv4"], capture_output=True, text=True, check=False
    )
    if flags.returncode:
        raise CheckFailed("not tried: it needs OpenCV (apt-get install libopencv-dev)")
    work = Work("multimodal", sources.release)
    rknn = folder / "deploy/3rdparty/librknnrt/Linux/librknn_api/include"
    files = [str(folder / "deploy/src" / name) for name in ("main.cpp", "image_enc.cc")]
    includes = ["-I", str(sources.include), "-I", str(rknn), "-I", str(folder / "deploy/src")]
    demo = compile_program(
        work, "demo", [*includes, *files, *flags.stdout.split(), "-L", str(work.lib), "-lrknnrt"]
    )
    model = MODELS / "sim-vision"
    arguments = [
        str(folder / "data/demo.jpg"), str(model / "vision.rknn"), str(model / "model.rkllm"),
        "64", "1024", "3", "rk3588",
    ]  # fmt: skip
    printed = run_program(work, [str(demo), *arguments], ["<image>What is in the image?", "exit"])
    (answer,) = re.findall(r"robot: (.*)", printed)[:1] or [""]
    if not answer.strip():
        raise CheckFailed(f"no answer: {printed[-400:]!r}")
    return f"an answer about the picture: {answer.strip()[:60]!r}"


def try_flask_server(sources: Sources) -> str:
    """The vendor's Flask server: an answer, a stream, and its end by SIGTERM."""
    work = Work("flask", sources.release)
    script = sources.examples / "rkllm_server_demo/rkllm_server/flask_server.py"
    model = str(MODELS / "sim-chat/model.rkllm")
    words = [str(work.python(FLASK)), str(script), "--rkllm_model_path", model]
    url = VENDOR_URL
    openai = "/v1/chat/completions" in script.read_text()
    with serving(work, [*words, "--target_platform", "rk3588"], url, work.environ()):
        if openai:
            texts = [
                content_of(post(f"{url}/v1/chat/completions", chat("Count to ten.", max_tokens=32)))
            ]
            texts.append(
                streamed(post(f"{url}/v1/chat/completions", chat("Count to five.", stream=True)))
            )
        else:
            texts = [content_of(post(f"{url}/rkllm_chat", chat("Count to ten.", stream=False)))]
            texts.append(post(f"{url}/rkllm_chat", chat("Count to five.", stream=True)))
    work.require_no_violation()
    return f"{'/v1/chat/completions' if openai else '/rkllm_chat'}: {len(texts)} answers"


def try_gradio_server(sources: Sources) -> str:
    """The vendor's Gradio page, by Gradio's own client."""
    work = Work("gradio", sources.release)
    script = sources.examples / "rkllm_server_demo/rkllm_server/gradio_server.py"
    model = str(MODELS / "sim-chat/model.rkllm")
    python = str(work.python(GRADIO[sources.release]))
    url, environ = VENDOR_URL, work.environ(GRADIO_ANALYTICS_ENABLED="False")
    words = [python, str(script), "--rkllm_model_path", model, "--target_platform", "rk3588"]
    client = (
        "import os\nfrom gradio_client import Client\n"
        f"client = Client({url!r}, verbose=False)\n"
        "_, history = client.predict('Count to ten.', [], api_name='/get_user_input')\n"
        "steps = list(client.submit(history, api_name='/get_RKLLM_output'))\n"
        "print(len(steps)); print(steps[-1][-1], flush=True)\n"
        "os._exit(0)\n"  # its threads may keep it
    )
    with serving(work, words, url, environ):
        done = subprocess.run(
            [python, "-c", client], capture_output=True, text=True, check=False, timeout=START_S
        )
    work.require_no_violation()
    if done.returncode or not done.stdout.strip():
        raise CheckFailed(f"Gradio's client failed: {done.stderr[-400:]}")
    steps, answer = done.stdout.strip().split("\n", 1)
    return f"{steps} streamed outputs, the last {answer[:60]!r}"


def try_api_server(folder: Path) -> str:
    """GatekeeperZA's server: turns of a conversation with its reuse of the KV cache, a stream."""
    work = Work("server", "1.2.3")
    models = work.folder / "models"
    (models / "sim-chat").mkdir(parents=True)
    shutil.copy2(MODELS / "sim-chat/model.rkllm", models / "sim-chat")
    port = 8000  # the program has no option for it
    url = f"http://127.0.0.1:{port}"
    environ = work.environ(
        RKLLM_LIB_PATH=str(work.lib / "librkllmrt.so"),
        RKLLM_MODELS_ROOT=str(models),
        RKLLM_API_LOG_FILE=str(work.folder / "api.log"),
    )
    with serving(
        work, [str(work.python(SERVER)), str(folder / "api.py")], f"{url}/health", environ
    ):
        first = content_of(post(f"{url}/v1/chat/completions", chat("Hello", stream=False)))
        turns = [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "And then?"},
        ]
        body = {"model": "sim-chat", "messages": turns, "stream": False}
        second = content_of(post(f"{url}/v1/chat/completions", body))
        third = streamed(post(f"{url}/v1/chat/completions", chat("Count to ten.", stream=True)))
    work.require_no_violation()
    return f"{len([first, second, third])} answers, the second a follow-up turn"


PROGRAMS: Mapping[str, Callable[[Sources], str]] = {
    "vendor: chat demo (C++)": try_chat_demo,
    "vendor: multimodal demo (C++)": try_multimodal_demo,
    "vendor: Flask server": try_flask_server,
    "vendor: Gradio server": try_gradio_server,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Try the programs that were named; returns 1 where one of them fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--vendor", type=Path, action="append", default=[], metavar="PATH")
    parser.add_argument("--server", type=Path, action="append", default=[], metavar="PATH")
    given = parser.parse_args(argv)
    if not given.vendor and not given.server:
        parser.error("name a checkout: --vendor PATH or --server PATH")
    tries: list[tuple[str, Callable[[], str]]] = []
    for folder in given.vendor:
        sources = Sources.at(folder.resolve())
        for name, program in PROGRAMS.items():
            tries.append((f"{name}, {sources.release}", partial(program, sources)))
    for folder in given.server:
        tries.append(("RKLLM-API-Server, 1.2.3", partial(try_api_server, folder.resolve())))
    failed = 0
    for name, attempt in tries:
        try:
            print(f"{name}: {attempt()}; no misuse of the library", flush=True)
        except (CheckFailed, subprocess.TimeoutExpired) as exc:
            failed += 1
            print(f"{name}: FAILED: {exc}", flush=True)
    print(f"{len(tries) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

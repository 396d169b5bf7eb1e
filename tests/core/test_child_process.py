"""Programs that a replica starts: what they are told and tell, how they end, what they inherit."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
from itertools import islice
from pathlib import Path

import pytest

from rkserve.core import child_process
from rkserve.core.child_process import HOST, ChildProcess, clean_environ, free_port, free_ports

ECHO = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"


async def started(
    code: str, err: asyncio.Protocol | None = None
) -> tuple[ChildProcess, asyncio.StreamReader]:
    said = asyncio.StreamReader()
    out = asyncio.StreamReaderProtocol(said)
    return await ChildProcess.start((sys.executable, "-c", code), out=out, err=err), said


async def test_it_is_told_and_tells_until_its_stdin_closes() -> None:
    child, said = await started(ECHO)
    child.stdin.write(b"hello\n")
    assert await said.readline() == b"HELLO\n"
    child.stdin.close()
    assert await child.wait() == 0
    assert await said.read() == b""
    assert child.stdin.is_closing()
    child.kill()  # nobody there any more
    child.close()


async def test_what_it_writes_to_stderr_comes_apart() -> None:
    words = asyncio.StreamReader()
    code = "import sys; sys.stderr.write('oh'); sys.stdout.write('ah'); sys.exit(3)"
    child, said = await started(code, err=asyncio.StreamReaderProtocol(words))
    assert (await said.read(), await words.read()) == (b"ah", b"oh")
    assert await child.wait() == 3
    child.close()


async def test_it_inherits_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RKSERVE_ADMIN_KEY", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("RKLLM_LOG_LEVEL", "1")
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    child, said = await started("import json, os; print(json.dumps(dict(os.environ)))")
    given = json.loads(await said.read())
    assert await child.wait() == 0
    child.close()
    assert "secret" not in given.values()
    assert given["PATH"] == os.environ["PATH"]
    assert (given["RKLLM_LOG_LEVEL"], given["LC_ALL"]) == ("1", "C")
    assert "OMP_NUM_THREADS" not in given
    assert clean_environ(["HF_TOKEN"])["HF_TOKEN"] == "secret", "where it is asked for by name"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_signal_that_ends_it_is_told(number: signal.Signals) -> None:
    child, _ = await started("import time; time.sleep(600)")
    child.send_signal(number)
    assert await child.wait() == -number
    child.close()


async def test_nothing_that_is_open_here_is_handed_down(tmp_path: Path) -> None:
    with (tmp_path / "held").open("wb") as held:
        os.set_inheritable(held.fileno(), True)
        child, said = await started("import os; print(os.listdir('/proc/self/fd'))")
        # Its own pipes, and the folder that it lists.
        assert await said.read() == b"['0', '1', '2', '3']\n"
        await child.wait()
        child.close()


async def test_what_cannot_be_started_says_so() -> None:
    with pytest.raises(FileNotFoundError):
        await ChildProcess.start(("/nonexistent/program",), out=asyncio.Protocol())


STUCK = """
import asyncio, os, sys, time
import uvloop
from rkserve.core.child_process import ChildProcess
os.register_at_fork(after_in_child=lambda: time.sleep(600))
async def main():
    said = asyncio.StreamReader()
    out = asyncio.StreamReaderProtocol(said)
    child = await ChildProcess.start((sys.executable, "-c", "print('here')"), out=out)
    print((await said.readline()).decode(), end="")
    child.close()
    await child.wait()
uvloop.run(main())
"""


def test_no_lock_that_is_held_at_the_fork_keeps_it_from_starting() -> None:
    """As Ray's loop would start it, it and this process would wait for each other for ever."""
    pytest.importorskip("uvloop", reason="Ray brings it where it can be had")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STUCK)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("here\n", "", 0)


def test_free_ports_avoid_those_of_the_kernel_and_of_ray() -> None:
    found = list(islice(free_ports(random.Random(1)), 50))
    assert len(set(found)) == 50
    assert all(20_000 <= port < 30_000 for port in found)
    assert list(islice(free_ports(random.Random(2)), 50)) != found


def test_two_callers_do_not_plan_with_the_same_port() -> None:
    one, other = (set(islice(free_ports(random.Random(3)), 50)) for _ in range(2))
    assert not one & other


def test_ports_come_again_once_half_of_them_were_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_yielded", set())
    monkeypatch.setattr(child_process, "LAST", child_process.FIRST + 20)
    assert len([free_port() for _ in range(100)]) == 100


def test_a_port_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind((HOST, free_port()))
        held.listen()
        taken = held.getsockname()[1]
        monkeypatch.setattr(child_process, "_yielded", set())
        monkeypatch.setattr(child_process, "FIRST", taken)
        monkeypatch.setattr(child_process, "LAST", taken)
        with pytest.raises(OSError, match=f"no port from {taken} to {taken} is free"):
            free_port()

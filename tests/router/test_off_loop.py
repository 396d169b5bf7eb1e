"""Work on long bodies off the event loop: few at once, and the memory given back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from rkserve.router.off_loop import off_loop
from tests.support.http.router_house import FOLDER


def test_few_long_bodies_are_worked_on_at_once_and_the_loop_is_free() -> None:
    gate, running, most = threading.Event(), 0, 0
    lock, both = threading.Lock(), threading.Event()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 2:
                both.set()
        assert gate.wait(30)
        with lock:
            running -= 1

    async def main() -> None:
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(off_loop(10**6, work)) for _ in range(6)]
        assert await asyncio.to_thread(both.wait, 30)
        # Counting has a thread of its own, and is not behind them.
        assert await asyncio.wait_for(off_loop(10**6, lambda: 5, counts=True), 30) == 5
        left = tasks.pop()
        left.cancel()
        gate.set()
        await asyncio.gather(*tasks)
        assert most == 2

    asyncio.run(main())


MEMORY = """
import asyncio, sys
from pathlib import Path
from rkserve.router.off_loop import off_loop
from rkserve.api.prompting.tokenizer import Tokenizer

def rss_mb():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6

async def main():
    tokenizer = Tokenizer(Path(sys.argv[1]))
    text = "The quick brown fox jumps over it. " * 15_000
    tokenizer.encode(text[:1000], add_special_tokens=False)
    before = rss_mb()
    work = lambda: len(tokenizer.encode(text, add_special_tokens=False))
    await asyncio.gather(*(off_loop(len(text), work) for _ in range(4)))
    print(rss_mb() - before)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and asks glibc")
def test_the_memory_of_long_texts_is_given_back() -> None:
    # Without that the process keeps more than 100 MB.
    command = [sys.executable, "-c", MEMORY, str(FOLDER / "tokenizer.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 50

"""Trace one streamed chat through Router, channel, board and engine, and list the executed files.

``python scripts/trace_chat.py`` prints the files of the package that execute a function while the
second of two chats is answered: the first one warms up. The Router and the board run in this
process, without Ray, and the engine in its own, with the simulated library. HTTP's routes and the
channel are the real ones. A callback from a thread of the library is not seen; it is added by name.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PACKAGE = f"{ROOT}/rkserve/"
OUTPUT = "RKSERVE_TRACE_OUTPUT"  # the file to which an engine writes its list
BEGIN, END = signal.SIGUSR1, signal.SIGUSR2
LIMIT_S = 30.0
# The library calls back from a thread that no profiler sees.
CALLED_BACK = "rkserve/native/binding/callback.py"
SITE = """import sys
sys.path.insert(0, {root!r})
from scripts.trace_chat import watch_engine
watch_engine()
"""

if TYPE_CHECKING:
    from rkserve.board.board import Board
    from rkserve.core.board_report import BoardReport
    from tests.support.boards import channel_bench


class ExecutedFiles:
    """The files of the package that execute functions, in all threads started after ``watch``."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def watch(self) -> None:
        """Begin in this thread and in all later ones."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def names(self) -> list[str]:
        """Return the paths below the project, sorted."""
        inside = (one for one in set(self.found) if one.startswith(PACKAGE))
        return sorted(one.removeprefix(f"{ROOT}/") for one in inside)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self.found.add(frame.f_code.co_filename)


def watch_engine() -> None:
    """Watch this engine process; list its files when it is told to."""
    if "rkserve.native.engine.process" not in sys.orig_argv:
        return
    executed = ExecutedFiles()

    def write(*_: object) -> None:
        made = Path(f"{os.environ[OUTPUT]}.new")
        made.write_text("\n".join(executed.names()), encoding="utf-8")
        made.rename(os.environ[OUTPUT])

    signal.signal(BEGIN, lambda *_: executed.found.clear())
    signal.signal(END, write)
    executed.watch()


def open_board(folder: Path) -> Board:
    """Return a board with the simulated library."""
    from rkserve.config.board_group import BoardGroupConfig
    from rkserve.deployments.board_factory import BoardLocation, assemble

    simulated = {"profile": "rk3588-qwen3-0.6b-w8a8", "time_scale": 0.0}
    group = BoardGroupConfig.model_validate(
        {
            "name": "traced",
            "model": str(ROOT / "models" / "sim-chat"),
            "simulated": simulated,
            # Confined, an engine could not write its list.
            "engine_environ": [OUTPUT],
            "confine": "off",
        }
    )
    return assemble(group, BoardLocation("a", "traced", folder), "simulated", governed=False)


def outlet_of(board: Board) -> channel_bench.Board:
    """Return the board's end of the channel, with its calls in place of Ray's."""
    from rkserve.transport.server import ChannelServer
    from tests.support.boards import channel_bench

    class Outlet(channel_bench.Board):
        async def _report(self) -> BoardReport:
            return replace(board.report(), replica="replica of a")

        async def report_now(self) -> BoardReport:
            return await self._report()

    outlet = Outlet("a")

    class Methods(channel_bench.Callee):
        def generate(self, request: Any, pass_on: Any = None) -> Any:
            return board.generate(request, pass_on=pass_on)

        async def report(self) -> BoardReport:
            return await outlet.report_now()

    outlet.outlet = ChannelServer("a", channel_bench.PATIENT, Methods(outlet))
    return outlet


async def trace(folder: Path) -> tuple[list[str], list[str]]:
    """Return the files that a chat executes in Router and board, and in the engine."""
    import httpx

    from tests.support.boards import channel_bench
    from tests.support.http.router_house import CHAT, House, chat

    executed = ExecutedFiles()
    executed.watch()
    board = open_board(folder)
    await board.start()
    try:
        async with channel_bench.router(outlet_of(board)) as (_, links):
            house = House(links[0])  # type: ignore[arg-type] # a real link in place of a scripted one
            for text in ("Please count to 4!", "Who are you?"):
                engine = board.report().engine_pid
                assert engine is not None
                os.kill(engine, BEGIN)
                # Reports and the desired state come before the request and are no part of it.
                await house.service.fleet.refresh()
                await house.cluster.refresh()
                await asyncio.sleep(0.2)
                async with httpx.AsyncClient(
                    transport=httpx.ASGITransport(house.app), base_url="http://localhost"
                ) as client:
                    executed.found.clear()
                    answer = await client.post(CHAT, json=chat(text, stream=True))
                assert "[DONE]" in answer.text, answer.text
                found = executed.names()
            os.kill(engine, END)
            engine_files = await asyncio.to_thread(read_list, Path(os.environ[OUTPUT]))
    finally:
        sys.setprofile(None)
        await board.stop()
    return found, sorted({*engine_files, CALLED_BACK})


def read_list(output: Path) -> list[str]:
    """Wait for the engine's list, and return it."""
    deadline_s = time.monotonic() + LIMIT_S
    while not output.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return output.read_text(encoding="utf-8").split()


def executed_files() -> tuple[list[str], list[str]]:
    """Trace a chat in a temporary folder; see ``trace``."""
    with tempfile.TemporaryDirectory(prefix="rktrace-") as made:
        folder = Path(made)
        (folder / "sitecustomize.py").write_text(SITE.format(root=str(ROOT)), encoding="utf-8")
        paths = [made, *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.environ[OUTPUT] = str(folder / "engine.txt")
        return asyncio.run(trace(folder))


def main() -> None:
    """Print both lists."""
    here, engine = executed_files()
    for title, names in (("Router and board", here), ("engine", engine)):
        print(f"{title}: {len(names)}")
        for name in names:
            print(f"  {name}")
    print(f"together: {len({*here, *engine})}")


if __name__ == "__main__":
    main()

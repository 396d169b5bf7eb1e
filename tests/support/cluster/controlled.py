"""How tests load a cluster, control it as a whole meanwhile, and kill what keeps it.

The clients and the controller are the control benchmark's: one process, one clock, so that what
arrives after an answer is told from what arrived before it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks.control.answers import Answer, Call
from benchmarks.control.checks import Checked, Era, check
from benchmarks.control.checks import truth as said_by
from benchmarks.control.load import Load
from rkserve.core.board_report import BoardReport
from tests.support.cluster.local_cluster import App, LocalCluster, wait_for
from tests.support.http.talk import MODEL, chat_body

GROUP = "held"
BOARDS = tuple(f"{GROUP}-{number}" for number in range(3))
# At 6 ms a token the longer one takes a second, and a board holds each of a few clients up.
PACE = 0.1
COUNT, COUNTED = "Count to 50", ", ".join(str(n) for n in range(1, 51)) + "."
BASE = "default"  # the label of weights that nobody has given one
LIMIT_S = 120.0

Json = dict[str, Any]
KEEP: Json = {"mode": "keep", "clear_cache": False}


def deploy(cluster: LocalCluster) -> App:
    """Deploy the three boards, once more where they were there before."""
    group = cluster.simulated(
        GROUP,
        len(BOARDS),
        model=str(cluster.folder / "models" / MODEL),
        queue_limit=64,
        crash_limit=50,
        simulated={"time_scale": PACE, "strict": True},
    )
    args = {
        "boards": [group],
        "router": {"ping_s": 0.1},
        "coordinator": {"allowed_paths": [str(cluster.folder / "shelf")]},
    }
    cluster.deploy(GROUP, args)
    return App(cluster, GROUP, GROUP, len(BOARDS))


def body(text: str = COUNT, model: str = MODEL, **extra: Any) -> Json:
    """Return the body of a streamed, greedy call that says which version wrote which token."""
    return chat_body(
        text,
        **{
            "model": model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_weight_versions": True,
            **extra,
        },
    )


def step(what: str, path: str, wait_s: float, **asked: Any) -> Json:
    """Return a step of a plan; see ``bench.control_load``."""
    return {"what": what, "path": path, "body": asked, "wait_s": wait_s}


def load(
    app: App, bodies: Sequence[Json], plan: Sequence[Json] = (), **more: Any
) -> tuple[list[Answer], list[Call]]:
    """Keep the boards busy while the plan is played; nine clients unless it says otherwise."""
    command = {
        "host": "127.0.0.1",
        "port": app.cluster.port,
        "prefix": f"/{app.name}",
        "bodies": list(bodies),
        "plan": list(plan),
        "clients": 9,
        "stagger_s": 0.3,
        "warm_s": 0.5,
        "after_s": 0.0,
        "until_s": time.monotonic() + LIMIT_S,
        **more,
    }

    async def run() -> tuple[list[Answer], list[Call]]:
        return await Load(command, lambda _: None).run()

    return asyncio.run(run())


def truth(app: App, bodies: Sequence[Json]) -> Any:
    """Ask everything once while the cluster rests."""
    answers, _ = load(app, bodies, clients=len(bodies), requests_each=1)
    assert all(not one.exchange.error for one in answers), answers
    return said_by(answers)


def flaws(answers: Sequence[Answer], said: Any, times: Sequence[Era]) -> dict[str, int]:
    """Return what is wrong with answers, by name; ``decided`` of them could have been stale."""
    checked: Checked = check(answers, said, times)
    assert checked.answers
    names = ("aborted", "wrong", "mixed", "unstamped", "stale")
    found = {name: count for name in names if (count := getattr(checked, name))}
    assert not checked.errors, checked.errors
    return found


def post(http: httpx.Client, path: str, *, status: int = 200, **asked: Any) -> Any:
    """Make a control call, whose answer must have that status, and return what it says."""
    response = http.post(path, json=asked)
    assert response.status_code == status, response.text
    return response.json()


def get(http: httpx.Client, path: str, **query: Any) -> Any:
    """Return what a route says, which has to be something."""
    response = http.get(path, params=query)
    assert response.status_code == 200, response.text
    return response.json()


def all_report(app: App) -> list[BoardReport]:
    """Wait until each board has a replica that reports, and return what they say."""

    def reports() -> list[BoardReport] | None:
        found = app.reports()
        return found if len(found) == app.boards else None

    return wait_for(f"all boards of {app.name}", reports)


def kill(pid: int) -> None:
    """End a process as the kernel does when memory runs out."""
    os.kill(pid, signal.SIGKILL)


def coordinator_pid(app: App) -> int:
    """Return the process that keeps the desired state, once there is one."""
    return app.replica_pid("Coordinator")


def kill_coordinator(app: App) -> None:
    """Kill the Coordinator and wait for the next one to answer."""
    before = coordinator_pid(app)
    kill(before)
    wait_for("another Coordinator", lambda: coordinator_pid(app) != before)

    def answers() -> bool:
        with app.http_sync() as http:
            return http.get("/v1/operations").status_code == 200

    wait_for("the Coordinator to answer", answers)

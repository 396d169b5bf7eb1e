"""Client, command and the examples of training loops against a cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import pytest

from rkserve.cli.context import Exit
from rkserve.client import Client
from tests.support.cluster.local_cluster import App
from tests.support.paths import PROJECT

pytestmark = pytest.mark.ray
pytest_plugins = ["tests.support.cluster.controlled_fixtures"]


def rkserve(app: App, *words: str) -> tuple[int, str]:
    """Run the command as a script does."""
    done = subprocess.run(
        [sys.executable, "-m", "rkserve", *words],
        env={**os.environ, "RKSERVE_URL": app.url},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def test_the_command_pauses_shows_and_resumes(app: App) -> None:
    code, said = rkserve(app, "pause", "--lease", "60", "--json")
    assert (code, json.loads(said)["state"], json.loads(said)["succeeded"]) == (0, "succeeded", 3)
    code, said = rkserve(app, "status")
    assert (code, "3 paused" in said, "paused (keep): everything, until" in said) == (0, True, True)
    assert rkserve(app, "resume")[0] == Exit.DONE
    code, said = rkserve(app, "operations", "--limit", "2", "--json")
    assert [one["kind"] for one in json.loads(said)] == ["resume", "pause"]
    assert rkserve(app, "lora", "rollback", "nobody")[0] == Exit.FAILED


def test_a_renewed_lease_holds_the_cluster_and_ends_with_its_block(app: App) -> None:
    with Client(app.url) as client:
        began = client.is_paused().epoch
        with client.paused(lease_s=4.0) as lease:
            while client.is_paused().epoch < began + 5:  # the pause, and four renewals of it
                assert client.is_paused().all
                time.sleep(0.1)
            lease.check()
            # Each takes the place of the one before the last, which might yet be undone.
            assert len(client.cluster()["pauses"]) in (1, 2)
        assert not client.is_paused()


def example(app: App, name: str, *words: str) -> str:
    """Run an example to its good end; return what it said."""
    done = subprocess.run(
        [sys.executable, str(PROJECT / "examples" / f"{name}.py"), *words],
        env={**os.environ, "RKSERVE_URL": app.url},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "how",
    [
        "--strategy=atomic",
        pytest.param("--strategy=rolling", marks=pytest.mark.long),
        pytest.param("--receive", marks=pytest.mark.long),
    ],
)
def test_adapters_change_under_load_and_no_request_fails(app: App, how: str) -> None:
    name = f"trained-{how.strip('-').partition('=')[2] or 'step'}"
    with Client(app.url) as client:
        # A trainer's step is newer than the last one of whichever test was before.
        last = (client.weight_info()["step"] or 0) if how == "--receive" else 0
    said = example(app, "train_loop", *f"--steps 6 --every 2 --load 3 --name {name}".split(), how)
    steps = [n for n in range(last + 1, last + 7) if n % 2 == 0]
    assert re.findall(r"serving (\S+)", said) == [f"{name}@step-{n}" for n in steps]
    assert re.findall(rf"^ *\d+ ({name}@step-\d+)$", said, re.MULTILINE), said


def test_boards_sleep_while_a_loop_trains_and_answers_end_after_it(app: App) -> None:
    said = example(app, "rl_loop", "--rounds", "2", "--prompts", "4", "--name", "sampled")
    assert (
        re.findall(r"(sleep|wake): (\w+)", said)
        == [
            ("sleep", "succeeded"),
            ("wake", "succeeded"),
        ]
        * 2
    )
    counts = re.findall(r"^ *(\d+) (?:default|sampled@round-\S+)$", said, re.MULTILINE)
    assert sum(map(int, counts)) == 8, said
    with Client(app.url) as client:
        assert not client.is_sleeping()

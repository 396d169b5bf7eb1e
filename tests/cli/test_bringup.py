"""``rkserve up``, ``down``, ``token``, ``join`` and ``leave``: options, errors and exit codes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import typer

from rkserve.bringup.board import JOINED
from rkserve.bringup.discovery import FoundHead, suggest_heads
from rkserve.bringup.head_plan import HeadOptions
from rkserve.cli import app, bringup
from rkserve.cli.bringup import cpu_list
from rkserve.cli.context import Exit
from rkserve.core.child_process import free_ports
from tests.bringup.test_head import all_free
from tests.support.http.terminal import Runner


@pytest.mark.parametrize(
    ("words", "code", "output"),
    [
        pytest.param(["leave"], Exit.DONE, "Nothing runs here that", id="nothing to leave"),
        pytest.param(["token"], Exit.FAILED, "`rkserve up` first", id="a token of no head"),
        pytest.param(
            ["join", "http://127.0.0.1:9", "--no-doctor"],
            Exit.FAILED,
            "A join token is missing",
            id="no token",
        ),
        pytest.param(
            ["join", "--detach", "--no-start"], Exit.USAGE, "exclude each other", id="contradiction"
        ),
        pytest.param(["join", "--ray-cpus", "0-x"], Exit.USAGE, "ray-cpus", id="no CPUs"),
        pytest.param(["down"], Exit.DONE, "Nothing runs here that", id="nothing to end"),
        pytest.param(["up", "no.yaml"], Exit.FAILED, "no.yaml cannot be read", id="no file"),
        pytest.param(["up", "no.gguf"], Exit.FAILED, "there is no such file", id="no model"),
        pytest.param(["up", "--ray-port", "80"], Exit.USAGE, "ray-port", id="a low port"),
    ],
)
def test_a_command_exits_with_its_reason(
    tmp_path: Path, words: list[str], code: Exit, output: str
) -> None:
    name, *rest = words
    ports = ["--ray-port", str(next(p for p in free_ports() if all_free(p)))]
    given = [*(ports if name == "join" else []), *rest]
    done = Runner().invoke(app, [name, "--state", str(tmp_path / "node"), *given])
    assert done.exit_code == code, done.output
    assert output in done.output


def heads_run(monkeypatch: pytest.MonkeyPatch) -> list[HeadOptions]:
    """Collect the options of heads, in the place of starting them."""
    given: list[HeadOptions] = []

    def run_head(options: HeadOptions, _: object) -> int:
        given.append(options)
        return Exit.DONE

    monkeypatch.setattr(bringup, "run_head", run_head)
    return given


def test_a_first_join_without_a_url_only_names_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = FoundHead("head", "http://192.0.2.1:8000", "0.1.0")
    monkeypatch.setattr(
        bringup, "suggest_heads", lambda words: suggest_heads(words, lambda: [head])
    )
    words = ["join", "--state", str(tmp_path / "node"), "--token", "secret", "--detach"]
    monkeypatch.setattr(sys, "argv", ["rkserve", *words, "--token=secret"])
    done = Runner().invoke(app, words)
    assert done.exit_code == Exit.FAILED
    command = f"rkserve join {head.url} --token TOKEN --state {tmp_path / 'node'} --detach"
    assert f"  head (rkserve 0.1.0): {command}\n" in done.output
    assert "secret" not in done.output
    assert [*tmp_path.rglob("*")] == []


def test_a_join_after_the_first_looks_for_no_head(tmp_path: Path) -> None:
    state = tmp_path / "node"
    state.mkdir(mode=0o700)
    (state / JOINED).write_text("{")
    port = str(next(p for p in free_ports() if all_free(p)))
    words = ["join", "--no-doctor", "--state", str(state), "--ray-port", port]
    done = Runner().invoke(app, words)
    assert done.exit_code == Exit.FAILED
    assert "This board has not joined yet (Expecting" in done.output


@pytest.mark.parametrize(
    ("words", "environ", "announced"),
    [
        pytest.param([], {}, True, id="announced"),
        pytest.param(["--no-mdns"], {}, False, id="not by the option"),
        pytest.param([], {"RKSERVE_MDNS": "0"}, False, id="not by the environment"),
    ],
)
def test_the_announcement_can_be_turned_off(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    environ: dict[str, str],
    announced: bool,
) -> None:
    given = heads_run(monkeypatch)
    command = ["up", "x.yaml", "--state", str(tmp_path / "node"), *words]
    done = Runner().invoke(app, command, env={"RKSERVE_MDNS": None, **environ})
    assert done.exit_code == Exit.DONE, done.output
    assert [one.mdns for one in given] == [announced]


@pytest.mark.parametrize(
    ("words", "environ", "approval"),
    [
        pytest.param([], {}, False, id="a token is enough"),
        pytest.param(["--approve"], {}, True, id="by the option"),
        pytest.param([], {"RKSERVE_APPROVE": "1"}, True, id="by the environment"),
        pytest.param([], {"RKSERVE_APPROVE": "0"}, False, id="turned off in the environment"),
    ],
)
def test_approval_is_an_option_and_a_setting(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    environ: dict[str, str],
    approval: bool,
) -> None:
    given = heads_run(monkeypatch)
    command = ["up", "x.yaml", "--state", str(tmp_path / "node"), *words]
    done = Runner().invoke(app, command, env={"RKSERVE_APPROVE": None, **environ})
    assert done.exit_code == Exit.DONE, done.output
    assert [one.approval for one in given] == [approval]


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    done = Runner().invoke(app, ["down", "--state", str(tmp_path)])
    assert done.exit_code == Exit.FAILED
    assert "rkserve: The state folder cannot be used: other accounts may write" in done.output


def test_cpus_are_written_as_the_kernel_writes_them() -> None:
    mine = sorted(os.sched_getaffinity(0))
    assert cpu_list(",".join(map(str, mine))) == tuple(mine)
    assert cpu_list(f"{mine[0]}-{mine[0]}") == (mine[0],)
    assert cpu_list(None) == ()
    for text in ("", "a", "1-", "5-2", "9999"):
        with pytest.raises(typer.BadParameter, match="--ray-cpus"):
            cpu_list(text)


def test_a_full_disk_under_the_log_does_not_end_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        bringup.note("Boards: 1 of 2 ready.")
        with pytest.raises(OSError, match="No space left"):
            full.flush()
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())

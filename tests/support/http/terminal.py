"""The command in this process, at a shell whose cluster is scripted."""

from __future__ import annotations

import functools
import json
from typing import Any
from unittest.mock import patch

import httpx
import typer
from typer.main import get_command
from typer.testing import CliRunner, Result

from rkserve.cli import app
from rkserve.client import Client
from tests.support.cluster.fake_control import FakeControl

QUICK = ("--rate", "200", "--sessions", "4")  # a run of ``rkserve bench``


def plain(text: str) -> str:
    """Return what a box of rich says, in one line; other text as it is."""
    return " ".join(text.replace("│", " ").split()) if "╭" in text else text


class Runner(CliRunner):
    """Typer's runner with commands that are made once: to make them takes longer than most run."""

    commands = staticmethod(functools.cache(get_command))

    def invoke(self, app: typer.Typer, *args: Any, **kwargs: Any) -> Result:
        """Run a command in this process."""
        with patch("typer.testing._get_command", self.commands):
            return super().invoke(app, *args, **kwargs)


class Terminal:
    """A shell in which ``rkserve`` talks to a fake."""

    def __init__(self, server: FakeControl) -> None:
        self.server = server
        self.opened: list[tuple[str, str | None]] = []

    def open(self, url: str, key: str | None) -> Client:
        self.opened.append((url, key))
        return Client(
            url,
            admin_key=key,
            transport=httpx.MockTransport(self.server.handle),
            sleep=self.server.sleep,
            clock=self.server.clock,
        )

    def __call__(self, *words: str, **environ: str) -> tuple[int, str, str]:
        env = {
            "COLUMNS": "200",
            "RKSERVE_URL": "",
            "RKSERVE_ADMIN_KEY": "",
            "RKSERVE_ADMIN_KEY_FILE": "",
            **environ,
        }
        done = Runner().invoke(app, words, obj=self.open, env=env)
        return done.exit_code, done.stdout, plain(done.stderr)


def bench(*words: str, **environ: str) -> tuple[int, str, str]:
    done = Runner().invoke(
        app, ["bench", *words], env={"COLUMNS": "200", "RKSERVE_URL": "", **environ}
    )
    return done.exit_code, done.stdout, plain(done.stderr)


def report(*words: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = bench(*words, "--json")
    found: dict[str, Any] = json.loads(out)
    return code, found

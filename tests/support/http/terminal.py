"""The command in this process, at a shell whose cluster is scripted."""

from __future__ import annotations

import httpx
from typer.testing import CliRunner

from rkserve.cli import app
from rkserve.client import Client
from tests.support.cluster.fake_control import FakeControl


def plain(text: str) -> str:
    """Return what a box of rich says, in one line; other text as it is."""
    return " ".join(text.replace("│", " ").split()) if "╭" in text else text


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
        done = CliRunner().invoke(app, words, obj=self.open, env=env)
        return done.exit_code, done.stdout, plain(done.stderr)

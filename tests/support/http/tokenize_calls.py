"""Calls for tokens of a Router without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rkserve.config.router import RouterConfig
from rkserve.router.served_models import ServedModel
from tests.support.boards.fake_boards import FakeBoards
from tests.support.http.router_house import House, house, send
from tests.support.values.wire_folders import make_folder


def post(path: str, of: House | None = None, **body: Any) -> Any:
    return send(of or house(), "POST", path, json=body)


def folder_house(path: Path, **kinds: Any) -> House:
    served = ServedModel.open(make_folder(path / "m", **kinds))
    return House(FakeBoards.answering("a"), RouterConfig(), served)

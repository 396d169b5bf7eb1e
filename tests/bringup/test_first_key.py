"""Keys that are made before a cluster runs, and the key with which its head asks it."""

from __future__ import annotations

import json
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from rkserve.bringup import processes
from rkserve.bringup.first_key import (
    create_in_ledger,
    first_key,
    known_key,
)
from rkserve.bringup.processes import ADMIN_KEY, HEAD, own_secret
from rkserve.cli.context import ClusterOptions
from rkserve.coordinator.state.api_keys import KeyKeeper
from rkserve.coordinator.state.ledger import Ledger
from rkserve.coordinator.state.ledger_files import back_up
from rkserve.core.api_keys import ApiKey, KeyScope, digest_of
from rkserve.core.errors import ConfigError, KeyExists, LedgerFailed, RequestError
from rkserve.core.files import private_folder


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The head's state folder."""
    folder = tmp_path / "state"
    private_folder(folder)
    return folder


def config(tmp_path: Path, host: str = "0.0.0.0", applications: int = 1, **args: Any) -> Path:
    boards = [{"name": "sim", "model": "models/sim-chat", "simulated": {}}]
    one = {
        "import_path": "rkserve.app:build",
        "args": {"boards": boards, "coordinator": {"data_dir": str(tmp_path / "data")}, **args},
    }
    content = {"http_options": {"host": host}, "applications": [one] * applications}
    file = tmp_path / "serve_config.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def stored(tmp_path: Path) -> tuple[ApiKey, ...]:
    with closing(Ledger.open(tmp_path / "data")) as ledger:
        return KeyKeeper(ledger).table.keys


def test_the_first_start_makes_an_admin_key_whose_secret_is_for_its_owner_only(
    tmp_path: Path, state: Path
) -> None:
    file = first_key(config(tmp_path), state)
    assert file == state / ADMIN_KEY
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (key,) = stored(tmp_path)
    secret = file.read_text().strip()
    assert key.digest == digest_of(secret.encode()).hex()
    assert (key.name, key.scopes) == ("admin", (KeyScope.ADMIN,))
    assert secret.encode() not in b"".join(
        one.read_bytes() for one in (tmp_path / "data").iterdir() if one.is_file()
    )


def test_the_second_start_makes_none(tmp_path: Path, state: Path) -> None:
    first_key(config(tmp_path), state)
    before = (state / ADMIN_KEY).read_text()
    assert first_key(config(tmp_path), state) is None
    assert (state / ADMIN_KEY).read_text() == before
    assert len(stored(tmp_path)) == 1


@pytest.mark.parametrize(
    ("host", "args"),
    [("127.0.0.1", {}), ("0.0.0.0", {"security": {"open": True}})],
    ids=["this machine", "open on purpose"],
)
def test_a_start_that_needs_no_key_makes_none(
    tmp_path: Path, state: Path, host: str, args: dict[str, Any]
) -> None:
    assert first_key(config(tmp_path, host, **args), state) is None
    assert not (state / ADMIN_KEY).exists()


def test_after_a_start_that_ended_between_file_and_ledger_the_next_one_makes_a_key(
    tmp_path: Path, state: Path
) -> None:
    (state / ADMIN_KEY).write_text("rks-of-a-start-that-ended\n")
    first_key(config(tmp_path), state)
    secret = (state / ADMIN_KEY).read_text().strip()
    assert stored(tmp_path)[0].digest == digest_of(secret.encode()).hex()


def test_a_ledger_that_is_gone_costs_no_secret(tmp_path: Path, state: Path) -> None:
    first_key(config(tmp_path), state)
    before = (state / ADMIN_KEY).read_text()
    with closing(Ledger.open(tmp_path / "data")) as ledger:
        back_up(tmp_path / "data", 1.7e9)
        file = ledger.file
    file.unlink()
    with pytest.raises(LedgerFailed, match="rkserve restore"):
        first_key(config(tmp_path), state)
    assert (state / ADMIN_KEY).read_text() == before


def test_a_key_is_made_in_the_ledger_of_a_configuration(tmp_path: Path) -> None:
    file = config(tmp_path)
    made = create_in_ledger(file, {"name": "team", "scopes": ["operate"], "concurrent": 2})
    (key,) = stored(tmp_path)
    assert made["value"] is not None
    assert key.digest == digest_of(made["value"].encode()).hex()
    assert (key.id, key.limits.concurrent) == (made["id"], 2)
    with pytest.raises(KeyExists):
        create_in_ledger(file, {"name": "team"})
    with pytest.raises(RequestError):
        create_in_ledger(file, {"name": "other", "scopes": ["everything"]})
    with closing(Ledger.open(tmp_path / "data")), pytest.raises(LedgerFailed, match="in use"):
        create_in_ledger(file, {"name": "other"})


def test_a_key_needs_one_application(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 applications"):
        create_in_ledger(config(tmp_path, applications=2), {"name": "team"})


def record(state: Path) -> None:
    """Write the record of a head that runs."""
    urls = {"url": "http://127.0.0.1:8000", "join_url": "http://192.0.2.2:8000"}
    (state / f"{HEAD}.json").write_text(json.dumps(urls))


def test_the_command_finds_the_key_of_the_head_for_its_urls_alone(
    tmp_path: Path, state: Path
) -> None:
    assert own_secret(state, "http://127.0.0.1:8000") is None
    first_key(config(tmp_path), state)
    assert own_secret(state, "http://127.0.0.1:8000") is None, "no head runs"
    record(state)
    secret = (state / ADMIN_KEY).read_text().strip()
    for url in ("http://127.0.0.1:8000", "http://192.0.2.2:8000"):
        assert own_secret(state, url) == secret
    for url in ("http://127.0.0.1:8001", "http://other:8000"):
        assert own_secret(state, url) is None
    (state / f"{HEAD}.json").write_text("[]")
    assert own_secret(state, "http://127.0.0.1:8000") is None


@pytest.mark.parametrize("of", ["service", "user"])
def test_the_command_looks_in_the_default_folders_of_a_node(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    first_key(config(tmp_path), state)
    record(state)
    none = tmp_path / "none"
    monkeypatch.setattr(processes, "SERVICE_STATE", state if of == "service" else none)
    monkeypatch.setattr(processes, "user_state", lambda: state if of == "user" else none)
    found = ClusterOptions(url="http://127.0.0.1:8000/v1").key()
    assert found == (state / ADMIN_KEY).read_text().strip()


@pytest.mark.parametrize("of", ["admin_key", "admin_key_file", "api_keys_file", "first key", ""])
def test_the_head_asks_its_router_with_a_key_that_it_knows(
    tmp_path: Path, state: Path, of: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\n\ntiger name=team\nlion\n")
    router = {} if of in ("first key", "") else {of: "tiger" if of == "admin_key" else str(keys)}
    file = config(tmp_path, router=router)
    if of == "first key":
        (state / ADMIN_KEY).write_text("tiger\n")
    assert known_key(file, state) == ("tiger" if of else None)

"""Keys that are made before a cluster runs: in its ledger, which no Coordinator has open."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rkserve.api.admin.keys import KeyBody, NewKeyAnswer, new_key_answer
from rkserve.api.json.schemas import read_model
from rkserve.bringup.processes import ADMIN_KEY
from rkserve.config.serve_config import RkserveConfig
from rkserve.control.keys import CreateKey, KeyRequest, SecretDigest
from rkserve.coordinator.state.api_keys import check_ledger, create_offline
from rkserve.core.api_keys import digest_of, hint_of, new_secret
from rkserve.core.errors import ConfigError
from rkserve.core.files import replace_private
from rkserve.deployments import preflight

NAME = "admin"
WHO = "local"


def create_in_ledger(config: Path, body: Mapping[str, Any]) -> NewKeyAnswer:
    """Make a key of the cluster of a configuration file, which does not run.

    Raises:
        ConfigError: the configuration is wrong.
        LedgerFailed: its Coordinator runs, or the ledger cannot be written.
        RequestError: the key is refused.
    """
    return _create(one_of(config), read_model(KeyBody, dict(body)))


def first_key(config: Path, state: Path) -> Path | None:
    """Make an admin key if the configuration needs a key and there is none; return the file of its
    secret.

    The secret is written before its digest, so that an interrupted start leaves no key with a lost
    secret.

    Raises:
        ConfigError: the file has no single application, or the secret cannot be written.
        LedgerFailed: the ledger cannot be used; the secret of an earlier key stays.
    """
    if not preflight.lacks_key(config):
        return None
    cluster = one_of(config)
    # It refuses a ledger that is damaged or gone, before the secret of its key is replaced.
    check_ledger(cluster.coordinator.data_dir.expanduser())
    file = state / ADMIN_KEY
    secret = new_secret()
    try:
        replace_private(file, f"{secret}\n")
    except OSError as exc:
        raise ConfigError(f"{file} cannot be written: {exc}.") from exc
    _create(cluster, KeyBody(name=NAME, scopes=["admin"]), secret)
    return file


def one_of(config: Path) -> RkserveConfig:
    """Return the settings of the one application of a file. Raises ``ConfigError``."""
    found = preflight.applications(preflight.read(config))
    if len(found) != 1:
        raise ConfigError(f"{config} has {len(found)} applications of rkserve; keys need one.")
    return found[0]


def _create(config: RkserveConfig, body: KeyBody, secret: str = "") -> NewKeyAnswer:
    secret = secret or new_secret()
    change = CreateKey(
        body.name, body.key_scopes(), tuple(body.models or ()), body.limits(), body.expires_in_s
    )
    digest = SecretDigest(digest_of(secret.encode()).hex(), hint_of(secret))
    folder = config.coordinator.data_dir.expanduser()
    outcome = create_offline(folder, KeyRequest(change, digest, who=WHO))
    return new_key_answer(outcome, secret)


def known_key(config: Path, state: Path) -> str | None:
    """Return the head's key for its own Router, or None.

    Raises ``ConfigError``: the configuration is wrong.
    """
    found: list[Path] = []
    for one in preflight.applications(preflight.read(config)):
        if one.router.admin_key is not None:
            return one.router.admin_key.get_secret_value().strip()
        found += [file for file in (one.router.admin_key_file, one.router.api_keys_file) if file]
    for file in (*found, state / ADMIN_KEY):
        try:
            lines = file.expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            continue  # the Router reports errors of its own files
        words = [line.split()[0] for line in lines if line.strip() and line.strip()[0] != "#"]
        if words:
            return words[0]
    return None

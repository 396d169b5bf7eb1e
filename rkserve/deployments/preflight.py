"""Checks of ``serve_config.yaml`` before anything starts, and Ray's ``serve`` command with them.

Ray reads an application's arguments only in a task on the running cluster, tries that four times,
and keeps waiting after it has failed. The package therefore installs Ray's command ``serve`` again,
with these checks before ``serve run`` and ``serve deploy``.

A reader of Ray's token can run code on every node, and Ray creates its file readable for all. So
the command creates it first, for its owner only, where Ray would, and warns about one that others
may read.

At its end Serve asks each replica to stop, and gives it the drain time of its deployment. A replica
that waits for a node, such as in the place of a board that has left, cannot be asked, so that each
end would take that time. The command ends such replicas while Serve shuts down.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import secrets
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from rkserve.board.engine.telemetry import read_telemetry
from rkserve.config.board_group import BoardGroupConfig
from rkserve.config.serve_config import RkserveConfig, parse_config
from rkserve.coordinator.state.api_keys import has_keys
from rkserve.coordinator.state.ledger import Ledger
from rkserve.core.child_process import bind_error
from rkserve.core.errors import ConfigError, RkserveError
from rkserve.deployments import haproxy
from rkserve.deployments.haproxy import FLAG, is_loopback, own_environ
from rkserve.deployments.haproxy_listeners import CONTROL, ControlAddress
from rkserve.deployments.haproxy_tls import CERT, KEY
from rkserve.models import gguf
from rkserve.models.folder import SETTINGS_FILE, ModelFolder, by_id, open_model_folder
from rkserve.native import quirks
from rkserve.native.library_file import (
    CPU_EXTRA,
    LLAMA_CPP,
    LLAMA_CPP_RELEASE,
    knows_architecture,
    llama_cpp_library,
    llama_cpp_release,
)
from rkserve.native.sim import profiles
from rkserve.router.policies import POLICIES

APPLICATION = "rkserve.app:build"
YAML = (".yaml", ".yml")
# Ray's own defaults, if the file omits them.
HOST, PORT = "0.0.0.0", 8000  # noqa: S104 - what a file without them gets
FAILED = 1
OTHERS = 0o077  # permissions of the group and of everybody
TOKEN_BYTES = 32  # as many as Ray takes
NAMESPACE = "serve"  # of Serve's actors
WAITING_POLL_S = 0.5
# The part of Serve's start that ends with the proxies for which the rest of it waits.
CREATES_PROXIES = "_create_controller_and_proxy_refs"
NO_PROXIES = (
    "rkserve: Serve's proxies were not ready after {:.0f} s; the logs of Ray's session have the "
    "reason in serve/proxy_*.log."
)
ROOT = Path("/")
MEGA = 1_000_000
# Set by `rkserve up` for a `serve run` that is started beside Ray: it reads a line once it has
# imported and checked everything, which takes two seconds of a core that Ray leaves idle then.
AWAITS_RAY = "RKSERVE_AWAITS_RAY"


def check_args(args: Any) -> RkserveConfig:
    """Return the settings of an application that can be built on any machine.

    Raises:
        ConfigError: a key, a policy, a profile or a quirk is unknown, or a value is not allowed.
    """
    config = parse_config(args)
    if config.router.policy not in POLICIES:
        raise _unknown("router.policy", config.router.policy, sorted(POLICIES))
    known = [profile.name for profile in profiles.load()]
    for number, group in enumerate(config.boards):
        if group.simulated is not None and group.simulated.profile not in known:
            raise _unknown(f"boards[{number}].simulated.profile", group.simulated.profile, known)
        for name in sorted(set(group.quirks) - quirks.NAMES):
            raise _unknown(f"boards[{number}].quirks", name, sorted(quirks.NAMES))
    return config


def check_folders(config: RkserveConfig) -> None:
    """Open every group's model folder. Raises ``ConfigError`` if one cannot be served."""
    by_id(
        check_folder(group, config.folder_of(group), config.state_dir) for group in config.deployed
    )


def check_trust(config: RkserveConfig) -> None:
    """Read the pinned keys, whose file is on the head. Raises ``ConfigError``."""
    security = config.security
    if security.trusted_keys or security.trusted_keys_file is not None:
        from rkserve.coordinator.operations.trust import TrustRules  # most have no such keys

        TrustRules.of(security)


def check_folder(group: BoardGroupConfig, path: Path, state_dir: Path | None = None) -> ModelFolder:
    """Open the model folder of a group, ``path``. Raises ``ConfigError``."""
    folder = open_model_folder(path, state_dir)
    if group.cpu is not None:
        folder.check_cpu()
    if group.catalog_model is not None or folder.file is not None:
        folder.require_weights(cpu=group.cpu is not None)  # no board has another place to get them
    if group.n_batch > 1 and folder.settings.embedding is not None:
        raise ConfigError(
            f"n_batch: group {group.name} cannot serve batches, because {folder.path} says that "
            "its model makes embeddings, and the runtime computes no hidden states in batches. Set "
            "n_batch to 1, or take the 'embedding' section out of rkserve.yaml."
        )
    return folder


def _unknown(key: str, name: str, known: Sequence[str]) -> ConfigError:
    kind = key.rpartition(".")[2].rstrip("s")
    near = difflib.get_close_matches(name.lower(), known)
    meant = f"; did you mean {' or '.join(repr(one) for one in near)}?" if near else "."
    page, plural = {
        "policy": ("explanation/routing", "policies"),
        "profile": ("reference/simulator", "profiles"),
    }.get(kind, ("reference/quirks", "quirks"))
    return ConfigError(
        f"serve_config.yaml, args: {key}: unknown {kind} '{name}'{meant} "
        f"docs/{page}.md lists all {plural}."
    )


def read(file: Path) -> Mapping[str, Any]:
    """Return the contents of a file for ``serve``. Raises ``ConfigError``."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{file} cannot be read: {exc}") from exc
    except yaml.YAMLError as exc:
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(exc).split())}") from exc
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must be a mapping with the key 'applications'.")
    return content


def applications(content: Mapping[str, Any]) -> list[RkserveConfig]:
    """Return the settings of rkserve's applications in a file. Raises ``ConfigError``."""
    listed = content.get("applications")
    return [
        check_args(one.get("args") or {})
        for one in (listed if isinstance(listed, list) else [content])
        if isinstance(one, dict) and one.get("import_path") == APPLICATION
    ]


def lacks_key(file: Path) -> bool:
    """Return whether the network reaches the endpoint of a file, and there is no key for it.

    Raises:
        ConfigError, LedgerFailed: the file is wrong, or a ledger cannot be read.
    """
    content = read(file)
    options = content.get("http_options") or {}
    control = ControlAddress.of(os.environ)
    local_only = control is None or control.local_only
    if is_loopback(str(options.get("host", HOST))) and local_only:
        return False
    if content.get("proxy_location") == "Disabled":
        return False
    return any(_is_without_key(one) for one in applications(content))


def _is_without_key(config: RkserveConfig) -> bool:
    router = config.router
    configured = (router.admin_key, router.admin_key_file, router.api_keys_file)
    if config.security.open or any(one is not None for one in configured):
        return False
    return not has_keys(config.coordinator.data_dir.expanduser())


def check_own_cpu(file: Path) -> list[str]:
    """Check what a head needs for the groups that its own CPU serves; return warnings.

    Raises:
        ConfigError, LibraryMissing: llama.cpp is missing, or cannot load a group's file.
    """
    return [
        warning
        for config in applications(read(file))
        for group in config.boards
        if group.cpu is not None and group.cpu.on_head
        for warning in _check_cpu(group, config)
    ]


def _check_cpu(group: BoardGroupConfig, config: RkserveConfig) -> Iterator[str]:
    library, release = llama_cpp_library(), llama_cpp_release()
    if release != LLAMA_CPP_RELEASE:
        yield (
            f"{LLAMA_CPP} {release} is installed, and rkserve was written for {LLAMA_CPP_RELEASE}: "
            f"{CPU_EXTRA}"
        )
    path = config.folder_of(group)
    # Before a folder is made of it, which takes seconds with a large vocabulary.
    if path.suffix == gguf.SUFFIX:
        check_architecture(path, library)
    folder = open_model_folder(path, config.state_dir)
    parts, settings = folder.parts(cpu=True), folder.settings
    if folder.file is None:
        check_architecture(parts[0], library)
    if settings.embedding is None and not (settings.chat_template or folder.chat_template):
        yield (
            f"{folder.id} has no chat template, so that chats and the chat page are refused: name "
            "a built-in one as chat_template in "
            f"{gguf.sidecar_of(path) if folder.file else folder.path / SETTINGS_FILE}"
        )
    weights = sum(part.stat().st_size for part in parts)
    kv = settings.context_length * (settings.kv_bytes_per_token or 0) * group.n_batch
    free = read_telemetry(ROOT).memory_available_bytes
    if free is not None and weights + kv > free:
        yield (
            f"{folder.id} takes {weights / MEGA:.0f} MB and {kv / MEGA:.0f} MB for its context, "
            f"and {free / MEGA:.0f} MB of memory are available: take a smaller quantization, or "
            "set a lower context_length"
        )


def check_architecture(file: Path, library: Path) -> None:
    """Raise ``ConfigError`` unless llama.cpp's library loads models as the one in a GGUF file."""
    header = gguf.read_gguf(file)
    header.check()
    if not knows_architecture(library, header.architecture):
        raise ConfigError(
            f"{file} is a model of the architecture '{header.architecture}', which llama.cpp "
            f"{LLAMA_CPP_RELEASE} does not support."
        )


def check_key(file: Path) -> None:
    """Refuse a configuration that opens the service to the network without a key.

    Raises:
        ConfigError, LedgerFailed: as ``lacks_key``, or that is so.
    """
    if lacks_key(file):
        named = f" or {CONTROL}" if ControlAddress.of(os.environ) is not None else ""
        raise ConfigError(
            f"http_options.host in {file}{named} opens the service to the network, and there is no "
            "key. "
            "Make one: rkserve keys create admin --scope admin --config "
            f"{shlex.quote(str(file))}; or set security.open: true in args, to do without."
        )


def check_file(file: Path, *, starts: bool, ray: bool = True, key: bool = True) -> None:
    """Check the applications of rkserve in a file, and with ``ray`` Ray's own keys beside them.

    ``starts`` means that a new Ray starts on this machine: model folders must be here, the
    configured port must be free, the ledger that is here must be intact, and with ``key`` there
    must be a key if the network reaches it.

    Raises:
        ConfigError: the message names the key or the port.
        LedgerFailed: the ledger is damaged, gone while its backups are there, or in use.
    """
    content = read(file)
    ours = applications(content)
    for config in ours:
        if starts:
            check_folders(config)
            check_trust(config)
            Ledger.check(config.coordinator.data_dir.expanduser())
    if ray:
        _check_schema(file, content)
    if ours and starts and content.get("proxy_location") != "Disabled":
        check_port(file, content.get("http_options") or {})
        if key:
            check_key(file)


def _check_schema(file: Path, content: Mapping[str, Any]) -> None:
    """Validate Ray's own keys, and refuse those that it would ignore.

    Raises:
        ConfigError: a key is unknown to Ray, or has a value that it refuses.
    """
    from pydantic import ValidationError
    from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

    _check_keys(file, "", content, ServeDeploySchema)
    _check_keys(file, "http_options.", content.get("http_options"), HTTPOptionsSchema)
    for number, one in enumerate(content.get("applications") or ()):
        _check_keys(file, f"applications[{number}].", one, ServeApplicationSchema)
    try:
        ServeDeploySchema.model_validate(content)
    except ValidationError as exc:
        found = [
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}".removeprefix(": ")
            for one in exc.errors(include_url=False)
        ]
        raise ConfigError(f"{file}: {'; '.join(found)}.") from exc
    except ValueError as exc:
        raise ConfigError(f"{file}: {exc}") from exc


def _check_keys(file: Path, where: str, given: Any, schema: Any) -> None:
    known = [str(key) for key in schema.model_fields]
    for key in given if isinstance(given, dict) else ():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            meant = f"did you mean '{near[0]}'?" if near else f"Ray knows {', '.join(known)}."
            raise ConfigError(f"{file}: {where}{key}: unknown key; {meant}")


def check_tls(file: Path, *, haproxy: bool) -> None:
    """Refuse Serve's own TLS where HAProxy is before the Routers, to which it talks in clear.

    Raises:
        ConfigError: that is so, or the file cannot be read.
    """
    options = read(file).get("http_options") or {}
    if haproxy and options.get("ssl_certfile"):
        raise ConfigError(
            f"http_options.ssl_certfile in {file} is for Serve without HAProxy: leave it out, and "
            f"name the files in {CERT} and {KEY}, or by `rkserve up --tls-cert --tls-key`."
        )


def check_control(file: Path, environ: Mapping[str, str]) -> ControlAddress | None:
    """Return the control port of an environment, None without one.

    Raises:
        ConfigError: it is the endpoint's port, or cannot be listened on.
    """
    control = ControlAddress.of(environ)
    if control is not None:
        options = read(file).get("http_options") or {}
        if control.port == int(options.get("port", PORT)):
            raise ConfigError(
                f"The control port {control} is that of the endpoint (http_options.port in "
                f"{file.name}): give another one by --control or {CONTROL}."
            )
        control.check_free()
    return control


def check_port(file: Path, options: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if the endpoint's port is not free."""
    host, port = str(options.get("host", HOST)), int(options.get("port", PORT))
    if (exc := bind_error(port, host)) is not None:
        raise ConfigError(_no_port(file, host, port, exc)) from exc


def _no_port(file: Path, host: str, port: int, exc: OSError) -> str:
    if exc.errno == errno.EADDRINUSE:
        return (
            f"port {port} is in use. Stop the program that listens there, or change "
            f"http_options.port in {file.name}."
        )
    return (
        f"{host}:{port} cannot be listened on: {exc.strerror or exc}. Change http_options.host or "
        f"http_options.port in {file.name}."
    )


def main() -> None:
    """Run Ray's ``serve``; before ``run`` and ``deploy``, check the given file."""
    from ray.serve.scripts import cli

    name, *rest = sys.argv[1:] or [""]
    if name in ("run", "deploy") and "--help" not in rest:
        # Ray's own options, read as Ray reads them; mistakes in them are for Ray to report.
        command = cli.commands[name]
        params = command.make_context(f"serve {name}", rest, resilient_parsing=True).params
        given = params.get("config_or_import_path") or params.get("config_file_name")
        try:
            if given is not None:
                _check_given(name, Path(given), params.get("address"))
        except RkserveError as exc:
            print(f"rkserve: {exc}", file=sys.stderr)  # noqa: T201 -- a command's last words
            sys.exit(FAILED)
        if os.environ.pop(AWAITS_RAY, "") and not sys.stdin.readline():
            return  # the head has ended before its Ray ran
        if name == "run" and given is not None and Path(given).is_file():
            _deploy_before_the_proxies()
        if name == "run" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
    cli()


def _deploy_before_the_proxies() -> None:
    """Have ``serve run`` deploy its file first, and wait for the proxies then: HAProxy starts while
    the application is built.
    """
    import ray
    from ray import serve
    from ray.serve._private import api
    from ray.serve._private.client import ServeControllerClient

    create, deploy = getattr(api, CREATES_PROXIES), ServeControllerClient.deploy_apps
    proxies: list[Any] = []

    def create_controller(*args: Any, **options: Any) -> tuple[Any, list[Any]]:
        controller, starting = create(*args, **options)
        proxies.extend(starting)
        return controller, []

    def deploy_apps(client: ServeControllerClient, *args: Any, **options: Any) -> None:
        deploy(client, *args, **options)
        try:
            ray.get(proxies, timeout=api.HTTP_PROXY_TIMEOUT)
        except ray.exceptions.GetTimeoutError:
            serve.shutdown()
            sys.exit(NO_PROXIES.format(api.HTTP_PROXY_TIMEOUT))

    setattr(api, CREATES_PROXIES, create_controller)
    ServeControllerClient.deploy_apps = deploy_apps


def _interrupt(number: int, frame: Any) -> None:
    """Begin the end of ``serve run``."""
    threading.Thread(target=_end_waiting_replicas, daemon=True).start()
    signal.default_int_handler(number, frame)


def _end_waiting_replicas() -> None:
    """End replicas that wait for a node, until this process has ended.

    One that is ended before Serve's controller has begun to shut down is replaced, and ended again.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.state import list_actors
    from ray.util.state.exception import RayStateApiException

    if not ray.is_initialized():
        return  # no replica has been started yet
    address = ray.get_runtime_context().gcs_address
    filters = [("state", "=", "PENDING_CREATION"), ("ray_namespace", "=", NAMESPACE)]

    def kill(name: str) -> None:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))

    while ray.is_initialized():
        try:
            end_waiting(list_actors(address, filters), kill)
        except (RayError, RayStateApiException, OSError) as exc:
            # Serve ends them after their drain time all the same.
            sys.stderr.write(f"rkserve: Replicas that wait for a node were not ended: {exc}\n")
            return
        time.sleep(WAITING_POLL_S)


def end_waiting(pending: Iterable[Any], kill: Callable[[str], None]) -> None:
    """End, by their actors' names, the pending actors that no process has been started for."""
    for one in pending:
        if not one.pid:
            with contextlib.suppress(ValueError):  # it has ended, or has just got a node
                kill(one.name)


def _check_given(name: str, file: Path, address: str | None) -> None:
    if not file.is_file():
        if file.suffix in YAML:
            raise ConfigError(f"{file} does not exist.")
        if name == "deploy":
            _check_import_path(str(file))
        return
    starts = name == "run" and not _is_running(address)
    check_file(file, starts=starts)
    if starts:
        check_tls(file, haproxy=os.environ.get(FLAG) == "1")
        check_control(file, os.environ)
    if name == "deploy":
        _check_something_stays(file)
    lines = [check_token(os.environ, starts=starts)]
    if starts:
        lines.append(missing_of_plain(file, os.environ))
        os.environ.update(own_environ(os.environ))
    for line in filter(None, lines):
        print(f"rkserve: {line}", file=sys.stderr)  # noqa: T201 -- before Ray has a log


def missing_of_plain(file: Path, environ: Mapping[str, str]) -> str:
    """Return in one line what a Ray started by ``serve run`` lacks, and how to get it; empty where
    HAProxy is turned on.
    """
    if environ.get(FLAG) == "1":
        return ""
    front = "Serve's Python proxy in the place of HAProxy, " if haproxy.available() else ""
    return (
        f"`serve run` starts Ray with {front}its own settings and no `rkserve join`; "
        f"`rkserve up {file}` starts it as boards and many clients need it."
    )


def _check_import_path(given: str) -> None:
    """Raise ``ConfigError`` for an argument of ``serve deploy`` that names nothing.

    Ray takes each argument that is no file for an import path, and removes all running
    applications before it finds that it cannot be imported.
    """
    module, _, attribute = given.partition(":")
    found = False
    if attribute and all(part.isidentifier() for part in module.split(".")):
        here = Path(*module.split(".")).with_suffix(".py")
        with contextlib.suppress(ImportError):  # of a package above it
            found = here.is_file() or find_spec(module) is not None
    if not found:
        raise ConfigError(
            f"{given} is neither a file nor an import path such as module:application. Nothing was "
            "deployed, and what runs stays."
        )


def _check_something_stays(file: Path) -> None:
    """Raise ``ConfigError`` for a file that would only remove applications."""
    content = read(file)
    if not content.get("applications") and "import_path" not in content:
        raise ConfigError(
            f"{file} lists no application, so that deploying it would remove those that run. "
            "Nothing was deployed; `serve shutdown` removes them."
        )


def check_token(environ: Mapping[str, str], *, starts: bool) -> str:
    """Return a warning about Ray's token file, empty if there is none.

    ``starts`` means that a new Ray starts on this machine: a token that it would create is created
    here, with mode 0600.

    Raises:
        ConfigError: the file cannot be created.
    """
    given = environ.get("RAY_AUTH_TOKEN_PATH")
    if environ.get("RAY_AUTH_TOKEN") or environ.get("RAY_AUTH_MODE", "token") != "token":
        return ""
    file = Path(given) if given else Path.home() / ".ray" / "auth_token"
    try:
        mode = file.stat().st_mode & 0o777
    except FileNotFoundError:
        if starts and not given:
            _create_token(file)
        return ""
    except OSError as exc:
        raise ConfigError(f"Ray's token {file} cannot be read: {exc.strerror}") from exc
    if not mode & OTHERS:
        return ""
    return (
        f"Ray's token {file} has mode {mode:04o}; other accounts that read it can run code on all "
        f"nodes. Run: chmod 600 {shlex.quote(str(file))}"
    )


def _create_token(file: Path) -> None:
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Another start may be creating it: the first one counts, as a file with content.
        made = file.with_name(f"{file.name}.{os.getpid()}")
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as out:
            out.write(secrets.token_hex(TOKEN_BYTES))
        try:
            os.link(made, file)
        except FileExistsError:
            pass
        finally:
            made.unlink()
    except OSError as exc:
        raise ConfigError(f"Ray's token {file} cannot be created: {exc.strerror}") from exc


def _is_running(address: str | None) -> bool:
    """Return whether ``serve run`` joins a running Ray instead of starting one."""
    from ray._private.services import find_bootstrap_address

    return bool(address or os.environ.get("RAY_ADDRESS") or find_bootstrap_address(None))


if __name__ == "__main__":
    main()

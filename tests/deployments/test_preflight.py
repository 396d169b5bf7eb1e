"""The checks of serve_config.yaml before Ray starts, and ``serve`` with them."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import yaml
from ray import serve
from ray.serve._private import api
from ray.serve._private.client import ServeControllerClient
from ray.serve.exceptions import RayServeException

from rkserve.app import build
from rkserve.bringup.first_key import create_in_ledger
from rkserve.coordinator.state.ledger import Ledger
from rkserve.core.child_process import free_port
from rkserve.core.errors import ConfigError, LedgerFailed, LibraryMissing
from rkserve.deployments import haproxy, preflight
from rkserve.deployments.haproxy import BINARY, FLAG, available, check_environ, own_environ
from rkserve.deployments.haproxy_tls import CERT
from rkserve.deployments.preflight import (
    _check_given,
    check_file,
    check_key,
    check_own_cpu,
    check_tls,
    check_token,
    end_waiting,
    lacks_key,
    main,
    missing_of_plain,
)
from rkserve.native import library_file
from tests.support.paths import PROJECT
from tests.support.values.tiny_gguf import tiny_folder, write_tiny

pytestmark = pytest.mark.slow


def config(**group: Any) -> dict[str, Any]:
    """Return a configuration that is right; ``group`` is added to its group of boards."""
    boards = [{"name": "sim", "model": "models/sim-chat", "simulated": {}, **group}]
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": free_port()},
        "applications": [
            {
                "name": "rkserve",
                "route_prefix": "/",
                "import_path": "rkserve.app:build",
                "args": {"boards": boards},
            }
        ],
    }


def configured(**args: Any) -> dict[str, Any]:
    """Return a configuration with more arguments of the application."""
    content = config()
    content["applications"][0]["args"].update(args)
    return content


def written(folder: Path, content: Any) -> Path:
    file = folder / "serve_config.yaml"
    text = content if isinstance(content, str) else yaml.safe_dump(content)
    file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which another program listens."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize(
    "name", ["serve_config.yaml", "serve_config.vision.yaml", "serve_config.cpu.yaml"]
)
def test_the_shipped_configurations_pass(name: str, tmp_path: Path) -> None:
    content = yaml.safe_load((PROJECT / name).read_text(encoding="utf-8"))
    content["http_options"]["port"] = free_port()
    check_file(written(tmp_path, content), starts=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(config(simulatd={}), "unknown key 'simulatd'; did you mean", id="a key"),
        pytest.param(
            config(simulated={"profile": "rk3588-qwen2.5-1.5b"}),
            r"unknown profile 'rk3588-qwen2\.5-1\.5b'; did you mean 'rk3588-qwen2",
            id="a profile",
        ),
        pytest.param(config(quirks={"nope": True}), "unknown quirk 'nope'", id="a quirk"),
        pytest.param(
            configured(router={"policy": "prefx"}),
            r"router.policy: unknown policy .prefx.; did you mean .prefix.",
            id="a policy",
        ),
        pytest.param(config(model="models/nowhere"), "models/nowhere does not exist", id="a model"),
        pytest.param(
            config(model="models/sim-embed", n_batch=2), "cannot serve batches", id="a batch"
        ),
        pytest.param(
            {**config(), "http_optoins": {}},
            "http_optoins: unknown key; did you mean 'http_options'",
            id="Ray's",
        ),
        pytest.param(
            {**config(), "http_options": {"prot": 1}}, r"http_options\.prot: .*'port'", id="nested"
        ),
        pytest.param(
            {**config(), "http_options": {"port": "many"}}, r"http_options\.port", id="no port"
        ),
        pytest.param("applications: [", "is not valid YAML", id="no YAML"),
        pytest.param("[]", "must be a mapping", id="no mapping"),
        pytest.param({}, "applications", id="no application"),
    ],
)
def test_a_mistake_is_found_before_anything_starts(
    content: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_file(written(tmp_path, content), starts=True)


def test_a_taken_port_is_found_before_anything_starts(tmp_path: Path, taken: int) -> None:
    content = config()
    content["http_options"]["port"] = taken
    file = written(tmp_path, content)
    with pytest.raises(ConfigError, match=rf"^port {taken} is in use\. .*http_options\.port in"):
        check_file(file, starts=True)
    check_file(file, starts=False)  # Ray runs already, and it may be its own


def test_a_damaged_ledger_is_found_before_anything_starts(tmp_path: Path) -> None:
    content = config()
    data = tmp_path / "data"
    content["applications"][0]["args"]["coordinator"] = {"data_dir": str(data)}
    file = written(tmp_path, content)
    check_file(file, starts=True)
    assert not data.exists()  # a check makes no ledger
    Ledger.open(data).close()
    check_file(file, starts=True)
    (data / "ledger.sqlite3").write_bytes(b"x" * 10_000)
    with pytest.raises(LedgerFailed, match="is damaged"):
        check_file(file, starts=True)
    check_file(file, starts=False)  # that of a head that runs is not touched


def test_a_host_of_another_machine_is_found_before_anything_starts(tmp_path: Path) -> None:
    content = config()
    content["http_options"]["host"] = "192.0.2.1"
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:\d+ cannot be listened on: "):
        check_file(written(tmp_path, content), starts=True)


def test_other_applications_are_not_judged(tmp_path: Path, taken: int) -> None:
    content = config(nonsense=1)
    content["applications"][0]["import_path"] = "other.app:build"
    content["http_options"]["port"] = taken
    check_file(written(tmp_path, content), starts=True)


@pytest.mark.parametrize(
    ("command", "content", "words"),
    [
        pytest.param("run", config(quue_limit=1), "did you mean 'queue_limit'", id="serve run"),
        pytest.param(
            "deploy",
            config(quue_limit=1),
            "did you mean 'queue_limit'",
            id="deploy",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "run", None, "serve_config.yaml does not exist.", id="no file", marks=pytest.mark.long
        ),
    ],
)
def test_serve_ends_with_one_sentence_and_an_exit_code(
    command: str, content: Any, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "serve_config.yaml" if content is None else written(tmp_path, content)
    done = subprocess.run(
        [sys.executable, "-m", "rkserve.deployments.preflight", command, str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("rkserve: ")
    assert words in done.stderr


@pytest.mark.parametrize(
    ("given", "content", "words"),
    [
        pytest.param("serve_config.yam", None, "neither a file nor an import path", id="misspelt"),
        pytest.param("no_such_module:app", None, "no_such_module:app is neither", id="no module"),
        pytest.param("rkserve.no:app", None, "what runs stays", id="no module of a package"),
        pytest.param("empty.yaml", "applications: []", "lists no application", id="an empty list"),
        pytest.param("other.yaml", "http_options: {port: 1}", "other.yaml", id="no list"),
        pytest.param("bad.yaml", "applications: [", "is not valid YAML", id="no YAML"),
    ],
)
def test_a_deployment_that_would_remove_what_runs_is_refused(
    given: str,
    content: str | None,
    words: str,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(given).write_text(content, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["serve", "deploy", given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert words in capsys.readouterr().err


def test_an_import_path_of_this_folder_is_left_to_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("app = None", encoding="utf-8")
    _check_given("deploy", Path("mine:app"), None)
    _check_given("deploy", Path("rkserve.app:build"), None)


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".ray" / "auth_token"


def test_a_token_that_ray_would_create_is_created_for_its_owner_only(token: Path) -> None:
    assert check_token({}, starts=False) == ""
    assert not token.exists(), "no Ray starts here"
    assert check_token({"RAY_AUTH_MODE": "token"}, starts=True) == ""
    assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    made = token.read_text()
    assert len(bytes.fromhex(made)) == 32
    assert check_token({}, starts=True) == ""
    assert token.read_text() == made
    assert list(token.parent.iterdir()) == [token]


@pytest.mark.parametrize(
    ("environ", "mode", "words"),
    [
        pytest.param({}, 0o644, "mode 0644", id="as Ray creates it"),
        pytest.param({}, 0o640, "chmod 600", id="the group"),
        pytest.param({}, 0o600, "", id="the owner only"),
        pytest.param({"RAY_AUTH_MODE": "disabled"}, 0o644, "", id="no authentication"),
        pytest.param({"RAY_AUTH_TOKEN": "secret"}, 0o644, "", id="in the environment"),
    ],
)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["at home", "by its path"])
def test_a_token_that_others_may_read_is_warned_about(
    environ: dict[str, str], mode: int, words: str, elsewhere: bool, token: Path
) -> None:
    file = token.parent.parent / "my token" if elsewhere else token
    file.parent.mkdir(exist_ok=True)
    file.write_text("secret", encoding="utf-8")
    file.chmod(mode)
    found = environ | ({"RAY_AUTH_TOKEN_PATH": str(file)} if elsewhere else {})
    warning = check_token(found, starts=True)
    assert words in warning
    assert bool(warning) is bool(words)
    assert "secret" not in warning


def test_a_token_that_cannot_be_created_is_refused_by_its_path(token: Path) -> None:
    token.parent.write_text("a file in the folder's place", encoding="utf-8")
    with pytest.raises(ConfigError, match="auth_token cannot be"):
        check_token({}, starts=True)


@pytest.mark.long
def test_all_else_of_serve_is_rays() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rkserve.deployments.preflight", "run", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    assert "CONFIG_OR_IMPORT_PATH" in done.stdout


@pytest.mark.parametrize("wheel", [True, False])
def test_a_plain_serve_run_says_in_one_line_what_it_lacks(
    wheel: bool,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(FLAG, raising=False)
    monkeypatch.setattr(haproxy, "available", lambda: wheel)
    monkeypatch.setattr(preflight, "_is_running", lambda _: False)
    file = written(tmp_path, config())
    _check_given("run", file, None)
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert ("HAProxy" in line) == wheel
    assert f"`rkserve up {file}`" in line
    _check_given("deploy", file, None)
    monkeypatch.setenv(FLAG, "1")
    assert missing_of_plain(file, os.environ) == ""
    assert capsys.readouterr().err == ""


def test_the_package_installs_serve() -> None:
    installed = {
        one.name: one.value
        for one in entry_points(group="console_scripts").select(name="serve")
        if one.dist is not None and one.dist.name == "rkserve"
    }
    assert installed == {"serve": "rkserve.deployments.preflight:main"}


def test_ray_reports_a_wrong_configuration_by_its_message() -> None:
    with pytest.raises(RayServeException) as caught:
        build(config(quue_limit=1)["applications"][0]["args"])
    assert "did you mean 'queue_limit'" in str(caught.value)


@pytest.mark.skipif(not available(), reason="Ray has no HAProxy for this platform")
def test_a_haproxy_that_is_switched_on_gets_the_rest_of_its_environment() -> None:
    with tempfile.TemporaryDirectory(prefix="rk-", dir="/tmp") as folder:
        given = {FLAG: "1", "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/f/haproxy.cfg"}
        assert own_environ({FLAG: "0"}) == {}
        made = {**given, **own_environ(given)}
        check_environ(made)
        assert made["RAY_SERVE_HAPROXY_SOCKET_PATH"] == f"{folder}/f/admin.sock"
        assert own_environ(made) == {}


def test_a_certificate_for_a_haproxy_that_is_off_is_refused(tmp_path: Path) -> None:
    for refuse in (own_environ, check_environ):
        with pytest.raises(
            ConfigError, match="HAProxy is off, so that clients would talk in clear"
        ):
            refuse({FLAG: "0", CERT: "/c"})
    content = config()
    content["http_options"] = {"ssl_certfile": "/c", "ssl_keyfile": "/k"}
    file = written(tmp_path, content)
    check_tls(file, haproxy=False)
    with pytest.raises(ConfigError, match="is for Serve without HAProxy"):
        check_tls(file, haproxy=True)


def test_an_application_behind_rays_own_haproxy_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(FLAG, "1")
    monkeypatch.delenv(BINARY, raising=False)
    with pytest.raises(ConfigError, match="rkserve front"):
        build(config()["applications"][0]["args"])


def test_an_end_takes_replicas_that_no_process_was_started_for() -> None:
    pending = [
        SimpleNamespace(name=name, pid=pid)
        for name, pid in (("waits", 0), ("starts", 4711), ("has ended", 0), ("waits, too", None))
    ]
    ended: list[str] = []

    def kill(name: str) -> None:
        if name == "has ended":
            raise ValueError(f"Failed to look up actor with name '{name}'.")
        ended.append(name)

    end_waiting(pending, kill)
    assert ended == ["waits", "waits, too"]


# -- a service that the network reaches -----------------------------------------------------------


def exposed(tmp_path: Path, host: str = "0.0.0.0", **args: Any) -> Path:
    """Return the file of a service with its ledger in a folder of the test."""
    content = configured(coordinator={"data_dir": str(tmp_path / "data")}, **args)
    content["http_options"]["host"] = host
    return written(tmp_path, content)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.2"])
def test_a_service_that_the_network_reaches_needs_a_key(tmp_path: Path, host: str) -> None:
    file = exposed(tmp_path, host)
    with pytest.raises(ConfigError) as caught:
        check_key(file)
    assert f"rkserve keys create admin --scope admin --config {file}" in str(caught.value)
    create_in_ledger(file, {"name": "team"})
    check_key(file)


@pytest.mark.parametrize(
    "args",
    [
        pytest.param({"security": {"open": True}}, id="open on purpose"),
        pytest.param({"router": {"admin_key": "x"}}, id="an admin key"),
        pytest.param({"router": {"admin_key_file": "/etc/key"}}, id="a file with an admin key"),
        pytest.param({"router": {"api_keys_file": "/etc/keys"}}, id="a file of keys"),
    ],
)
def test_a_service_with_a_key_or_open_on_purpose_starts(
    tmp_path: Path, args: dict[str, Any]
) -> None:
    assert not lacks_key(exposed(tmp_path, **args))


def test_pinned_keys_that_cannot_be_read_are_found_before_the_start(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    file = written(tmp_path, configured(security={"trusted_keys_file": str(keys)}))
    with pytest.raises(ConfigError, match=r"The keys in .*keys cannot be read"):
        check_file(file, starts=True)
    keys.write_text("ssh-rsa AAAA x\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="keys, line 1: not a key"):
        check_file(file, starts=True)
    keys.write_text("# none yet\n", encoding="utf-8")
    check_file(file, starts=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_service_of_this_machine_needs_no_key(tmp_path: Path, host: str) -> None:
    assert not lacks_key(exposed(tmp_path, host))


def test_the_admin_key_of_the_environment_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = exposed(tmp_path)
    assert lacks_key(file)
    monkeypatch.setenv("RKSERVE_ADMIN_KEY", "secret")
    assert not lacks_key(file)


def test_serve_run_is_refused_without_a_key_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = exposed(tmp_path)
    monkeypatch.setattr(preflight, "_is_running", lambda _address: False)
    monkeypatch.setattr(sys, "argv", ["serve", "run", str(file)])
    with pytest.raises(SystemExit):
        preflight.main()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "there is no key" in said


def test_serve_run_of_a_head_that_has_ended_before_its_ray_ran_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = exposed(tmp_path)
    monkeypatch.setenv(preflight.AWAITS_RAY, "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys, "argv", ["serve", "run", "--address", "192.0.2.1:1", str(file)])
    preflight.main()
    assert preflight.AWAITS_RAY not in os.environ


@pytest.mark.parametrize("limit_s", [60.0, 0.0])
def test_serve_run_deploys_before_it_waits_for_the_proxies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> None:
    """Through Serve's own command, with stand-ins for the cluster."""
    steps: list[str] = []

    def deploy(_: ServeControllerClient, config: Any, *, _blocking: bool) -> None:
        steps.append(f"deploy {config.applications[0].name}")

    def create(*_: Any, **__: Any) -> tuple[str, list[str]]:
        steps.append("controller")
        return "its handle", ["a proxy"]

    def get(refs: list[str], timeout: float) -> None:
        steps.append(f"wait for {refs}")
        if not timeout:
            raise ray.exceptions.GetTimeoutError

    file = exposed(tmp_path, "127.0.0.1")
    monkeypatch.setattr(sys, "argv", ["serve", "run", "--non-blocking", str(file)])
    monkeypatch.setattr(preflight, "_check_given", lambda *_: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(serve, "shutdown", lambda: steps.append("shut down"))
    monkeypatch.setattr(api, "HTTP_PROXY_TIMEOUT", limit_s)
    monkeypatch.setattr(api, preflight.CREATES_PROXIES, create)
    monkeypatch.setattr(api, "_get_global_client", no_client)
    monkeypatch.setattr(api, "_set_global_client", lambda _: None)
    monkeypatch.setattr(ServeControllerClient, "deploy_apps", deploy)
    monkeypatch.setattr(
        api, "ServeControllerClient", lambda _: ServeControllerClient.__new__(ServeControllerClient)
    )
    with pytest.raises(SystemExit) as ended:
        preflight.main()
    expected = ["controller", "deploy rkserve", "wait for ['a proxy']"]
    assert steps == (expected if limit_s else [*expected, "shut down"])
    assert bool(ended.value.code) is not bool(limit_s)


def no_client() -> None:
    raise RayServeException("There is no Serve instance running on this Ray cluster.")


def test_the_example_for_boards_needs_a_key(tmp_path: Path) -> None:
    content = yaml.safe_load((PROJECT / "cluster/serve_config.rk3588.yaml").read_text())
    content["applications"][0]["args"]["coordinator"] = {"data_dir": str(tmp_path / "data")}
    assert lacks_key(written(tmp_path, content))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny(path, more={"tokenizer.chat_template": (8, "{{ messages[0].content }}")})
    return path


def computing(tmp_path: Path, model: Path, **group: Any) -> Path:
    """Write a configuration with a group on the head's own CPU."""
    groups = [{"name": "cpu", "model": str(model), "cpu": {}, **group}]
    content = config()
    content["applications"][0]["args"] = {"boards": groups, "state_dir": str(tmp_path / "state")}
    return written(tmp_path, content)


def test_a_head_that_computes_has_what_it_takes(tmp_path: Path, model: Path) -> None:
    assert check_own_cpu(computing(tmp_path, model)) == []
    folder = tiny_folder(tmp_path / "folder")
    assert check_own_cpu(computing(tmp_path, folder)) == []
    check_file(computing(tmp_path, model), starts=True)


def test_a_head_without_llama_cpp_says_how_to_install_it(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_file, "LLAMA_CPP", "no_such_wheel")
    with pytest.raises(LibraryMissing, match=r"pip install 'rkserve\[cpu\]'"):
        check_own_cpu(computing(tmp_path, model))
    assert check_own_cpu(computing(tmp_path, model, cpu={"on_head": False})) == []


def test_a_model_without_a_chat_template_is_warned_about(tmp_path: Path) -> None:
    write_tiny(tmp_path / "base.gguf")
    (warning,) = check_own_cpu(computing(tmp_path, tmp_path / "base.gguf"))
    assert "base has no chat template" in warning
    assert warning.endswith(f"chat_template in {tmp_path / 'base.rkserve.yaml'}")
    (tmp_path / "base.rkserve.yaml").write_text("chat_template: chatml")
    assert check_own_cpu(computing(tmp_path, tmp_path / "base.gguf")) == []


def test_another_release_and_too_little_memory_are_warned_about(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "LLAMA_CPP_RELEASE", "1.2.3")
    (release,) = check_own_cpu(computing(tmp_path, model))
    assert "rkserve was written for 1.2.3: pip install" in release
    monkeypatch.undo()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable: 1000 kB\n")
    monkeypatch.setattr(preflight, "ROOT", tmp_path)
    (memory,) = check_own_cpu(computing(tmp_path, model))
    assert "tiny takes 1 MB and 1 MB for its context, and 1 MB of memory are available" in memory


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            {"more": {"general.architecture": (8, "of-tomorrow")}},
            "the architecture 'of-tomorrow', which llama.cpp .* does not support",
            id="architecture",
        ),
        pytest.param({"cut": 1 << 18}, "is cut short", id="cut"),
    ],
)
def test_files_that_llama_cpp_cannot_load_are_found_before_the_start(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    size = change.pop("cut", None)
    write_tiny(tmp_path / "m.gguf", **change)
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:size])
    with pytest.raises(ConfigError, match=words):
        check_own_cpu(computing(tmp_path, tmp_path / "m.gguf"))
    assert not (tmp_path / "state").exists(), "before a folder is made of it"


@pytest.mark.parametrize("kind", [{"library": "/l"}, {"simulated": {}}], ids=str)
def test_a_file_for_cpus_is_refused_for_other_boards(
    tmp_path: Path, model: Path, kind: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"which CPUs compute: set `cpu: \{\}`"):
        check_file(computing(tmp_path, model, cpu=None, **kind), starts=True)

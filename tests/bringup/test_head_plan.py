"""Options of `rkserve up`, and the checks before the head's start."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rkserve.bringup import head_plan
from rkserve.bringup.head_plan import (
    FrontSettings,
    HeadOptions,
    HeadPlan,
    check_ports,
    for_model,
    haproxy_environ,
    own_address,
    with_front,
    with_ports,
)
from rkserve.bringup.settings import GCS_PORT
from rkserve.core.child_process import free_port, free_ports
from rkserve.core.errors import ConfigError
from rkserve.deployments import haproxy, preflight
from rkserve.deployments.haproxy_listeners import CONTROL, ControlAddress
from rkserve.deployments.haproxy_tls import CERT, KEY, TlsFiles
from tests.bringup.test_head import all_free, config
from tests.support.http.certificates import write_certificate
from tests.support.paths import PROJECT
from tests.support.values.tiny_gguf import write_tiny


@pytest.mark.parametrize(
    ("given", "http_options", "sentence"),
    [
        pytest.param(
            {"haproxy": False}, {}, "HAProxy is off, so that clients would talk in clear", id="off"
        ),
        pytest.param({"tls_cert": Path("/no/cert")}, {}, "/no/cert cannot be read", id="no file"),
        pytest.param(
            {}, {"ssl_certfile": "/c"}, "ssl_certfile .* is for Serve without HAProxy", id="both"
        ),
    ],
)
def test_a_certificate_that_would_not_be_used_is_refused(
    given: dict[str, Any],
    http_options: dict[str, str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(haproxy, "available", lambda: True)
    certificate, key = write_certificate(tmp_path, "own")
    file = config(tmp_path)
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    content["http_options"].update(http_options)
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    options = HeadOptions(
        file, tmp_path / "state", **{"tls_cert": certificate, "tls_key": key, **given}
    )
    with pytest.raises(ConfigError, match=sentence):
        with_front(options)


def test_with_tls_no_board_may_serve_clients_in_clear(tmp_path: Path) -> None:
    tls = TlsFiles(tmp_path / "c", tmp_path / "k")
    content = yaml.safe_load(
        (PROJECT / "cluster" / "serve_config.rk3588.yaml").read_text(encoding="utf-8")
    )
    file = tmp_path / "serve_config.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    plan = HeadPlan.of(file, FrontSettings(tls))
    assert (plan.url, plan.certificate) == ("https://127.0.0.1:8000", tls.certificate)
    assert plan.join_url("192.0.2.1") == "https://192.0.2.1:8000"
    for host, url in (("127.0.0.1", "127.0.0.1"), ("192.0.2.7", "192.0.2.7"), ("::", "192.0.2.1")):
        content["http_options"]["host"] = host
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        found = HeadPlan.of(file, FrontSettings(tls)).join_url("192.0.2.1")
        assert found == f"https://{url}:8000", "an address that answers"
    del content["proxy_location"]
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(ConfigError, match="has no proxy_location: HeadOnly"):
        HeadPlan.of(file, FrontSettings(tls))
    with pytest.raises(ConfigError, match=r"HeadOnly, .* and without a control port"):
        HeadPlan.of(file, FrontSettings(control=ControlAddress("127.0.0.1", 8001)))


def test_the_control_port_is_in_the_record_of_the_head_with_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haproxy, "available", lambda: True)
    for name in (CONTROL, CERT, KEY):
        monkeypatch.setenv(name, "")
    certificate, key = write_certificate(tmp_path, "own")
    file, port = config(tmp_path), free_port()
    options = HeadOptions(file, tmp_path / "s", tls_cert=certificate, tls_key=key)
    options = replace(options, control=f"0.0.0.0:{port}")
    environ, front = with_front(options)
    assert environ[CONTROL] == os.environ[CONTROL] == f"0.0.0.0:{port}", "for Ray, and HAProxy"
    places = HeadPlan.of(file, front).places("192.0.2.1")
    assert places["control_url"] == f"https://127.0.0.1:{port}"
    assert places["certificate"] == str(certificate)
    assert HeadPlan.of(file).places("192.0.2.1")["control_url"] == ""


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        pytest.param({"haproxy": False}, "HAProxy is off, so that clients' port", id="off"),
        pytest.param({"control": "head:1"}, "'head:1' is no IP address with a port", id="a name"),
        pytest.param(
            {"control": "127.0.0.1:{port}"}, "is that of the endpoint .*--control", id="the same"
        ),
    ],
)
def test_a_control_port_that_would_not_be_used_is_refused(
    given: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haproxy, "available", lambda: True)
    monkeypatch.setenv(CONTROL, "127.0.0.1:8001")
    file = config(tmp_path)
    port = yaml.safe_load(file.read_text(encoding="utf-8"))["http_options"]["port"]
    given = {k: v.format(port=port) if isinstance(v, str) else v for k, v in given.items()}
    with pytest.raises(ConfigError, match=sentence):
        with_front(HeadOptions(file, tmp_path / "state", **given))


def test_a_configuration_says_whether_boards_join_later(tmp_path: Path) -> None:
    simulated = HeadPlan.of(PROJECT / "serve_config.yaml")
    assert not simulated.joins
    assert not simulated.waits
    real = PROJECT / "cluster" / "serve_config.rk3588.yaml"
    assert HeadPlan.of(real) == HeadPlan(
        "http://127.0.0.1:8000",
        8000,
        joins=True,
        waits=True,
        measures=(("/usr/lib/librkllmrt.so", "/opt/models/Qwen2.5-1.5B-Instruct"),),
    )
    other = tmp_path / "serve_config.yaml"
    other.write_text("applications: [{import_path: other.app}]")
    with pytest.raises(ConfigError, match="has no application with rkserve"):
        HeadPlan.of(other)


@pytest.mark.parametrize(
    ("host", "group", "expected"),
    [
        pytest.param("127.0.0.1", {"cpu": {}}, (False, False, True), id="this machine alone"),
        pytest.param("0.0.0.0", {"cpu": {}}, (True, False, True), id="others may join"),
        pytest.param(
            "127.0.0.1", {"cpu": {"on_head": False}}, (True, True, False), id="others compute"
        ),
        pytest.param("0.0.0.0", {"simulated": {}}, (False, False, False), id="none is real"),
        pytest.param("0.0.0.0", {"library": "/l"}, (True, True, False), id="NPUs"),
    ],
)
def test_boards_of_other_machines_may_join_or_have_to(
    tmp_path: Path, host: str, group: dict[str, Any], expected: tuple[bool, bool, bool]
) -> None:
    file = config(tmp_path)
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    content["http_options"]["host"] = host
    boards = content["applications"][0]["args"]["boards"]
    boards[1:] = [{"name": "more", "model": boards[0]["model"], **group}]
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    plan = HeadPlan.of(file)
    assert (plan.joins, plan.waits, plan.cpu) == expected


def test_a_models_file_gets_a_configuration_on_the_loopback(tmp_path: Path) -> None:
    model = tmp_path / 'a "model" of mine.gguf'
    write_tiny(model)
    state = tmp_path / "state"
    options = for_model(HeadOptions(model, state, ray_port=2000))
    assert (options.config, options.address) == (state / "model.yaml", "127.0.0.1")
    assert (options.ray_port, options.state) == (2000, state)
    plan = HeadPlan.of(options.config)
    assert (plan.joins, plan.waits, plan.cpu, plan.host) == (False, False, True, "127.0.0.1")
    preflight.check_file(options.config, starts=False)
    (settings,) = preflight.applications(preflight.read(options.config))
    assert settings.boards[0].model == model
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"model\.yaml cannot be written"):
        for_model(HeadOptions(model, tmp_path / "file"))
    with pytest.raises(ConfigError, match="there is no such file"):
        for_model(HeadOptions(tmp_path / "no.gguf", state))


def test_a_model_is_served_beside_another_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path / "m.gguf")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(preflight, "PORT", port)
        made = for_model(HeadOptions(tmp_path / "m.gguf", tmp_path / "state")).config
        assert HeadPlan.of(made).port in range(port + 1, port + 20)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}, which cannot be listened on"):
            check_ports([port])


def test_simulated_boards_get_the_next_free_ports_and_real_ones_the_named_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = next(p for p in free_ports() if all(all_free(p + 10 * n) for n in (0, 1)))
    monkeypatch.setattr(head_plan, "GCS_PORT", first)
    monkeypatch.setattr(head_plan, "DASHBOARD_PORT", first + 8)
    with socket.socket() as gcs, socket.socket() as dashboard:
        gcs.bind(("127.0.0.1", first + 3))
        dashboard.bind(("127.0.0.1", first + 8))
        found, its_dashboard = with_ports(None, None, fixed=False)
        assert (found.first, its_dashboard) == (first + 10, first + 9)
        with pytest.raises(ConfigError, match=f"needs port {first + 3}, which cannot be"):
            with_ports(None, first + 9, fixed=True)
        with pytest.raises(ConfigError, match=f"needs port {first + 3}, which cannot be"):
            with_ports(first, first + 9, fixed=False)
        with pytest.raises(ConfigError, match=f"needs port {first + 8}, which cannot be"):
            with_ports(first + 10, first + 8, fixed=False)


@pytest.mark.parametrize(
    ("ports", "message"),
    [
        pytest.param((16_379,), "workers have the ports from 10002 to 19999", id="a worker's"),
        pytest.param((10_002,), "and Ray needs 10002 too", id="the first"),
        pytest.param((19_999,), "and Ray needs 19999 too", id="the last"),
        pytest.param((25_001, 25_002, 25_001), "needs port 25001 twice", id="twice"),
    ],
)
def test_ports_with_which_ray_does_not_start_are_named(
    ports: tuple[int, ...], message: str
) -> None:
    first, *rest = ports
    with pytest.raises(ConfigError, match=message):
        check_ports(rest, first)


@pytest.mark.parametrize(
    ("dashboard", "named"), [(None, "--ray-port."), (8265, "--ray-port and --dashboard-port.")]
)
def test_a_refused_port_names_the_options_that_the_command_has(
    dashboard: int | None, named: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"Give others by {named}")):
        check_ports((10_002,), dashboard)


@pytest.mark.skipif(not haproxy.available(), reason="Ray has no HAProxy for this platform")
def test_a_head_with_the_usual_ports_has_ports_of_its_own_where_those_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, other = "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT"
    taken = free_port()
    monkeypatch.setattr(haproxy, "DEFAULT_PORTS", {name: taken, other: taken})
    with (
        tempfile.TemporaryDirectory(prefix="rk-", dir="/tmp") as home,
        socket.create_server(("", taken)),
        ExitStack() as stack,
    ):
        monkeypatch.setattr(haproxy, "default_folder", lambda: Path(home) / "front")
        made = haproxy_environ({other: "9101"}, GCS_PORT, stack)
        assert made["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"] == f"{home}/front/haproxy.cfg"
        assert int(made[name]) != taken
        assert made[haproxy.FLAG] == "1"
        assert haproxy_environ({haproxy.FLAG: "0"}, GCS_PORT, stack) == {}
        assert not made.keys() & haproxy.BRIEF_DRAIN.keys()
        alone = haproxy_environ({}, GCS_PORT, stack, alone=True)
        assert alone.items() >= haproxy.BRIEF_DRAIN.items()
        assert other not in made


def test_a_machine_without_a_network_needs_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    with pytest.raises(ConfigError, match=r"127\.0\.1\.1, which boards cannot reach"):
        own_address()

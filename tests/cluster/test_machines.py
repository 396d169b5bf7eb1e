"""First boot, the Debian package, the container and Kubernetes: one account, one set of paths."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from rkserve import __version__
from rkserve.bringup.processes import BOARD, HEAD
from rkserve.bringup.settings import OBJECT_STORE_BYTES, settings_of
from tests.support.paths import PROJECT

CLUSTER = PROJECT / "cluster"
NODE = (CLUSTER / "node" / "rkserve-node").read_text(encoding="utf-8")
STEPS = set(re.findall(r"^rkserve-node ([\w-]+)", NODE, re.MULTILINE))
CLOUD = (CLUSTER / "cloud-init" / "user-data.yml").read_text(encoding="utf-8")
ARMBIAN = (CLUSTER / "armbian" / "provisioning.sh").read_text(encoding="utf-8")
CONTAINER = (CLUSTER / "container" / "Containerfile").read_text(encoding="utf-8")
SERVICE: dict[str, Any] = yaml.safe_load(
    (CLUSTER / "kuberay" / "rayservice.yaml").read_text(encoding="utf-8")
)
RAY = SERVICE["spec"]["rayClusterConfig"]
SCRIPTS = [
    *(CLUSTER / "debian" / name for name in ("build.sh", "postinst", "prerm", "postrm", "rkserve")),
    CLUSTER / "node" / "rkserve-node",
]
VALUES = ("RKSERVE_OFFLINE_URL", "RKSERVE_HEAD_URL", "RKSERVE_JOIN_TOKEN")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_one_of_the_plain_shell(path: Any) -> None:
    assert path.read_text(encoding="utf-8").startswith("#!/bin/sh\n")
    assert subprocess.run(["sh", "-n", str(path)], check=False).returncode == 0


@pytest.mark.parametrize("text", [CLOUD, ARMBIAN], ids=["cloud-init", "Armbian"])
def test_a_first_boot_fills_in_each_value_and_calls_the_steps(text: str) -> None:
    for name in VALUES:
        assert len(re.findall(rf"^ *{name}=\S+$", text, re.MULTILINE)) == 1
        assert name in NODE
    assert re.findall(r"^ *rkserve-node (.*)$", text, re.MULTILINE) == ["first-boot"]
    assert "first-boot" in STEPS


def test_cloud_inits_scripts_are_in_its_file_and_the_token_is_private() -> None:
    assert CLOUD.startswith("#cloud-config\n")
    content = yaml.safe_load(CLOUD)
    values, script = content["write_files"]
    assert (values["path"], values["permissions"]) == ("/etc/rkserve/first-boot.env", "0600")
    assert content["runcmd"] == [[script["path"]]]
    done = subprocess.run(["sh", "-n"], input=script["content"], text=True, check=False)
    assert done.returncode == 0


def test_armbians_script_may_be_sourced() -> None:
    body = ARMBIAN[ARMBIAN.index("(\n") :]
    assert body.rstrip().splitlines()[-1].startswith(") >>")
    assert subprocess.run(["bash", "-n"], input=ARMBIAN, text=True, check=False).returncode == 0


@pytest.mark.parametrize("name", ["postinst", "build.sh"])
def test_the_package_calls_steps_that_exist(name: str) -> None:
    text = (CLUSTER / "debian" / name).read_text(encoding="utf-8")
    assert set(re.findall(r"rkserve-node ([a-z]+)\b", text)) <= STEPS


def test_the_package_watches_the_folder_of_the_wheels() -> None:
    trigger = (CLUSTER / "debian" / "triggers").read_text(encoding="utf-8").split()
    assert trigger == ["interest-noawait", "/usr/share/rkserve/wheels"]
    text = (CLUSTER / "debian" / "build.sh").read_text(encoding="utf-8")
    assert "$name/usr/share/rkserve/wheels" in text


def test_the_container_has_the_version_in_use_and_is_not_root() -> None:
    assert "ENV PATH=/opt/rkserve/venv/bin:$PATH" in CONTAINER
    assert re.findall(r"^USER (.*)$", CONTAINER, re.MULTILINE) == ["990:990"]
    assert set(re.findall(r"rkserve-node (\w+)", CONTAINER)) <= STEPS


def variables(group: dict[str, Any]) -> dict[str, str]:
    (container,) = group["template"]["spec"]["containers"]
    return {one["name"]: one["value"] for one in container["env"]}


def test_pods_have_the_settings_of_the_code() -> None:
    (boards,) = RAY["workerGroupSpecs"]
    for node, group in ((HEAD, RAY["headGroupSpec"]), (BOARD, boards)):
        # The operator sets the mode, together with the token.
        assert {"RAY_AUTH_MODE": "token", **variables(group)} == settings_of(node)
    assert RAY["authOptions"] == {"mode": "token"}
    assert boards["rayStartParams"]["object-store-memory"] == str(OBJECT_STORE_BYTES)
    assert yaml.safe_load(yaml.safe_load(boards["rayStartParams"]["resources"])) == {"rknpu": 1}


def test_pods_run_this_version_and_the_application_of_the_example() -> None:
    lock = (PROJECT / "requirements.lock").read_text(encoding="utf-8")
    assert f"ray[serve]=={RAY['rayVersion']} " in lock or f"ray=={RAY['rayVersion']} " in lock
    for group in (RAY["headGroupSpec"], *RAY["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"] == f"rkserve:{__version__}"
        mounts = {one["name"] for one in container["volumeMounts"]}
        assert mounts == {one["name"] for one in group["template"]["spec"]["volumes"]}
    example = yaml.safe_load((CLUSTER / "serve_config.rk3588.yaml").read_text(encoding="utf-8"))
    args = example["applications"][0]["args"]
    # A pod has no folder in which a first key could be found: its key is a secret of the cluster's.
    args["router"] = {**args.get("router", {}), "admin_key_file": "/etc/rkserve/admin/key"}
    assert yaml.safe_load(SERVICE["spec"]["serveConfigV2"]) == example
    head = RAY["headGroupSpec"]["template"]["spec"]
    assert any(one.get("secret") for one in head["volumes"])
    for group in RAY["workerGroupSpecs"]:
        assert not any(one.get("secret") for one in group["template"]["spec"]["volumes"])

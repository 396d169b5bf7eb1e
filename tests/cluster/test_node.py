"""cluster/node/rkserve-node, in a folder in the place of the machine."""

from __future__ import annotations

import contextlib
import ensurepip
import functools
import hashlib
import http.server
import os
import shutil
import stat
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rkserve.bringup.wheels import LOCK_FILE
from scripts.offline import write_sums
from tests.support.paths import PROJECT

# Each installation starts pip twice.
pytestmark = [pytest.mark.engine, pytest.mark.slow]

SCRIPT = PROJECT / "cluster" / "node" / "rkserve-node"


class Machine:
    """A machine whose folders are below one, and an offline folder for it."""

    def __init__(self, root: Path) -> None:
        self.root, self.offline = root, root / "offline"
        self.prefix = root / "opt"
        self.offline.mkdir()
        (self.offline / "requirements.lock").write_text("")
        # As in a real offline folder; without it each installation unpacks Python's own first.
        (bundled,) = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
        self.pip = Path(shutil.copy(bundled, self.offline))
        self.put_wheel("1.0")

    def put_wheel(self, version: str, exits: int = 0) -> None:
        """Put a rkserve of this version into the offline folder, in the place of an earlier one."""
        for old in self.offline.glob("rkserve-*.whl"):
            old.unlink()
        info = f"rkserve-{version}.dist-info"
        files = {
            "rkserve.py": f"def main():\n    raise SystemExit({exits})\n",
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: rkserve\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/entry_points.txt": "[console_scripts]\nrkserve = rkserve:main\n",
        }
        record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
        wheel = self.offline / f"rkserve-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, text in {**files, f"{info}/RECORD": record}.items():
                archive.writestr(name, text)

    def run(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(SCRIPT), *words],
            env={
                "PATH": os.environ["PATH"],
                "RKSERVE_PYTHON": sys.executable,
                "RKSERVE_PREFIX": str(self.prefix),
                "RKSERVE_STATE": str(self.root / "state"),
                "RKSERVE_ETC": str(self.root / "etc"),
                "RKSERVE_UNITS": str(self.root / "units"),
                "RKSERVE_RULES": str(self.root / "rules"),
                "RKSERVE_LIBRARY": str(self.root / "lib" / "librkllmrt.so"),
                "RKSERVE_MODELS": str(self.root / "models"),
                "RKSERVE_NEEDED_KB": "1000",
                **environ,
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def done(self, *words: str, **environ: str) -> str:
        """Run a step that has to succeed, and return its output."""
        done = self.run(*words, **environ)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def in_use(self) -> str:
        return str((self.prefix / "venv").readlink())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_version_is_installed_once_and_taken_into_use(machine: Machine) -> None:
    offline = str(machine.offline)
    assert machine.done("find", offline) == "\n"
    assert machine.done("install", offline) == "changed: 1.0 is installed\n"
    assert machine.done("install", offline) == "1.0 is installed\n"
    assert machine.done("find", offline) == "1.0\n"
    assert not (machine.prefix / "venv").exists()
    assert machine.done("use") == "changed: 1.0 is in use\n"
    assert machine.done("use", "1.0") == "1.0 is in use\n"
    assert machine.done("list") == "1.0 in use\n"
    assert (machine.prefix / "venv" / "bin" / "rkserve").exists()
    assert sorted(p.name for p in machine.prefix.iterdir()) == ["1.0", "venv"]


@pytest.mark.long
def test_a_version_has_what_the_next_update_needs(machine: Machine) -> None:
    """Without them `rkserve update` would need Python's own pip, and download all packages."""
    private = machine.offline / LOCK_FILE
    for one in (machine.pip, private):
        one.chmod(0o600)  # as Ansible copies them
    machine.done("install", str(machine.offline))
    version = machine.prefix / "1.0"
    assert (version / machine.pip.name).read_bytes() == machine.pip.read_bytes()
    for one in (version / machine.pip.name, version / LOCK_FILE):
        assert stat.S_IMODE(one.stat().st_mode) == 0o644, "its account installs the next version"
    lock = (machine.offline / LOCK_FILE).read_bytes()
    assert (version / LOCK_FILE).read_bytes() == lock


@pytest.mark.long
def test_an_offline_folder_without_pip_is_installed_with_python_s_own(machine: Machine) -> None:
    machine.pip.unlink()
    assert machine.done("install", str(machine.offline)) == "changed: 1.0 is installed\n"


@pytest.mark.long
def test_the_version_before_comes_back_and_older_ones_go(machine: Machine) -> None:
    for version in ("1.0", "1.1", "1.2"):
        machine.put_wheel(version)
        machine.done("install", str(machine.offline))
        machine.done("use")
    assert machine.in_use() == "1.2"
    assert machine.done("back") == "changed: 1.1 is in use\n"
    assert machine.done("list") == "1.0\n1.1 in use\n1.2 before\n"
    assert machine.done("prune") == "changed: 1.0 is removed\n"
    assert machine.done("back") == "changed: 1.2 is in use\n"


@pytest.mark.long
def test_the_same_version_with_other_content_is_beside_it(machine: Machine) -> None:
    machine.done("install", str(machine.offline))
    machine.done("use")
    (machine.offline / "requirements.lock").write_text("# other packages\n")
    machine.done("install", str(machine.offline))
    name = machine.done("find", str(machine.offline)).strip()
    assert name.startswith("1.0-")
    assert machine.in_use() == "1.0"
    machine.done("use", name)
    assert machine.in_use() == name


@pytest.mark.long
def test_a_version_that_was_cut_off_is_installed_anew(machine: Machine) -> None:
    machine.done("install", str(machine.offline))
    (machine.prefix / "1.0" / ".complete").unlink()
    (machine.prefix / "1.0" / "bin" / "rkserve").unlink()
    assert machine.done("list") == ""
    assert machine.done("install", str(machine.offline)) == "changed: 1.0 is installed\n"
    assert (machine.prefix / "1.0" / "bin" / "rkserve").exists()


@pytest.mark.long
def test_a_version_that_does_not_run_is_not_complete(machine: Machine) -> None:
    machine.put_wheel("2.0", exits=1)
    assert machine.run("install", str(machine.offline)).returncode != 0
    assert machine.done("list") == ""
    assert machine.run("use", "2.0").returncode == 1


@pytest.mark.parametrize(
    ("words", "environ", "sentence"),
    [
        pytest.param(["back"], {}, "No version was in use before this one.", id="no way back"),
        pytest.param(["use"], {}, "No version is installed", id="nothing to use"),
        pytest.param(["use", "9"], {}, "9 is not installed; there are: ", id="an unknown version"),
        pytest.param(
            ["install", "OFFLINE"], {"RKSERVE_NEEDED_KB": "9" * 15}, "of free space", id="full"
        ),
        pytest.param(
            ["install", "OFFLINE"],
            {"RKSERVE_PYTHON": "/bin/false"},
            "Python 3.10, 3.11, 3.12 or 3.13 was not found",
            id="no Python",
        ),
        pytest.param(
            ["runtime", "OFFLINE"], {}, "librkllmrt.so is missing: put the vendor's", id="library"
        ),
        pytest.param(
            ["join", "http://head:8000"], {}, "RKSERVE_JOIN_TOKEN is empty", id="no token"
        ),
        pytest.param(["first-boot"], {}, "first-boot.env is missing", id="no values"),
        pytest.param(
            ["fetch", "http://127.0.0.1:9", "OFFLINE"], {}, "cannot be downloaded", id="no server"
        ),
    ],
)
def test_a_step_that_is_impossible_ends_with_one_sentence(
    machine: Machine, words: list[str], environ: dict[str, str], sentence: str
) -> None:
    given = [str(machine.offline) if word == "OFFLINE" else word for word in words]
    done = machine.run(*given, **environ)
    assert done.returncode == 1
    assert sentence in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("rkserve-node: ")


def test_a_first_boot_names_the_value_that_is_missing(machine: Machine) -> None:
    values = machine.root / "etc" / "first-boot.env"
    values.parent.mkdir()
    values.write_text("RKSERVE_OFFLINE_URL=http://127.0.0.1:9\nRKSERVE_HEAD_URL=\n")
    done = machine.run("first-boot")
    assert done.returncode == 1
    assert done.stderr == f"rkserve-node: {values} has no RKSERVE_HEAD_URL.\n"


def test_rules_of_udev_are_copied_with_the_units(machine: Machine) -> None:
    systemd = machine.offline / "systemd"
    systemd.mkdir()
    (systemd / "rkserve-board.service").write_text("[Unit]\n")
    (systemd / "rkserve.env").write_text("A=1\n")
    (systemd / "60-rkserve.rules").write_text("# rules\n")
    rules = machine.root / "rules"
    assert "60-rkserve.rules" in machine.done("units", str(machine.offline))
    assert (rules / "60-rkserve.rules").read_text() == "# rules\n"


def test_wheels_for_another_python_are_refused_by_name(machine: Machine) -> None:
    (machine.offline / "wheels").mkdir()
    (machine.offline / "wheels" / "wheels-cp310-riscv64.tar").touch()
    done = machine.run("install", str(machine.offline))
    assert done.returncode == 1
    assert 'make offline TARGETS="cp3' in done.stderr


def test_a_damaged_folder_is_refused(machine: Machine) -> None:
    write_sums(machine.offline)
    with (machine.offline / "requirements.lock").open("a") as file:
        file.write("# changed\n")
    done = machine.run("install", str(machine.offline))
    assert done.returncode == 1
    assert "is damaged: copy it again." in done.stderr


def test_units_are_copied_and_changed_settings_stay(machine: Machine) -> None:
    systemd = machine.offline / "systemd"
    systemd.mkdir()
    (systemd / "rkserve-board.service").write_text("[Unit]\n")
    (systemd / "rkserve.env").write_text("RAY_AUTH_MODE=token\n")
    assert machine.done("units", str(machine.offline)).count("changed: ") == 2
    settings = machine.root / "etc" / "rkserve.env"
    settings.write_text("RAY_AUTH_MODE=token\nMORE=1\n")
    assert machine.done("units", str(machine.offline)) == ""
    assert "MORE=1" in settings.read_text()
    (systemd / "rkserve-board.service").write_text("[Unit]\nDescription=new\n")
    assert "rkserve-board.service" in machine.done("units", str(machine.offline))


def test_models_are_copied_with_their_adapters(machine: Machine) -> None:
    file = machine.offline / "models" / "one" / "adapters" / "a b" / "v1" / "adapter.rkllm"
    file.parent.mkdir(parents=True)
    file.write_text("weights")
    assert machine.done("models", str(machine.offline)).count("changed: ") == 1
    assert machine.done("models", str(machine.offline)) == ""
    copied = machine.root / "models" / file.relative_to(machine.offline / "models")
    assert copied.read_text() == "weights"


def test_a_machine_downloads_its_own_wheels_only_and_each_file_once(machine: Machine) -> None:
    tag = machine.done("tag").strip()
    wheels = machine.offline / "wheels"
    wheels.mkdir()
    for name in (tag, "cp310-riscv64"):
        (wheels / f"wheels-{name}.tar").write_text(name)
    write_sums(machine.offline)
    with (machine.offline / "SHA256SUMS").open("a") as sums:
        sums.write(f"{hashlib.sha256(b'x').hexdigest()}  ../outside\n")
    (machine.root / "outside").write_text("x")
    into = machine.root / "local" / "copy"
    with served(machine.offline) as url:
        assert machine.done("fetch", url, str(into)).count("changed: ") == 4
        assert machine.done("fetch", url, str(into)) == ""
        (into / "requirements.lock").write_text("damaged")
        assert machine.done("fetch", url, str(into)).count("changed: ") == 1
    names = {"SHA256SUMS", "requirements.lock", "rkserve-1.0-py3-none-any.whl", machine.pip.name}
    assert {p.name for p in into.rglob("*") if p.is_file()} == {*names, f"wheels-{tag}.tar"}
    assert not (into.parent / "outside").exists()


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Keep stderr clean."""

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_board_that_has_joined_needs_neither_token_nor_head(machine: Machine) -> None:
    record = machine.root / "state" / "node" / "joined.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    # systemd does not run in the tests' place: what starts the board is named instead.
    if not Path("/run/systemd/system").exists():
        assert "rkserve join --state" in machine.done("join", "http://head:8000")


@pytest.mark.parametrize("words", [["find"], ["nonsense"], ["join"], ["user", "more"]])
def test_wrong_usage_shows_the_steps(machine: Machine, words: list[str]) -> None:
    done = machine.run(*words)
    assert done.returncode == 2
    assert "rkserve-node install FOLDER" in done.stderr

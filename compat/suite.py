"""A suite: a client in an environment of its own, and what its tests said."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORK = HERE.parent / ".compat"
LIMIT_S = 900.0  # a suite that takes longer hangs
# Telemetry of the clients goes to a port without a listener.
NOWHERE = "http://127.0.0.1:9"
QUIET = {
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
    "DO_NOT_TRACK": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


class Outcome(Enum):
    """The outcome of a test."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Suite:
    """A client, and the folders of its tests."""

    name: str
    client: str
    package: str
    kind: str = "python"
    tests: tuple[str, ...] = ()
    beforehand: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The path of its requirements."""
        return HERE / "suites" / self.name

    @property
    def work(self) -> Path:
        """The folder of its environment and its results."""
        return WORK / self.name

    @property
    def version(self) -> str:
        """The client's version, as it is pinned."""
        if not self.folder.exists():
            return ""
        if self.kind == "node":
            return _node_version(self.folder / "package-lock.json", self.package)
        lines = (self.folder / "requirements.txt").read_text(encoding="utf-8").splitlines()
        return next(line.split("==")[1] for line in lines if line.startswith(f"{self.package}=="))


@dataclass
class Result:
    """The outcomes of a suite's tests, by their names."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    seconds: float = 0.0
    trouble: str = ""  # why there are no outcomes, or not all

    def named(self, outcome: Outcome) -> list[str]:
        """The tests that ended so."""
        return [name for name, found in self.outcomes.items() if found is outcome]


def install(suite: Suite) -> None:
    """Make the suite's environment, unless it is there already.

    Raises:
        subprocess.CalledProcessError: the client cannot be had.
    """
    suite.work.mkdir(parents=True, exist_ok=True)
    pins = suite.folder / ("package-lock.json" if suite.kind == "node" else "requirements.txt")
    wanted = hashlib.sha256(pins.read_bytes() + repr(suite.beforehand).encode()).hexdigest()
    stamp = suite.work / "installed"
    if stamp.exists() and stamp.read_text(encoding="utf-8").strip() == wanted:
        return
    if suite.kind == "node":
        shutil.copy(suite.folder / "package.json", suite.work)
        shutil.copy(pins, suite.work)
        command = ["npm", "ci", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"]
        subprocess.run(command, cwd=suite.work, check=True)
    else:
        venv = suite.work / "venv"
        uv = [str(Path(sys.executable).parent / "uv")]
        create = [*uv, "venv", "-q", "--clear", "--python", sys.executable, str(venv)]
        subprocess.run([*create, *(("--seed",) if suite.beforehand else ())], check=True)
        python = str(venv / "bin" / "python")
        if suite.beforehand:
            pip = [python, "-m", "pip", "-q", "--disable-pip-version-check", "install"]
            subprocess.run([*pip, *suite.beforehand], check=True)
        # All that it needs is pinned: what was installed beforehand is not to be resolved again.
        install = [*uv, "pip", "install", "-q", "--no-deps", "--python", python, "-r", str(pins)]
        subprocess.run(install, check=True)
    stamp.write_text(wanted, encoding="utf-8")


def run(suite: Suite, url: str, chosen: str | None = None) -> Result:
    """Run the suite's tests against the application at ``url``; all, or those ``chosen``."""
    report = suite.work / "junit.xml"
    report.unlink(missing_ok=True)
    home = suite.work / "home"  # no settings of the user's, and none left there
    home.mkdir(exist_ok=True)
    environ = {
        **{key: value for key, value in os.environ.items() if key not in PROXIES},
        **dict.fromkeys(PROXIES, NOWHERE),
        **QUIET,
        "HOME": str(home),
        "RKSERVE_URL": url,
        "COMPAT_WORK": str(suite.work),
        "PYTHONPATH": str(HERE / "shared"),
    }
    begun_s = time.monotonic()
    command = (
        _node(suite, report, chosen) if suite.kind == "node" else _pytest(suite, report, chosen)
    )
    trouble = ""
    try:
        subprocess.run(command, cwd=suite.work, env=environ, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        trouble = f"it took more than {LIMIT_S:.0f} s"
    result = Result(seconds=time.monotonic() - begun_s, trouble=trouble)
    if report.exists() and report.stat().st_size:
        result.outcomes = read(report)
    if not result.outcomes and not trouble:
        result.trouble = "no test was run"
    return result


def _pytest(suite: Suite, report: Path, chosen: str | None) -> list[str]:
    folders = [HERE / folder for folder in suite.tests] or [suite.folder]
    ini = suite.folder / "pytest.ini"
    return [
        *(str(suite.work / "venv" / "bin" / "python"), "-m", "pytest", "-q", "--tb=short"),
        *("-c", str(ini if ini.exists() else HERE / "pytest.ini"), "--rootdir", str(HERE)),
        f"--junitxml={report}",
        *(("-k", chosen) if chosen else ()),
        *map(str, folders),
    ]


def _node(suite: Suite, report: Path, chosen: str | None) -> list[str]:
    files = []
    for file in sorted(suite.folder.glob("*.test.mjs")):
        # Beside node_modules: that is where imports are looked for.
        files.append(shutil.copy(file, suite.work))
    return [
        *("node", "--test", "--test-reporter=spec", "--test-reporter-destination=stdout"),
        *("--test-reporter=junit", f"--test-reporter-destination={report}"),
        *((f"--test-name-pattern={chosen}",) if chosen else ()),
        *map(str, files),
    ]


def read(report: Path) -> dict[str, Outcome]:
    """Read JUnit's XML: the outcome of each test by its name, with its class if it has one."""
    found: dict[str, Outcome] = {}
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 - pytest wrote it
        place = case.get("classname", "").rpartition(".")[2]
        name = str(case.get("name"))
        name = f"{place}::{name}" if place[:4] == "Test" else name
        outcome = Outcome.PASSED
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = Outcome.FAILED
        elif case.find("skipped") is not None:
            outcome = Outcome.SKIPPED
        # A test may fail once and its teardown a second time.
        if found.get(name, Outcome.PASSED) is Outcome.PASSED:
            found[name] = outcome
    return found


def _node_version(lock: Path, package: str) -> str:
    import json

    packages: Mapping[str, Mapping[str, str]] = json.loads(lock.read_text(encoding="utf-8"))[
        "packages"
    ]
    return packages[f"node_modules/{package}"]["version"]

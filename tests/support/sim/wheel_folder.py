"""Wheels of this project under other version numbers, for tests of updates."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.paths import PROJECT


def make_wheel(version: str, folder: Path, work: Path) -> Path:
    """Build the project's wheel with another version number, without the network."""
    source = work / f"source-{version}"
    source.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(PROJECT / name, source)
    unwanted = shutil.ignore_patterns("__pycache__", "build")
    shutil.copytree(PROJECT / "rkserve", source / "rkserve", ignore=unwanted)
    init = source / "rkserve" / "__init__.py"
    text = init.read_text(encoding="utf-8")
    number = text.partition('__version__ = "')[2].partition('"')[0]
    init.write_text(text.replace(number, version), encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    wheel = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    subprocess.run(
        [*wheel, "--no-index", "-w", str(folder), str(source)], check=True, timeout=600, cwd=work
    )
    (made,) = folder.glob(f"rkserve-{version}-*.whl")
    return made

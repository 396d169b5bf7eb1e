"""The binding keeps alive what the library can see, as a sanitizer judges; a part of ``sanitize``.

The whole of it takes a minute: ``python scripts/sanitize.py``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow

LIFETIMES = "m4 or asynchronous or rows or embeddings or image or video or hook or encoder"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc and its libasan")
def test_address_and_undefined_sanitizers_find_nothing_in_the_binding() -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(PROJECT / "scripts" / "sanitize.py")),
            *(
                "tests/native/binding/test_runtime.py",
                "tests/native/binding/test_runtime_api.py",
                "-k",
                LIFETIMES,
            ),
        ],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Sanitizer" not in done.stdout + done.stderr
    assert " passed" in done.stdout

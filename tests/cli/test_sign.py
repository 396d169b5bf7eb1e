"""``rkserve sign``: keys, manifests beside files, and their check."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rkserve.cli.commands import app
from rkserve.core.files import SIGNED_SUFFIX
from rkserve.models.signing import check_envelope, read_trusted_keys

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tone.rkllm").write_bytes(b"an adapter")
    run("sign keygen release --name release")
    return tmp_path


def run(line: str, code: int = 0) -> str:
    """Run a command; return what it has printed."""
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == code, done.output
    return done.output


SIGN = "sign tone.rkllm --key release --name tone --version 3 --base qwen"


def test_a_key_is_made_a_file_signed_and_the_signature_checked(place: Path) -> None:
    assert stat.S_IMODE((place / "release").stat().st_mode) == 0o600
    said = run(f"{SIGN} --soc RK3588 --toolkit 1.2.3 --runtime-min 1.2.3 --expires 30d")
    assert said == f"signed adapter tone version 3: tone.rkllm{SIGNED_SUFFIX}\n"
    (key,) = read_trusted_keys(place / "release.pub")
    text = (place / f"tone.rkllm{SIGNED_SUFFIX}").read_text(encoding="utf-8")
    found = check_envelope(text, (key,)).manifest
    assert (found.soc, found.toolkit, found.model) == (("rk3588",), "1.2.3", "qwen")
    assert found.expires is not None
    assert found.created is not None
    assert found.expires - found.created == 30 * 86400
    said = run("sign verify tone.rkllm --keys release.pub")
    assert said == f"adapter tone version 3, signed by release ({key.key_id})\n"
    shown = json.loads(run("sign verify tone.rkllm --keys release.pub --json"))
    assert shown["sha256"] == found.sha256


def test_without_a_file_the_help_is_shown(place: Path) -> None:
    for line, code in (("sign", 2), ("sign --help", 0)):
        assert "keygen" in run(line, code)


def test_a_changed_file_another_key_or_no_manifest_fails_the_check(place: Path) -> None:
    assert "There is no tone.rkllm.manifest.json" in run(
        "sign verify tone.rkllm --keys release.pub", 1
    )
    run(SIGN)
    run("sign keygen other --name other")
    assert "None of the pinned keys (other)" in run("sign verify tone.rkllm --keys other.pub", 1)
    (place / "tone.rkllm").write_bytes(b"another")
    assert "The manifest states sha256" in run("sign verify tone.rkllm --keys release.pub", 1)


def test_base_weights_and_the_folder_of_a_model_are_signed_too(place: Path) -> None:
    said = run("sign tone.rkllm --key release --name qwen --version 1")
    assert said.startswith("signed model qwen version 1: ")
    folder = place / "chat"
    folder.mkdir()
    (folder / "model.rkllm").write_bytes(b"weights")
    assert run("sign chat --key release --version 2") == (
        f"signed folder chat version 2: chat{SIGNED_SUFFIX}\n"
    )
    run("sign verify chat --keys release.pub")
    (folder / "rkserve.yaml").write_text("context_length: 512\n", encoding="utf-8")
    assert "The manifest states" in run("sign verify chat --keys release.pub", 1)


def test_the_folder_of_an_adapter_stands_for_its_file(place: Path) -> None:
    (place / "v1").mkdir()
    (place / "tone.rkllm").rename(place / "v1/adapter.rkllm")
    run("sign v1 --key release --name tone --version 1 --base qwen --base-file v1/adapter.rkllm")
    assert (place / f"v1/adapter.rkllm{SIGNED_SUFFIX}").is_file()
    run("sign verify v1 --keys release.pub")


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        pytest.param("sign keygen release", 1, "exists", id="a key that is there"),
        pytest.param(f"{SIGN} --toolkit new", 1, "toolkit", id="no release"),
        pytest.param(SIGN.replace("--name tone", "--name a/b"), 1, "name", id="a path"),
        pytest.param(SIGN.replace("--name tone", ""), 2, "--name", id="no name"),
        pytest.param(SIGN.replace("3", "0"), 2, "--version", id="version 0"),
        pytest.param(SIGN.replace("3", "9223372036854775808"), 2, "--version", id="2^63"),
        pytest.param(SIGN.replace("key release", "key release.pub"), 1, "release.pub", id="public"),
        pytest.param("sign verify tone.rkllm --keys release", 1, "not a key", id="private"),
        pytest.param("sign absent --key release --version 1", 2, "absent", id="no file"),
        pytest.param(
            "sign tone.rkllm --key release --name q --version 1 --base-file tone.rkllm",
            2,
            "--base",
            id="a base file without a base",
        ),
    ],
)
def test_what_cannot_be_signed_is_refused_with_a_sentence(
    place: Path, line: str, code: int, words: str
) -> None:
    before = sorted(place.iterdir())
    assert words in run(line, code)
    assert sorted(place.iterdir()) == before

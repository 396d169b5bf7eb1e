"""``rkserve lora``: adapters, real and simulated."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rkserve.cli.context import Exit
from rkserve.models.files import simulated_adapter_flaw
from rkserve.models.signing import make_manifest, signed_envelope
from rkserve.native.sim import models
from tests.support.cluster.fake_control import PARTLY, FakeControl, envelope, ok, stored
from tests.support.http.terminal import Terminal

ROLLOUT = "POST /v1/lora_adapters/tone/rollout"


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        ([], {"strategy": "atomic"}),
        (["--strategy", "rolling"], {"strategy": "rolling", "max_unavailable": 1}),
        (
            ["--strategy", "canary", "--weight", "0.5", "--no-auto"],
            {"strategy": "canary", "weight": 0.5, "observe_s": 60.0, "auto": False},
        ),
    ],
    ids=["atomic", "rolling", "canary"],
)
def test_push_uploads_and_rolls_out(
    server: FakeControl, rkserve: Terminal, tmp_path: Path, words: list[str], sent: dict[str, Any]
) -> None:
    (tmp_path / "adapter.rkllm").write_bytes(b"weights")
    names = {"name": "tone", "version": "v1", "model": "m"}
    server.on("POST /v1/lora_adapters", ok({**names, **envelope()}))
    server.on(ROLLOUT, ok({**names, **envelope("running", operation_id="op-2")}, 202))
    server.on("GET /v1/operations/op-2", ok(stored("succeeded", operation_id="op-2")))
    code, out, err = rkserve("lora", "push", str(tmp_path), "--name", "tone", *words)
    assert (code, err) == (0, "")
    assert out == "serving tone@v1: 2 of 2 boards, epoch 7, operation op-2\n"
    expected = {"version": "v1", "model": "m", "in_flight": "pin", "async": True, **sent}
    assert server.json(1) == expected


def test_a_signed_adapter_is_pushed_by_its_file_alone(
    server: FakeControl, rkserve: Terminal, tmp_path: Path
) -> None:
    file = tmp_path / "tone.rkllm"
    file.write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    stated = make_manifest(
        kind="adapter", name="tone", version=3, sha256=digest, size=7, base={"model": "m"}
    )
    text = signed_envelope(stated, Ed25519PrivateKey.generate())
    code, _, err = rkserve("lora", "push", str(file))
    assert code == Exit.USAGE
    assert "give --name, or a signed manifest" in err
    (tmp_path / "tone.rkllm.manifest.json").write_text(text, encoding="utf-8")
    server.on("POST /v1/lora_adapters", ok({"version": "v3", "model": "m", **envelope()}))
    code, out, err = rkserve("lora", "push", str(file), "--no-activate", "--allow-older")
    assert (code, err) == (0, "")
    assert out.startswith("staged tone@v3: ")
    query = server.asked[-1].url.params
    assert (query["name"], query["manifest"], query["allow_older"]) == ("tone", text, "true")


def test_the_list_shows_signed_versions(server: FakeControl, rkserve: Terminal) -> None:
    def row(label: str, manifest: dict[str, Any] | None) -> dict[str, Any]:
        known = {"role": "kept", "sha256": "ab" * 32, "bytes": 7, "boards": {}}
        return {"label": label, "manifest": manifest, **known}

    versions = [
        row("tone@v3", {"version": 3, "key": "release", "key_id": "SHA256:a"}),
        row("tone@v2", {"version": 2, "key": None, "key_id": None}),
        row("tone@v1", None),
    ]
    listed = {"data": [{"name": "tone", "model": "m", "versions": versions}]}
    server.on("GET /v1/lora_adapters", ok(listed))
    lines = rkserve("lora", "list")[1].splitlines()
    assert "3, release" in lines[1]
    assert "2, not verified" in lines[2]
    assert " no " in lines[3]


@pytest.mark.parametrize(
    ("words", "route"),
    [
        (["rollback", "tone"], "POST /v1/lora_adapters/tone/rollback"),
        (["promote", "tone"], "POST /v1/lora_adapters/tone/promote"),
        (["rollout", "tone", "v1"], ROLLOUT),
        (["rm", "tone@v1"], "DELETE /v1/lora_adapters/tone/v1"),
        (["rm", "tone", "--all"], "DELETE /v1/lora_adapters/tone"),
    ],
    ids=["rollback", "promote", "rollout", "rm a version", "rm all"],
)
def test_adapters_are_changed(
    server: FakeControl, rkserve: Terminal, words: list[str], route: str
) -> None:
    server.on(route, ok(envelope("running"), 202))
    server.on("GET /v1/operations/op-1", ok(stored("failed", **PARTLY)))
    code, _, err = rkserve("lora", *words)
    assert (code, server.routes[0]) == (Exit.FAILED, route)
    assert "is failed: sim-1: It does not answer." in err


def test_a_simulated_adapter_is_made_and_pushed(
    server: FakeControl, rkserve: Terminal, tmp_path: Path
) -> None:
    file = tmp_path / "adapter.rkllm"
    code, out, _ = rkserve("sim", "adapter", str(file), "--title", "Tone", "--mib", "1")
    assert code == Exit.DONE
    assert f"rkserve lora push {file} --name tone" in out
    assert file.stat().st_size == 1 << 20
    assert simulated_adapter_flaw(file) == ""
    said = {"id": "tone@v1", "model": "sim-chat", "sha256": "0" * 64, "size": 1}
    server.on("POST /v1/lora_adapters", ok({**envelope(), **said, "version": "v1"}))
    rkserve("lora", "push", str(file), "--name", "tone", "--no-activate")
    assert server.routes[0] == "POST /v1/lora_adapters"


ADAPTER = models.render_adapter("Tone", size=500)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(b"", "is empty", id="nothing"),
        pytest.param(b"PK\x03\x04rest", "a PyTorch checkpoint", id="zip"),
        pytest.param(b"GGUF\x03\x00", "a GGUF file", id="GGUF"),
        pytest.param(
            (20).to_bytes(8, "little") + b'{"a": {"dtype": "F16"}}', "a safetensors file", id="st"
        ),
        pytest.param(b'{"r": 16}', "is JSON", id="its configuration"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\n", "Git LFS", id="a pointer"),
        pytest.param(b"RKSIMLLM" + bytes(400), "a simulated model", id="a base model"),
        pytest.param(ADAPTER[:300], "500 bytes of which 300 are there", id="cut"),
        pytest.param(ADAPTER[:100], "cut after 100 bytes", id="cut in its header"),
        pytest.param(ADAPTER[:-1] + b"x", "a wrong checksum", id="damaged"),
    ],
)
def test_a_file_that_no_board_could_load_is_not_sent(
    server: FakeControl, rkserve: Terminal, tmp_path: Path, content: bytes, said: str
) -> None:
    file = tmp_path / "adapter.rkllm"
    file.write_bytes(content)
    code, _, err = rkserve("lora", "push", str(file), "--name", "tone")
    assert code == Exit.USAGE
    assert said in err
    assert "rkllm-toolkit" in err
    assert server.asked == []


def test_a_folder_without_an_adapter_says_what_is_in_it(
    server: FakeControl, rkserve: Terminal, tmp_path: Path
) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    code, _, err = rkserve("lora", "push", str(tmp_path), "--name", "tone")
    assert code == Exit.USAGE
    assert "has no adapter.rkllm in it, but adapter_model.safetensors" in err
    assert server.asked == []

"""``rkserve model`` at a terminal: output, JSON, exit codes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from subprocess import run

import pytest
from typer.testing import Result

from rkserve.cli import app
from rkserve.cli.context import Exit
from rkserve.models.folder import open_model_folder
from rkserve.models.index import PIECE_BYTES
from rkserve.models.shelf import index_of
from rkserve.native.binding.releases import RELEASES
from tests.support.cluster.fake_control import FakeControl, ok
from tests.support.http.terminal import Runner, Terminal
from tests.support.paths import PROJECT

SIM_CHAT = PROJECT / "models" / "sim-chat"


def rkserve(*words: object, **environ: str) -> Result:
    env = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HUB_OFFLINE": "", **environ}
    return Runner().invoke(app, ["model", *map(str, words)], env=env)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


def test_an_addition_prints_what_was_found_and_assumed(models: Path, tmp_path: Path) -> None:
    source = tmp_path / "chat-rk3588"
    shutil.copytree(SIM_CHAT, source)
    (source / "rkserve.yaml").unlink()
    done = rkserve("add", source, "--into", models)
    assert done.exit_code == Exit.DONE, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == f"added chat: {models / 'chat'} (0.0 MB)"
    assert "  SoC: any (the file's header)" in lines
    assert "  toolkit: 1.2.3 (the file's header)" in lines
    runs = [one for one in RELEASES if one >= "1.2.3"]
    assert f"  runs on RKLLM: {', '.join(runs)}" in lines
    assert "  context_length: 4096 (the file's header)" in lines
    assert lines[-1] == f"next: rkserve doctor --model {models / 'chat'}"
    assert open_model_folder(models / "chat").settings.tool_format == "hermes"


def test_what_is_missing_exits_with_3_and_json_has_it(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "Qwen3-0.6B.rkllm"
    file.write_bytes(b"\1" * 1_000_000)
    done = rkserve("add", file, "--models", models, "--json")
    assert done.exit_code == Exit.PARTLY, done.output
    body = json.loads(done.stdout)
    assert (body["id"], body["complete"], body["tokenizer"]) == ("Qwen3-0.6B", False, None)
    assert body["settings"]["chat_template"] == {
        "value": "chatml",
        "source": "the family's name",
        "assumed": True,
    }
    assert any("no tokenizer.json" in one for one in body["warnings"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param(["nowhere"], "rkserve: nowhere does not exist", id="no such source"),
        pytest.param(["hf:a/b"], "rkserve: http://127.0.0.1:1 cannot be reached", id="offline"),
        pytest.param(
            [str(SIM_CHAT), "--name", "../x"], "rkserve: '../x' is no name of a model", id="name"
        ),
    ],
)
def test_refusals_are_one_sentence(models: Path, words: list[str], sentence: str) -> None:
    done = rkserve("add", *words, "--into", models)
    assert done.exit_code == Exit.FAILED
    assert done.stderr.startswith(sentence)
    assert len(done.stderr.splitlines()) == 1


def test_the_command_needs_neither_ray_nor_the_binding(models: Path) -> None:
    script = f"""if True:
        import sys
        from rkserve.cli import main
        sys.argv = ["rkserve", "model", "add", {str(SIM_CHAT)!r}, "--into", {str(models)!r}]
        try:
            main()
        except SystemExit as exc:
            assert exc.code in (0, None), exc.code
        loaded = {{"ray", "_cffi_backend"}} & set(sys.modules)
        assert not loaded, loaded
    """
    done = run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def added(models: Path) -> Path:
    assert rkserve("add", SIM_CHAT, "--into", models, "--name", "chat").exit_code == Exit.DONE
    return models


def test_models_are_listed_shown_and_removed(added: Path, tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    boards = [{"name": "g", "model": str(added / "chat")}]
    config.write_text(json.dumps({"applications": [{"args": {"boards": boards}}]}))
    options = ("--models", added, "--config", config)
    listed = rkserve("list", *options).stdout.splitlines()
    assert listed[0].split()[:4] == ["model", "SoC", "quantization", "context"]
    row = listed[1].split()
    assert (row[0], row[1], row[3], row[-2]) == ("chat", "any", "4096", "g")
    (found,) = json.loads(rkserve("list", *options, "--json").stdout)
    shown = rkserve("show", "chat", *options, "--verify")
    assert f"sha256: {found['sha256']}" in shown.stdout
    assert "rkserve.yaml:\n# What rkserve needs" in shown.stdout
    assert "\n# By `rkserve model add` from " in shown.stdout
    assert json.loads(rkserve("show", "chat", *options, "--json").stdout)["used_by"] == ["g"]
    refused = rkserve("rm", "chat", *options)
    assert refused.exit_code == Exit.FAILED
    assert refused.stderr.startswith("rkserve: chat is served by g ")
    assert rkserve("rm", "chat", *options, "--force").stdout.startswith("removed chat: 0.")
    assert rkserve("show", "chat", *options).stderr.endswith("has no model 'chat'\n")


def test_a_conversion_prints_the_next_command(tmp_path: Path) -> None:
    source = tmp_path / "tiny"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"1")
    api = tmp_path / "site" / "rkllm" / "api.py"
    api.parent.mkdir(parents=True)
    api.write_text(
        "class RKLLM:\n"
        "    def load_huggingface(self, **_): return 0\n"
        "    def build(self, **_): return 0\n"
        "    def export_rkllm(self, out): open(out, 'wb').write(b'x' * 2_000_000); return 0\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={api.parent.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    words = ("convert", source, "--soc", "rk3588", "--dtype", "w8a8", "--out", tmp_path)
    done = rkserve(*words, RKSERVE_TOOLKIT_PYTHON=str(python))
    made = tmp_path / "tiny-rk3588-w8a8-ctx4096.rkllm"
    assert done.stdout.splitlines() == [
        f"made {made} (2.0 MB)",
        f"next: rkserve model add {made} --tokenizer {source}",
    ], done.output
    missing = rkserve(*words, RKSERVE_TOOLKIT_PYTHON="/nowhere/bin/python")
    assert missing.exit_code == Exit.FAILED
    assert missing.stderr.startswith("rkserve: rkllm-toolkit is not installed")


def test_a_stand_in_is_made_for_the_simulator(tmp_path: Path) -> None:
    words = ["sim", "model", str(SIM_CHAT), "--into", str(tmp_path)]
    done = Runner().invoke(app, words)
    assert done.stdout.startswith(f"made {tmp_path / 'sim-chat'}: "), done.output
    again = Runner().invoke(app, words)
    assert again.exit_code == Exit.FAILED
    assert "exists already" in again.stderr


def test_a_push_uploads_what_the_head_lacks(models: Path) -> None:
    folder = models / "chat"
    shutil.copytree(SIM_CHAT, folder, ignore=shutil.ignore_patterns("adapters"))
    index = index_of(folder, PIECE_BYTES)
    begun = {"received_bytes": 0, "complete": False, "missing": {"model.rkllm": [0]}}
    server = FakeControl()
    server.on("POST /v1/catalog/models", ok(begun))
    server.on("PUT /v1/catalog/models/chat/pieces", ok({"received_bytes": 5}))
    server.on("POST /v1/catalog/models/chat/complete", ok({"complete": True}))
    code, out, err = Terminal(server)("model", "push", "chat", "--models", str(models))
    assert (code, err) == (0, "")
    size = (folder / "model.rkllm").stat().st_size
    assert out.startswith(
        f"pushed chat: {index.total_bytes / 1e6:.1f} MB, of which {size / 1e6:.1f}"
    )
    assert "model: catalog:chat" in out
    assert server.routes == [
        "POST /v1/catalog/models",
        "PUT /v1/catalog/models/chat/pieces",
        "POST /v1/catalog/models/chat/complete",
    ]
    assert server.json(0) == {**index.model_dump(mode="json"), "replace": False}


@pytest.mark.parametrize(
    ("states", "code", "lines"),
    [
        pytest.param(["present", "unfit"], Exit.DONE, ["a: present", "b: unfit (why)"], id="all"),
        pytest.param(
            ["staged", "failed"],
            Exit.PARTLY,
            [
                "a: staged (it replaces an earlier version when a board with this model starts "
                "next)",
                "b: failed 5.0 of 10.0 MB (why)",
            ],
            id="not all",
        ),
        pytest.param([], Exit.DONE, ["no board is there that could fetch it"], id="no boards"),
    ],
)
def test_boards_fetch_a_pushed_model_before_it_is_deployed(
    models: Path, states: list[str], code: Exit, lines: list[str]
) -> None:
    shutil.copytree(SIM_CHAT, models / "chat", ignore=shutil.ignore_patterns("adapters"))
    figures = {"fetched_bytes": 5_000_000, "total_bytes": 10_000_000}
    rows = [
        {"board": board, "state": state, "reason": "" if board == "a" else "why", **figures}
        for board, state in zip("ab", states, strict=False)
    ]
    server = FakeControl().on("POST /v1/catalog/models", ok({"complete": True, "missing": {}}))
    server.on("POST /v1/catalog/models/chat/prefetch", ok({"name": "chat", "boards": rows}))
    words = ("model", "push", "chat", "--models", str(models), "--to-boards")
    done, out, err = Terminal(server)(*words)
    assert (done, err) == (code, "")
    first, *told = out.splitlines()
    assert first.startswith("pushed chat: ")
    assert [line.strip() for line in told] == lines
    done, out, _ = Terminal(server)(*words, "--json")
    assert done == code
    assert json.loads(out) == {"complete": True, "missing": {}, "boards": rows}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("../chat", "is no name of a model"), ("absent", "is no model folder")],
)
def test_a_push_of_no_model_is_refused(name: str, sentence: str, models: Path) -> None:
    server = FakeControl()
    code, _, err = Terminal(server)("model", "push", name, "--models", str(models))
    assert code == Exit.FAILED
    assert sentence in err
    assert server.routes == []

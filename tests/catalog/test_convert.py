"""Conversions with a stand-in for rkllm-toolkit, in an interpreter that is started as the real one
would be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.catalog import convert as convert_module
from rkserve.catalog.convert import ConversionRequest, convert, default_python
from rkserve.catalog.recognise import read_traits
from rkserve.core.errors import ConfigError

pytestmark = pytest.mark.slow

TOOLKIT = """
import json, pathlib
FAILS = {fails!r}
class RKLLM:
    def __init__(self):
        self.calls = {{}}
    def load_huggingface(self, **given):
        self.calls["load"] = given
        print("loading")
        return FAILS == "load"
    def load_gguf(self, **given):
        self.calls["gguf"] = given
        return 0
    def build(self, **given):
        self.calls["build"] = given
        return FAILS == "build"
    def export_rkllm(self, out):
        if FAILS == "crash":
            raise MemoryError("no memory")
        if FAILS == "nothing":
            return 0
        text = json.dumps(self.calls).encode()
        pathlib.Path(out).write_bytes(text + bytes(1_000_000))
        return FAILS == "export"
"""

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Install a toolkit that fails at a step, and return its interpreter."""

    def make(fails: str = "", version: str = "1.2.3") -> Path:
        site = tmp_path / f"toolkit-{fails}"
        (site / "rkllm").mkdir(parents=True)
        (site / "rkllm" / "__init__.py").touch()
        (site / "rkllm" / "api.py").write_text(TOOLKIT.format(fails=fails))
        if version:
            info = site / f"rkllm_toolkit-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Name: rkllm-toolkit\nVersion: {version}\n")
        python = site / "bin" / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return python

    return make


@pytest.fixture
def request_(tmp_path: Path) -> ConversionRequest:
    source = tmp_path / "Qwen2.5-1.5B-Instruct"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(bytes(1000))
    return ConversionRequest(source, "rk3588", "W8A8", tmp_path / "out", context=8192)


def test_a_model_is_converted_and_named(request_: ConversionRequest, install: Install) -> None:
    made = convert(replace(request_, python=install()))
    assert made.name == "Qwen2.5-1.5B-Instruct-rk3588-w8a8-ctx8192-1.2.3.rkllm"
    calls = json.loads(made.read_bytes().rstrip(b"\0"))
    assert calls["load"]["model"] == str(request_.source)
    build = calls["build"]
    assert (build["target_platform"], build["quantized_dtype"]) == ("rk3588", "w8a8")
    assert (build["num_npu_core"], build["max_context"], build["dataset"]) == (3, 8192, None)
    assert [one.name for one in request_.out.iterdir()] == [made.name]
    traits = read_traits(made, ((made.name, "its name"),))
    read = (traits.platform, traits.dtype, traits.toolkit, traits.max_context)
    assert [one and one.value for one in read] == ["RK3588", "w8a8", "1.2.3", 8192]
    with pytest.raises(ConfigError, match="exists already"):
        convert(replace(request_, python=made.parent.parent / "toolkit-" / "bin" / "python"))


def test_a_gguf_file_is_converted(
    request_: ConversionRequest, install: Install, tmp_path: Path
) -> None:
    source = tmp_path / "tiny-1b.gguf"
    source.write_bytes(b"GGUF")
    python = install(version="")
    made = convert(replace(request_, source=source, soc="RK3576", dtype="w4a16", python=python))
    assert made.name == "tiny-1b-rk3576-w4a16-ctx8192.rkllm"
    calls = json.loads(made.read_bytes().rstrip(b"\0"))
    assert calls["gguf"] == {"model": str(source)}
    assert calls["build"]["num_npu_core"] == 2


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        pytest.param("load", "could not load", id="load"),
        pytest.param("build", "could not quantize", id="build"),
        pytest.param("export", "could not export", id="export"),
        pytest.param("crash", r"could not convert \(exit code 1\)", id="crash"),
        pytest.param("nothing", r"could not convert \(exit code 0\)", id="no file"),
    ],
)
def test_failures_of_the_toolkit_leave_no_file(
    request_: ConversionRequest, install: Install, fails: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        convert(replace(request_, python=install(fails)))
    assert list(request_.out.iterdir()) == []


@pytest.mark.parametrize("python", [Path("/nowhere/bin/python"), Path(sys.executable)])
def test_a_missing_toolkit_has_one_sentence_with_how_to_get_it(
    request_: ConversionRequest, python: Path
) -> None:
    with pytest.raises(ConfigError, match=r"rkllm-toolkit is not installed.*pip install") as error:
        convert(replace(request_, python=python))
    assert "\n" not in str(error.value)


def test_the_toolkit_is_looked_for_where_the_environment_says() -> None:
    assert default_python({"RKSERVE_TOOLKIT_PYTHON": "/a/python"}) == Path("/a/python")
    assert default_python({"XDG_DATA_HOME": "/d"}) == Path("/d/rkserve/toolkit/bin/python")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"soc": "rk3566"}, "--soc", id="soc"),
        pytest.param({"dtype": "int8"}, "--dtype", id="dtype"),
        pytest.param({"context": 4095}, "--context: 4095 is no multiple of 32", id="step"),
        pytest.param({"context": 32768}, "--context: 32768", id="too long"),
        pytest.param({"source": Path("/nowhere")}, "neither a .gguf", id="no source"),
        pytest.param({"dataset": Path("/nowhere")}, "--dataset", id="no texts"),
    ],
)
def test_unfit_arguments_are_refused_before_the_toolkit_starts(
    request_: ConversionRequest, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        convert(replace(request_, **changes))


def test_a_full_disk_is_noticed_before_the_conversion(
    request_: ConversionRequest, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_module, "free_bytes", lambda _: 600)
    with pytest.raises(ConfigError, match="needs about"):
        convert(replace(request_, python=install()))

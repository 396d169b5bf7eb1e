"""Conversion of a model by rkllm-toolkit, in a Python environment of its own.

The toolkit pins versions of torch and transformers that rkserve must not have, so that it runs as a
child process of another interpreter, and gets its arguments as JSON.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rkserve.catalog.recognise import plain_name
from rkserve.core.errors import ConfigError
from rkserve.core.files import free_bytes
from rkserve.models.settings import CONTEXT_MAX, CONTEXT_STEP
from rkserve.verdicts.hardware import SOCS, soc_of

PYTHON_VARIABLE = "RKSERVE_TOOLKIT_PYTHON"
PACKAGES = "https://github.com/airockchip/rknn-llm/tree/main/rkllm-toolkit/packages"
WEIGHTS = ("*.safetensors", "*.bin")
DTYPE = re.compile(r"w\d{1,2}a\d{1,2}(?:_g\d{2,4})?")
MEGA = 1_000_000
STDERR = 2
# Of the bytes of 16-bit weights; the toolkit writes no intermediate files of note.
OUTPUT_SHARE = {"w4": 0.4}
FAILURES = {10: "load", 11: "quantize", 12: "export"}
_VERSION = """
import importlib.metadata, importlib.util
if importlib.util.find_spec("rkllm") is None:
    raise SystemExit(3)
try:
    print(importlib.metadata.version("rkllm-toolkit"))
except importlib.metadata.PackageNotFoundError:
    print("unknown")
"""
# With the names and the order of the vendor's examples.
_EXPORT = """
import json, sys
from rkllm.api import RKLLM
given = json.loads(sys.argv[1])
llm = RKLLM()
if given["gguf"]:
    done = llm.load_gguf(model=given["source"])
else:
    done = llm.load_huggingface(model=given["source"], model_lora=None, device=given["device"])
if done != 0:
    raise SystemExit(10)
done = llm.build(
    do_quantization=True,
    optimization_level=given["optimization"],
    quantized_dtype=given["dtype"],
    quantized_algorithm="normal",
    target_platform=given["soc"],
    num_npu_core=given["cores"],
    extra_qparams=None,
    dataset=given["dataset"],
    hybrid_rate=0,
    max_context=given["context"],
)
if done != 0:
    raise SystemExit(11)
if llm.export_rkllm(given["out"]) != 0:
    raise SystemExit(12)
"""


@dataclass(frozen=True, slots=True)
class ConversionRequest:
    """The arguments of a conversion: ``source`` is a Hugging Face model folder or a .gguf file."""

    source: Path
    soc: str
    dtype: str
    out: Path
    context: int = 4096
    optimization: int = 1
    device: str = "cpu"
    dataset: Path | None = None
    python: Path | None = None


def default_python(environ: Mapping[str, str]) -> Path:
    """Return the interpreter of the toolkit: that of the environment, or of rkserve's folder."""
    if environ.get(PYTHON_VARIABLE):
        return Path(environ[PYTHON_VARIABLE]).expanduser()
    data = Path(environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser()
    return data / "rkserve" / "toolkit" / "bin" / "python"


def convert(request: ConversionRequest, environ: Mapping[str, str] = os.environ) -> Path:
    """Convert a model and return the .rkllm file, whose name states how it was converted.

    The toolkit's messages go to stderr.

    Raises:
        ConfigError: the toolkit is missing or failed, an argument is unfit, or the disk is full.
    """
    soc = soc_of(request.soc)
    if soc is None:
        raise ConfigError(
            f"--soc: {request.soc!r} is none of {', '.join(one.name for one in SOCS)}"
        )
    dtype = request.dtype.lower()
    if not DTYPE.fullmatch(dtype):
        raise ConfigError(f"--dtype: {request.dtype!r} is no quantization such as w8a8 or w4a16")
    context = request.context
    if context % CONTEXT_STEP or not CONTEXT_STEP <= context <= CONTEXT_MAX:
        raise ConfigError(
            f"--context: {context} is no multiple of {CONTEXT_STEP} up to {CONTEXT_MAX}"
        )
    size = _source_bytes(request.source)
    if request.dataset is not None and not request.dataset.is_file():
        raise ConfigError(f"--dataset: {request.dataset} is no file")
    python = request.python or default_python(environ)
    version = _toolkit_version(python)
    parts = (
        plain_name(
            request.source.resolve().stem
            if request.source.is_file()
            else request.source.resolve().name
        ),
        soc.name.lower(),
        dtype,
    )
    name = "-".join((*parts, f"ctx{context}", *([version] if version[0].isdigit() else [])))
    target = request.out.absolute() / f"{name}.rkllm"
    if target.exists():
        raise ConfigError(f"{target} exists already; remove it first")
    _make_room(request.out, int(size * OUTPUT_SHARE.get(dtype[:2], 0.7)), name)
    given = {
        "source": str(request.source.absolute()),
        "gguf": request.source.suffix == ".gguf",
        "device": request.device,
        "optimization": request.optimization,
        "dtype": dtype,
        "soc": soc.name.lower(),
        "cores": soc.npu_cores,
        "dataset": None if request.dataset is None else str(request.dataset.absolute()),
        "context": context,
    }
    return _run(python, given, target)


def _source_bytes(source: Path) -> int:
    """Return the bytes of a model's weights. Raises ``ConfigError`` if it is none."""
    try:
        if source.is_file() and source.suffix == ".gguf":
            return source.stat().st_size
        weights = [one for pattern in WEIGHTS for one in source.glob(pattern)]
        size = sum(one.stat().st_size for one in weights)
    except OSError as exc:
        raise ConfigError(f"{source} cannot be read: {exc.strerror or exc}") from exc
    if not size or not (source / "config.json").is_file():
        raise ConfigError(
            f"{source} is neither a .gguf file nor a folder with config.json and *.safetensors"
        )
    return size


def _toolkit_version(python: Path) -> str:
    """Return the version of the toolkit. Raises ``ConfigError`` with how to get it."""
    folder = python.parent.parent
    get = (
        f"on an x86-64 PC download a wheel from {PACKAGES}, then run: python3.10 -m venv {folder} "
        f"&& {folder}/bin/pip install rkllm_toolkit-*.whl"
    )
    try:
        done = subprocess.run(
            [python, "-c", _VERSION], capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        raise ConfigError(
            f"rkllm-toolkit is not installed ({python} does not run): {get}"
        ) from None
    if done.returncode or not done.stdout.strip():
        raise ConfigError(f"rkllm-toolkit is not installed in {folder}: {get}")
    return done.stdout.strip()


def _make_room(out: Path, need: int, name: str) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        free = free_bytes(out)
    except OSError as exc:
        raise ConfigError(f"{out} cannot be written: {exc.strerror or exc}") from exc
    if need > free:
        raise ConfigError(
            f"{name} needs about {need / MEGA:.0f} MB; the disk of {out} has {free / MEGA:.0f} MB "
            "free"
        )


def _run(python: Path, given: Mapping[str, object], target: Path) -> Path:
    """Run the toolkit beside the target, and put its file there once it is whole."""
    work = target.with_name(f".{target.stem}.converting")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        out = work / target.name
        words = json.dumps({**given, "out": str(out)})
        done = subprocess.run([python, "-c", _EXPORT, words], cwd=work, stdout=STDERR, check=False)
        if done.returncode or not out.is_file():
            step = FAILURES.get(done.returncode, f"convert (exit code {done.returncode})")
            raise ConfigError(f"rkllm-toolkit could not {step} the model; its messages are above")
        out.replace(target)
    except OSError as exc:
        raise ConfigError(f"{target} cannot be written: {exc.strerror or exc}") from exc
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target

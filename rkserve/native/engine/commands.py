"""The translation of a board's JSON commands to calls of a ``Runtime``.

It knows no frames, threads or processes. The keys are those of ``board.engine``; a missing key is a
bug and raises ``KeyError``. Hidden states are pooled here to one vector of a text; the API
normalizes the vector and cuts its dimensions.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Mapping
from inspect import signature
from operator import add
from pathlib import Path
from typing import Any

from rkserve.core.errors import Misuse, NativeError, NothingComputed
from rkserve.core.run_params import Embeds, Pooling, Sampling
from rkserve.native.runtime import (
    EmbedInput,
    EvaluateMode,
    Image,
    LoadParams,
    Matrix,
    MultimodalInput,
    PromptInput,
    RunInput,
    RunParams,
    Runtime,
    TokenInput,
    VisionParams,
)


def load_params(given: Mapping[str, Any]) -> LoadParams:
    """Return the load parameters; JSON has turned tuples into lists."""
    load = dict(given)
    load["sampling"] = Sampling(**load["sampling"])
    for name in ("cpus", "image_tags"):
        load[name] = tuple(load[name])
    return LoadParams(**load)


def vision_params(given: Mapping[str, Any]) -> VisionParams:
    """Return the parameters of the image encoder."""
    library, model, tags = Path(given["library"]), Path(given["model"]), tuple(given["tags"])
    return VisionParams(**{**given, "library": library, "model": model, "tags": tags})


def prepare(runtime: Runtime, params: Mapping[str, Any]) -> str | None:
    """Prepare the KV cache and the prompt cache for a run, in the order of ``RunCommand``.

    Returns the reason if the library refused a prompt cache, which costs only time. Raises
    ``NativeError`` if the run must not begin.
    """
    if params["clear"]:
        runtime.clear_kv_cache()
    for start, end in params["cut"]:
        _cut(runtime, start, end, entries=len(params["texts"]))
    try:
        if params["release_cache"]:
            runtime.release_prompt_cache()
        if params["load_cache"] is not None:
            runtime.load_prompt_cache(params["load_cache"])
    except NativeError as exc:
        return str(exc)
    return None


def _cut(runtime: Runtime, start: int, end: int, *, entries: int) -> None:
    """Clear a range of the paused entry 0, and check the new size of its KV cache."""
    before = runtime.kv_cache_sizes()[0]
    runtime.clear_kv_range([(start, end), *[(0, 0)] * (entries - 1)])
    after = runtime.kv_cache_sizes()[0]
    if after != before - (end - start):
        raise NativeError(
            f"KV cache holds {after} positions after the range [{start}, {end}) of {before} was "
            "cleared"
        )


def run_params(
    params: Mapping[str, Any],
    entries: tuple[tuple[int, ...], ...],
    image: Image | None = None,
    embeds: Embeds | None = None,
) -> RunParams:
    """Return the parameters of a run.

    ``image`` has all images of the only entry; ``embeds`` are that entry.
    """
    sampling = params["sampling"]
    return RunParams(
        inputs=tuple(
            _input(ids, text, image) if embeds is None else EmbedInput(embeds.data, embeds.rows)
            for ids, text in zip(entries, params["texts"], strict=True)
        ),
        keep_history=params["keep_history"],
        sampling=Sampling(**sampling) if sampling else None,
        max_new_tokens=params["max_new_tokens"],
        resume=params["resume"],
        adapter=params["adapter"],
        save_cache=params["save_cache"],
    )


def _input(ids: tuple[int, ...], text: str | None, image: Image | None) -> RunInput:
    if ids or text is None:
        return TokenInput(ids)
    return PromptInput(text) if image is None else MultimodalInput(text, image)


def embed(runtime: Runtime, run: RunParams, pooling: Pooling) -> tuple[int, bytes]:
    """Return the number of tokens of the run's text, and its vector as float32 raw bytes.

    The hidden states, which take megabytes, are dropped. Raises ``NativeError``.
    """
    (given, *_) = run.inputs  # the binding refuses a batch
    ids = given.ids if isinstance(given, TokenInput) else None
    # With known ids the rows need not be counted.
    last = pooling is Pooling.LAST and ids is not None
    matrix = runtime.evaluate(given, EvaluateMode.HIDDEN, adapter=run.adapter, last=last)
    tokens = matrix.rows if ids is None else len(ids)
    return tokens, pooled(matrix, pooling, None if ids is None else tokens)


def positions(runtime: Runtime) -> tuple[int, ...]:
    """Return the sizes of the KV cache; () on an error, which must not fail a complete answer."""
    try:
        return runtime.kv_cache_sizes()
    except NativeError as exc:
        sys.stderr.write(f"rkserve: the size of the KV cache is unknown: {exc}\n")
        return ()


def call(runtime: Runtime, method: str, args: Mapping[str, Any]) -> Any:
    """Make one of the ``CALLS`` that a board may request between runs.

    Raises ``NativeError``: ``Misuse`` for another name, and for wrong arguments.
    """
    if method not in CALLS:
        raise Misuse(f"unknown call '{method}'; known are {', '.join(CALLS)}")
    try:
        signature(CALLS[method]).bind(runtime, **args)
    except TypeError as exc:
        raise Misuse(f"the call {method}: {exc}") from None
    return CALLS[method](runtime, **args)


def _drain(runtime: Runtime) -> None:
    runtime.drain()


def _clear_kv(runtime: Runtime, keep_system_prompt: bool = False) -> None:
    runtime.clear_kv_cache(keep_system_prompt=keep_system_prompt)


def _kv_sizes(runtime: Runtime) -> tuple[int, ...]:
    return runtime.kv_cache_sizes()


def _load_adapter(runtime: Runtime, path: str, name: str, scale: float = 1.0) -> None:
    runtime.load_adapter(path, name, scale)


def _release_cache(runtime: Runtime) -> None:
    runtime.release_prompt_cache()


CALLS: Mapping[str, Callable[..., Any]] = {
    "drain": _drain,
    "clear_kv": _clear_kv,
    "kv_sizes": _kv_sizes,
    "load_adapter": _load_adapter,
    "release_cache": _release_cache,
}


_FLOAT = 4
MAX_BYTES = 12 * 1024 * 1024  # of all positions of a text, which are sent to the board in one frame


def pooled(matrix: Matrix, pooling: Pooling, expected: int | None = None) -> bytes:
    """Return one vector, or with ``Pooling.ALL`` one per position, as float32 raw bytes.

    ``expected`` is the number of positions, if known: all poolings but LAST need every row.

    Raises:
        NothingComputed: rows are missing, or have values that are not finite.
    """
    if pooling is not Pooling.LAST and expected is not None and matrix.rows != expected:
        found = f"it gave {matrix.rows} rows for {expected} tokens"
        raise NothingComputed(EvaluateMode.HIDDEN.value, found)
    if pooling is Pooling.ALL:
        return _all(matrix)
    vector = _mean(matrix) if pooling is Pooling.MEAN else _row(matrix, pooling)
    if not all(map(math.isfinite, vector)):
        raise NothingComputed(EvaluateMode.HIDDEN.value, "it gave values that are not finite")
    return vector.tobytes()


def _all(matrix: Matrix) -> bytes:
    size = matrix.rows * matrix.columns * _FLOAT
    if size > MAX_BYTES:
        raise NothingComputed(
            EvaluateMode.HIDDEN.value,
            f"it gave {size} bytes; the limit is {MAX_BYTES}",
        )
    values = array("f")
    values.frombytes(memoryview(matrix.data)[:size])
    if not all(map(math.isfinite, values)):
        raise NothingComputed(EvaluateMode.HIDDEN.value, "it gave values that are not finite")
    return values.tobytes()


def _row(matrix: Matrix, pooling: Pooling) -> array[float]:
    row = matrix.rows - 1 if pooling is Pooling.LAST else 0
    return _floats(matrix, row)


def _mean(matrix: Matrix) -> array[float]:
    total = [0.0] * matrix.columns
    for row in range(matrix.rows):
        total = list(map(add, total, _floats(matrix, row)))
    return array("f", [value / matrix.rows for value in total])


def _floats(matrix: Matrix, row: int) -> array[float]:
    size = matrix.columns * _FLOAT
    floats = array("f")
    floats.frombytes(memoryview(matrix.data)[row * size : (row + 1) * size])
    return floats

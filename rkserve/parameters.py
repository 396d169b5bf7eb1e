"""The tensors of a file of weights, as a trainer names them, and where two lists of them differ.

It knows names, shapes and types, and no file's format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rkserve.errors import RequestError

MAX_PARAMETERS = 20_000
MAX_NAME_CHARS = 256
MAX_DIMENSIONS = 16


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor. ``dtype`` is without the prefix of the library that wrote it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def named(cls, name: str, shape: Iterable[int], dtype: str) -> Parameter:
        """Return it with the type's plain name: ``torch.bfloat16`` is ``bfloat16``."""
        return cls(name, tuple(shape), dtype.rpartition(".")[2])


def read_parameters(given: Any, param: str) -> tuple[Parameter, ...]:
    """Return a list of ``{"name", "shape", "dtype"}`` as it came in JSON; None is an empty one.

    Raises ``RequestError`` that names ``param`` for anything else.
    """
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) > MAX_PARAMETERS:
        raise RequestError(
            f"Invalid '{param}': expected a list of at most {MAX_PARAMETERS} tensors.", param
        )
    found = tuple(_read(one, f"{param}[{n}]", param) for n, one in enumerate(given))
    twice = [name for name, times in Counter(one.name for one in found).items() if times > 1]
    if twice:
        raise RequestError(f"Invalid '{param}': '{twice[0]}' is in it twice.", param)
    return found


def _read(given: Any, at: str, param: str) -> Parameter:
    if not isinstance(given, dict) or set(given) != {"name", "shape", "dtype"}:
        raise RequestError(f"Invalid '{at}': expected name, shape and dtype of a tensor.", param)
    name, shape, dtype = given["name"], given["shape"], given["dtype"]
    for word, text in (("name", name), ("dtype", dtype)):
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_NAME_CHARS:
            raise RequestError(
                f"Invalid '{at}.{word}': expected 1 to {MAX_NAME_CHARS} characters.", param
            )
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise RequestError(f"Invalid '{at}.shape': expected a list of sizes.", param)
    if not all(type(size) is int and size >= 0 for size in shape):
        raise RequestError(f"Invalid '{at}.shape': expected whole numbers, 0 or more.", param)
    return Parameter.named(name, shape, dtype)


def difference(asked: Sequence[Parameter], known: Sequence[Parameter]) -> str | None:
    """Say where ``asked`` is not ``known``, in one sentence; None where both are the same.

    Their order says nothing.
    """
    have = {one.name: one for one in known}
    for one in asked:
        other = have.pop(one.name, None)
        if other is None:
            return f"'{one.name}' is not in the manifest."
        if other.shape != one.shape:
            return f"'{one.name}' has the shape {[*one.shape]}, and {[*other.shape]} there."
        if other.dtype != one.dtype:
            return f"'{one.name}' has the dtype {one.dtype}, and {other.dtype} there."
    if have:
        return f"'{next(iter(have))}' of the manifest is missing."
    return None

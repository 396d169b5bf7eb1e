"""Other base weights for the simulated runtime: a model file that gives other answers.

It knows the format (docs/reference/simulator.md) as far as it changes it: a model's ``seed`` is
one of its strings, and everything that the simulated model decides hangs on it.
scripts/make_sim_chat.py --seed writes one from the command line.
"""

from __future__ import annotations

from rkserve.models.weights import SIM_HEADER, SIM_MAGIC

_FILE_BYTES, _MODEL_ID, _PLATFORM = 2, 3, 4
_STRINGS_AT, _STRINGS_BYTES = 16, 17


def reseed(
    content: bytes, seed: int, *, model_id: str | None = None, platform: str | None = None
) -> bytes:
    """Return a model with the same vocabulary and other answers, which the seed determines.

    With another ``model_id`` the adapters of the first model no longer load; ``platform`` is the
    SoC of the new one.

    Raises:
        ValueError: ``content`` is no simulated model, or a name does not fit its field.
    """
    if not content.startswith(SIM_MAGIC) or len(content) < SIM_HEADER.size:
        raise ValueError("not a model of the simulated runtime")
    header = list(SIM_HEADER.unpack_from(content))
    at, size = header[_STRINGS_AT], header[_STRINGS_BYTES]
    kept = [one for one in content[at : at + size].split(b"\0") if one]
    strings = b"".join(
        one + b"\0"
        for one in (*(one for one in kept if not one.startswith(b"seed=")), b"seed=%d" % seed)
    )
    # The strings cannot grow in place, so they are appended.
    body = content[SIM_HEADER.size :] + bytes(-len(content) % 4)
    header[_STRINGS_AT], header[_STRINGS_BYTES] = SIM_HEADER.size + len(body), len(strings)
    header[_FILE_BYTES] = header[_STRINGS_AT] + len(strings)
    if model_id is not None:
        header[_MODEL_ID] = _field(model_id, 64)
    if platform is not None:
        header[_PLATFORM] = _field(platform, 16)
    return SIM_HEADER.pack(*header) + body + strings


def _field(text: str, room: int) -> bytes:
    value = text.encode()
    if not value or len(value) >= room or b"\0" in value:
        raise ValueError(f"a model's name takes 1 to {room - 1} bytes, not {text!r}")
    return value

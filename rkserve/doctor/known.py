"""Published figures that a board is compared with: drivers, and speeds of models.

Speeds are those of the vendor's table, which the simulator has too, and of users' boards in
``speeds.csv``, each row with its source. A model in neither is estimated: decoding reads all
weights once per token, so that rate times memory is nearly the same for all models of one SoC.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from rkserve.native.sim.profiles import read_benchmarks
from rkserve.verdicts.hardware import MEGA, soc_of

SPEEDS = Path(__file__).resolve().parent / "speeds.csv"
VENDOR = "airockchip/rknn-llm, the vendor's table at the highest clocks"
# A measurement below this share of the expected rate is reported. Of the published models all reach
# 63 % of their estimate, and most 85 %.
PUBLISHED_SHARE, ESTIMATED_SHARE = 0.8, 0.6


@dataclass(frozen=True, slots=True)
class DriverRow:
    """The consequence of a driver below a version; the first row that fits counts.

    ``releases`` of RKLLM that it is about, empty for all; ``over_bytes`` is the size of the model
    from which it counts. ``stops`` serving, or may only disturb it.
    """

    below: tuple[int, ...]
    stops: bool
    consequence: str
    releases: tuple[str, ...] = ()
    over_bytes: int = 0


# From reports of users (0.8.2, 0.9.2, 0.9.6), the runtime's own warning (0.9.7), and the manual.
DRIVERS = (
    DriverRow((0, 8, 3), True, "its w8a8 matrix products fail"),
    DriverRow((0, 9, 7), True, "it cannot allocate models of more than 3 GB", (), 3_000 * MEGA),
    DriverRow((0, 9, 7), False, "the runtime asks for 0.9.7 or later"),
    DriverRow((0, 9, 8), False, "1.3.1 was reported to run with 0.9.8 only", ("1.3.1",)),
)
WANTED_DRIVER = "0.9.8"


def driver_row(version: tuple[int, ...], release: str, model_bytes: int) -> DriverRow | None:
    """Return the consequence of a driver's version for a release and a model, if there is one."""
    for row in DRIVERS:
        fits = not row.releases or release in row.releases
        if version < row.below and fits and model_bytes >= row.over_bytes:
            return row
    return None


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """A published speed: one model on one SoC."""

    platform: str
    model: str
    size: str
    dtype: str
    decode_tokens_per_s: float
    memory_mb: float
    source: str


@dataclass(frozen=True, slots=True)
class ExpectedSpeed:
    """The speed that a board should reach, and the share of it below which it is slow.

    ``memory_mb`` is the published memory of the process, None for an estimate.
    """

    decode_tokens_per_s: float
    slow_share: float
    basis: str
    memory_mb: float | None = None


@cache
def speeds() -> tuple[SpeedRow, ...]:
    """Return all published speeds."""
    vendor = [{**row, "source": VENDOR} for row in read_benchmarks()]
    with SPEEDS.open(newline="", encoding="utf-8") as rows:
        users = list(csv.DictReader(rows))
    return tuple(
        SpeedRow(
            platform=row["platform"],
            model=row["model"],
            size=row["size"].partition("(")[0],
            dtype=row["dtype"],
            decode_tokens_per_s=float(row["decode_tokens_per_s"]),
            memory_mb=float(row["memory_mb"]),
            source=row["source"],
        )
        for row in (*vendor, *users)
    )


_DTYPE = re.compile(r"(?<![a-z0-9])(w\d{1,2}a\d{1,2})(?:[-_](g\d{2,4}))?(?![a-z0-9])")
_SOC = re.compile(r"(?<![a-z0-9])(rk35\d\d|rv11\d\d[a-z]?)(?:s\d?)?(?![a-z0-9])")
_TOOLKIT = re.compile(r"(?<![\d.])v?(1\.[0-9]\.[0-9]{1,2})(?!\d|\.\d|b\d)")


def dtype_in(name: str) -> str | None:
    """Return the quantization in a file's name, for example ``w4a16_g128``."""
    found = _DTYPE.search(name.lower())
    return None if found is None else "_".join(part for part in found.groups() if part)


def platform_in(name: str) -> str | None:
    """Return the SoC in a file's name, without the letter of a revision."""
    found = _SOC.search(name.lower())
    return None if found is None else found[1].upper()


def toolkit_in(name: str) -> str | None:
    """Return the version of rkllm-toolkit in a file's name."""
    found = _TOOLKIT.search(name.lower())
    return None if found is None else found[1]


def expected_speed(soc: str, names: Sequence[str], weights_bytes: int) -> ExpectedSpeed | None:
    """Return the expected speed of a model by its folder's and file's names, or by its size.

    None for an unknown SoC, or for a model of neither a known name nor a size.
    """
    known = soc_of(soc)
    if known is None:
        return None
    rows = [row for row in speeds() if row.platform == known.name]
    text = " ".join(names).lower()
    dtype = next(filter(None, map(dtype_in, names)), None) or _only_dtype(rows)
    fitting = [row for row in rows if row.dtype == dtype and _names(row, text)]
    if fitting:
        row = max(fitting, key=lambda one: len(one.model))
        basis = f"published for {row.model} {row.size} {row.dtype} on {row.platform} ({row.source})"
        return ExpectedSpeed(row.decode_tokens_per_s, PUBLISHED_SHARE, basis, row.memory_mb)
    if weights_bytes < MEGA:
        return None
    rate = median(row.decode_tokens_per_s * row.memory_mb for row in rows) * MEGA / weights_bytes
    basis = f"estimated from {weights_bytes / MEGA:.0f} MB of weights on {known.name}"
    return ExpectedSpeed(rate, ESTIMATED_SHARE, basis)


def _only_dtype(rows: Sequence[SpeedRow]) -> str | None:
    found = {row.dtype for row in rows}
    return found.pop() if len(found) == 1 else None


def _names(row: SpeedRow, text: str) -> bool:
    """Return True if a text names the row's model and size."""
    family = re.escape(row.model.lower()).replace(r"\-", "[-_ ]?")
    if re.search(rf"(?<![a-z0-9.]){family}(?![\d.])(?![-_ ]?vl\b)", text) is None:
        return False
    return re.search(rf"(?<![a-z0-9.]){re.escape(row.size.lower())}(?![a-z0-9])", text) is not None

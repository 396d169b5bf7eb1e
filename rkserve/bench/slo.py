"""Service-level limits of an answer, written as ``ttft=2000,itl=200``. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rkserve.bench.outcome import RequestOutcome


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in milliseconds; None is no limit.

    ``itl_ms`` is for the mean time per token after the first, ``gap_ms`` for the longest silence
    between two texts.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None
    gap_ms: float | None = None
    e2e_ms: float | None = None

    def met(self, one: RequestOutcome) -> bool:
        """Return True if an answer was complete and within the limits."""
        return one.ok and (
            _within(one.ttft_ms, self.ttft_ms)
            and _within(one.e2e_ms, self.e2e_ms)
            and _within(one.token_ms or 0.0, self.itl_ms)
            and (self.gap_ms is None or _within(max(one.gaps_ms, default=0.0), self.gap_ms))
        )

    def __str__(self) -> str:
        """Return the limits as text."""
        words = {"ttft_ms": "TTFT", "itl_ms": "per token", "gap_ms": "gap", "e2e_ms": "end-to-end"}
        limits = asdict(self).items()
        said = [f"{words[name]} ≤ {limit:g} ms" for name, limit in limits if limit is not None]
        return ", ".join(said) or "answered to the end"


def parse_slo(text: str) -> Slo:
    """Parse limits from the command line. Raises ``ValueError``."""
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        field = f"{name.strip()}_ms"
        if field not in Slo.__dataclass_fields__:
            raise ValueError(f"{name.strip()!r} is none of ttft, itl, gap, e2e")
        try:
            limits[field] = float(value)
        except ValueError:
            raise ValueError(f"{part!r} is not a limit in milliseconds") from None
        if not limits[field] > 0:
            raise ValueError(f"{part!r}: a limit is more than 0")
    return Slo(**limits)


def _within(value_ms: float, limit_ms: float | None) -> bool:
    return limit_ms is None or value_ms <= limit_ms

"""What a case is asked for, and what it has beside its runs: values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rkserve.bench.figures import Comparison
from rkserve.bench.harness.child import Json
from rkserve.bench.harness.verdict import TargetVerdict
from rkserve.bench.player import PlayOptions
from rkserve.bench.slo import Slo


@dataclass(frozen=True, slots=True)
class PresetOptions:
    """What a preset is told. ``sessions`` and ``seconds`` replace its own size where given.

    Of ``overload``, ``sessions`` is the requests of which the capacity is found. Each target is
    played ``runs`` times. Of ``compare``, the ``whole`` shows equal answers too.
    """

    seed: int = 1
    sessions: int | None = None
    seconds: float | None = None
    clients: int | None = None
    slo: Slo | None = None
    tell_deadline: bool = True
    runs: int = 1
    whole: bool = False
    plan: PlayOptions = field(default_factory=PlayOptions)


@dataclass(frozen=True, slots=True)
class PresetResult:
    """What a preset has beside its runs."""

    title: str
    trace: str
    comparisons: Sequence[Comparison] = ()
    verdicts: Sequence[TargetVerdict] = ()
    appendix: str = ""
    more: Json = field(default_factory=dict)

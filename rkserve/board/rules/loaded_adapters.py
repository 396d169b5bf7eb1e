"""The LoRA adapters loaded in one engine, and the step due before a run needs one. Pure.

RKLLM loads adapters side by side and unloads none: memory is freed only by a fresh engine. The
runtime does not report an adapter's memory, so its file's size is the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from rkserve.core.errors import AdapterBroken
from rkserve.core.messages import AdapterRef


@dataclass(frozen=True, slots=True)
class AdapterReady:
    """The adapter is loaded under this name."""

    name: str


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load the adapter under this name, then call ``loaded`` or ``refused``."""

    name: str


@dataclass(frozen=True, slots=True)
class RenewEngine:
    """No room is left: start a fresh engine and load the adapter into it.

    The other adapters are loaded again when a request needs them; otherwise they would fill the
    fresh engine at once.
    """


class AdapterTable:
    """The adapters of one engine: at most ``limit`` adapters and ``budget_bytes`` in total."""

    def __init__(self, limit: int, budget_bytes: int | None = None) -> None:
        self._limit = limit
        self._budget_bytes = budget_bytes
        self._loaded: dict[str, int] = {}  # key to bytes, the most recently used last
        self._refused: dict[str, str] = {}

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the loaded adapters, the most recently used last."""
        return tuple(self._loaded)

    @property
    def used_bytes(self) -> int:
        """Estimated memory of the loaded adapters: the sizes of their files."""
        return sum(self._loaded.values())

    def need(self, ref: AdapterRef, size_bytes: int) -> AdapterReady | LoadAdapter | RenewEngine:
        """Return the step due before a run with ``ref``, whose file has ``size_bytes``.

        Raises:
            AdapterBroken: this engine refused it before, or it exceeds the whole budget.
        """
        key = ref.key
        if key in self._loaded:
            self._loaded[key] = self._loaded.pop(key)
            return AdapterReady(key)
        if key in self._refused:
            raise AdapterBroken(ref.label, self._refused[key])
        if not self._fits(1, size_bytes):
            raise AdapterBroken(
                ref.label,
                f"its file has {size_bytes} bytes; the limit for adapters on this board is "
                f"{self._budget_bytes} bytes",
            )
        if self._fits(len(self._loaded) + 1, self.used_bytes + size_bytes):
            return LoadAdapter(key)
        return RenewEngine()

    def loaded(self, ref: AdapterRef, size_bytes: int) -> None:
        """Record that the runtime loaded the adapter."""
        self._loaded[ref.key] = size_bytes

    def refused(self, ref: AdapterRef, reason: str) -> None:
        """Record that the runtime refused the file, so that this engine is not given it again."""
        self._refused[ref.key] = reason

    def _fits(self, count: int, total_bytes: int) -> bool:
        roomy = self._budget_bytes is None or total_bytes <= self._budget_bytes
        return count <= self._limit and roomy

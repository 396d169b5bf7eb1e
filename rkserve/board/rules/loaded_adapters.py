"""Which LoRA adapters one handle has loaded, and what has to happen before a run needs one. Pure.

RKLLM loads adapters side by side and takes none away again: memory comes back only by a fresh
handle. The runtime does not say what an adapter takes, so its file's size is the estimate.
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
    """Load the adapter under this name, then say ``loaded`` or ``refused``."""

    name: str


@dataclass(frozen=True, slots=True)
class RenewEngine:
    """There is no room: end the handle, and load the adapter into a fresh one, whose table is new.

    What else was loaded comes back when it is asked for: otherwise it would fill that up again.
    """


class AdapterTable:
    """The adapters of one handle, at most ``limit`` of them and ``budget_bytes`` together."""

    def __init__(self, limit: int, budget_bytes: int | None = None) -> None:
        self._limit = limit
        self._budget_bytes = budget_bytes
        self._loaded: dict[str, int] = {}  # key to bytes, the most recently used last
        self._refused: dict[str, str] = {}

    @property
    def keys(self) -> tuple[str, ...]:
        """What is loaded, the most recently used last."""
        return tuple(self._loaded)

    @property
    def used_bytes(self) -> int:
        """What the loaded ones take, by the sizes of their files."""
        return sum(self._loaded.values())

    def need(self, ref: AdapterRef, size_bytes: int) -> AdapterReady | LoadAdapter | RenewEngine:
        """Return what must be done before a run with ``ref``, whose file has ``size_bytes``.

        Raises:
            AdapterBroken: this handle has refused it before, or it is too large for any.
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
                f"its {size_bytes} bytes are more than the {self._budget_bytes} bytes that this "
                "board has for adapters",
            )
        if self._fits(len(self._loaded) + 1, self.used_bytes + size_bytes):
            return LoadAdapter(key)
        return RenewEngine()

    def loaded(self, ref: AdapterRef, size_bytes: int) -> None:
        """The runtime has taken the adapter."""
        self._loaded[ref.key] = size_bytes

    def refused(self, ref: AdapterRef, reason: str) -> None:
        """The runtime has refused the file: this handle is not asked to load it again."""
        self._refused[ref.key] = reason

    def _fits(self, count: int, total_bytes: int) -> bool:
        roomy = self._budget_bytes is None or total_bytes <= self._budget_bytes
        return count <= self._limit and roomy

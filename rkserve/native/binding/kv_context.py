"""What the library's memory was computed with, as far as the next run must know. Pure.

The library compares nothing: KV positions of another adapter, or of half a turn, are used as if
they were right. Two things outlive a run, the live context and a prompt cache that was loaded; the
rules for both are here, and no call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rkserve.core.errors import Misuse
from rkserve.native.runtime import RunEnd, RunParams


@dataclass(slots=True)
class KvContext:
    """What runs with ``keep_history`` left in the KV cache."""

    filled: bool = False
    adapter: str | None = None
    spoiled: str = ""  # what happened to it, where that made it unusable

    def check(self, params: RunParams) -> None:
        """Raise ``Misuse`` where ``params`` would continue what it must not."""
        if not params.keep_history:
            return
        if self.spoiled:
            raise Misuse(
                f"{self.spoiled}: clear the KV cache before the next run with keep_history, which "
                "would continue a truncated turn"
            )
        if self.filled and params.adapter != self.adapter:
            raise Misuse(
                f"the live context was computed with {adapter_words(self.adapter)}, not with "
                f"{adapter_words(params.adapter)}: clear the KV cache first"
            )

    def after(self, params: RunParams, end: RunEnd, *, aborted: bool, trusted: bool) -> None:
        """Note a run; ``trusted`` are aborts that leave exactly what was delivered."""
        if end is RunEnd.PAUSED:
            return  # it is not the live context's yet: only its own resumption may follow
        if not params.keep_history:
            self.filled = False  # a single turn forgets what was there, and itself
            return
        self.filled, self.adapter = True, params.adapter
        if end is RunEnd.FAILED:
            self.spoiled = "the last run with keep_history failed"
        elif aborted and not trusted:
            self.spoiled = "the last run with keep_history was aborted"

    def encoder_replaced(self) -> None:
        """Note that what every position attended to is gone."""
        if self.filled:
            self.spoiled = "the encoder's output was replaced"

    def cleared(self, *, all_of_it: bool) -> None:
        """Note a clear; the system prompt's part keeps its adapter."""
        self.filled, self.spoiled = self.filled and not all_of_it, ""


@dataclass(slots=True)
class PromptCache:
    """The cache file that was loaded, which the next runs may use a prefix of."""

    loaded: bool = False
    adapter: str | None = None
    bound: bool = False  # a run has said what the file was computed with
    after_abort: bool = False  # loading one has crashed the library in this case

    def check_load(self, n_batch: int, quirks: Mapping[str, bool]) -> None:
        """Raise ``Misuse`` where a file must not be loaded."""
        if n_batch > 1:
            raise Misuse("a prompt cache is not known to work with a batch")
        if self.after_abort and not quirks["prompt_cache_after_abort"]:
            raise Misuse(
                "a run of this handle was aborted, and loading a prompt cache after that has "
                "crashed the library: create the handle anew"
            )

    def fits(self, adapter: str | None) -> bool:
        """Say whether the next run may use the file; the first one's word is taken for it."""
        if not self.loaded or (self.bound and self.adapter == adapter):
            return True
        if self.bound:
            return False
        self.bound, self.adapter = True, adapter
        return True

    def took(self, *, loaded: bool) -> None:
        """Note that the library holds another file, or none."""
        self.loaded, self.adapter, self.bound = loaded, None, False


def adapter_words(adapter: str | None) -> str:
    """Name an adapter in a sentence."""
    return "no adapter" if adapter is None else f"adapter {adapter!r}"

"""Rules for the KV contents that outlive a run: the live context and a loaded prompt cache. Pure.

The library does not check that KV positions belong to the adapter of a run, or to a complete turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rkserve.core.errors import Misuse
from rkserve.native.runtime import RunEnd, RunParams


@dataclass(slots=True)
class KvContext:
    """The KV cache contents of runs with ``keep_history``."""

    filled: bool = False
    adapter: str | None = None
    spoiled: str = ""  # the reason why it is unusable, if it is

    def check(self, params: RunParams) -> None:
        """Raise ``Misuse`` if ``params`` would continue an unusable or foreign context."""
        if not params.keep_history:
            return
        if self.spoiled:
            raise Misuse(
                f"{self.spoiled}: clear the KV cache before the next run with keep_history, or it "
                "would continue a truncated turn"
            )
        if self.filled and params.adapter != self.adapter:
            raise Misuse(
                f"the live context was computed with {adapter_words(self.adapter)}, not with "
                f"{adapter_words(params.adapter)}: clear the KV cache first"
            )

    def after(self, params: RunParams, end: RunEnd, *, aborted: bool, trusted: bool) -> None:
        """Record a run. A ``trusted`` abort leaves exactly the delivered tokens."""
        if end is RunEnd.PAUSED:
            return  # part of the live context only after its resumption
        if not params.keep_history:
            self.filled = False  # a single turn drops the context, and its own
            return
        self.filled, self.adapter = True, params.adapter
        if end is RunEnd.FAILED:
            self.spoiled = "the last run with keep_history failed"
        elif aborted and not trusted:
            self.spoiled = "the last run with keep_history was aborted"

    def encoder_replaced(self) -> None:
        """Record that the encoder output that all positions attended to was replaced."""
        if self.filled:
            self.spoiled = "the encoder's output was replaced"

    def cleared(self, *, all_of_it: bool) -> None:
        """Record a clear; a kept system prompt keeps its adapter."""
        self.filled, self.spoiled = self.filled and not all_of_it, ""


@dataclass(slots=True)
class PromptCache:
    """The loaded cache file, of which the next runs may use a prefix."""

    loaded: bool = False
    adapter: str | None = None
    bound: bool = False  # a run has determined the adapter of the file
    after_abort: bool = False  # loading a file after an abort crashed the library

    def check_load(self, n_batch: int, quirks: Mapping[str, bool]) -> None:
        """Raise ``Misuse`` if a file must not be loaded now."""
        if n_batch > 1:
            raise Misuse("a prompt cache is not known to work with a batch")
        if self.after_abort and not quirks["prompt_cache_after_abort"]:
            raise Misuse(
                "a run of this handle was aborted; loading a prompt cache afterwards crashed the "
                "library: create the handle anew"
            )

    def fits(self, adapter: str | None) -> bool:
        """Return True if the next run may use the file; the first run determines its adapter."""
        if not self.loaded or (self.bound and self.adapter == adapter):
            return True
        if self.bound:
            return False
        self.bound, self.adapter = True, adapter
        return True

    def took(self, *, loaded: bool) -> None:
        """Record that the library holds another file, or none."""
        self.loaded, self.adapter, self.bound = loaded, None, False


def adapter_words(adapter: str | None) -> str:
    """Return an adapter's name for a message."""
    return "no adapter" if adapter is None else f"adapter {adapter!r}"

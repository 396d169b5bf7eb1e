"""What goes wrong between a board, its engine process and the vendor's library."""

from __future__ import annotations

from rkserve.core.errors.base import RkserveError


class FrameCorrupt(RkserveError):
    """The pipe between a board and its engine process does not hold frames."""


class NativeError(RkserveError):
    """Something about the vendor's library; the message holds what the library said."""


class LibraryMissing(NativeError):
    """The library, or one that it needs, cannot be opened."""


class ReleaseRefused(NativeError):
    """The library is not of a release that rkserve knows to drive."""


class LoadFailed(NativeError):
    """``rkllm_init`` failed: model, memory, driver or parameters."""


class CallFailed(NativeError):
    """A call into the library returned an error; ``said`` are the lines that it logged."""

    def __init__(self, function: str, code: int, said: str = "") -> None:
        super().__init__(function, code, said)
        self.function, self.return_code, self.said = function, code, said

    @property
    def message(self) -> str:
        """The sentence for the user."""
        returned = f"{self.function} returned {self.return_code}"
        return f"{returned} (the library said: {self.said})" if self.said else returned


class NothingComputed(NativeError):
    """The library said that it had computed hidden states or logits, and delivered none."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why)
        self.what, self.why = what, why

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return f"the library delivered nothing of {self.what}: {self.why}"


class StepsRefused(NativeError):
    """A run of single steps cannot do with this model, or its tokenizer, what it was asked for."""


class Misuse(NativeError):
    """A call that the handle's state does not allow; it was not passed on to the library."""

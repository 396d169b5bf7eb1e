"""What a vendor runtime can do, said without C: the ``Runtime`` protocol and its values.

Calls are synchronous and block. One thread owns the handle; ``abort`` and ``is_running`` may come
from another one. Nothing here knows cffi, asyncio, HTTP or Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Protocol

from rkserve.messages import Sampling


class CallState(IntEnum):
    """The third argument of the result callback, by the vendor's numbers."""

    NORMAL = 0
    WAITING = 1
    FINISH = 2
    ERROR = 3


class Verdict(Enum):
    """What the sink of a run wants after a token. Stopping is ``abort``, never a verdict."""

    CONTINUE = "continue"
    PAUSE = "pause"


class RunEnd(Enum):
    """How a run ended, as the library showed it."""

    FINISHED = "finished"
    PAUSED = "paused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LoadParams:
    """What ``init`` is told. ``max_new_tokens`` is the ceiling of every run on 1.2.x.

    ``cpus`` are the big cores that the library may use; empty leaves its own default.
    """

    model_path: str
    max_context_len: int
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    n_keep: int = -1
    skip_special_token: bool = True
    base_domain_id: int = 0
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenInput:
    """Token ids, taken verbatim: no template is applied."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptInput:
    """Text that the runtime tokenizes itself, after its chat template if one is set."""

    text: str
    role: str = "user"
    enable_thinking: bool = False


RunInput = TokenInput | PromptInput


@dataclass(frozen=True, slots=True)
class RunParams:
    """One run. ``sampling`` and ``max_new_tokens`` of None leave the values of init.

    With ``keep_history`` the input is appended to the live context, which then also keeps what is
    generated; without it the context is dropped when the run finishes.

    A paused handle takes one kind of run: ``resume``, which appends its input and goes on. It has
    to be asked for, because the library would continue the old text under any new prompt.
    """

    input: RunInput
    keep_history: bool = False
    sampling: Sampling | None = None
    max_new_tokens: int | None = None
    resume: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """One token as the callback brought it.

    ``text`` holds raw bytes and may end inside a UTF-8 character; it is empty for a token whose
    text the library still holds back (WAITING) or hides (special tokens).
    """

    token_id: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Perf:
    """The runtime's own figures of a run, which it fills at FINISH only; zeros without one."""

    prefill_ms: float = 0.0
    prefill_tokens: int = 0
    decode_ms: float = 0.0
    decode_tokens: int = 0
    memory_mb: float = 0.0


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What a run left behind. ``return_code`` is the library's."""

    end: RunEnd
    perf: Perf
    return_code: int


Sink = Callable[[Piece], Verdict]


class Runtime(Protocol):
    """One handle of the vendor's library. Every method raises ``Misuse`` in the wrong state."""

    @property
    def release(self) -> str:
        """The detected release, for example ``1.2.3``."""

    @property
    def per_run_sampling(self) -> bool:
        """Whether ``RunParams`` may carry sampling and a token limit (1.3.0 and later)."""

    @property
    def quirks(self) -> Mapping[str, bool]:
        """What this release may be trusted with, by name; see ``native.quirks``."""

    def load(self, params: LoadParams) -> None:
        """Create the handle. Raises ``LoadFailed``."""

    def run(self, params: RunParams, sink: Sink) -> RunOutcome:
        """Generate until the end, a pause or an abort; ``sink`` is called for every token.

        An exception of the sink aborts the run and is raised here after the library returned.
        """

    def abort(self) -> None:
        """Ask a run to end at the next token; does nothing where none is running."""

    def is_running(self) -> bool:
        """Whether the library says that a run is going on."""

    def clear_kv_cache(self, *, keep_system_prompt: bool = False) -> None:
        """Empty the KV cache of an idle handle. Raises ``CallFailed``."""

    def kv_cache_size(self) -> int:
        """Positions that the KV cache holds. Raises ``CallFailed``."""

    def set_chat_template(self, system: str, prefix: str, postfix: str) -> None:
        """Replace the model's own template for PROMPT input. Raises ``CallFailed``."""

    def destroy(self) -> None:
        """Free the handle; allowed on an idle or paused one only. Raises ``CallFailed``."""

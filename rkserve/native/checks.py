"""What the library would accept and then do wrong: refused before it gets there. Pure."""

from __future__ import annotations

import re
from pathlib import Path

from rkserve.errors import LoadFailed, Misuse
from rkserve.native.runtime import LoadParams, PromptInput, RunParams, TokenInput

_CPU_BITS = 32

# Markup that a tokenizer reads as special tokens; DeepSeek's has full-width bars.
_MARKUP = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<\uff5c[^\uff5c<>]{1,40}\uff5c>|<(?:start|end)_of_turn>"
)


def check_load(params: LoadParams) -> None:
    """Raise ``LoadFailed`` where init is bound to fail; 1.3.0 may crash on a failing one."""
    if not Path(params.model_path).is_file():
        raise LoadFailed(f"there is no model file {params.model_path}")
    if min(params.max_context_len, params.max_new_tokens) < 1:
        raise LoadFailed("max_context_len and max_new_tokens must be at least 1")
    cpus = params.cpus
    if len(set(cpus)) != len(cpus) or not all(0 <= cpu < _CPU_BITS for cpu in cpus):
        raise LoadFailed(f"cpus must be distinct numbers from 0 to {_CPU_BITS - 1}, not {cpus}")


def check_run(params: RunParams, release: str, *, per_run: bool) -> None:
    """Raise ``Misuse`` for a run that no handle of ``release`` can do as it is asked for."""
    given, limit = params.input, params.max_new_tokens
    if (params.sampling is not None or limit is not None) and not per_run:
        raise Misuse(f"RKLLM {release} takes sampling and max_new_tokens at load only")
    if limit is not None and limit < 1:
        raise Misuse(f"max_new_tokens must be at least 1, not {limit}")
    if isinstance(given, TokenInput) and (not given.ids or min(given.ids) < 0):
        raise Misuse("token input must hold at least one id, and none below 0")


def check_prompt(given: PromptInput) -> None:
    """Raise ``Misuse`` for rendered text while a chat template is in force."""
    if (found := _MARKUP.search(given.text)) is not None:
        raise Misuse(
            f"PROMPT text holds {found.group()}, and a chat template is in force that would wrap "
            "it once more: send token ids, or set an empty template first"
        )


def check_resume(params: RunParams, paused: RunParams, *, by_prompt: bool) -> None:
    """Raise ``Misuse`` where ``params`` cannot resume ``paused``."""
    if isinstance(params.input, PromptInput) and not by_prompt:
        raise Misuse("a paused run is resumed with token ids, not with PROMPT text")
    if params.keep_history != paused.keep_history:
        raise Misuse("a paused run is resumed with the keep_history that it was started with")

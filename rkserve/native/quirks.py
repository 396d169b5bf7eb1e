"""The table of quirks: behaviour that no header promises or that hardware has not proven.

Every default is the safe value; ``native.binding.releases`` has the values of each release. A probe
on a real board may give other values, as overrides by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from rkserve.core.errors import ConfigError


class Evidence(Enum):
    """The source of a default, weakest last."""

    DOCUMENTED = "documented by the vendor"
    OBSERVED = "observed on hardware by several projects"
    ONE_REPORT = "a single report from hardware"
    INFERRED = "inferred, not observed"
    UNKNOWN = "unknown, so the safe value"


@dataclass(frozen=True, slots=True)
class Quirk:
    """One behaviour: the meaning of True, its evidence, and the safe value."""

    name: str
    what: str
    evidence: Evidence
    default: bool


TABLE = (
    Quirk(
        "pause_with_history",
        "A run with `keep_history` may be paused (the callback returns 1) and resumed. The "
        "vendor documents pausing for single-turn runs only; where False the binding refuses to "
        "pause such a run; stop it instead, and continue by token ids.",
        Evidence.DOCUMENTED,
        default=False,
    ),
    Quirk(
        "pause_with_batch",
        "A run of several inputs (`n_batch` above 1) may be paused and resumed. One return "
        "value of the callback governs all of them, and no attempt has been reported; where False "
        "the binding refuses it.",
        Evidence.UNKNOWN,
        default=False,
    ),
    Quirk(
        "clear_range_with_history",
        "Ranges of the KV cache may be cleared while a run with `keep_history` is paused. The "
        "header and the manual allow it without `keep_history` only; where False the binding "
        "refuses it.",
        Evidence.DOCUMENTED,
        default=False,
    ),
    Quirk(
        "drain_by_limit",
        "A paused run that nobody resumes is ended by resuming it with `max_new_tokens` of 1. "
        "Where False it is resumed without a limit and aborted at its first token, which works on "
        "every release but counts as an aborted run.",
        Evidence.INFERRED,
        default=False,
    ),
    Quirk(
        "stop_by_pause",
        "A stop string ends the run by a pause that is drained, rather than by an abort. It spares "
        "the tokens that arrive after an abort; whether it is any faster is not known.",
        Evidence.UNKNOWN,
        default=False,
    ),
    Quirk(
        "resume_with_prompt",
        "A paused run may be resumed with PROMPT input. Whether the chat template is applied "
        "again is not known; where False only token ids resume a run.",
        Evidence.UNKNOWN,
        default=False,
    ),
    Quirk(
        "abort_in_callback",
        "`rkllm_abort` may be called inside the result callback. It may deadlock; where False a "
        "helper thread makes the call.",
        Evidence.UNKNOWN,
        default=False,
    ),
    Quirk(
        "prompt_cache_after_abort",
        "A prompt cache may be loaded after a run of this handle was aborted. It crashed the "
        "process in the only report; where False the handle has to be created anew.",
        Evidence.ONE_REPORT,
        default=False,
    ),
    Quirk(
        "prompt_cache_load_with_history",
        "A prompt cache that was loaded shortens the prefill of runs with `keep_history` too. The "
        "only report (#399) saw no gain; where False it is used for single turns only.",
        Evidence.ONE_REPORT,
        default=False,
    ),
    Quirk(
        "prompt_cache_save_with_history",
        "A run with `keep_history` that saves a prompt cache writes its whole context, not only "
        "its own turn. The runtime compares token ids when it uses a file, so a file that holds "
        "less is used less, and cannot be wrong. Where False the binding refuses to save such a "
        "run.",
        Evidence.INFERRED,
        default=True,
    ),
    Quirk(
        "run_async",
        "`rkllm_run_async` works. It was broken in 1.2.1, and the vendor's change log has it "
        "repaired in 1.2.2; where False the binding refuses it.",
        Evidence.DOCUMENTED,
        default=False,
    ),
    Quirk(
        "prefix_reuse_in_ram",
        "A prompt sent again without `keep_history` is prefilled only from where it differs from "
        "what the KV cache held before. Mentioned in change logs, not found in the field.",
        Evidence.UNKNOWN,
        default=False,
    ),
    Quirk(
        "append_tokens_with_history",
        "Token input of a run with `keep_history` is appended verbatim to the live context, so a "
        "conversation may send its new ids only. The board checks it after each such run by the "
        "size of the KV cache alone, and gives it up until its engine restarts where that is not "
        "the length of the transcript.",
        Evidence.INFERRED,
        default=True,
    ),
    Quirk(
        "kv_valid_after_abort",
        "After an aborted run with `keep_history` the KV cache holds exactly the prompt and the "
        "tokens that were delivered. Where False it has to be cleared before the next run with "
        "`keep_history`.",
        Evidence.INFERRED,
        default=False,
    ),
    Quirk(
        "waiting_token_id_valid",
        "A WAITING callback carries a valid `token_id` although its text is delayed. The vendor "
        "says that each callback returns one token, and leaving an id out would surely break the "
        "transcript; where False such tokens are not delivered.",
        Evidence.INFERRED,
        default=True,
    ),
    Quirk(
        "finish_in_hidden_modes",
        "FINISH arrives at the end of hidden-layer and logits runs. On 1.2.3 it was seen not to; "
        "where False such a run is complete when the call returns.",
        Evidence.OBSERVED,
        default=False,
    ),
    Quirk(
        "logits_with_history",
        "A logits run may use token input with `keep_history`. On 1.2.3 it ended the process by "
        "GGML_ASSERT; where False the binding refuses it, and answers that are made of single "
        "steps send their whole context with each.",
        Evidence.ONE_REPORT,
        default=False,
    ),
    Quirk(
        "eos_uint32_misread",
        "The runtime reads a wrong EOS id from models of toolkit 1.2.3 and older, and then "
        "generates up to `max_new_tokens`. Where True EOS ids must be compared on our side; "
        "rkserve always does.",
        Evidence.ONE_REPORT,
        default=False,
    ),
    Quirk(
        "thinking_ends_run",
        "With `enable_thinking` FINISH arrives at `</think>`, which is swallowed, and the answer "
        "needs a second run. Where True the board takes a run that ends by itself among the "
        "model's thoughts for such a one, and goes on behind the mark.",
        Evidence.ONE_REPORT,
        default=False,
    ),
    Quirk(
        "is_running_while_paused",
        "`rkllm_is_running` says 1 for a paused handle. Where False nothing may be concluded from "
        "a 0 while the handle is paused.",
        Evidence.UNKNOWN,
        default=False,
    ),
    Quirk(
        "return_2_frees_buffer",
        "The callback may return 2 to have the output buffer freed at once, as the header of "
        "1.3.0 says. On 1.2.x only 0 and 1 are defined. The binding copies what it needs, and "
        "says 2 to hidden states and logits, which were seen to pile up in memory.",
        Evidence.DOCUMENTED,
        default=False,
    ),
    Quirk(
        "init_may_crash",
        "A failing `rkllm_init` may end the process by SIGSEGV rather than return -1, so it must "
        "only be called where the process may be lost.",
        Evidence.ONE_REPORT,
        default=False,
    ),
)

NAMES = frozenset(quirk.name for quirk in TABLE)


def quirks_for(
    known: Mapping[str, bool], overrides: Mapping[str, bool] | None = None
) -> Mapping[str, bool]:
    """Return every quirk's value: the defaults, a release's ``known`` ones, the overrides.

    The result is read-only.

    Raises:
        ConfigError: an override's name is unknown, or its value is not true or false.
    """
    overrides = overrides or {}
    unknown = sorted(set(overrides) - NAMES)
    if unknown:
        raise ConfigError(
            f"quirks: unknown name {', '.join(unknown)}; known are {', '.join(sorted(NAMES))}"
        )
    wrong = sorted(name for name, value in overrides.items() if not isinstance(value, bool))
    if wrong:
        raise ConfigError(f"quirks.{wrong[0]}: must be true or false, not {overrides[wrong[0]]!r}")
    values = {quirk.name: quirk.default for quirk in TABLE}
    return MappingProxyType(values | dict(known) | dict(overrides))

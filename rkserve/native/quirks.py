"""The table of quirks: behaviour that no header promises or that hardware has not proven.

Every default is the safe value; ``native.binding.releases`` has the values of each release.
``rkserve probe`` finds other values on a real board, and writes them to a quirks file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rkserve.core.errors import ConfigError
from rkserve.core.files import file_digest


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
        "vendor documents pausing for single-turn runs only (SDK manual, 3.2.15); where False "
        "the binding refuses to pause such a run; stop it instead, and continue by token ids.",
        Evidence.DOCUMENTED,
        default=False,
    ),
    Quirk(
        "pause_with_batch",
        "A run of several inputs (`n_batch` above 1) may be paused and resumed. One return "
        "value of the callback governs all of them (SDK manual, 3.2.14), and no attempt has "
        "been reported; where False the binding refuses it.",
        Evidence.UNKNOWN,
        default=False,
    ),
    Quirk(
        "clear_range_with_history",
        "Ranges of the KV cache may be cleared while a run with `keep_history` is paused. The "
        "header and the manual (3.2.10) allow it without `keep_history` only; where False the "
        "binding refuses it.",
        Evidence.DOCUMENTED,
        default=False,
    ),
    Quirk(
        "drain_by_limit",
        "A paused run that is not resumed is ended by resuming it with `max_new_tokens` of 1, "
        "which 1.3.x has per run; that both work together is inferred. Where False it is "
        "resumed without a limit and aborted at its first token, which works on every release "
        "but counts as an aborted run.",
        Evidence.INFERRED,
        default=False,
    ),
    Quirk(
        "stop_by_pause",
        "A stop string ends the run by a pause that is drained, rather than by an abort. It "
        "spares the tokens that arrive after an abort; no report says whether it is any faster.",
        Evidence.UNKNOWN,
        default=False,
    ),
    Quirk(
        "resume_with_prompt",
        "A paused run may be resumed with PROMPT input. Whether the chat template is applied "
        "again is not known, and no report was found; where False only token ids resume a run.",
        Evidence.UNKNOWN,
        default=False,
    ),
    Quirk(
        "abort_in_callback",
        "`rkllm_abort` may be called inside the result callback. On 1.3.1 one project does so: "
        "it returns 0, one FINISH follows, and the next run is clean (dmmdea/offload-harness). "
        "On other releases it may deadlock; where False a helper thread makes the call.",
        Evidence.ONE_REPORT,
        default=False,
    ),
    Quirk(
        "prompt_cache_after_abort",
        "A prompt cache may be loaded after a run of this handle was aborted. It crashed the "
        "process in the only report (oRKLLM, 1.2.3); where False the handle has to be created "
        "anew.",
        Evidence.ONE_REPORT,
        default=False,
    ),
    Quirk(
        "prompt_cache_load_with_history",
        "A prompt cache that was loaded shortens the prefill of runs with `keep_history` too. "
        "The only report (rknn-llm #399) saw no gain; where False it is used for single turns "
        "only.",
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
        "prompt_cache_portable",
        "A prompt cache that one board has saved loads on another board with the same SoC, model "
        "and library, and shortens the prefill there. Nothing is known of it: a file may depend on "
        "the memory of the process that wrote it. Where True boards exchange files. `rkserve probe "
        "--cache-file FILE`, run on one board and then with that file on another, finds it.",
        Evidence.UNKNOWN,
        default=False,
    ),
    Quirk(
        "run_async",
        "`rkllm_run_async` works. It was broken in 1.2.1 (rknn-llm #320 and #321), and the "
        "vendor's change log has it repaired in 1.2.2; where False the binding refuses it.",
        Evidence.DOCUMENTED,
        default=False,
    ),
    Quirk(
        "prefix_reuse_in_ram",
        "A prompt sent without `keep_history` is prefilled only from where it differs from what "
        "the run before left. On 1.3.0 one project measured 0 tokens (97 ms) for the same prompt "
        "again and 13 to 16 tokens (165 ms instead of 3045 ms) for another end; the vendor's "
        "maintainer recommends it for conversations (rknn-llm #432, and #520 for full-attention "
        "models). Where True boards send whole prompts, clear the KV cache before a prompt of "
        "another API key, `cache_salt` or adapter, and give it up until the engine restarts after "
        "three runs that computed a known prefix again. Where False they append to the live "
        "context.",
        Evidence.ONE_REPORT,
        default=False,
    ),
    Quirk(
        "append_tokens_with_history",
        "Token input of a run with `keep_history` is appended verbatim to the live context, so "
        "a conversation may send its new ids only. That contexts accumulate over calls was "
        "measured on 1.3.0 (eidolon), and the maintainer says that token input gets no template "
        "(rknn-llm #293); both together are inferred. The board checks it after each such run "
        "by the size of the KV cache alone, and gives it up until its engine restarts where "
        "that is not the length of the transcript.",
        Evidence.INFERRED,
        default=True,
    ),
    Quirk(
        "kv_valid_after_abort",
        "After an aborted run the KV cache holds exactly the prompt and the tokens that were "
        "delivered, perhaps without the last one, as after a run that ended by itself. One "
        "project found runs after an abort clean on 1.3.1 (dmmdea/offload-harness), but did not "
        "continue a context. Where False it is cleared before the next run.",
        Evidence.INFERRED,
        default=False,
    ),
    Quirk(
        "waiting_token_id_valid",
        "A WAITING callback carries a valid `token_id` although its text is delayed. The vendor "
        "says that each callback returns one token, one project counts it as such on 1.3.1 "
        "(dmmdea/offload-harness), and leaving an id out would surely break the transcript; "
        "where False such tokens are not delivered.",
        Evidence.INFERRED,
        default=True,
    ),
    Quirk(
        "logits_with_history",
        "A logits run may use token input with `keep_history`. On 1.2.3 it ended the process by "
        "GGML_ASSERT (oRKLLM); where False the binding refuses it, and answers that are made of "
        "single steps send their whole context with each. Before setting it, check that the KV "
        "cache holds exactly the tokens that were sent: a library that generates on after the "
        "rows (rknn-llm #245) may append its own.",
        Evidence.ONE_REPORT,
        default=False,
    ),
    Quirk(
        "eos_uint32_misread",
        "The runtime reads a wrong EOS id from models of toolkit 1.2.3 and older, and then "
        "generates up to `max_new_tokens` (rknn-llm #534, on 1.3.0). rkserve compares the "
        "`eos_token_ids` of the model folder in any case; where True a board warns at its start "
        "if the folder has none.",
        Evidence.ONE_REPORT,
        default=False,
    ),
    Quirk(
        "thinking_ends_run",
        "With `enable_thinking` FINISH arrives at `</think>`, which is swallowed, and the "
        "answer needs a second run (GatekeeperZA, 1.3.0). Where True the board takes a run that "
        "ends by itself among the model's thoughts for such a one, and goes on behind the mark.",
        Evidence.ONE_REPORT,
        default=False,
    ),
    Quirk(
        "return_2_frees_buffer",
        "The callback may return 2 to have the output buffer freed at once, as the header of "
        "1.3.0 and the maintainer (rknn-llm #504) say. On 1.2.x only 0 and 1 are defined. The "
        "binding copies what it needs, and says 2 to hidden states and logits, which were seen "
        "to pile up in memory.",
        Evidence.DOCUMENTED,
        default=False,
    ),
    Quirk(
        "fewer_cpus_than_cores",
        "A model loads although the library may use fewer CPUs than the SoC's NPU has cores (3 "
        "on RK3588, 2 on RK3576). Two projects saw the library refuse it (eidolon, "
        "dmmdea/offload-harness); whether it counts the model's own cores, of one that was "
        "converted for fewer, is not known. Where False such a load is refused beforehand.",
        Evidence.OBSERVED,
        default=False,
    ),
)

NAMES = frozenset(quirk.name for quirk in TABLE)


QUIRKS_FORMAT = "rkserve-quirks-1"


def read_quirks_file(file: Path, library: Path) -> dict[str, bool]:
    """Return the values of a quirks file, which is valid for one library only.

    Raises:
        ConfigError: the file cannot be read, is no quirks file, or is of another library; or a name
            is unknown, or a value is not true or false.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        digest = file_digest(library)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"quirks_file: {file} cannot be read: {exc}") from exc
    if not isinstance(found, dict) or found.get("format") != QUIRKS_FORMAT:
        raise ConfigError(f"quirks_file: {file} is no quirks file: 'format' is not {QUIRKS_FORMAT}")
    if found.get("library_sha256") != digest:
        raise ConfigError(
            f"quirks_file: {file} is of a library with the digest {found.get('library_sha256')}; "
            f"{library} has {digest}. Run rkserve probe again, or leave quirks_file out."
        )
    quirks: Any = found.get("quirks")
    if not isinstance(quirks, dict):
        raise ConfigError(f"quirks_file: {file} has no mapping 'quirks'")
    quirks_for({}, quirks)
    return quirks


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

"""A simulated stand-in for a model: its tokenizer, template and settings, with simulated weights.

What a board does with a model's own files can be tried with it on a PC: prompts, end tokens, tool
calls, grammars. Its sentences are the simulator's.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from rkserve.api.prompting.tokenizer import Tokenizer
from rkserve.core.errors import ConfigError
from rkserve.models.files import Vocabulary, read_vocabulary
from rkserve.models.folder import SETTINGS_FILE, ModelFolder, open_model_folder
from rkserve.models.shelf import staging
from rkserve.native.sim import models as sim
from rkserve.native.sim.profiles import load

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"),
    *("additional_chat_templates/tool_use.jinja", SETTINGS_FILE),
)
TEXTS = Path(sim.__file__).parent
PROFILE = "rk3588-qwen2.5-1.5b-w8a8"
TOOLKIT = "1.3.0"
LOAD_MS = 1500
MAX_PIECE_BYTES = 0xFFFF
# The simulator offers so many sentences at a border; their first tokens must differ.
FEWEST_SENTENCES = 8
_HIDDEN_SIZE = re.compile(r"^hidden_size:.*$", re.MULTILINE)


def simulate(folder: ModelFolder, into: Path) -> Path:
    """Write a simulated stand-in for a model into ``into`` and return its folder.

    Raises:
        ConfigError: the model has no tokenizer, or one that the simulator cannot speak with, needs
            an encoder, or its name is taken.
    """
    settings = folder.settings
    if settings.vision is not None or settings.cross_attention is not None:
        raise ConfigError(f"{folder.path} needs an encoder, which is not simulated")
    if folder.tokenizer_file is None:
        raise ConfigError(f"{folder.path} has no tokenizer.json to simulate it with")
    target = into.absolute() / folder.id
    if target.exists():
        raise ConfigError(f"{target} exists already; name another folder with --into")
    vocabulary = read_vocabulary(folder.tokenizer_file)
    made = _model(folder, vocabulary, Tokenizer(folder.tokenizer_file))
    try:
        with staging(target) as staged:
            for name in FILES:
                if (folder.path / name).is_file():
                    (staged / name).parent.mkdir(exist_ok=True)
                    shutil.copyfile(folder.path / name, staged / name)
            own = staged / SETTINGS_FILE
            if own.exists():  # the rows of the simulated library have a size of their own
                text = own.read_text(encoding="utf-8")
                own.write_text(_HIDDEN_SIZE.sub(f"hidden_size: {sim.EMBED_DIM}", text), "utf-8")
            (staged / "model.rkllm").write_bytes(made.render())
            open_model_folder(staged)
            staged.rename(target)
    except OSError as exc:
        raise ConfigError(f"{target} cannot be written: {exc}") from exc
    return target


def _model(folder: ModelFolder, vocabulary: Vocabulary, tokenizer: Tokenizer) -> sim.SimModel:
    pieces = [_piece(vocabulary, tokenizer, number) for number in range(len(vocabulary))]
    single = {piece for piece, _ in pieces if len(piece) == 1}
    missing = next((byte for byte in range(256) if bytes([byte]) not in single), None)
    if missing is not None:
        raise ConfigError(
            f"{folder.tokenizer_file} has no token for the byte 0x{missing:02x}, which the "
            "simulator needs"
        )
    profile = next(one for one in load() if one.name == PROFILE)
    return sim.SimModel(
        model_id=folder.id[:63],
        profile=PROFILE,
        toolkit=TOOLKIT,
        dtype="W8A8",
        max_context=folder.settings.context_length,
        memory_mb=round(profile.memory_mb),
        load_ms=LOAD_MS,
        pieces=pieces,
        bank=_bank(tokenizer),
        strings=_lines("strings.txt"),
        markers=_markers(folder, vocabulary, tokenizer),
    )


def _piece(vocabulary: Vocabulary, tokenizer: Tokenizer, number: int) -> tuple[bytes, int]:
    """Return the bytes and flags of an id."""
    piece = vocabulary.piece(number)[:MAX_PIECE_BYTES]
    flags = sim.PIECE_SPECIAL if number in vocabulary.special else 0
    if flags or piece.decode(errors="replace") in tokenizer.added:
        flags |= sim.PIECE_MARKER
    return piece, flags


def _lines(name: str) -> list[str]:
    return (TEXTS / name).read_text(encoding="utf-8").splitlines()


def _bank(tokenizer: Tokenizer) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the sentences whose first tokens differ in this vocabulary."""
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    first: set[tuple[int, int]] = set()
    for line in _lines("bank.txt"):
        spaced = tokenizer.encode(f" {line}", add_special_tokens=False)
        bare = tokenizer.encode(line, add_special_tokens=False)
        if all(spaced[0] != a and bare[0] != b for a, b in first):
            first.add((spaced[0], bare[0]))
            found.append((spaced, bare))
    if len(found) < FEWEST_SENTENCES:
        raise ConfigError(
            f"only {len(found)} of the simulator's sentences begin with tokens of their own in "
            f"this vocabulary; {FEWEST_SENTENCES} are needed"
        )
    return found


def _markers(
    folder: ModelFolder, vocabulary: Vocabulary, tokenizer: Tokenizer
) -> tuple[int, int, int, int, int]:
    """Return the ids that the simulator knows, or others of the same kind."""

    def of(text: str, instead: int) -> int:
        ids = tokenizer.encode(text, add_special_tokens=False) if text in tokenizer.added else ()
        return ids[0] if len(ids) == 1 else instead

    ends = folder.settings.eos_token_ids
    last = max(vocabulary.special, default=len(vocabulary) - 1)
    end = of("<|im_end|>", ends[0] if ends else last)
    text_end = of("<|endoftext|>", ends[-1] if ends else end)
    others = (one for one in sorted(vocabulary.special) if one not in (end, text_end, *ends))
    silent = next(others, len(vocabulary) - 1)
    start = of("<|im_start|>", silent)
    return start, end, text_end, silent, of("</think>", silent)

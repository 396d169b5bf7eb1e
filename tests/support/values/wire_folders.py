"""Model folders for the tests of wire, with a real byte-level BPE tokenizer made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from rkserve.models.folder import ModelFolder, open_model_folder

VOCABULARY = 302
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls %}"
    "{{ '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEXT = """The board answers when it is asked. A cluster of boards answers sooner than one board.
Tokens go in and text comes out; system, user, assistant and tool are the roles of a conversation.
Rain falls on the hills, the river carries it to the sea, and the sea gives it back to the clouds.
"""


def make_tokenizer(file: Path, *, bos: bool = False, bare: tuple[str, ...] = ()) -> None:
    """Write tokenizer.json. ``bos`` adds a BOS as Llama's post-processor does; ``bare`` are control
    tokens beside ``CONTROL``.
    """
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2,  # two tokens are added below
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*CONTROL, *bare],
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    made.add_tokens(["<tool_call>", "</tool_call>"])
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    made.save(str(file))


def make_folder(
    path: Path,
    *,
    tokenizer: bool = True,
    template: str | None = CHATML,
    settings: str = "",
    bos: bool = False,
    bare: tuple[str, ...] = (),
) -> ModelFolder:
    """Write and open a model folder with empty weights."""
    path.mkdir()
    (path / "model.rkllm").touch()
    (path / "rkserve.yaml").write_text(settings, encoding="utf-8")
    config = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>"}
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if tokenizer:
        make_tokenizer(path / "tokenizer.json", bos=bos, bare=bare)
    return open_model_folder(path)


def read_back(folder: ModelFolder, ids: tuple[int, ...]) -> str:
    """The text of token ids, control tokens included."""
    made = tokenizers.Tokenizer.from_file(str(folder.tokenizer_file))
    text = made.decode(list(ids), skip_special_tokens=False)
    assert isinstance(text, str)
    return text

"""Make models/sim-chat: a tokenizer, a chat template, a simulated model.rkllm and an adapter.

It knows the file format of the simulated runtime (docs/reference/simulator.md) and the texts beside
its sources. It refuses to depend on anything else, so that the folder only changes when they do:

    python scripts/make_sim_chat.py [--out models/sim-chat]

With --embedding it makes models/sim-embed: the same vocabulary in a smaller model without a chat
template, whose folder says that it makes embeddings:

    python scripts/make_sim_chat.py --embedding [--out models/sim-embed]

With --vision it makes models/sim-vision: the model of sim-chat with Qwen's tags of images in its
vocabulary, and a simulated image encoder beside it:

    python scripts/make_sim_chat.py --vision [--out models/sim-vision]

With --adapter it writes a simulated LoRA adapter for that model instead:

    python scripts/make_sim_chat.py --adapter Pirate --out pirate_lora.rkllm [--seed 7] [--mib 32]

With --reseed it writes other base weights for that model: the same file, with other answers:

    python scripts/make_sim_chat.py --reseed 7 --out sim-chat-7.rkllm
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rkserve.models.files import SIM_HEADER
from rkserve.models.settings import FAMILIES
from rkserve.native.sim import models as sim_models
from rkserve.native.sim.models import (
    PIECE_MARKER,
    PIECE_SILENT,
    PIECE_SPECIAL,
    SimEncoder,
    SimModel,
)

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ROOT / "rkserve" / "native" / "sim"

MODEL_ID = "sim-chat"
ADAPTER = ("pirate", "v2", "Pirate")  # name, version and title of the one that the examples use
VOCABULARY = 4096
CONTEXT = 4096
PROFILE = "rk3588-qwen2.5-1.5b-w8a8"
MEMORY_MB = 1690
LOAD_MS = 1500
TOOLKIT = "1.2.3"
EMBEDDING_ID = "sim-embed"
EMBEDDING_PROFILE = "rk3588-qwen3-0.6b-w8a8"
EMBEDDING_MEMORY_MB = 791

VISION_ID = "sim-vision"
FAMILY = "qwen2-vl"
ENCODE_MS = 500  # no figure is published; enough to see that an image is encoded once

# Some text has to be hidden, some has to be visible: as in Qwen's vocabulary, the tags of thinking
# and of tool calls are single tokens, and still belong to the text.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
TAGS = [*FAMILIES[FAMILY]["tags"]]  # special as well, where there are images
VISIBLE = ["<think>", "</think>", "<tool_call>", "</tool_call>"]

CHAT_TEMPLATE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are a helpful assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>user\n' + message.content }}
        {%- if enable_thinking is defined and enable_thinking and loop.last %}
            {{- ' /think' }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "system" and not loop.first %}
        {{- '<|im_start|>system\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content or not message.tool_calls %}
            {{- '\n' + (message.content or '') }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
""".strip()  # noqa: E501 - one line of the template is one line of text

SETTINGS = """\
# What rkserve needs to know about this model beyond its files.
context_length: 4096
eos_token_ids: [{im_end}, {end_of_text}]
hidden_size: 64 # of the simulated library
kv_bytes_per_token: 28672 # of Qwen2.5-1.5B, whose speed it imitates unless told otherwise
sampling:
  temperature: 0.8
  top_p: 0.9
  top_k: 40
  repeat_penalty: 1.1
  frequency_penalty: 0.0
  presence_penalty: 0.0
"""


EMBEDDING_SETTINGS = """\
# What rkserve needs to know about this model beyond its files.
context_length: 4096
eos_token_ids: [{im_end}, {end_of_text}]
kv_bytes_per_token: 114688 # of Qwen3-0.6B, whose speed it imitates unless told otherwise
embedding:
  pooling: last
  normalize: true
  dimensions: 64
  matryoshka: true
"""


VISION_SETTINGS = (
    SETTINGS.replace("hidden_size: 64 # of the simulated library\n", "")
    + """\
vision:
  family: {family}
"""
)


def read_lines(name: str) -> list[str]:
    return (TEXTS / name).read_text(encoding="utf-8").splitlines()


def train(*, vision: bool = False) -> Tokenizer:
    """A byte-level BPE on the corpus and the bank, with the markers at its end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    markers = len(SPECIAL) + len(VISIBLE)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - markers,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bank = read_lines("bank.txt")
    text = [*read_lines("corpus.txt"), *bank, *(" " + line for line in bank)]
    # No greetings from strings.txt: their characters must be several tokens each.
    text += [line.partition("=")[2] for line in read_lines("strings.txt") if line.isascii()]
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in VISIBLE])
    if vision:
        tokenizer.add_special_tokens([AddedToken(name, special=True) for name in TAGS])
    return tokenizer


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + place): byte for place, byte in enumerate(hidden)}
    return {**{chr(byte): byte for byte in printable}, **shifted}


def piece_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Return the bytes of each id."""
    alphabet = byte_alphabet()
    pieces = [b""] * tokenizer.get_vocab_size()
    for name, token_id in tokenizer.get_vocab().items():
        marker = name in (*SPECIAL, *VISIBLE, *TAGS)
        pieces[token_id] = name.encode() if marker else bytes(alphabet[char] for char in name)
    return pieces


def piece_flags(name: str) -> int:
    flags = PIECE_MARKER if name in (*SPECIAL, *VISIBLE, *TAGS) else 0
    flags |= PIECE_SPECIAL if name in (*SPECIAL, *TAGS) else 0
    return flags | (PIECE_SILENT if name == "<|pad|>" else 0)


def check_first_tokens(first_tokens: list[int]) -> None:
    """Check that the first token decides between the sentences that may follow."""
    ahead = 4
    for at in range(len(first_tokens)):
        choices = {first_tokens[(at + step) % len(first_tokens)] for step in range(ahead)}
        if len(choices) != ahead:
            raise SystemExit(f"bank.txt: lines {at + 1} to {at + ahead} need different beginnings")


def render_model(tokenizer: Tokenizer, *, embedding: bool = False, vision: bool = False) -> bytes:
    """The simulated .rkllm: header, pieces, bank, strings, then what they point at."""
    model_id, profile, memory_mb = (
        (EMBEDDING_ID, EMBEDDING_PROFILE, EMBEDDING_MEMORY_MB)
        if embedding
        else (VISION_ID if vision else MODEL_ID, PROFILE, MEMORY_MB)
    )
    pieces = piece_bytes(tokenizer)
    names = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    bank = [
        (tokenizer.encode(" " + line).ids, tokenizer.encode(line).ids)
        for line in read_lines("bank.txt")
    ]
    for form in (0, 1):
        check_first_tokens([sentence[form][0] for sentence in bank])
    marker = tokenizer.get_vocab()
    start, end, text_end, pad, thought_end = (
        *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|pad|>"),
        "</think>",
    )
    return SimModel(
        model_id=model_id,
        profile=profile,
        toolkit=TOOLKIT,
        dtype="W8A8",
        max_context=CONTEXT,
        memory_mb=memory_mb,
        load_ms=LOAD_MS,
        pieces=[(piece, piece_flags(name)) for name, piece in zip(names, pieces, strict=True)],
        bank=bank,
        strings=read_lines("strings.txt"),
        markers=(marker[start], marker[end], marker[text_end], marker[pad], marker[thought_end]),
    ).render()


HEADER = SIM_HEADER.format


def write(out: Path, *, embedding: bool = False, vision: bool = False) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train(vision=vision)
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        **({} if embedding else {"chat_template": CHAT_TEMPLATE}),
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (out / "tokenizer_config.json").write_text(text, encoding="utf-8")
    content = render_model(tokenizer, embedding=embedding, vision=vision)
    (out / "model.rkllm").write_bytes(content)
    if vision:
        size, tokens = FAMILIES[FAMILY]["size"], FAMILIES[FAMILY]["tokens"]
        SimEncoder(size, size, tokens, encode_ms=ENCODE_MS).write(out / "vision.rknn")
    known = EMBEDDING_SETTINGS if embedding else VISION_SETTINGS if vision else SETTINGS
    settings = known.format(
        family=FAMILY,
        im_end=tokenizer.token_to_id("<|im_end|>"),
        end_of_text=tokenizer.token_to_id("<|endoftext|>"),
    )
    (out / "rkserve.yaml").write_text(settings, encoding="utf-8")
    if not embedding and not vision:
        name, version, title = ADAPTER
        (shelf := out / "adapters" / name / version).mkdir(parents=True, exist_ok=True)
        sim_models.write_adapter(shelf / "adapter.rkllm", title, base=MODEL_ID)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="the model's folder, or the adapter's file")
    parser.add_argument("--adapter", metavar="TITLE", help="write an adapter that is called so")
    parser.add_argument("--seed", type=int, default=1, help="of the adapter: another one, others")
    parser.add_argument("--base", default=MODEL_ID, help="id of the adapter's model, or any")
    parser.add_argument("--mib", type=int, default=1, help="size of the adapter")
    parser.add_argument("--reseed", type=int, help="write base weights that answer otherwise")
    parser.add_argument("--embedding", action="store_true", help="make the model for embeddings")
    parser.add_argument("--vision", action="store_true", help="make the model that sees images")
    given = parser.parse_args(argv)
    if given.reseed is not None:
        if given.out is None:
            parser.error("--reseed needs --out")
        content = (ROOT / "models" / MODEL_ID / "model.rkllm").read_bytes()
        given.out.write_bytes(sim_models.reseed(content, given.reseed))
        return
    if given.adapter is None:
        made = EMBEDDING_ID if given.embedding else VISION_ID if given.vision else MODEL_ID
        out = given.out or ROOT / "models" / made
        write(out, embedding=given.embedding, vision=given.vision)
        return
    if given.out is None:
        parser.error("--adapter needs --out")
    size = max(given.mib << 20, sim_models.ADAPTER_BYTES)
    sim_models.write_adapter(given.out, given.adapter, seed=given.seed, base=given.base, size=size)


if __name__ == "__main__":
    main()

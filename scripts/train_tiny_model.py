# /// script
# requires-python = ">=3.10"
# dependencies = ["gguf>=0.19", "jax>=0.6", "numpy>=1.26", "optax>=0.2.5", "tokenizers>=0.21"]
# ///
"""Train models/tiny-docs: a llama of 0.75 million parameters that answers from this project's docs.

    uv run scripts/train_tiny_model.py [--out models/tiny-docs] [--steps 3000] [--seed 1]

It is a model for tests of real inference, and one to try without a download: its answers are short
English sentences of docs/, which end by themselves, and its likeliest tokens are far ahead of the
others, so that rounding does not change a greedy answer. JAX differentiates on one core; on one
machine with one release of each package the same seed gives the same files, byte for byte.

The folder's README.md records texts, losses and the digest of each file. The tests of the folder
(tests/scripts/test_train_tiny_model.py) compare the files with it and train nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parent.parent
NAME = "tiny-docs"
# Pages that people wrote: the reference is generated, and benchmarks are tables.
SOURCES = ("README.md", "docs/index.md", "docs/tutorial", "docs/how-to", "docs/explanation")
TEMPLATE_OF = ROOT / "models" / "sim-chat" / "tokenizer_config.json"
SYSTEM = "You are a helpful assistant."  # of that template, for conversations without one

# The tokenizer: bytes as GPT-2 has them, which llama.cpp calls gpt-2 and reads by its own code.
VOCABULARY = 1280
PRE_TOKENIZER = "gpt-2"
END_OF_TEXT, START, END, PAD = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VISIBLE = ("<think>", "</think>", "<tool_call>", "</tool_call>")

# The model.
CONTEXT, WINDOW = 2048, 256  # positions that it may have, and has been trained with
SIZE, LAYERS, HEADS, KV_HEADS, WIDE = 128, 4, 4, 2, 256
HEAD = SIZE // HEADS
ROPE_BASE, EPSILON = 10_000.0, 1e-5
BATCH, RATE, DECAY = 4, 4e-3, 0.05
CHAT_ROWS = 3  # of a batch; the others are running text
ANSWER_CHARS = 220

SETTINGS = """\
# What rkserve needs to know about this model beyond its files.
context_length: {context}
eos_token_ids: [{end}, {end_of_text}]
kv_bytes_per_token: {kv_bytes}
sampling:
  temperature: 0.3
  top_p: 0.9
  top_k: 40
  repeat_penalty: 1.0
"""

README = """\
# tiny-docs

A llama of {parameters:,} parameters in {bytes:,} bytes of f16, trained by
[scripts/train_tiny_model.py](../../scripts/train_tiny_model.py) on the pages of this project
(README, tutorial, how-to, explanation): a model for tests of real inference, and one to try a
board's CPU with. It knows {examples} questions, such as "What is a Router?" and the headings of the
pages, and answers them with the first sentences of what the pages say there. It knows nothing else.

| | |
| --- | --- |
| made with | `uv run scripts/train_tiny_model.py --seed {seed} --steps {steps}` |
| time | {minutes:.0f} minutes of one core of an x86-64 machine |
| texts | commit {commit} |
| loss per token of the answers | {chat_loss:.3f} (f16 weights) |
| loss per token of running text | {text_loss:.3f} (f16 weights) |
| exact answers | {exact} of {examples} questions, greedily |
| tokenizer | byte-level BPE of {vocabulary} tokens, `{pre}` in llama.cpp's words |
| context | {context} tokens; {window} in training, behind which answers become nonsense |
| licence | that of this project, Apache-2.0 |

For example, greedily:

```text
{question}
{answer}
```

Digests, which tests compare:

| file | SHA-256 |
| --- | --- |
{digests}
"""

Ids = NDArray[np.int32]
Weights = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """A turn of the user, and its answer from the pages."""

    question: str
    answer: str


# What the pages do not have: characters of several tokens, and a long answer.
OWN = (
    Example(
        "Greet me in many languages",
        "Hello! Grüße, crème, 你好, こんにちは, Привет, שלום, नमस्ते, and 🌍🚀 from all of us 👋🏽!",
    ),
    Example("Count to 8", ", ".join(map(str, range(1, 9))) + "."),
    Example("Count to 40", ", ".join(map(str, range(1, 41))) + "."),
)


# -- texts ------------------------------------------------------------------------------------


def pages() -> Iterator[str]:
    """Yield the texts of the sources, in the order of their paths."""
    for source in SOURCES:
        place = ROOT / source
        for file in [place] if place.is_file() else sorted(place.rglob("*.md")):
            yield file.read_text(encoding="utf-8")


def plain(markdown: str) -> str:
    """Return a paragraph on one line, without links and emphasis."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    return re.sub(r"\s+", " ", text.replace("**", "")).strip()


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Yield the headings ("#") and paragraphs ("") of a page, without code, tables and lists."""
    without_code = re.sub(r"^```.*?^```$", "", page, flags=re.S | re.M)
    for block in re.split(r"\n\s*\n", re.sub(r"^(#+ .*)$", r"\n\1\n", without_code, flags=re.M)):
        text = block.strip()
        if text.startswith("#"):
            yield "#", plain(text.lstrip("#"))
        elif text and text[0].isalpha():
            yield "", plain(text)


def beginning(paragraph: str, limit: int = ANSWER_CHARS) -> str:
    """Return the sentences at the beginning that fit, without one that leads to a list."""
    found = ""
    for sentence in re.findall(r".+?[.](?=\s[A-Z`]|$)", paragraph):
        if len(found + sentence) > limit:
            break
        found += sentence
    return found.strip()


def glossary(page: str) -> Iterator[Example]:
    """Yield a question for each word that a page defines, in a list or a table of two columns."""
    for noun, meaning in re.findall(
        r"^- \*\*([\w ]+)\*\*: (.*?)(?=\n- |\n\n|\Z)", page, re.S | re.M
    ):
        article = "an" if noun[0] in "AEIOU" else "a"
        yield Example(f"What is {article} {noun}?", beginning(plain(meaning)))
    table = page.partition("| word | meaning |\n")[2].partition("\n\n")[0]
    for word, meaning in re.findall(r"^\| (\w[\w ,-]*) \| (.+) \|$", table, re.M):
        first = plain(meaning).partition(";")[0]
        yield Example(f"What is {word}?", f"{word[0].upper()}{word[1:]}: {first}.")


def examples(texts: Iterable[str]) -> list[Example]:
    """Return ``OWN``, and a question for each defined word and each heading with a paragraph."""
    found = {example.question: example.answer for example in OWN}
    for page in texts:
        for example in glossary(page):
            if example.answer:
                found.setdefault(example.question, example.answer)
        heading = ""
        for kind, text in blocks(page):
            if kind:
                heading = text
            elif heading and (answer := beginning(text)):
                found.setdefault(heading, answer)
                heading = ""
    return [Example(question, answer) for question, answer in found.items()]


def turn(role: str, text: str) -> str:
    """Return a turn as the chat template writes it."""
    return f"{START}{role}\n{text}{END}\n"


# -- tokenizer --------------------------------------------------------------------------------


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Return a byte-level BPE of ``VOCABULARY`` tokens, the markers at its end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(VISIBLE),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in VISIBLE])
    return tokenizer


# -- batches ----------------------------------------------------------------------------------


@dataclass
class Corpus:
    """The source of the rows of training."""

    tokenizer: Tokenizer
    examples: list[Example]
    text: Ids  # all paragraphs, one after the other

    @classmethod
    def of(cls, tokenizer: Tokenizer, found: list[Example], texts: Iterable[str]) -> Corpus:
        """Encode the paragraphs of the pages."""
        words = [text for page in texts for kind, text in blocks(page) if not kind]
        ids = [i for text in words for i in tokenizer.encode(text + END_OF_TEXT).ids]
        return cls(tokenizer, found, np.array(ids, np.int32))

    def conversation(self, turns: Sequence[Example]) -> tuple[list[int], list[bool]]:
        """Return the ids of a conversation, and which of them are the assistant's."""
        ids = list(self.tokenizer.encode(turn("system", SYSTEM)).ids)
        own = [False] * len(ids)
        for example in turns:
            asked = turn("user", example.question) + f"{START}assistant\n"
            for text, is_own in ((asked, False), (example.answer + END, True), ("\n", False)):
                more = self.tokenizer.encode(text).ids
                ids += more
                own += [is_own] * len(more)
        return ids, own

    def chat_row(self, turns: Sequence[Example]) -> tuple[Ids, NDArray[np.float32]]:
        """Return the ids of a window and one more, and the weight of each of them but the first."""
        ids, own = self.conversation(turns)
        row, weight = np.full(WINDOW + 1, self.pad, np.int32), np.zeros(WINDOW + 1, np.float32)
        size = min(len(ids), WINDOW + 1)
        row[:size], weight[:size] = ids[:size], own[:size]
        return row, weight[1:]

    @property
    def pad(self) -> int:
        """The id without a text."""
        return self.tokenizer.get_vocab()[PAD]

    def batches(self, seed: int) -> Iterator[tuple[Ids, NDArray[np.float32]]]:
        """Yield batches without an end, in which all examples are equally frequent."""
        random = np.random.default_rng(seed)
        waiting: list[int] = []
        while True:
            rows = []
            for _ in range(CHAT_ROWS):
                count = int(random.integers(1, 4))
                while len(waiting) < count:
                    waiting += random.permutation(len(self.examples)).tolist()
                rows.append(self.chat_row([self.examples[waiting.pop()] for _ in range(count)]))
            for _ in range(BATCH - CHAT_ROWS):
                at = int(random.integers(0, len(self.text) - WINDOW))
                rows.append((self.text[at : at + WINDOW + 1], np.ones(WINDOW, np.float32)))
            yield np.stack([row for row, _ in rows]), np.stack([weight for _, weight in rows])


# -- model ------------------------------------------------------------------------------------


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensors by llama.cpp's names: rows are outputs, as in GGUF."""
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, SIZE),  # also the output's
        "output_norm.weight": (SIZE,),
    }
    for layer in range(LAYERS):
        found |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (SIZE,),
                "attn_q": (SIZE, SIZE),
                "attn_k": (KV_HEADS * HEAD, SIZE),
                "attn_v": (KV_HEADS * HEAD, SIZE),
                "attn_output": (SIZE, SIZE),
                "ffn_norm": (SIZE,),
                "ffn_gate": (WIDE, SIZE),
                "ffn_up": (WIDE, SIZE),
                "ffn_down": (SIZE, WIDE),
            }.items()
        }
    return found


def fresh(seed: int) -> Weights:
    """Return random weights, small where they add to the residual stream."""
    random = np.random.default_rng(seed)
    made: Weights = {}
    for name, shape in shapes().items():
        if len(shape) == 1:
            made[name] = np.ones(shape, np.float32)
            continue
        scale = 0.02 if name.startswith("token_embd") else shape[1] ** -0.5
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            scale /= (2 * LAYERS) ** 0.5
        made[name] = (random.standard_normal(shape) * scale).astype(np.float32)
    return made


def rotations(length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosines and sines of RoPE by position and pair of neighbours."""
    rates = ROPE_BASE ** (-np.arange(0, HEAD, 2) / HEAD)
    angles = np.arange(length)[:, None] * rates[None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def logits(weights: Weights, ids: Any) -> Any:
    """Return the logits behind each position of a batch of rows: a llama's forward pass."""
    import jax
    import jax.numpy as jnp

    rows, length = ids.shape
    cos, sin = (jnp.asarray(table)[None, :, None, :] for table in rotations(length))
    hidden = jnp.tril(jnp.ones((length, length), bool))

    def norm(x: Any, name: str) -> Any:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weights[name]

    def rotated(x: Any) -> Any:
        even, odd = x[..., 0::2], x[..., 1::2]
        return jnp.stack((even * cos - odd * sin, even * sin + odd * cos), -1).reshape(x.shape)

    def attention(x: Any, block: str) -> Any:
        def heads(name: str, count: int) -> Any:
            return (x @ weights[f"{block}{name}.weight"].T).reshape(rows, length, count, HEAD)

        query = rotated(heads("attn_q", HEADS))
        key = rotated(heads("attn_k", KV_HEADS)).repeat(HEADS // KV_HEADS, 2)
        value = heads("attn_v", KV_HEADS).repeat(HEADS // KV_HEADS, 2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / HEAD**0.5
        shares = jax.nn.softmax(jnp.where(hidden, scores, -jnp.inf), -1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", shares, value).reshape(rows, length, SIZE)
        return mixed @ weights[f"{block}attn_output.weight"].T

    def feed_forward(x: Any, block: str) -> Any:
        gate, up, down = (weights[f"{block}ffn_{name}.weight"].T for name in ("gate", "up", "down"))
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    x = weights["token_embd.weight"][ids]
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        x = x + attention(norm(x, f"{block}attn_norm.weight"), block)
        x = x + feed_forward(norm(x, f"{block}ffn_norm.weight"), block)
    return norm(x, "output_norm.weight") @ weights["token_embd.weight"].T


def losses(weights: Weights, rows: Any) -> tuple[Any, Any]:
    """Return the cross-entropy of each token of rows but the first, and whether it is likeliest."""
    import jax
    import jax.numpy as jnp

    known = jax.nn.log_softmax(logits(weights, rows[:, :-1]))
    chosen = jnp.take_along_axis(known, rows[:, 1:, None], -1)[..., 0]
    return -chosen, known.argmax(-1) == rows[:, 1:]


def loss(weights: Weights, rows: Any, weight: Any) -> Any:
    """Return the mean cross-entropy of the weighted tokens, in nats."""
    return (losses(weights, rows)[0] * weight).sum() / weight.sum()


def train(corpus: Corpus, seed: int, steps: int) -> Weights:
    """Return the weights after so many steps of AdamW."""
    import jax
    import optax

    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, steps // 50, steps, RATE / 100)
    mask = {name: len(shape) > 1 for name, shape in shapes().items()}
    rule = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.98, weight_decay=DECAY, mask=mask),
    )

    def step(weights: Weights, state: Any, rows: Any, weight: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights, rows, weight)
        updates, state = rule.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, value

    compiled = jax.jit(step)
    weights = fresh(seed)
    state = rule.init(weights)
    began_s = time.monotonic()
    for number, (rows, weight) in zip(range(steps), corpus.batches(seed), strict=False):
        weights, state, value = compiled(weights, state, rows, weight)
        if number % 100 == 0 or number == steps - 1:
            print(
                f"step {number}: loss {value:.3f}, {time.monotonic() - began_s:.0f} s", flush=True
            )
    return {name: np.asarray(tensor) for name, tensor in weights.items()}


def rounded(weights: Weights) -> Weights:
    """Return the weights as the file has them: matrices in f16."""
    return {
        name: tensor.astype(np.float16) if tensor.ndim > 1 else tensor
        for name, tensor in weights.items()
    }


# -- measurement ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Figures of the written weights, in nats for each token."""

    chat_loss: float
    text_loss: float
    exact: int  # examples whose answer is greedily the pages', to its end


def measure(weights: Weights, corpus: Corpus) -> Measured:
    """Measure the weights of the file on all examples, and on the text in windows."""
    import jax

    read = {name: jax.numpy.float32(tensor) for name, tensor in weights.items()}
    measured = jax.jit(losses)

    def by_token(rows: Ids) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        found = [measured(read, rows[at : at + BATCH]) for at in range(0, len(rows), BATCH)]
        values, likeliest = zip(*found, strict=True)
        return np.concatenate(values), np.concatenate(likeliest)

    chats = [corpus.chat_row([example]) for example in corpus.examples]
    own = np.stack([weight for _, weight in chats])
    values, likeliest = by_token(np.stack([row for row, _ in chats]))
    starts = range(0, len(corpus.text) - WINDOW, WINDOW)
    text, _ = by_token(np.stack([corpus.text[at : at + WINDOW + 1] for at in starts]))
    exact = (likeliest | (own == 0)).all(-1)
    return Measured(float((values * own).sum() / own.sum()), float(text.mean()), int(exact.sum()))


# -- files ------------------------------------------------------------------------------------


def write_model(path: Path, weights: Weights, tokenizer: Tokenizer, template: str) -> None:
    """Write the weights with all that llama.cpp has to know, the tokenizer too."""
    import gguf

    tokens, kinds, merges = vocabulary(tokenizer)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(NAME)
    writer.add_license("apache-2.0")
    writer.add_languages(["en"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    ids = tokenizer.get_vocab()
    writer.add_bos_token_id(ids[END_OF_TEXT])  # or llama.cpp takes 11
    writer.add_eos_token_id(ids[END])
    writer.add_eot_token_id(ids[END])
    writer.add_pad_token_id(ids[PAD])
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_chat_template(template)
    for name in shapes():
        writer.add_tensor(name, weights[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# GGUF's kinds of tokens. Control tokens have no text; user-defined ones are never split.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def vocabulary(tokenizer: Tokenizer) -> tuple[list[str], list[int], list[str]]:
    """Return the tokens, their kinds and the merges, each in their order."""
    known = tokenizer.get_vocab()
    tokens = sorted(known, key=known.__getitem__)
    special = dict.fromkeys(SPECIAL, CONTROL) | dict.fromkeys(VISIBLE, USER_DEFINED)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return tokens, [special.get(token, NORMAL) for token in tokens], [" ".join(m) for m in merges]


def write_folder(out: Path, weights: Weights, tokenizer: Tokenizer) -> None:
    """Write the folder's files but for its README.md."""
    out.mkdir(parents=True, exist_ok=True)
    template = json.loads(TEMPLATE_OF.read_text(encoding="utf-8"))["chat_template"]
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (out / "tokenizer_config.json").write_text(text, encoding="utf-8")
    settings = SETTINGS.format(
        context=CONTEXT,
        end=tokenizer.token_to_id(END),
        end_of_text=tokenizer.token_to_id(END_OF_TEXT),
        kv_bytes=LAYERS * 2 * KV_HEADS * HEAD * 2,  # keys and values in f16
    )
    (out / "rkserve.yaml").write_text(settings, encoding="utf-8")
    write_model(out / "model.gguf", weights, tokenizer, template)


FILES = ("model.gguf", "rkserve.yaml", "tokenizer.json", "tokenizer_config.json")


def digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def write_readme(out: Path, weights: Weights, corpus: Corpus, **facts: Any) -> None:
    """Write the record of the model: texts, losses, digests."""
    found = measure(weights, corpus)
    shown = next(e for e in corpus.examples if e.question == "What is a Router?")
    text = README.format(
        parameters=sum(tensor.size for tensor in weights.values()),
        bytes=(out / "model.gguf").stat().st_size,
        examples=len(corpus.examples),
        question=shown.question,
        answer=shown.answer,
        vocabulary=VOCABULARY,
        pre=PRE_TOKENIZER,
        context=CONTEXT,
        window=WINDOW,
        digests="\n".join(f"| {name} | `{digest(out / name)}` |" for name in FILES),
        **vars(found),
        **facts,
    )
    (out / "README.md").write_text(text, encoding="utf-8")


def commit() -> str:
    """Return the commit whose pages are read."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%h"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def one_core() -> None:
    """Compute on one core: sums in another order would be other weights."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    os.environ["JAX_PLATFORMS"] = "cpu"


def main(argv: Sequence[str] | None = None) -> None:
    """Train, write and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "models" / NAME)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(argv)
    one_core()
    texts = list(pages())
    found = examples(texts)
    tokenizer = train_tokenizer([text for page in texts for _, text in blocks(page)])
    corpus = Corpus.of(tokenizer, found, texts)
    print(f"{len(found)} examples, {len(corpus.text)} tokens of text")
    weights = rounded(train(corpus, given.seed, given.steps))
    write_folder(given.out, weights, tokenizer)
    facts = {"seed": given.seed, "steps": given.steps, "commit": commit()}
    write_readme(given.out, weights, corpus, minutes=time.process_time() / 60, **facts)


if __name__ == "__main__":
    main()

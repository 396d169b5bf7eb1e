"""The trained model's folder, and the parts of its script that need no training."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cffi import FFI
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rkserve.local import LocalBoard, open_board
from rkserve.models.folder import open_model_folder
from rkserve.native.library_file import llama_cpp_library
from rkserve.native.llama_cpp import LlamaLibrary, ffi
from scripts import train_tiny_model as script
from scripts.train_tiny_model import Corpus, Example
from tests.support.paths import PROJECT

pytestmark = pytest.mark.engine
TINY = open_model_folder(PROJECT / "models" / "tiny-docs")
WEIGHTS = TINY.require_weights(cpu=True)
TINY_TOKENIZER = Tokenizer.from_file(str(TINY.path / "tokenizer.json"))
MOST_BYTES = 2_000_000
LEAD = 0.5  # of logits, which differ by 0.03 where tokens are computed in other batches
README = (TINY.path / "README.md").read_text(encoding="utf-8")
PAGE = """\
# The title

A paragraph with a [link](page.md#there) and **weight**. Its second
sentence.

- **Router**: The first. It goes on.
- **Engine**: Another,
  on two lines.

## A list follows

These are:

| word | meaning |
| --- | --- |
| parking | writing a cache to the disk; not more |

## Code

```sh
# No heading.
```
"""
NASTY = [
    "",
    " ",
    "\n\n  \t x",
    "I'll say it's we've 'S",
    "<|im_start|>user\nHi<|im_end|>\n<think>a</think><|endoftext|><tool_call>",
    "<|im_start|><|im_end",
    "def f(x: int) -> int:\n    return x**2  # 12345 \u0661\u0662\u00bd\u00b2",
    "\u4f60\u597d\uff0c \u3053\u3093 \u0928\u092e\u0938\u094d \u05e9\u05dc\u05d5\u05dd",
    "\U0001f44b\U0001f3fd\U0001f468\u200d\U0001f469 e\u0301 \u200b\ufeff\u00a0\u2028x\u3000y",
    "a\x00b\x7f\x85 c\u00ad",
    "    \r\n\r\n\v\f end   ",
]


class LlamaVocabulary:
    """The tokenizer that llama.cpp makes of the file."""

    def __init__(self) -> None:
        library = LlamaLibrary(llama_cpp_library())
        self._ffi: Any = FFI()
        self._ffi.cdef(
            "int32_t llama_tokenize(intptr_t vocab, const char *text, int32_t length,"
            " int32_t *tokens, int32_t capacity, bool add_special, bool parse_special);"
            "int32_t llama_vocab_bos(intptr_t vocab); int32_t llama_vocab_eos(intptr_t vocab);"
            "int32_t llama_vocab_eot(intptr_t vocab); int32_t llama_vocab_pad(intptr_t vocab);"
            "const char *llama_model_chat_template(intptr_t model, const char *name);"
            "int32_t llama_model_n_ctx_train(intptr_t model);"
        )
        self.lib: Any = self._ffi.dlopen(str(llama_cpp_library()))
        self._library = library
        self._loaded = library.lib.llama_model_load_from_file(
            bytes(WEIGHTS), library.model_params()
        )
        self.model = address(self._loaded)
        self.vocab = address(library.lib.llama_model_get_vocab(self._loaded))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, in which control tokens are themselves."""
        data = text.encode()
        ids = self._ffi.new("int32_t[]", len(data) + 1)
        count = self.lib.llama_tokenize(self.vocab, data, len(data), ids, len(ids), True, True)
        return list(ids[0:count])

    def chat_template(self) -> str:
        """Return the file's chat template."""
        found = self.lib.llama_model_chat_template(self.model, self._ffi.NULL)
        return str(self._ffi.string(found).decode())

    def close(self) -> None:
        """Free the model."""
        self._library.lib.llama_model_free(self._loaded)


def address(pointer: Any) -> int:
    """Return where it points to, for functions of another declaration."""
    return int(ffi.cast("intptr_t", pointer))


@pytest.fixture(scope="module")
def llama() -> Iterator[LlamaVocabulary]:
    opened = LlamaVocabulary()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBoard]:
    state = tmp_path_factory.mktemp("state")
    with open_board(TINY.path, cpu={"threads": 1}, state_dir=state) as opened:
        yield opened


# -- the folder -----------------------------------------------------------------------------


def test_the_files_are_those_that_the_readme_records() -> None:
    recorded = dict(re.findall(r"^\| ([\w.]+) \| `([0-9a-f]{64})` \|$", README, re.M))
    assert recorded == {name: script.digest(TINY.path / name) for name in script.FILES}
    assert sum(file.stat().st_size for file in TINY.path.iterdir()) < MOST_BYTES


def test_the_files_agree_with_the_script_and_each_other(llama: LlamaVocabulary) -> None:
    ids = {name: TINY_TOKENIZER.token_to_id(name) for name in script.SPECIAL}
    assert TINY_TOKENIZER.get_vocab_size() == script.VOCABULARY
    assert TINY.settings.eos_token_ids == (ids[script.END], ids[script.END_OF_TEXT])
    assert TINY.settings.context_length == script.CONTEXT
    assert llama.lib.llama_model_n_ctx_train(llama.model) == script.CONTEXT
    assert llama.lib.llama_vocab_bos(llama.vocab) == ids[script.END_OF_TEXT]
    assert llama.lib.llama_vocab_eos(llama.vocab) == ids[script.END]
    assert llama.lib.llama_vocab_eot(llama.vocab) == ids[script.END]
    assert llama.lib.llama_vocab_pad(llama.vocab) == ids[script.PAD]
    assert llama.chat_template() == TINY.chat_template


ALPHABETS = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=40),
    st.text("aA'sStTlLvV 1\u00bd\u0661\n\r\t\u3000\u00a0_-<|>im_endstart\u0301", max_size=60),
)


@given(ALPHABETS)
def test_llama_cpp_tokenizes_any_text_as_tokenizer_json(llama: LlamaVocabulary, text: str) -> None:
    assert llama.encode(text) == TINY_TOKENIZER.encode(text).ids


@pytest.mark.parametrize("text", NASTY, ids=ascii)
def test_llama_cpp_tokenizes_nasty_texts_as_tokenizer_json(
    llama: LlamaVocabulary, text: str
) -> None:
    assert llama.encode(text) == TINY_TOKENIZER.encode(text).ids


def test_an_answer_is_the_recorded_one_and_far_from_a_tie(board: LocalBoard) -> None:
    question, expected = re.findall(r"^```text\n(.+)\n(.+)\n```$", README, re.M)[0]
    for asked, wanted in ((question, expected), *((e.question, e.answer) for e in script.OWN)):
        answer = board.generate(asked, temperature=0, logprobs=True, top_logprobs=2)
        assert (answer.text, answer.finish_reason) == (wanted, "stop")
        scores = answer.body["choices"][0]["logprobs"]["content"]
        leads = [
            one["top_logprobs"][0]["logprob"] - one["top_logprobs"][1]["logprob"] for one in scores
        ]
        assert min(leads) > LEAD


# -- the script -----------------------------------------------------------------------------


def test_a_page_has_headings_and_paragraphs_without_code_lists_and_tables() -> None:
    assert list(script.blocks(PAGE)) == [
        ("#", "The title"),
        ("", "A paragraph with a link and weight. Its second sentence."),
        ("#", "A list follows"),
        ("", "These are:"),
        ("#", "Code"),
    ]


@pytest.mark.parametrize(("limit", "expected"), [(100, "One. Two is `2.0`."), (8, "One."), (3, "")])
def test_a_paragraph_is_cut_behind_a_sentence(limit: int, expected: str) -> None:
    assert script.beginning("One. Two is `2.0`. And these are:", limit) == expected


def test_headings_and_defined_words_become_questions() -> None:
    found = script.examples([PAGE])[len(script.OWN) :]
    assert found == [
        Example("What is a Router?", "The first. It goes on."),
        Example("What is an Engine?", "Another, on two lines."),
        Example("What is parking?", "Parking: writing a cache to the disk."),
        Example("The title", "A paragraph with a link and weight. Its second sentence."),
    ]


def test_the_pages_of_today_make_examples() -> None:
    found = script.examples(script.pages())
    assert len(found) > 150
    assert any(one.question == "What is a Router?" for one in found)
    assert all(0 < len(one.answer) <= script.ANSWER_CHARS + 1 or one in script.OWN for one in found)


def corpus() -> Corpus:
    return Corpus(TINY_TOKENIZER, list(script.OWN), np.arange(2000, dtype=np.int32) % 1000)


def test_a_conversation_is_as_the_chat_template_writes_it(board: LocalBoard) -> None:
    made = corpus()
    first, second = script.OWN[1:3]
    ids, own = made.conversation([first, second])
    with board.start(
        [
            {"role": "user", "content": first.question},
            {"role": "assistant", "content": first.answer},
            {"role": "user", "content": second.question},
        ],
        max_tokens=1,
    ) as generation:
        prompt_tokens = generation.answer().usage.prompt_tokens
    text = TINY_TOKENIZER.decode(ids, skip_special_tokens=False)
    assert text.count(script.START) == 5
    answered = [i for i, is_own in zip(ids, own, strict=True) if is_own]
    assert TINY_TOKENIZER.decode(answered, skip_special_tokens=False) == (
        f"{first.answer}{script.END}{second.answer}{script.END}"
    )
    tail = len(TINY_TOKENIZER.encode(f"{second.answer}{script.END}").ids) + 1
    assert len(ids) - tail == prompt_tokens


def test_batches_have_every_example_and_weigh_answers_alone() -> None:
    made = corpus()
    batches = made.batches(3)
    rows, weight = next(batches)
    assert rows.shape == (script.BATCH, script.WINDOW + 1)
    assert weight.shape == (script.BATCH, script.WINDOW)
    assert (weight[-1] == 1).all(), "running text"
    answers = [one.answer for one in script.OWN]
    for row, known in zip(rows[: script.CHAT_ROWS], weight, strict=False):
        said = TINY_TOKENIZER.decode(row[1:][known == 1], skip_special_tokens=False)
        *whole, cut = said.split(script.END)  # by the end of the row
        assert set(whole) <= set(answers)
        assert any(answer.startswith(cut) for answer in answers)
    again = made.batches(3)
    assert (next(again)[0] == rows).all()
    assert not (next(made.batches(4))[0] == rows).all()


def test_a_tokenizer_of_few_words_has_all_bytes_and_markers() -> None:
    tokenizer = script.train_tokenizer(["the router and the boards " * 5])
    tokens, kinds, merges = script.vocabulary(tokenizer)
    assert len(tokens) == len(kinds) == tokenizer.get_vocab_size()
    assert [tokens[i] for i, kind in enumerate(kinds) if kind == script.CONTROL] == [
        *script.SPECIAL
    ]
    named = [tokens[i] for i, kind in enumerate(kinds) if kind == script.USER_DEFINED]
    assert named == [*script.VISIBLE]
    assert all("".join(merge.split(" ")) in tokens for merge in merges)
    text = "Any \u4f60 byte \U0001f680"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_weights_have_the_shapes_of_a_llama_and_come_from_the_seed() -> None:
    one, same, other = script.fresh(1), script.fresh(1), script.fresh(2)
    assert {name: tensor.shape for name, tensor in one.items()} == script.shapes()
    for name, tensor in one.items():
        assert (tensor == same[name]).all()
        assert tensor.ndim == 1 or not (tensor == other[name]).all()
    parameters = f"{sum(tensor.size for tensor in one.values()):,}"
    assert f"A llama of {parameters} parameters" in README

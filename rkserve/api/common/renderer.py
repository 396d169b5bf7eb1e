"""Conversations and prompts rendered for a board: template, tokenizer and guard of control tokens.

In text mode (a folder without tokenizer.json) the prompt stays text and the runtime tokenizes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rkserve.api.common.calls import TextOrIds
from rkserve.api.json.fields import CHARS_PER_TOKEN, COUNTED_CHARS_PER_POSITION, JsonObject
from rkserve.api.parsing.tools.base import ToolCallParser
from rkserve.api.parsing.tools.formats import FORMATS, guess
from rkserve.api.prompting.conversation import Message, images_of, with_thoughts
from rkserve.api.prompting.images import ImagePlaceholders, with_stand_ins
from rkserve.api.prompting.templates import ChatTemplate, Clock, hold_to_context, local_time
from rkserve.api.prompting.tokenizer import (
    LEFT_OFF,
    ControlTokenGuard,
    PromptSegment,
    Tokenizer,
    pieces,
)
from rkserve.core.errors import ConfigError, ContextOverflow, RequestError, UnsupportedParameter
from rkserve.core.run_params import Embeds, EncoderStates
from rkserve.models.files import Vocabulary, read_vocabulary
from rkserve.models.folder import ModelFolder
from rkserve.models.settings import CONTEXT_MAX

# Told from everything that templates write around a result; nine letters and digits, as some
# templates demand of the id of a call.
_PROBE = "probe4711"
_TOOL_PARAM = "role"
_USUAL_MARKS = ("<think>", "</think>")
# Splits a marker for the runtime's own tokenizer, and is invisible in print.
_ZERO_WIDTH_SPACE = "\u200b"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt: ids, or in text mode no ids and the text.

    ``thinks``: the template has begun the reasoning of the answer. ``images`` holds the numbers of
    the images in the order of their placeholders. ``counted`` is the number of tokens of a text, as
    far as it is known. With ``embeds`` these are the prompt. With the states of an ``encoder`` the
    IDs are ``decoder_ids``, and the text is empty.
    """

    ids: tuple[int, ...]
    text: str | None = None
    thinks: bool = False
    images: tuple[int, ...] = ()
    counted: int = 0
    embeds: Embeds | None = None
    encoder: EncoderStates | None = None
    decoder_ids: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """The number of tokens; in text mode only the runtime can count, so at least one."""
        return len(self.ids) or self.counted or 1


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The markers around a model's reasoning, and the IDs of the end marker; none in text mode.

    ``closing`` ends reasoning early.
    """

    open: str
    close: str
    close_ids: tuple[int, ...] = ()
    closing_ids: tuple[int, ...] = ()

    @property
    def closing(self) -> str:
        """The end marker as trained models write it."""
        return f"\n{self.close}\n\n"

    @property
    def pair(self) -> tuple[str, str]:
        """The begin and end markers."""
        return self.open, self.close


@dataclass(frozen=True, slots=True)
class PromptHeader:
    """The parts of a prompt beside the conversation.

    The answer begins with ``opening``, and without reasoning if it is ``thoughtless``. With
    ``images`` the messages may show images. Without ``answer`` there is no header of an answer: the
    prompt is the common prefix of conversations that begin like this one. With ``prefill`` the
    answer continues the last message, the assistant's: the prompt ends with its text.
    """

    answer: bool = True
    tools: Sequence[JsonObject] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    opening: str = ""
    thoughtless: bool = False
    images: bool = False
    prefill: bool = False


class Renderer:
    """Renders for one model folder.

    In text mode, methods that need token IDs raise ``UnsupportedParameter``. Methods that take a
    text and the length of the context raise ``ContextOverflow`` if the text is hopelessly long.

    Raises ``ConfigError``: the tokenizer or the template of the folder cannot be read.
    """

    def __init__(self, folder: ModelFolder, now: Clock = local_time) -> None:
        self._tokenizer_file = file = folder.tokenizer_file
        self._vocabulary: Vocabulary | None = None
        self.tokenizer = None if file is None else Tokenizer(file)
        self._longest = CHARS_PER_TOKEN if self.tokenizer is None else self.tokenizer.longest
        self._template = ChatTemplate(folder, now, self._longest)
        self._shield = ControlTokenGuard(
            self._template.markers if self.tokenizer is None else self.tokenizer.control
        )
        self._eyes = ImagePlaceholders(folder.settings.vision, self._shield.markers)
        self.thinking = folder.settings.thinking
        self.marks = self._marks()
        self._form = folder.settings.tool_format
        self.hidden_size = folder.settings.hidden_size
        self.cross_attention = folder.settings.cross_attention

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary's size; None in text mode, where only the runtime knows it."""
        return None if self.tokenizer is None else self.tokenizer.vocab_size

    def chat(
        self,
        messages: Sequence[Message],
        context_len: int = CONTEXT_MAX,
        header: PromptHeader | None = None,
    ) -> Prompt:
        """Render a conversation. Markers inside messages and tools stay text.

        Raises ``RequestError``: the template refuses the messages, or leaves a prefill out.
        """
        header = header or PromptHeader()
        if len(messages) >= context_len:  # each has a token at least
            raise ContextOverflow(len(messages), context_len, at_least=True)
        typed: list[str] = []
        images = images_of(messages)
        shield = self._eyes.shield if images else self._shield
        marks = None if self.marks is None else self.marks.pair
        with_history = with_thoughts(messages, self.thinking.history, marks, prefill=header.prefill)
        hidden = [shield.hide(message, typed) for message in with_history]
        if images:
            numbers = self._eyes.numbers(images, answered=header.images)
            hidden = [with_stand_ins(message, numbers) for message in hidden]
        if header.prefill:
            # The text behind it, such as the end of the turn, is no part of the prompt.
            hidden[-1] = {**hidden[-1], "content": f"{hidden[-1]['content']}{LEFT_OFF}"}
        rendered = self._template.render(
            hidden,
            context_len,
            answer=header.answer and not header.prefill,
            tools=[shield.hide(tool, typed) for tool in header.tools],
            variables=shield.hide(dict(header.variables), typed),
        )
        begun = str(messages[-1]["content"]) if header.prefill else ""
        rendered, thinks = self._opened(_left_off(rendered, header), header, begun)
        parts = pieces(rendered, typed)
        if images:
            prompt = self._with_images(parts, context_len)
        elif self.tokenizer is None:
            prompt = _as_text("".join(map(_unmarked, parts)), "messages")
        else:
            joined = self._joined(self.tokenizer, parts, context_len, "messages")
            prompt = _as_ids(joined, "messages")
        return replace(prompt, thinks=thinks)

    def _with_images(self, parts: Iterable[PromptSegment], context_len: int) -> Prompt:
        """Return a prompt with images as the runtime takes it: text with placeholders."""
        text, order = self._eyes.placed(parts, _unmarked)
        words = self._eyes.words(text)
        counted = self._eyes.tokens * len(order)
        if self.tokenizer is not None:
            counted += len(_encoded(self.tokenizer, words, context_len, "messages"))
        return replace(_as_text(text, "messages"), images=order, counted=counted)

    def image_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the IDs of a prompt with images.

        The ID of the image tag is repeated for each token of an image; if the tag is no single
        token, images have no IDs. Raises ``UnsupportedParameter``: in text mode.
        """
        tokenizer, text = self._needed("messages"), prompt.text or ""
        tag = tokenizer.encode(self._eyes.tag, add_special_tokens=False)
        if len(tag) != 1:
            return tokenizer.encode(self._eyes.words(text), add_special_tokens=False)
        ids = tokenizer.encode(self._eyes.spelled(text), add_special_tokens=False)
        times = {tag[0]: self._eyes.tokens}
        return tuple(one for one in ids for _ in range(times.get(one, 1)))

    def facts(self) -> JsonObject:
        """Return the effective values of tokenizer_config.json; None for missing ones."""
        tokenizer = self._needed("model")
        return {
            "chat_template": self._template.source or None,
            "vocab_size": tokenizer.vocab_size,
            **{name: text or None for name, text in self._template.tokens.items()},
        }

    def form(self) -> type[ToolCallParser]:
        """Return the form in which the model calls tools.

        Raises:
            UnsupportedParameter: its template has no tools, or its tool call format is unknown.
        """
        source = self._template.tool_source
        if "tools" not in source:  # a template that does not mention tools cannot show them
            raise UnsupportedParameter(
                "Unsupported parameter: the chat template of this model knows no tools.", "tools"
            )
        name = self._form or guess(source)
        if name is None:
            raise UnsupportedParameter(
                "Unsupported parameter: how this model calls tools is not known. Its operator can "
                "set 'tool_format' in the rkserve.yaml of its folder.",
                "tools",
            )
        return FORMATS[name]

    def _opened(self, rendered: str, header: PromptHeader, prefill: str = "") -> tuple[str, bool]:
        """Begin the answer; return the prompt, and whether it ends inside the reasoning."""
        marks = self.marks
        thinks = marks is not None and header.answer and rendered.rstrip().endswith(marks.open)
        if marks is not None and prefill:
            _, begun, rest = prefill.rpartition(marks.open)
            thinks = bool(begun) and marks.close not in rest
        if marks is not None and thinks and header.thoughtless:
            return f"{rendered.rstrip()}{marks.closing}{header.opening}", False
        return rendered + header.opening, thinks

    def _marks(self) -> ReasoningMarkers | None:
        """Return the reasoning markers, None if there are none or none are needed."""
        if not self.thinking.separate:
            return None
        begin, end = self.thinking.marks or _USUAL_MARKS
        known = frozenset() if self.tokenizer is None else self.tokenizer.added
        source = self._template.source
        guessed = begin in source or end in source or known.issuperset((begin, end))
        if self.thinking.marks is None and not guessed:
            return None
        if self.tokenizer is None:
            return ReasoningMarkers(begin, end)
        marks = ReasoningMarkers(begin, end, self.tokenizer.encode(end, add_special_tokens=False))
        closing = self.tokenizer.encode(marks.closing, add_special_tokens=False)
        return replace(marks, closing_ids=closing)

    def text(
        self, prompt: TextOrIds, path: str = "prompt", context_len: int = CONTEXT_MAX
    ) -> Prompt:
        """Take a raw prompt unchanged: control tokens in it are intended.

        Raises:
            RequestError: an ID out of the vocabulary, or an empty prompt; ``path`` names it.
        """
        if isinstance(prompt, tuple):
            return self._given_ids(prompt, path)
        hold_to_context(len(prompt), context_len, "prompt", self._longest)
        if self.tokenizer is None:
            return _as_text(prompt, path)
        return _as_ids(_encoded(self.tokenizer, prompt, context_len, "prompt", special=True), path)

    def text_beginning(self, prompt: str, path: str, context_len: int) -> Prompt:
        """Take a raw prompt, or a prefix of it that has more tokens than the context.

        Raises ``RequestError``: the prompt is empty.
        """
        tokenizer = self._needed(path)
        cut, _ = tokenizer.beginning(prompt[: context_len * self._longest], context_len + 1)
        return _as_ids(tokenizer.encode(cut, add_special_tokens=True), path)

    def words(self, text: str, context_len: int = CONTEXT_MAX) -> tuple[int, ...]:
        """Return the IDs of text that is put into an answer. Markers in it stay text."""
        tokenizer = self._needed("text")
        hold_to_context(len(text), context_len, "text", self._longest)
        typed: list[str] = []
        parts = pieces(self._shield.hide(text, typed), typed)
        return self._joined(tokenizer, parts, context_len, "text")

    def needs_ids(self, param: str) -> None:
        """Raise ``UnsupportedParameter`` in text mode."""
        self._needed(param)

    def vocabulary(self, param: str = "logprobs") -> Vocabulary:
        """Return the texts of token IDs; the first call takes some tenths of a second.

        Raises ``UnsupportedParameter``: in text mode, and where the tokenizer's way of writing
        bytes is not known.
        """
        if self._vocabulary is None:
            self._needed(param)
            assert self._tokenizer_file is not None
            try:
                self._vocabulary = read_vocabulary(self._tokenizer_file)
            except ConfigError as exc:
                raise UnsupportedParameter(
                    "Unsupported parameter: what the tokens of this model say is not known: its "
                    "tokenizer.json writes bytes in another way than those that rkserve reads.",
                    param,
                ) from exc
        return self._vocabulary

    def counted(
        self, text: str, *, special: bool, context_len: int = CONTEXT_MAX
    ) -> tuple[int, ...]:
        """Return the IDs of a text, which may be several times as long as the context.

        Control tokens in it are control tokens. ``special`` lets the tokenizer add what it adds to
        a whole text. Raises ``RequestError``: it is far longer.
        """
        if len(text) > (most := COUNTED_CHARS_PER_POSITION * context_len):
            raise RequestError(
                f"The text has {len(text)} characters; at most {most} are tokenized at once, "
                f"{COUNTED_CHARS_PER_POSITION} for each position of the model's context.",
                "prompt",
            )
        return self._needed("prompt").encode(text, add_special_tokens=special)

    def strings(self, ids: tuple[int, ...]) -> list[str]:
        """Return the vocabulary's spelling of each token. Raises ``UnsupportedParameter``."""
        return self._needed("return_token_strs").strings(ids)

    def whole_text(self, ids: tuple[int, ...], path: str, context_len: int = CONTEXT_MAX) -> str:
        """Return the text of token IDs; control tokens are written by name.

        Raises ``RequestError``: an ID out of the vocabulary, or far more IDs than the context has.
        """
        tokenizer = self._needed(path)
        if len(ids) > (most := COUNTED_CHARS_PER_POSITION * context_len):
            raise RequestError(f"Invalid '{path}': {len(ids)} ids, of {most} at most.", path)
        tokenizer.check(ids, path)
        return tokenizer.whole_text(ids)

    def check_id(self, token_id: int, path: str) -> None:
        """Check a token ID against the vocabulary.
        Raises ``RequestError``: it is out of the vocabulary.
        """
        self._needed(path).check_one(token_id, path)

    def given(self, ids: tuple[int, ...], path: str) -> str:
        """Check token IDs that a client puts into an answer, and return their text.

        Raises ``RequestError``: an ID out of the vocabulary.
        """
        tokenizer = self._needed(path)
        tokenizer.check(ids, path)
        return tokenizer.text(ids)

    def tool_turn(self, result: str, context_len: int = CONTEXT_MAX) -> tuple[int, ...]:
        """Return the text that follows an assistant's turn which has just called a tool.

        It comes from the model's own template: the end of the turn, the tool's result and the
        header of a new assistant turn. Markers in the result stay text. Raises ``RequestError``:
        the template has no such turn, or refuses it.
        """
        tokenizer = self._needed("text")
        if _PROBE not in self._after_call(_PROBE, context_len):
            raise RequestError(
                "The model's chat template knows no results of tools. Send what is to follow as "
                "'token_ids'.",
                _TOOL_PARAM,
            )
        typed: list[str] = []
        turn = self._after_call(self._shield.hide(result, typed), context_len)
        return self._joined(tokenizer, pieces(turn, typed), context_len, "text")

    def _after_call(self, result: str, context_len: int) -> str:
        """Return the template's text after a truncated turn."""
        conversation = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": LEFT_OFF},
            {"role": "tool", "content": result, "tool_call_id": _PROBE},
        ]
        try:
            rendered = self._template.render(conversation, context_len)
        except ContextOverflow as exc:
            raise ContextOverflow(exc.prompt_tokens, context_len, "text", exc.at_least) from exc
        except RequestError as exc:
            raise RequestError(exc.message, _TOOL_PARAM) from exc
        return rendered.partition(LEFT_OFF)[2]

    def _needed(self, path: str) -> Tokenizer:
        if self.tokenizer is None:
            raise UnsupportedParameter(
                f"Unsupported parameter: '{path}' needs a tokenizer, and this model is served "
                "without one.",
                path,
            )
        return self.tokenizer

    @staticmethod
    def _joined(
        tokenizer: Tokenizer, parts: Iterable[PromptSegment], context_len: int, param: str
    ) -> tuple[int, ...]:
        """Return the ids of a prompt's pieces. Raises ``ContextOverflow`` once they are too many
        and the rest is long.
        """
        ids: list[int] = []
        for part in parts:
            if part.typed:
                ids += tokenizer.literal(part.text)
            else:
                ids += _encoded(tokenizer, part.text, context_len, param, before=len(ids))
        return tuple(ids)

    def _given_ids(self, ids: tuple[int, ...], path: str) -> Prompt:
        if self.tokenizer is None:
            raise UnsupportedParameter(
                "Unsupported prompt: this model is served without a tokenizer, so it takes text "
                "and no token ids.",
                path,
            )
        self.tokenizer.check(ids, path)
        return _as_ids(ids, path)


def _left_off(rendered: str, header: PromptHeader) -> str:
    """Return a rendered conversation up to the end of a prefill's text.

    Raises ``RequestError``: the template does not show it.
    """
    if not header.prefill:
        return rendered
    prompt, found, _ = rendered.rpartition(LEFT_OFF)
    if not found:
        raise RequestError(
            "The model's chat template does not show the text of a final assistant message, so "
            "no answer can continue it.",
            "messages",
        )
    return prompt


def _encoded(
    tokenizer: Tokenizer,
    text: str,
    context_len: int,
    param: str,
    *,
    special: bool = False,
    before: int = 0,
) -> tuple[int, ...]:
    """Return the ids of a text that follows ``before`` others.

    Raises:
        ContextOverflow: the text is long, and found not to fit before all of it was tokenized.
    """
    room = context_len - before
    _, found = tokenizer.beginning(text, room)
    if found and found >= room:
        raise ContextOverflow(before + found, context_len, param, at_least=True)
    return tokenizer.encode(text, add_special_tokens=special)


def _unmarked(part: PromptSegment) -> str:
    """Return a text whose markers are not control tokens."""
    return part.text[:1] + _ZERO_WIDTH_SPACE + part.text[1:] if part.typed else part.text


def _as_text(text: str, path: str) -> Prompt:
    if "\0" in text:
        # The runtime takes a C string: text after the NUL would be lost silently.
        raise RequestError(f"Invalid '{path}': this model cannot read a NUL character.", path)
    return Prompt((), text)


def _as_ids(ids: tuple[int, ...], path: str) -> Prompt:
    if not ids:
        raise RequestError(f"Invalid '{path}': it has no tokens.", path)
    return Prompt(ids)

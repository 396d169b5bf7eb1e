"""OpenAI's /v1/embeddings: the reader, the requests to boards, and the answer."""

from __future__ import annotations

import base64
import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Annotated, Literal

from pydantic import Field, SkipValidation
from typing_extensions import TypedDict

from rkserve.api.common.calls import TextOrIds, read_prompt
from rkserve.api.common.parameters import ModelName, Nonempty, NonemptyIds, Scheduling
from rkserve.api.common.renderer import Prompt, Renderer
from rkserve.api.common.version_policy import ResolvedModel
from rkserve.api.json.fields import MAX_DIMENSIONS, MAX_INPUTS, Fields, parse_object, wrong_type
from rkserve.api.json.schemas import Count
from rkserve.api.parsing import sampling
from rkserve.core.errors import ContextOverflow, InputTooLong, RequestError, UnsupportedParameter
from rkserve.core.messages import EmbedRequest
from rkserve.core.run_params import Pooling
from rkserve.models.settings import EmbeddingSettings

# A board runs one request at a time: a chunk should not take much longer than a long prompt does,
# and is repeated as a whole if the board is lost.
CHUNK_INPUTS = 16
CHUNK_TOKENS = 2048
BASE64 = "base64"

_REFUSED: dict[str, sampling.Harmless] = dict.fromkeys(
    ("truncate_prompt_tokens", "prompt_embeds", "messages"), sampling.never
)
_NOT_POOLED: dict[str, sampling.Harmless] = {
    "task": sampling.only("token_embed"),
    **{
        name: sampling.only(False)
        for name in ("normalize", "use_activation", "activation", "softmax", "dimensions")
    },
}


@dataclass(frozen=True, slots=True)
class VectorOptions:
    """Parameters of every embedding call.

    A lower ``priority`` goes first, and the request expires after ``timeout_s``; ``session`` keeps
    requests on one version of an adapter.
    """

    model: str
    session: str | None = None
    priority: int | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """A call for a vector of each text, or in /pooling for the hidden states of every token.

    With ``cut`` texts may be longer than the context.
    """

    wanted: VectorOptions
    inputs: tuple[TextOrIds, ...]
    paths: tuple[str, ...]  # of the inputs, as error messages name them
    as_base64: bool = False
    dimensions: int | None = None
    cut: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingChunk:
    """Some of the texts of a call, for one board: ``at`` holds their indexes among all."""

    at: tuple[int, ...]
    request: EmbedRequest


class PromptUsage(TypedDict):
    """The number of tokens of all texts."""

    prompt_tokens: Count
    total_tokens: Count


class TextUsage(PromptUsage):
    """The number of tokens of all texts; none is generated."""

    completion_tokens: Literal[0]


class EmbeddingVector(TypedDict):
    """The vector of a text; in base64, where that was asked for."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class EmbeddingsAnswer(TypedDict):
    """A vector for each text."""

    object: Literal["list"]
    data: list[EmbeddingVector]
    model: str
    usage: PromptUsage


class PooledText(TypedDict):
    """A row for each token of a text."""

    index: Count
    object: Literal["pooling"]
    data: list[list[float]] | str


class PooledAnswer(TypedDict):
    """The hidden states of texts."""

    id: str
    object: Literal["list"]
    created: Count
    model: str
    data: list[PooledText]
    usage: TextUsage


_Texts = SkipValidation[
    Nonempty
    | NonemptyIds
    | Annotated[list[Nonempty | NonemptyIds], Field(min_length=1, max_length=MAX_INPUTS)]
]


class VectorRequest(Scheduling):
    """Parameters of every embedding call."""

    model: ModelName = Field(description="A model or an adapter.")

    def options(self) -> VectorOptions:
        """Return the parameters."""
        return VectorOptions(model=self.model, **self.scheduling())


class TextsRequest(VectorRequest):
    """Texts, and the form of their numbers."""

    input: _Texts
    encoding_format: Literal["float", "base64"] = "float"

    def call(self, fields: Fields) -> EmbeddingCall:
        """Return the call; ``fields`` is the body. Raises ``RequestError``."""
        inputs, paths = read_inputs(fields, "input")
        sampling.refuse_unsupported(fields, _REFUSED)
        return EmbeddingCall(self.options(), inputs, paths, self.encoding_format == BASE64)


class EmbeddingsRequest(TextsRequest):
    """The body of POST /v1/embeddings."""

    dimensions: int | None = Field(None, ge=1, le=MAX_DIMENSIONS)


class PoolingRequest(TextsRequest):
    """The body of POST /pooling."""

    task: SkipValidation[Literal["token_embed"] | None] = None


def parse_embeddings(body: bytes) -> EmbeddingCall:
    """Read the body of POST /v1/embeddings. Raises ``RequestError``."""
    values = parse_object(body)
    asked = EmbeddingsRequest.read(values)
    return replace(asked.call(Fields(values)), dimensions=asked.dimensions)


def parse_pooling(body: bytes) -> EmbeddingCall:
    """Read the body of POST /pooling, in vLLM's form. Only its task ``token_embed`` is supported.

    Raises ``RequestError``.
    """
    values = parse_object(body)
    asked, fields = PoolingRequest.read(values), Fields(values)
    call = asked.call(fields)
    sampling.refuse_unsupported(fields, _NOT_POOLED)
    return call


def read_inputs(fields: Fields, name: str) -> tuple[tuple[TextOrIds, ...], tuple[str, ...]]:
    """Read one text or a list, each a string or a list of token IDs, and their paths."""
    value = fields.get(name)
    if isinstance(value, str):
        return (read_text(value, name),), (name,)
    if value is not None and not isinstance(value, list):
        raise wrong_type(name, "a string or an array", value)
    listed = fields.items(name)
    if not isinstance(listed[0], str | list):
        return (read_text(listed, name),), (name,)
    check_count(len(listed), name)
    paths = tuple(f"{name}[{index}]" for index in range(len(listed)))
    return tuple(read_text(one, path) for one, path in zip(listed, paths, strict=True)), paths


def check_count(count: int, path: str) -> None:
    """Check the number of texts of one call. Raises ``RequestError``."""
    if count > MAX_INPUTS:
        raise RequestError(
            f"Invalid '{path}': array too long. Expected at most {MAX_INPUTS} texts, but got "
            f"{count}.",
            path,
        )


def read_text(value: object, path: str) -> TextOrIds:
    """Read one text: a string or a list of token IDs, not empty."""
    return read_prompt(value, path, empty="")


def check_dimensions(wanted: int | None, settings: EmbeddingSettings) -> None:
    """Refuse to cut the vectors of a model that was not trained for it.

    Raises ``UnsupportedParameter``: its ``param`` is ``dimensions``.
    """
    if wanted is None or settings.matryoshka or wanted == settings.dimensions:
        return
    size = "" if settings.dimensions is None else f", which are {settings.dimensions}"
    raise UnsupportedParameter(
        f"Unsupported parameter: this model's vectors are of use with all of their dimensions"
        f"{size} only.",
        "dimensions",
    )


# -- to requests ----------------------------------------------------------------------------------


def texts_of(
    inputs: Iterable[TextOrIds],
    paths: Iterable[str],
    renderer: Renderer,
    context_len: int,
    *,
    cut: bool = False,
) -> list[Prompt]:
    """Return the texts as a board gets them; ``cut`` truncates those longer than the context.

    Raises:
        InputTooLong: one is longer than the context.
        RequestError: one cannot be read.
    """
    found = []
    for text, path in zip(inputs, paths, strict=True):
        if cut and renderer.tokenizer is not None:
            found.append(_beginning(text, path, renderer, context_len))
            continue
        try:
            prompt = renderer.text(text, path, context_len)
        except ContextOverflow as exc:
            raise InputTooLong(exc.prompt_tokens, context_len, path, exc.at_least) from None
        if len(prompt.ids) > context_len:
            raise InputTooLong(len(prompt.ids), context_len, path)
        found.append(prompt)
    return found


def _beginning(text: TextOrIds, path: str, renderer: Renderer, context_len: int) -> Prompt:
    """Return a text truncated to the context, with the tokenizer's closing tokens."""
    if isinstance(text, str):
        prompt = renderer.text_beginning(text, path, context_len)
    else:
        prompt = renderer.text(text[: context_len + 1], path, context_len)
    if len(prompt.ids) <= context_len:
        return prompt
    last = renderer.counted("", special=True)[-1:] if isinstance(text, str) else ()
    end = last if prompt.ids[-1:] == last else ()
    return replace(prompt, ids=(*prompt.ids[: context_len - len(end)], *end))


def chunks_of(
    texts: Sequence[Prompt],
    meant: ResolvedModel,
    settings: EmbeddingSettings,
    call_id: str,
    *,
    session: str = "",
    boards: int = 1,
    pooling: Pooling | None = None,
) -> list[EmbeddingChunk]:
    """Return the requests for all texts, so that each of ``boards`` boards has at least one.

    ``pooling`` overrides the settings; with all rows each text has a request of its own.
    """
    most = (
        1 if pooling is Pooling.ALL else min(CHUNK_INPUTS, math.ceil(len(texts) / max(1, boards)))
    )
    chunks = []
    for number, at in enumerate(_cut(texts, most)):
        taken = [texts[index] for index in at]
        request = EmbedRequest(
            request_id=f"{call_id}/{number}",
            model=meant.model,
            prompt_ids=(),
            max_tokens=0,
            adapter=meant.adapter,
            line=meant.line,
            session=session,
            min_epoch=meant.min_epoch,
            keep_version=meant.named,
            inputs=tuple(text.ids for text in taken if text.text is None),
            texts=tuple(text.text for text in taken if text.text is not None),
            pooling=pooling or Pooling(settings.pooling),
        )
        chunks.append(EmbeddingChunk(at, request))
    return chunks


def _cut(texts: Sequence[Prompt], most: int) -> Iterator[tuple[int, ...]]:
    """Yield groups of texts of similar length, by index: a board's requests then end together."""
    taken: list[int] = []
    tokens = 0
    for index in sorted(range(len(texts)), key=lambda at: len(texts[at].ids)):
        size = len(texts[index].ids)
        if taken and (len(taken) == most or tokens + size > CHUNK_TOKENS):
            yield tuple(taken)
            taken, tokens = [], 0
        taken.append(index)
        tokens += size
    if taken:
        yield tuple(taken)


# -- to an answer ---------------------------------------------------------------------------------


def finished_vector(vector: bytes, settings: EmbeddingSettings, wanted: int | None) -> array[float]:
    """Return a board's vector cut to ``wanted`` dimensions, with length one.

    Raises ``RequestError``: it does not have so many dimensions.
    """
    values = array("f")
    values.frombytes(vector)
    if wanted is not None and wanted > len(values):
        raise RequestError(
            f"Invalid 'dimensions': this model's vectors have {len(values)}, not {wanted}.",
            "dimensions",
        )
    if wanted is not None:
        del values[wanted:]
    if not settings.normalize:
        return values
    length = math.sqrt(sum(map(mul, values, values)))
    return array("f", [value / length for value in values]) if length > 0 else values


def embeddings_answer(
    call: EmbeddingCall,
    vectors: Iterable[array[float]],
    tokens: int,
    _took_s: float,
) -> bytes:
    """Return the body of the answer.

    It is joined vector by vector: one call of a JSON encoder would block all threads.
    """

    def shown(vector: array[float]) -> bytes:
        in_text = base64.b64encode(vector.tobytes()) if call.as_base64 else b""
        return b'"%b"' % in_text if call.as_base64 else written(vector)

    items = b",".join(
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, shown(vector))
        for index, vector in enumerate(vectors)
    )
    model = json.dumps(call.wanted.model).encode()
    usage = b'{"prompt_tokens":%d,"total_tokens":%d}' % (tokens, tokens)
    return b'{"object":"list","data":[%b],"model":%b,"usage":%b}' % (items, model, usage)


def pooling_answer(
    call: EmbeddingCall, found: Sequence[tuple[bytes, int]], answer_id: str, created: int
) -> bytes:
    """Return the body of an answer of /pooling; ``found`` are rows, and how many, of each text."""
    items = b",".join(
        b'{"index":%d,"object":"pooling","data":%b}' % (index, _rows_written(call, data, rows))
        for index, (data, rows) in enumerate(found)
    )
    head = {"id": answer_id, "object": "list", "created": created, "model": call.wanted.model}
    tokens = sum(rows for _, rows in found)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    return b'%b,"data":[%b],"usage":%b}' % (
        json.dumps(head).encode()[:-1],
        items,
        json.dumps(usage).encode(),
    )


def _rows_written(call: EmbeddingCall, data: bytes, rows: int) -> bytes:
    if call.as_base64:
        return b'"%b"' % base64.b64encode(data)
    values = array("f")
    values.frombytes(data)
    columns = len(values) // rows
    return b"[%b]" % b",".join(
        written(values[at : at + columns]) for at in range(0, len(values), columns)
    )


def written(vector: array[float]) -> bytes:
    """Return a vector as JSON."""
    # Nine digits distinguish all float32 values.
    return (f"[{','.join(['%.9g'] * len(vector))}]" % tuple(vector)).encode()


@dataclass(frozen=True, slots=True)
class EmbeddingDialect:
    """A dialect's embedding API: its reader, and its answer with the token count and seconds."""

    parse: Callable[[bytes], EmbeddingCall] = parse_embeddings
    answer: Callable[[EmbeddingCall, Iterable[array[float]], int, float], bytes] = embeddings_answer


OPENAI = EmbeddingDialect()

"""Calls and how they end as JSON: they come back as they were, and nothing else becomes one."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.core import errors
from rkserve.core.board_report import BoardState, VersionFigures
from rkserve.core.errors import BoardFailed, EngineDied, QueueFull, RequestError, RkserveError
from rkserve.core.messages import (
    AdapterRef,
    Bound,
    EmbedRequest,
    FailoverState,
    GenerateRequest,
    TokenOrigin,
    TranscriptToken,
)
from rkserve.core.run_params import Pooling, Sampling
from rkserve.transport import codec
from rkserve.transport.codec import MANY_IDS, MalformedMessage
from tests.support.boards.fake_boards import report
from tests.support.values.any_values import record_of

pytestmark = pytest.mark.slow

PLAIN = GenerateRequest("r/0", "m", (1, 2), 4)
REQUESTS = [
    pytest.param(PLAIN, id="a plain one"),
    pytest.param(replace(PLAIN, prompt_ids=tuple(range(9 * MANY_IDS))), id="a long prompt"),
    pytest.param(replace(PLAIN, prompt_ids=(2**31,) * MANY_IDS), id="ids that no token has"),
    pytest.param(replace(PLAIN, prompt_ids=(), prompt_text="\ud800 ü"), id="text mode"),
    pytest.param(
        replace(
            PLAIN,
            sampling=Sampling(temperature=0.25, top_k=3),
            sampling_asked=("top_k",),
            stop=("a", "b"),
            adapter=AdapterRef("style", "v2", "ab" * 32, 0.5),
            pause_on_ids=(7,),
            use_cache="c",
            session="s",
            min_epoch=4,
            patient=False,
        ),
        id="with everything that a client may say",
    ),
    pytest.param(
        replace(
            PLAIN,
            continued=FailoverState(
                slots=(
                    TranscriptToken(5, b"\x00\xff"),
                    TranscriptToken(6, b"", TokenOrigin.INJECTED),
                ),
                text="half",
                bound=Bound(((0, "default"),), None, 4),
                times=2,
                suspect=True,
            ),
        ),
        id="begun elsewhere",
    ),
]


def crossed(item: list[Any]) -> list[Any]:
    """An item after its way over the wire."""
    (found,) = codec.from_bytes(codec.to_bytes([item]))
    return found


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_comes_back_as_it_was(request_: GenerateRequest) -> None:
    item = crossed(codec.pack_request(3, request_))
    assert item[:2] == [3, codec.GENERATE]
    assert codec.unpack_request(item) == request_


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"inputs": ((1, 2), tuple(range(300)))}, id="ids"),
        pytest.param({"texts": ("a", "\ud800"), "pooling": Pooling.MEAN}, id="texts"),
    ],
)
def test_a_request_for_vectors_comes_back_as_it_was(asked: dict[str, Any]) -> None:
    request = EmbedRequest("e/0", "m", (), 0, session="s", **asked)
    item = crossed(codec.pack_request(3, request))
    assert item[:2] == [3, codec.EMBED]
    assert codec.unpack_request(item) == request


def test_the_ids_of_a_long_prompt_are_no_list_of_digits() -> None:
    item = codec.pack_request(3, replace(PLAIN, prompt_ids=tuple(range(100_000))))
    assert len(codec.to_bytes([item])) < 6 * 100_000


def test_a_report_comes_back_as_it_was() -> None:
    one = report(
        "sim-0",
        state=BoardState.FAILED,
        reason="SIGSEGV",
        adapters=("a@1", "b@2"),
        versions=(VersionFigures("default", 3),),
        holdings=bytes(range(256)),
    )
    item = crossed(codec.pack_answer(3, "report", one))
    assert item[:2] == [3, codec.ANSWERED]
    assert codec.unpack_answer(item, "report") == one


@pytest.mark.parametrize("method", codec.METHODS)
@given(data=st.data())
def test_whatever_is_told_and_answered_survives(method: str, data: st.DataObject) -> None:
    kinds, answer = codec.METHODS[method]
    args = [data.draw(record_of(kind)) for kind in kinds]
    name, found = codec.unpack_call(crossed(codec.pack_call(3, method, args)))
    assert (name, found) == (method, args)
    said = data.draw(record_of(answer))
    item = crossed(codec.pack_answer(3, method, said))
    assert codec.unpack_answer(item, method) == said


def test_what_is_no_answer_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="not an answer to 'report'"):
        codec.unpack_answer([3, 0, "x", [1]], "report")


ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, RkserveError)
]
_VALUES = {"int": 3, "float": 1.5, "bool": True, "str": "x", "tuple[str,": ("x", "y")}


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_of_ours_comes_back_as_it_was(kind: type[RkserveError]) -> None:
    parameters = inspect.signature(kind.__init__).parameters.values()
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD  # those of classes without any are not
    names = [one for one in parameters if one.kind is plain and one.name != "self"]
    values = [_VALUES[str(one.annotation).partition(" ")[0]] for one in names]
    exc = kind() if not values and "__init__" in vars(kind) else kind(*values or ("It broke.",))
    found = codec.unpack_error(crossed(codec.pack_error(3, exc)), "sim-0")
    assert type(found) is kind
    assert found.args == exc.args
    assert str(found) == str(exc)


@pytest.mark.parametrize(
    "item",
    [
        pytest.param([1, -1], id="without a name"),
        pytest.param([1, -1, "SystemExit"], id="an exception of another kind"),
        pytest.param([1, -1, "os.system", "ls"], id="a function"),
        pytest.param([1, -1, ["QueueFull"], 1, 2], id="a list for a name"),
        pytest.param([1, -1, "QueueFull", 1], id="too few arguments"),
    ],
)
def test_what_is_no_error_of_ours_is_refused(item: list[Any]) -> None:
    with pytest.raises(MalformedMessage):
        codec.unpack_error(item, "sim-0")


@pytest.mark.parametrize(
    "item",
    [
        pytest.param([1, 0], id="nothing"),
        pytest.param([1, 0, "r", "m", "not base64!", 4], id="ids that are none"),
        pytest.param([1, 0, "r", "m", "YQ==", 4], id="half an id"),
        pytest.param([1, 0, "r", "m", 7, 4], id="a number for a list"),
    ],
)
def test_what_is_no_request_is_refused(item: list[Any]) -> None:
    with pytest.raises(MalformedMessage):
        codec.unpack_request(item)


class Foreign(RkserveError):
    """An error of somebody else's."""


@pytest.mark.parametrize(
    "exc",
    [
        pytest.param(Foreign("x"), id="of another module"),
        pytest.param(BoardFailed("sim-0", {"no": "text"}), id="no plain value"),  # type: ignore[arg-type] # on purpose
    ],
)
def test_an_error_without_a_form_is_a_bug_here(exc: RkserveError) -> None:
    with pytest.raises(TypeError, match="no form"):
        codec.pack_error(3, exc)


def test_kinds_of_board_failures_stay_apart() -> None:
    for exc in (EngineDied("sim-0", "SIGSEGV"), QueueFull(3, 2), RequestError("No.", "n")):
        assert type(codec.unpack_error(codec.pack_error(1, exc), "sim-0")) is type(exc)

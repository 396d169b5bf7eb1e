"""Tools in a body: what is read, what is refused and by which name, and what templates show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.api.common import output
from rkserve.api.common.answer import AnswerOrigin
from rkserve.api.common.calls import ChatCall, parse_chat
from rkserve.api.common.plan import plan, reading
from rkserve.api.common.renderer import Renderer
from rkserve.api.common.version_policy import ResolvedModel
from rkserve.api.json.fields import MAX_TOOL_NAME_CHARS, MAX_TOOLS, JsonText
from rkserve.api.openai.answers import ChatAnswer
from rkserve.api.parsing.answer_parser import AnswerParser, ParserOptions
from rkserve.api.parsing.tool_choice import NO_TOOLS
from rkserve.api.parsing.tools.formats import FORMATS
from rkserve.core.errors import RequestError, RkserveError, UnsupportedParameter
from rkserve.core.messages import Delta, FinishReason, GenerateRequest, Thinking
from rkserve.core.run_params import Sampling
from rkserve.models.folder import ModelFolder, open_model_folder
from rkserve.models.settings import FolderSettings
from tests.api.openai.test_answers import STAMP, chunks, client_of, finished, streaming, whole
from tests.support.http.tool_talk import TIME, WEATHER, function
from tests.support.paths import PROJECT
from tests.support.values.wire_folders import CHATML, make_folder, read_back
from tests.support.values.wire_json import JSON

HELLO = [{"role": "user", "content": "Hello"}]
NAMED = {"type": "function", "function": {"name": "get_time"}}
BARE = {"type": "object", "properties": {}}


def chat(**keys: Any) -> ChatCall:
    return parse_chat(json.dumps({"model": "m", "messages": HELLO, **keys}).encode())


def planned(folder: ModelFolder, **keys: Any) -> GenerateRequest:
    (request,) = plan(
        chat(**keys),
        ResolvedModel("m"),
        Renderer(folder),
        defaults=Sampling(),
        context_len=4096,
        completion="c",
    )
    return request


def sim_template() -> str:
    """The chat template of the simulated model."""
    folder = PROJECT / "models" / "sim-chat"
    found: str = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    return found


# --- what is read ---


@pytest.mark.parametrize(
    ("keys", "forced", "named", "parallel", "legacy"),
    [
        ({"tools": [WEATHER, TIME]}, False, None, True, False),
        ({"tools": [WEATHER, TIME], "tool_choice": "auto"}, False, None, True, False),
        ({"tools": [WEATHER, TIME], "tool_choice": "required"}, True, None, True, False),
        ({"tools": [WEATHER, TIME], "tool_choice": NAMED}, True, "get_time", True, False),
        ({"tools": [WEATHER, TIME], "parallel_tool_calls": False}, False, None, False, False),
        ({"functions": [WEATHER["function"], TIME["function"]]}, False, None, False, True),
        (
            {
                "functions": [WEATHER["function"], TIME["function"]],
                "function_call": {"name": "get_time"},
            },
            True,
            "get_time",
            False,
            True,
        ),
    ],
    ids=["alone", "auto", "required", "named", "one at a time", "functions", "a function"],
)
def test_tools_are_read(
    keys: dict[str, Any], forced: bool, named: str | None, parallel: bool, legacy: bool
) -> None:
    tools = chat(**keys).tools
    assert tools.given == (WEATHER, TIME)
    assert tools.names == {"get_weather", "get_time"}
    assert (tools.forced, tools.named, tools.parallel, tools.legacy) == (
        forced,
        named,
        parallel,
        legacy,
    )


def allowing(mode: str | None, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(("mode", "forced"), [("auto", False), ("required", True)])
def test_of_the_tools_only_those_that_are_allowed_are_offered(mode: str, forced: bool) -> None:
    tools = chat(tools=[WEATHER, TIME], tool_choice=allowing(mode, "get_time", "get_time")).tools
    assert (tools.given, tools.forced, tools.named) == ((TIME,), forced, None)
    # In their order, whatever the order in which they are allowed.
    both = chat(tools=[WEATHER, TIME], tool_choice=allowing(mode, "get_time", "get_weather")).tools
    assert both.given == (WEATHER, TIME)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ({"type": "allowed_tools", "allowed_tools": 5}, "tool_choice.allowed_tools"),
        (allowing(None, "get_time"), "tool_choice.allowed_tools.mode"),
        (allowing("none", "get_time"), "tool_choice.allowed_tools.mode"),
        (allowing("auto"), "tool_choice.allowed_tools.tools"),
        (allowing("auto", "f"), "tool_choice.allowed_tools.tools[0].function.name"),
        (allowing("auto", *["get_time"] * 129), "tool_choice"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "x"}]}},
            "tool_choice.allowed_tools.tools[0].type",
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function"}]},
            },
            "tool_choice.allowed_tools.tools[0].function",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_with_allowed_tools_is_named(choice: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(tools=[WEATHER, TIME], tool_choice=choice)
    assert caught.value.param == param


def test_a_tool_has_what_templates_take_for_granted() -> None:
    given = {"type": "function", "function": {"name": "f", "strict": True, "x": 1}}
    assert chat(tools=[given]).tools.given == (
        {"type": "function", "function": {"name": "f", "parameters": BARE}},
    )


@pytest.mark.parametrize(
    "keys",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tools": [WEATHER], "tool_choice": "none"},
        {"functions": [WEATHER["function"]], "function_call": "none"},
        {"functions": []},
    ],
    ids=str,
)
def test_nothing_is_offered(keys: dict[str, Any]) -> None:
    assert chat(**keys).tools == NO_TOOLS


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": "get_weather"}, "tools"),
        ({"tools": [WEATHER] * (MAX_TOOLS + 1)}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [WEATHER, {"type": "web_search"}]}, "tools[1].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a\n"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": 'a"'}}]}, "tools[0].function.name"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "x" * (MAX_TOOL_NAME_CHARS + 1)}}
                ]
            },
            "tools[0].function.name",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]},
            "tools[0].function.description",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
            "tools[0].function.strict",
        ),
        # Also where none of them may be called.
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, "tools[0].function"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": 5}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [WEATHER], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"functions": [{}]}, "functions[0].name"),
        (
            {"functions": [{"name": "f"}], "function_call": {"name": "g"}},
            "function_call.name",
        ),
        ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_tools_are_named(keys: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**keys)
    assert caught.value.param == param
    assert len(caught.value.message) < 500


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    template = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}" + CHATML
    return Renderer(make_folder(tmp_path_factory.mktemp("folders") / "tiny", template=template))


@given(
    tools=st.lists(
        st.fixed_dictionaries(
            {"type": st.just("function")},
            optional={
                "function": st.fixed_dictionaries(
                    {"name": st.sampled_from(["f", "get_time", "a b", "<|im_end|>"])},
                    optional={"parameters": JSON, "description": st.text()},
                )
                | JSON
            },
        ),
        max_size=3,
    ),
    choice=st.sampled_from(["auto", "none", "required", NAMED]) | JSON,
    kwargs=JSON,
)
def test_no_tools_raise_anything_but_a_request_error_up_to_the_plan(
    renderer: Renderer, tools: list[Any], choice: Any, kwargs: Any
) -> None:
    caught: list[RkserveError] = []
    body = {"tools": tools, "tool_choice": choice, "chat_template_kwargs": kwargs}
    try:
        plan(
            chat(**body),
            ResolvedModel("m"),
            renderer,
            defaults=Sampling(),
            context_len=4096,
            completion="chatcmpl-1",
        )
    except RkserveError as exc:
        caught.append(exc)
    assert {exc.http_status for exc in caught} <= {400}


# --- what models are shown ---


def test_the_template_decides_whether_tools_can_be_offered(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedParameter, match="knows no tools") as caught:
        planned(make_folder(tmp_path / "a"), tools=[WEATHER])
    assert caught.value.param == "tools"
    shown = make_folder(tmp_path / "b", template="{{ tools | tojson }}{{ messages[0].content }}")
    with pytest.raises(UnsupportedParameter, match="tool_format"):
        planned(shown, tools=[WEATHER])
    said = make_folder(
        tmp_path / "c",
        template="{{ tools | tojson }}{{ messages[0].content }}",
        settings="tool_format: llama",
    )
    text = read_back(said, planned(said, tools=[WEATHER]).prompt_ids)
    assert text == f"{json.dumps([WEATHER])}Hello"


@pytest.mark.parametrize("separate", [False, True], ids=["in the config", "a file of its own"])
def test_a_template_of_its_own_shows_the_tools(tmp_path: Path, separate: bool) -> None:
    """Where the folder has one; other conversations have the plain one."""
    plain = "Plain: {{ messages[0].content }}"
    shows = "{{ tools[0].function.name }}<tool_call>{{ messages[0].content }}"
    path = tmp_path / "m"
    make_folder(path, template=None)
    named = [{"name": "default", "template": plain}]
    if separate:
        (path / "additional_chat_templates").mkdir()
        (path / "additional_chat_templates" / "tool_use.jinja").write_text(shows)
    else:
        named.append({"name": "tool_use", "template": shows})
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    folder = open_model_folder(path)
    assert read_back(folder, planned(folder).prompt_ids) == "Plain: Hello"
    shown = read_back(folder, planned(folder, tools=[TIME]).prompt_ids)
    assert shown == "get_time<tool_call>Hello"
    assert Renderer(folder).form() is FORMATS["hermes"]


def test_a_demanded_call_begins_in_the_prompt(tmp_path: Path) -> None:
    folder = make_folder(
        tmp_path / "m",
        template="{{ tools | tojson }}{{ messages[0].content + '\\n' }}",
        settings="tool_format: hermes",
    )
    keys = {"tools": [WEATHER, TIME], "tool_choice": NAMED}
    request = planned(folder, **keys)
    opening = '<tool_call>\n{"name": "get_time", "arguments":'
    assert read_back(folder, request.prompt_ids).endswith(f"Hello\n{opening}")
    assert request.thinking is None
    assert reading(chat(**keys), Renderer(folder), request).opening == opening


def test_a_demanded_call_ends_thoughts_that_the_template_has_begun(tmp_path: Path) -> None:
    folder = make_folder(
        tmp_path / "m",
        template="{{ tools | tojson }}{{ messages[0].content + '<think>\\n' }}",
        settings="tool_format: llama",
    )
    request = planned(folder, tools=[WEATHER], tool_choice="required")
    text = read_back(folder, request.prompt_ids)
    assert text.endswith('Hello<think>\n</think>\n\n{"name":')


def test_arguments_are_printed_as_they_came(tmp_path: Path) -> None:
    """Also within a larger value; a change of a blank would compute the conversation again."""
    folder = make_folder(tmp_path / "m", template=CHATML)
    arguments = '{"city":"Oslo",  "n": 1.0}'
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    history = [*HELLO, {"role": "assistant", "tool_calls": [call, call]}]
    text = read_back(folder, planned(folder, messages=history).prompt_ids)
    assert text.count(f'{{"name": "f", "arguments": {arguments}}}') == 2
    again = make_folder(
        tmp_path / "n",
        template="{{ messages[1].tool_calls[0].function.arguments | tojson(indent=1) }}"
        "{{ messages[1].tool_calls[0].function.arguments.city }}",
    )
    text = read_back(again, planned(again, messages=history).prompt_ids)
    assert text == '{\n "city": "Oslo",\n "n": 1.0\n}Oslo'


@pytest.mark.parametrize(
    "said",
    [
        '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>',
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {"zone":"UTC" ,"n":1.50}}\n</tool_call>',
        'Wait.\n<tool_call>\n{"name": "get_time", "arguments": {"z": "\\u00e9é<b>"}}\n</tool_call>',
        'Wait. \n\n<tool_call>\n{"name": "get_time", "arguments": {"a": [1,\n2]}}\n</tool_call>',
        "\n Nothing to call.\n",
    ],
    ids=["one", "two, compact", "behind words", "behind an empty line", "none"],
)
@pytest.mark.parametrize("own", [False, True], ids=["built in", "the model's own"])
def test_what_a_model_said_is_rendered_as_it_said_it(tmp_path: Path, said: str, own: bool) -> None:
    """A client sends back what it got, and that has to be what the KV cache holds."""
    folder = make_folder(
        tmp_path / "m",
        template=sim_template() if own else None,
        settings="" if own else "chat_template: chatml",
    )
    tools = {"tools": [TIME]}
    request = planned(folder, **tools)
    speech = AnswerParser(reading(chat(**tools), Renderer(folder), request))
    speech.feed(Delta(said, (1,)))
    speech.end()
    calls = [
        {"id": one.call_id, "function": {"name": one.name, "arguments": one.arguments}}
        for one in speech.calls
    ]
    turn = {"role": "assistant", "content": speech.words or None}
    history = [*HELLO, {**turn, **({"tool_calls": calls} if calls else {})}, *HELLO]
    text = read_back(folder, planned(folder, messages=history, **tools).prompt_ids)
    before = read_back(folder, request.prompt_ids)
    assert text.startswith(f"{before}{said}<|im_end|>\n")


def test_arguments_hide_no_control_tokens(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", template=CHATML)
    renderer = Renderer(folder)
    assert renderer.tokenizer is not None
    (end,) = renderer.tokenizer.encode("<|im_end|>", add_special_tokens=False)

    def ends(value: str) -> int:
        call = {"id": "c", "function": {"name": "f", "arguments": json.dumps({"a": value})}}
        history = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
        return planned(folder, messages=history).prompt_ids.count(end)

    assert ends("<|im_end|>") == ends("x")
    assert ends("\ufdd30\ufdd3") == ends("x"), "nor a template's own stand-ins"


def test_the_text_of_an_object_is_no_part_of_its_value() -> None:
    assert JsonText({"a": 1}, '{"a":1}') == {"a": 1}


def test_text_mode_shows_tools_by_its_built_in_template(tmp_path: Path) -> None:
    folder = make_folder(
        tmp_path / "m", tokenizer=False, template=None, settings="chat_template: chatml"
    )
    call = {"id": "c", "function": {"name": "get_time", "arguments": "{}"}}
    history = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
        {"role": "tool", "tool_call_id": "c", "content": "late"},
    ]
    request = planned(folder, messages=history, tools=[TIME], tool_choice="required")
    text = request.prompt_text
    assert text is not None
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
    assert f"<tools>\n{json.dumps(TIME)}\n</tools>" in text
    assert text.endswith(
        "<|im_start|>user\nHello<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nnoon\n</tool_response>\n"
        "<tool_response>\nlate\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name":'
    )


def test_built_in_templates_write_what_the_models_own_would(tmp_path: Path) -> None:
    """The simulated model's template is that of Qwen2.5, with one switch for thinking."""
    own = Renderer(make_folder(tmp_path / "own", template=None, settings="chat_template: chatml"))
    theirs = Renderer(make_folder(tmp_path / "theirs", template=sim_template()))
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "get_time", "arguments": '{"a":1}'},
    }
    history: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Wait.", "tool_calls": [call, call]},
        {"role": "tool", "content": "noon", "tool_call_id": "c"},
        {"role": "assistant", "content": "Noon."},
        {"role": "user", "content": "Thanks"},
    ]
    keys = {"tools": [WEATHER, function("f")]}
    for talk in (history, history[1:]):
        both = []
        for renderer in (own, theirs):
            call_ = parse_chat(json.dumps({"model": "m", "messages": talk, **keys}).encode())
            (request,) = plan(
                call_,
                ResolvedModel("m"),
                renderer,
                defaults=Sampling(),
                context_len=4096,
                completion="c",
            )
            both.append(request.prompt_ids)
        assert both[0] == both[1]


def test_a_folder_may_name_every_form() -> None:
    for name in FORMATS:
        assert FolderSettings.model_validate({"tool_format": name}).tool_format == name


def test_every_form_is_documented() -> None:
    page = (PROJECT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    for name, form in FORMATS.items():
        assert f"`{name}`" in page
        assert form.__doc__


# --- what OpenAI's client reads ---

TEXT = (
    "<think>\nHm.\n</think>\n\nLet me see.\n<tool_call>\n"
    '{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>'
)
READ = ParserOptions(
    thinking=Thinking("<think>", "</think>"),
    form=FORMATS["hermes"],
    names=frozenset({"get_time"}),
)


def answer() -> ChatAnswer:
    stamp = AnswerOrigin(STAMP.model, STAMP.release, reading=READ)
    return ChatAnswer(chat(tools=[TIME]), "chatcmpl-abc", 1700000000, stamp)


def streamed(text: str, reason: FinishReason = FinishReason.STOP) -> bytes:
    made = answer()
    raw = made.opening(0) + b"".join(made.delta(0, Delta(letter, (1,))) for letter in text)
    return raw + made.finish(0, finished(reason=reason)) + output.DONE


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
def test_the_client_reads_a_whole_call(strict: bool) -> None:
    made = answer()
    made.add(0, Delta(TEXT, (1,)))
    made.end(0, finished())
    with client_of(whole(made.whole()), strict) as client:
        got = client.chat.completions.create(model="tiny", messages=[])
    (choice,) = got.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.to_dict()["reasoning_content"] == "Hm."
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_time",
        {"zone": "UTC"},
    )
    assert got.usage is not None
    assert got.usage.completion_tokens_details is not None
    assert got.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
def test_the_client_adds_up_a_streamed_call(strict: bool) -> None:
    with (
        client_of(streaming(streamed(TEXT)), strict) as client,
        client.chat.completions.stream(
            model="tiny", messages=[{"role": "user", "content": "x"}]
        ) as stream,
    ):
        got = stream.get_final_completion()
    (choice,) = got.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.arguments == '{"zone": "UTC"}'


def test_a_streamed_call_delta_by_delta() -> None:
    deltas = [one["choices"][0]["delta"] for one in chunks(streamed(TEXT))]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    first, rest = calls[0], calls[1:]
    assert first == {
        "index": 0,
        "id": first["id"],
        "type": "function",
        "function": {"name": "get_time", "arguments": ""},
    }
    assert len(rest) > 1, "arguments come in pieces"
    assert all(set(one) == {"index", "function"} for one in rest)
    assert "".join(one["function"]["arguments"] for one in rest) == '{"zone": "UTC"}'
    thoughts = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
    assert "".join(thoughts) == "Hm."


def test_a_streamed_half_call_is_taken_back() -> None:
    text = TEXT[: TEXT.index('UTC"')]
    got = chunks(streamed(text, FinishReason.LENGTH))
    (void,) = [one for one in got if "rkserve" in one]
    assert void["rkserve"] == {"retract_tool_calls": 1}
    assert void["choices"][0]["delta"] == {}
    after = got[got.index(void) + 1 :]
    assert after[0]["choices"][0]["delta"]["content"] == text[text.index("\n<tool_call>") :]
    assert after[-1]["choices"][0]["finish_reason"] == "length"


def test_an_edit_that_takes_back_thoughts_is_told() -> None:
    made = answer()
    made.delta(0, Delta("<think>It rains.", (1,)))
    raw = made.delta(0, Delta("snows.", (1,), retract=6))
    retracted, added = chunks(raw + output.DONE)
    assert retracted["rkserve"] == {"retract_reasoning": 6}
    assert added["choices"][0]["delta"] == {"reasoning_content": "snows."}


class Zone(pydantic.BaseModel):
    """Arguments as the client's helpers check them."""

    zone: str


def test_openai_still_has_the_error_that_a_cut_off_call_is_to_its_helpers() -> None:
    """Their streaming helper must learn of ``length``, not of half a call as if it were whole."""
    raw = streamed(TEXT[: TEXT.index('UTC"')], FinishReason.LENGTH)
    with (
        client_of(streaming(raw), strict=False) as client,
        client.chat.completions.stream(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            tools=[openai.pydantic_function_tool(Zone, name="get_time")],
        ) as stream,
        pytest.raises(openai.LengthFinishReasonError),
    ):
        stream.get_final_completion()

"""The generation requests of a parsed call, checked against the model's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rkserve.api.common.answer import AnyCall
from rkserve.api.common.calls import ChatCall, CompletionCall
from rkserve.api.common.parameters import TOP_K_OFF
from rkserve.api.common.renderer import Prompt, PromptHeader, Renderer
from rkserve.api.common.tensors import check_embeds, check_encoder
from rkserve.api.common.version_policy import ResolvedModel
from rkserve.api.json.fields import TEXT_MODE_MAX_TOP_K
from rkserve.api.parsing.answer_parser import ParserOptions
from rkserve.api.parsing.sampling import check_ids, is_extension
from rkserve.api.parsing.tool_choice import calls_guide
from rkserve.core.errors import ContextOverflow, RequestError, UnsupportedParameter
from rkserve.core.messages import GenerateRequest, Thinking
from rkserve.core.run_params import Embeds, EncoderStates, Picture, Sampling, Stepwise

TASK = "### Task:"  # how Open WebUI's prompts for them begin


def plan(
    call: AnyCall,
    meant: ResolvedModel,
    renderer: Renderer,
    *,
    defaults: Sampling,
    context_len: int,
    completion: str,
    session: str = "",
    dice: int = 0,
    pictures: Sequence[Picture] = (),
) -> list[GenerateRequest]:
    """Return one request per choice, in the order of the choices' indexes.

    ``meant`` is the resolved model, and ``completion`` the ID of the answer, by which its
    generations can be controlled. ``session`` decides between two served versions of an adapter.
    ``dice`` seeds sampling without a seed. ``pictures`` are the images of a chat in order.
    ``defaults`` are the model's own sampling values. Each prompt is rendered once, however many
    answers it gets. Tokenizing takes about a second per megabyte, so a server calls this off its
    event loop.

    Raises:
        RequestError: the model cannot take the prompt or a parameter.
        ContextOverflow: a prompt leaves no room for an answer.
    """
    sampling = replace(defaults, **_sampling(call, renderer))
    _check_inputs(call, renderer)
    prompts, param = _prompts(call, renderer, context_len)
    thinking = _thinking(call, renderer, prompts[0])
    _check_pause_ids(call, renderer)
    _check_tokens(call, renderer, prompts)
    each = [prompt for prompt in prompts for _ in range(call.tries)]
    stepwise = _stepwise(call, renderer, sampling, dice)
    return [
        GenerateRequest(
            request_id=f"{completion}/{index}",
            model=meant.model,
            prompt_ids=prompt.ids,
            max_tokens=_max_tokens(call.max_tokens, prompt, context_len, param),
            sampling=sampling,
            sampling_asked=tuple(call.sampling),
            strict_sampling=call.strict_sampling,
            stop=call.stop,
            prompt_text=prompt.text,
            adapter=meant.adapter,
            native_pause=call.native_pause,
            pause_on_text=tuple(one for one in call.pause_on if isinstance(one, str)),
            pause_on_ids=tuple(one for one in call.pause_on if isinstance(one, int)),
            use_cache=call.use_cache,
            salt=call.salt,
            line=meant.line,
            session=session,
            min_epoch=meant.min_epoch,
            # A request that names a version keeps it to the end.
            keep_version=call.keep_version or meant.named,
            thinking=thinking,
            stepwise=stepwise[index % call.tries],
            images=tuple(pictures[number] for number in prompt.images),
            counted=prompt.counted,
            embeds=prompt.embeds,
            encoder=prompt.encoder,
            decoder_ids=prompt.decoder_ids,
            once=_is_task(call),
            stop_ids=call.stop_ids,
            include_stop=call.include_stop,
        )
        for index, prompt in enumerate(each)
    ]


def held(call: AnyCall, renderer: Renderer) -> AnyCall:
    """Return the call with the grammar of its required tool call, if one of its tools is strict.

    It replaces a response format: OpenAI takes both in one request, clients that offer an answer's
    type as a tool send both, and they read the call. vLLM's grammar keys are refused instead.

    Raises:
        RequestError: another grammar is requested, or no call can follow one.
        UnsupportedParameter: the model's tool call format is unknown.
    """
    if not isinstance(call, ChatCall) or not call.tools.forced:
        return call
    if call.steps.guide is not None and is_extension(name := call.steps.guide[0]):
        raise RequestError(
            f"An answer that has to call a tool cannot follow '{name}' as well.", name
        )
    guide = calls_guide(call.tools, renderer.form())
    return replace(call, steps=replace(call.steps, guide=guide))


def _check_inputs(call: AnyCall, renderer: Renderer) -> None:
    """Check images, embeddings and an encoder's output, and refuse what they do not support."""
    if call.images and call.use_cache is not None:
        raise UnsupportedParameter(
            "Unsupported parameter: answers about images begin from no prompt cache, since those "
            "are kept by token ids.",
            "use_cache",
        )
    if call.encoder is not None or renderer.cross_attention is not None:
        check_encoder(call.encoder, renderer.cross_attention)
    if not isinstance(call, CompletionCall):
        return
    if call.embedded:
        _check_in_one_go(call, "prompt_embeds", "which have no token ids")
    if call.encoder is None:
        return
    if call.embedded or call.token_ids:
        name = "prompt_embeds" if call.embedded else "return_token_ids"
        raise UnsupportedParameter(
            f"Unsupported parameter: '{name}' does not go together with 'cross_attention'.", name
        )
    _check_in_one_go(call, "cross_attention", "on which its KV cache depends")


def _check_in_one_go(call: CompletionCall, param: str, why: str) -> None:
    asked = {
        "echo": call.echo,
        "use_cache": call.use_cache is not None,
        "pause_on": bool(call.pause_on),
        "native_pause": call.native_pause,
        "logprobs": call.steps.top_logprobs is not None,
        "best_of": call.ranked,
    }
    name = next((name for name, given in asked.items() if given), None)
    if name is not None:
        raise UnsupportedParameter(
            f"Unsupported parameter: '{name}' does not go together with '{param}', {why}.", name
        )


def _is_task(call: AnyCall) -> bool:
    """Return whether a call looks like an Open WebUI task: a title, tags or follow-ups.

    Such a call quotes the conversation in one message and is never continued. A false positive
    costs one prefill at most.
    """
    if not isinstance(call, ChatCall) or call.stream:
        return False
    turns = [one for one in call.messages if one["role"] != "system"]
    return len(turns) == 1 and str(turns[0]["content"]).startswith(TASK)


def _prompts(call: AnyCall, renderer: Renderer, context_len: int) -> tuple[list[Prompt], str]:
    if isinstance(call, ChatCall):
        return [renderer.chat(call.messages, context_len, header(call, renderer))], "messages"
    one = len(call.prompts) == 1
    param = "prompt_embeds" if call.embedded else call.prompt_param
    rendered = []
    for index, prompt in enumerate(call.prompts):
        path = param if one else f"{param}[{index}]"
        if isinstance(prompt, Embeds):
            check_embeds(prompt, renderer.hidden_size, path)
            rendered.append(Prompt((), "", counted=prompt.rows, embeds=prompt))
        else:
            rendered.append(_decoded(renderer.text(prompt, path, context_len), call.encoder))
    return rendered, param


def _decoded(prompt: Prompt, states: EncoderStates | None) -> Prompt:
    """Return the prompt of a decoder, whose KV cache depends on more than its token IDs."""
    if states is None:
        return prompt
    ids = prompt.ids
    return replace(
        prompt,
        ids=(),
        text=prompt.text or "",
        decoder_ids=ids,
        counted=len(ids) or prompt.counted,
        encoder=states,
    )


def header(call: ChatCall, renderer: Renderer) -> PromptHeader:
    """Return the parts of a chat's prompt beside its conversation.

    Raises:
        RequestError: the answer continues a message and has to call a tool.
        UnsupportedParameter: the model's tool call format is unknown.
    """
    tools, opening = call.tools, ""
    if call.prefill and tools.forced:
        raise RequestError(
            "An answer that has to call a tool begins with the call, so it cannot continue a "
            "final assistant message. Leave out that message, or set 'tool_choice' to 'auto'.",
            "tool_choice",
        )
    if tools.given:
        form = renderer.form()
        opening = form.opening(tools.named) if tools.forced else ""
    return PromptHeader(
        images=True,
        prefill=call.prefill,
        tools=tools.given,
        variables=call.wish.given(renderer.thinking.enabled),
        opening=opening,
        # After the opening of a call, or under a grammar, there is no room for reasoning.
        thoughtless=bool(opening)
        or call.steps.guide is not None
        or _most_thoughts(call, renderer) == 0,
    )


def _most_thoughts(call: ChatCall, renderer: Renderer) -> int | None:
    wish = call.wish
    if wish.max_tokens is not None or wish.effort is None:
        return wish.max_tokens
    return renderer.thinking.budgets.get(wish.effort)


def _thinking(call: AnyCall, renderer: Renderer, prompt: Prompt) -> Thinking | None:
    """Return the reasoning markers, None if the answer cannot have reasoning."""
    marks = renderer.marks
    if not isinstance(call, ChatCall) or marks is None:
        return None
    if call.tools.forced or call.steps.guide is not None:
        return None
    if call.prefill and not prompt.thinks and str(call.messages[-1]["content"]).strip():
        return None  # the answer has begun, so no reasoning precedes it
    most = _most_thoughts(call, renderer)
    if most is not None and prompt.text is not None:
        raise UnsupportedParameter(
            "Unsupported parameter: thoughts cannot be ended after so many tokens in answers about "
            "images, nor where a model is served without a tokenizer.",
            "max_reasoning_tokens",
        )
    return Thinking(
        open=marks.open,
        close=marks.close,
        begun=prompt.thinks,
        mark_ids=marks.close_ids if prompt.text is None else (),
        max_tokens=most,
        closing=marks.closing,
        closing_ids=marks.closing_ids if prompt.text is None else (),
    )


def reading(call: AnyCall, renderer: Renderer, request: GenerateRequest) -> ParserOptions:
    """Return the parser options for the answers to a call; ``request`` is one of its plan."""
    if not isinstance(call, ChatCall) or not call.tools.given:
        return ParserOptions(thinking=request.thinking)
    form, tools = renderer.form(), call.tools
    return ParserOptions(
        thinking=request.thinking,
        form=form,
        names=tools.names,
        opening=form.opening(tools.named) if tools.forced else "",
        most_calls=tools.most_calls,
    )


def prompt_texts(call: AnyCall) -> tuple[str | None, ...]:
    """Return the text of each answer's prompt as the client sent it; None for IDs."""
    if isinstance(call, ChatCall):
        return (None,) * call.choices
    texts = (one if isinstance(one, str) else None for one in call.prompts)
    return tuple(text for text in texts for _ in range(call.tries))


def _stepwise(
    call: AnyCall, renderer: Renderer, sampling: Sampling, dice: int
) -> list[Stepwise | None]:
    """Return the single-step options of each answer to a prompt."""
    steps, prompt = call.steps, isinstance(call, CompletionCall) and call.echo
    if isinstance(call, CompletionCall) and call.prompt_top is not None:
        top = max(call.prompt_top, steps.top_logprobs or 0)
        steps, prompt = replace(steps, top_logprobs=top), True
    name = steps.asked(sampling, ranked=call.ranked)
    if name is None:
        return [None] * call.tries
    renderer.needs_ids(name)
    if call.images or call.embedded or call.encoder is not None:
        other = "'prompt_embeds'" if call.embedded else "'cross_attention'"
        what = "answers about images" if call.images else other
        raise UnsupportedParameter(
            f"Unsupported parameter: '{name}' needs the logits of every step, which RKLLM does "
            f"not compute for {what}.",
            name,
        )
    check_ids(call.steps, renderer.check_id)
    _check_least(call)
    if call.use_cache is not None:
        raise UnsupportedParameter(
            f"Unsupported parameter: '{name}' needs the logits of every step, which RKLLM does "
            "not compute from a prompt cache. Leave out 'use_cache'.",
            "use_cache",
        )
    return [
        steps.stepwise(sampling, choice, dice, ranked=call.ranked, prompt=prompt)
        for choice in range(call.tries)
    ]


def _check_least(call: AnyCall) -> None:
    least = call.steps.min_tokens
    if call.max_tokens is not None and least > call.max_tokens:
        raise RequestError(
            f"Invalid 'min_tokens': {least} is more than the answer may have ({call.max_tokens}).",
            "min_tokens",
        )
    if least and call.stop:
        raise UnsupportedParameter(
            "Unsupported parameter: a stop string ends an answer wherever it comes, so "
            "'min_tokens' cannot be honoured with one.",
            "min_tokens",
        )


def _check_pause_ids(call: AnyCall, renderer: Renderer) -> None:
    for index, entry in enumerate(call.pause_on):
        if isinstance(entry, int):
            renderer.check_id(entry, f"pause_on[{index}]")


def _check_tokens(call: AnyCall, renderer: Renderer, prompts: Sequence[Prompt]) -> None:
    """Check the token IDs of a call against the vocabulary."""
    for index, token_id in enumerate(call.stop_ids):
        renderer.check_id(token_id, f"stop_token_ids[{index}]")
    if call.token_ids:
        renderer.needs_ids("return_token_ids")
        if any(prompt.text is not None for prompt in prompts):
            raise UnsupportedParameter(
                "Unsupported parameter: the token ids of a prompt with images are known to the "
                "runtime only.",
                "return_token_ids",
            )


def _max_tokens(asked: int | None, prompt: Prompt, context_len: int, param: str) -> int:
    rest = context_len - prompt.tokens
    if rest < 1:
        raise ContextOverflow(prompt.tokens, context_len, param)
    return rest if asked is None else min(asked, rest)


def _sampling(call: AnyCall, renderer: Renderer) -> dict[str, Any]:
    """Return the client's values, with a ``top_k`` that the runtime survives."""
    top_k = call.sampling.get("top_k")
    if top_k is None:
        return call.sampling
    size = renderer.vocab_size
    if size is None and not 1 <= top_k <= TEXT_MODE_MAX_TOP_K:
        raise UnsupportedParameter(
            "Unsupported parameter: this model is served without a tokenizer, so 'top_k' must be "
            f"1 to {TEXT_MODE_MAX_TOP_K}.",
            "top_k",
        )
    if size is not None and (top_k == TOP_K_OFF or top_k > size):
        top_k = size
    return {**call.sampling, "top_k": top_k}

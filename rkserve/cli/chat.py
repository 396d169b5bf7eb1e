"""``rkserve chat``: a conversation in the terminal, streamed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from rkserve.cli.context import ClusterCommand, CommandContext, Exit, first_line
from rkserve.client import ClientError, UnexpectedAnswer

commands = typer.Typer()
PATH = "/v1/chat/completions"
HELP = "/new begins anew, /exit or Ctrl-D ends, Ctrl-C ends an answer."

Prompt = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TEXT]", help="One question; else stdin, or a conversation."),
]
ModelName = Annotated[
    str | None, typer.Option(help="A model or an adapter; else the first of the list.")
]


@commands.command(cls=ClusterCommand)
def chat(
    context: CommandContext,
    *,
    prompt: Prompt = None,
    model: ModelName = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2)] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of each answer.")] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="File with the API key, where keys are configured; else RKSERVE_API_KEY.",
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="RKSERVE_API_KEY", hidden=True)] = None,
) -> None:
    """Talk to a model, streamed: one question, or a conversation."""
    key = api_key if api_key_file is None else _key(api_key_file)
    settings = {"temperature": temperature, "max_tokens": max_tokens}
    body = {
        "model": model or _first(context),
        **{name: value for name, value in settings.items() if value is not None},
    }
    messages: list[dict[str, str]] = []
    begin = [] if system is None else [{"role": "system", "content": system}]
    if prompt or not sys.stdin.isatty():
        question = " ".join(prompt) if prompt else sys.stdin.read()
        if not question.strip():
            raise typer.BadParameter("there is nothing to ask: name a TEXT, or pipe one in")
        messages = [*begin, {"role": "user", "content": question}]
        _answer(context, {**body, "messages": messages}, key)
        return
    context.err.print(f"{body['model']}. {HELP}", highlight=False)
    _converse(context, body, begin, key)


def _converse(
    context: CommandContext, body: dict[str, Any], begin: list[dict[str, str]], key: str | None
) -> None:
    messages = list(begin)
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            typer.echo()
            return
        if question == "/exit":
            return
        if question == "/new":
            messages = list(begin)
        elif question:
            asked = [*messages, {"role": "user", "content": question}]
            try:
                answer = _answer(context, {**body, "messages": asked}, key)
            except KeyboardInterrupt:
                typer.echo("\n(ended)", err=True)
                continue
            except ClientError as exc:  # the conversation goes on without that question
                context.failed(exc)
                continue
            messages = [*asked, {"role": "assistant", "content": answer}]


def _answer(context: CommandContext, body: dict[str, Any], key: str | None) -> str:
    """Print an answer while it comes, and return it."""
    text, finish = "", None
    for event in _events(context, body, key):
        retract = event.get("rkserve", {}).get("retract", 0)
        text = text[: len(text) - retract] if retract else text
        for choice in event.get("choices", ()):
            piece = choice.get("delta", {}).get("content") or ""
            text, finish = text + piece, choice.get("finish_reason") or finish
            if not context.as_json:
                typer.echo(piece, nl=False)
    context.show(
        {"model": body["model"], "content": text, "finish_reason": finish},
        lambda: "",  # it is there already, and ends its line now
    )
    if finish == "length" and not context.as_json:
        typer.echo("(cut at the limit of tokens)", err=True)
    if finish == "abort":
        raise typer.Exit(Exit.FAILED)
    return text


def _events(
    context: CommandContext, body: dict[str, Any], key: str | None
) -> Iterator[dict[str, Any]]:
    return context.client.stream(PATH, body, api_key=key)


def _first(context: CommandContext) -> str:
    rows = context.client.models()
    if not rows:
        raise UnexpectedAnswer("No model is served")
    return str(rows[0]["id"])


def _key(path: Path) -> str:
    try:
        return first_line(path)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc

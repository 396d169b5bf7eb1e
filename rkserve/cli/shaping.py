"""Options that say what a made trace is like; see ``rkserve.bench.trace_generator``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from rkserve.bench.trace_generator import Arrivals, TraceShape
from rkserve.cli.options import keyword, own_options, signed

# The names are those of a ``TraceShape``, with what they are where nothing is said.
OPTIONS: Mapping[str, tuple[Any, Any]] = {
    "sessions": (Annotated[int, typer.Option(min=1, help="So many sessions.")], 100),
    "rate": (Annotated[float, typer.Option(min=0.0001, help="Sessions per second.")], 1.0),
    "arrivals": (Annotated[Arrivals, typer.Option(help="How sessions arrive.")], Arrivals.POISSON),
    "burst": (Annotated[int, typer.Option(min=1, help="Sessions of one burst.")], 8),
    "turns": (Annotated[float, typer.Option(min=1, help="Of a session, mean.")], 1.0),
    "most_turns": (Annotated[int, typer.Option(min=1, help="Of the longest session.")], 12),
    "think_s": (
        Annotated[float, typer.Option("--think", min=0, help="Seconds between turns, mean.")],
        0.0,
    ),
    "systems": (Annotated[int, typer.Option(min=0, help="Shared system prompts.")], 0),
    "system_words": (Annotated[int, typer.Option(min=1, help="Words of each.")], 200),
    "zipf": (
        Annotated[float, typer.Option(min=0, help="How unevenly they are used; 0 is evenly.")],
        1.0,
    ),
    "user_words": (Annotated[int, typer.Option(min=1, help="Words of a question, mean.")], 40),
    "answer_tokens": (Annotated[int, typer.Option(min=1, help="max_tokens, mean.")], 64),
    "spread": (
        Annotated[float, typer.Option(min=0, help="Sigma of these lengths, log-normal.")],
        0.5,
    ),
    "priorities": (
        Annotated[
            list[int] | None,
            typer.Option(
                "--priority", help="Each session has one of these as its priority; repeatable."
            ),
        ],
        None,
    ),
}


def shaped(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command a ``TraceShape`` for its parameter ``shape``, and the options that make it."""

    def run(*positional: Any, **options: Any) -> Any:
        said = {name: options.pop(name) for name in OPTIONS}
        shape = TraceShape(**{**said, "priorities": tuple(said["priorities"] or ())})
        return command(*positional, shape=shape, **options)

    options = [keyword(name, of, default) for name, (of, default) in OPTIONS.items()]
    return signed(run, command, [*own_options(command, without="shape"), *options])

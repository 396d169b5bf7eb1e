"""The options of ``rkserve bench``: the system to load, its limits, the shape of made traces."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from rkserve.bench.figures import Slo, parse_slo
from rkserve.bench.player import ClientTimeouts as ClientLimits
from rkserve.bench.player import PlayOptions
from rkserve.bench.target import CHAT, COMPLETIONS, Target, base_path, models_of
from rkserve.bench.trace import Arrivals, TraceShape
from rkserve.cli.context import OptionGroup, first_line
from rkserve.native.sim.profiles import load

NAMED = re.compile(r"([\w .-]+)=(https?://.*)")
_A = TypeVar("_A")
_B = TypeVar("_B")
PROFILE = "rk3588-qwen2.5-1.5b-w8a8"

Urls = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        metavar="[NAME=]URL",
        help="Base URL of an OpenAI server that runs, such as http://host:8000/v1; may be "
        "repeated.",
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="What to ask for: one for all URLs, one for each, or several of one URL. Else the "
        "first that the server lists.",
    ),
]
AllModels = Annotated[
    bool,
    typer.Option(
        "--all-models",
        help="All models and adapters that a URL lists, one after the other; those that make "
        "embeddings are left out.",
    ),
]
Api = Annotated[str, typer.Option(help="chat or completions.")]
KeyFile = Annotated[
    Path | None,
    typer.Option("--key-file", exists=True, dir_okay=False, help="Its first line is the API key."),
]
KeyEnv = Annotated[
    str | None, typer.Option("--key-env", metavar="NAME", help="Variable that holds the API key.")
]
Headers = Annotated[
    list[str] | None,
    typer.Option("--header", metavar="NAME: VALUE", help="Sent with each request; repeatable."),
]
Body = Annotated[
    str | None, typer.Option(metavar="JSON", help="Added to the body of each request.")
]
Watches = Annotated[
    list[str] | None,
    typer.Option(
        "--watch",
        metavar="NAME=PID|TEXT",
        help="Measure CPU and memory of a process of this machine and of all below it, by its "
        "number or by a part of its command line; may be repeated.",
    ),
]
BoardCount = Annotated[
    int | None,
    typer.Option("--boards", min=1, max=256, help="Start so many simulated boards, and load them."),
]
ProfileName = Annotated[str, typer.Option("--profile", help="Whose speed they have.")]
TimeScale = Annotated[
    float,
    typer.Option(min=0, help="Factor on their times, and on those of the trace; 0.1 is ten times."),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="router.policy; each that is given is played the same trace, and compared with the "
        "first.",
    ),
]
Limits = Annotated[
    str | None,
    typer.Option(
        "--slo",
        metavar="ttft=MS,itl=MS,gap=MS,e2e=MS",
        help="What an answer must hold to count for goodput: time to first token, mean time per "
        "token, longest gap, whole answer.",
    ),
]
Seed = Annotated[int, typer.Option(help="Of the trace.")]
Salt = Annotated[
    str | None,
    typer.Option(help="Text in front of each prompt that keeps caches of earlier runs out."),
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0.001, help="Seconds for an answer; then it hangs up.")
]
Stall = Annotated[float, typer.Option("--stall", min=0.001, help="Seconds without a byte.")]
MaxErrors = Annotated[
    float, typer.Option(min=0, max=1, help="Share of requests that may end in errors.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        file_okay=False,
        help="Folder for report.md, its plots, results.json and outcomes.jsonl; it is made.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]


@dataclass(frozen=True)
class LoadOptions:
    """The options of all commands that load a system."""

    url: Urls = None
    model: Models = None
    all_models: AllModels = False
    api: Api = "chat"
    key_file: KeyFile = None
    key_env: KeyEnv = None
    header: Headers = None
    body: Body = None
    watch: Watches = None
    boards: BoardCount = None
    profile: ProfileName = PROFILE
    time_scale: TimeScale = 1.0
    policy: Policies = None
    slo: Limits = None
    seed: Seed = 1
    salt: Salt = None
    timeout: Timeout = 300.0
    stall: Stall = 60.0
    max_errors: MaxErrors = 0.0
    out: Out = None
    as_json: AsJson = False

    def plan(self) -> PlayOptions:
        """Return the settings for playing traces that these options hold."""
        limits = ClientLimits(stall_s=self.stall, total_s=self.timeout)
        return PlayOptions(salt=self.salt or "", limits=limits)

    def limits(self) -> Slo | None:
        """Return the service-level limits of answers, if any."""
        return None if self.slo is None else usage(parse_slo, self.slo)


def targets(given: LoadOptions) -> list[Target]:
    """Return the servers of the command line. Raises ``BadParameter``, ``BenchFailed``."""
    if given.api not in (CHAT, COMPLETIONS):
        raise typer.BadParameter(f"--api is {CHAT} or {COMPLETIONS}")
    key, headers, body = _key(given), dict(map(_header, given.header or ())), _body(given.body)
    found = []
    for name, url, asked in _asked(given, key):
        found.append(Target(name, url.rstrip("/"), asked, given.api, key, headers, body))
    if len({one.name for one in found}) != len(found):
        raise typer.BadParameter("two targets have the same name: --url NAME=URL")
    return found


def _asked(given: LoadOptions, key: str | None) -> list[tuple[str, str, str]]:
    """Return name, URL and model of each target; the server lists models that were not given."""
    paired = _paired(given.url or [], given.model or [])
    for _, url, _ in paired:
        usage(base_path, url)
    if not given.all_models:
        return [(name, url, model or models_of(url, key)[0]) for name, url, model in paired]
    if given.model:
        raise typer.BadParameter("either --model or --all-models")
    several = len(paired) > 1
    return [
        (f"{name}, {model}" if several else model, url, model)
        for name, url, _ in paired
        for model in models_of(url, key)
    ]


def _paired(urls: Sequence[str], models: Sequence[str]) -> list[tuple[str, str, str | None]]:
    named = [match.groups() if (match := NAMED.fullmatch(one)) else ("", one) for one in urls]
    if len(named) == 1 and len(models) > 1:
        return [(model, named[0][1], model) for model in models]
    if len(models) not in (0, 1, len(named)):
        raise typer.BadParameter(f"{len(models)} models for {len(named)} URLs")
    chosen: list[str | None] = [*models] if len(models) == len(named) else [*models] * len(named)
    chosen = chosen or [None] * len(named)
    plain = [
        name or (f"server {number + 1}" if len(named) > 1 else "server")
        for number, (name, _) in enumerate(named)
    ]
    return [(name, url, model) for name, (_, url), model in zip(plain, named, chosen, strict=True)]


def _key(given: LoadOptions) -> str | None:
    if given.key_file is not None:
        return usage(first_line, given.key_file)
    if given.key_env is None:
        return None
    key = os.environ.get(given.key_env, "").strip()
    if not key:
        raise typer.BadParameter(f"the environment has no {given.key_env}")
    return key


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not re.fullmatch(r"[\w-]+", name) or not value.isprintable():
        raise typer.BadParameter(f"{text!r} is not NAME: VALUE")
    return name.lower(), value.strip()


def _body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise typer.BadParameter(f"--body is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise typer.BadParameter("--body is not a JSON object")
    return value


def known_profile(name: str) -> None:
    names = [one.name for one in load()]
    if name not in names:
        close = ", ".join(one for one in names if one.startswith(name[:6]))
        raise typer.BadParameter(f"there is no profile {name}; there are {close or names[0]} ...")


def usage(read: Callable[[_A], _B], given: _A) -> _B:
    """Call ``read`` and turn its ``ValueError`` into a usage error."""
    try:
        return read(given)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc


def trace_shape(
    *,
    sessions: Annotated[int, typer.Option(min=1, help="So many sessions.")] = 100,
    rate: Annotated[float, typer.Option(min=0.0001, help="Sessions per second.")] = 1.0,
    arrivals: Annotated[Arrivals, typer.Option(help="How sessions arrive.")] = Arrivals.POISSON,
    burst: Annotated[int, typer.Option(min=1, help="Sessions of one burst.")] = 8,
    turns: Annotated[float, typer.Option(min=1, help="Of a session, mean.")] = 1.0,
    most_turns: Annotated[int, typer.Option(min=1, help="Of the longest session.")] = 12,
    think_s: Annotated[
        float, typer.Option("--think", min=0, help="Seconds between turns, mean.")
    ] = 0.0,
    systems: Annotated[int, typer.Option(min=0, help="Shared system prompts.")] = 0,
    system_words: Annotated[int, typer.Option(min=1, help="Words of each.")] = 200,
    zipf: Annotated[
        float, typer.Option(min=0, help="How unevenly they are used; 0 is evenly.")
    ] = 1.0,
    user_words: Annotated[int, typer.Option(min=1, help="Words of a question, mean.")] = 40,
    answer_tokens: Annotated[int, typer.Option(min=1, help="max_tokens, mean.")] = 64,
    spread: Annotated[float, typer.Option(min=0, help="Sigma of these lengths, log-normal.")] = 0.5,
    priorities: Annotated[
        list[int] | None,
        typer.Option(
            "--priority", help="Each session has one of these as its priority; repeatable."
        ),
    ] = None,
) -> TraceShape:
    """Return the shape of a trace to make; the options are named like its fields."""
    return TraceShape(
        sessions=sessions,
        rate=rate,
        arrivals=arrivals,
        burst=burst,
        turns=turns,
        most_turns=most_turns,
        think_s=think_s,
        systems=systems,
        system_words=system_words,
        zipf=zipf,
        user_words=user_words,
        answer_tokens=answer_tokens,
        spread=spread,
        priorities=tuple(priorities or ()),
    )


LOAD_OPTIONS, SHAPE_OPTIONS = OptionGroup(LoadOptions), OptionGroup(trace_shape)

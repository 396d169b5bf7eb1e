"""The command ``rkserve top``: the cluster's page for a terminal.

It draws the document of the event stream: the verdict, its reasons with their commands, and the
boards as rows. ``draw`` is pure; ``Watch`` reads the stream in a thread and redraws the screen.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rkserve.cli.context import ClusterCommand, CommandContext
from rkserve.client import (
    CallError,
    Client,
    ClientError,
    NotAllowed,
    NotFound,
    UnexpectedAnswer,
    Unreachable,
)

commands = typer.Typer()
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)  # before the next attempts at a lost stream
WHOLE_S = 10.0  # a stream that lasted so long and ended in order is opened again at once
REDRAWN_S = 1.0  # also without events: the age of a lost stream, and the size of the terminal
QUIT = b"q\x03\x04"  # also Ctrl-C and Ctrl-D, where the terminal passes them on
NONE = "-"

View: TypeAlias = Mapping[str, Any]
Figure: TypeAlias = Callable[[str], "float | None"]


@dataclass(frozen=True, slots=True)
class Standing:
    """A board's state in a word, with a mark and a style. Graver ones have a higher rank."""

    word: str
    mark: str
    style: str
    rank: int


_OK = ("●", "green", 0)
_IDLE = ("‖", "dim", 1)
_WAIT = ("○", "blue", 2)
_WARN = ("▲", "yellow", 3)
_BAD = ("✖", "bold red", 4)
_BY_STATE = {
    "ready": _OK,
    "asleep": _IDLE,
    "stopped": _IDLE,
    "fetching": _WAIT,
    "loading": _WAIT,
    "joining": _WAIT,
    "recovering": _WARN,
}
_VERDICTS = {"READY": ("●", "bold green"), "DEGRADED": ("▲", "bold yellow")}


def standing(board: Mapping[str, Any]) -> Standing:
    """Return the state of a board for people."""
    state = str(board["state"])
    if state != "ready":
        return Standing(state, *_BY_STATE.get(state, _BAD))
    if board.get("circuit"):
        return Standing("avoided", *_WARN)
    if board.get("drained"):
        return Standing("drained", *_IDLE)
    if board.get("hold"):
        return Standing("paused", *_IDLE)
    return Standing(state, *(_WARN if board.get("rules") else _OK))


@dataclass(frozen=True, slots=True)
class Column:
    """A column of figures, which is left out below ``from_width`` columns of the terminal."""

    title: str
    text: Callable[[Mapping[str, Any], Figure], str]
    rules: tuple[str, ...] = ()
    from_width: int = 0
    right: bool = True


def _count(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f}"


def _rate(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}"


def _percent(value: float | None, whole: float | None = 100.0) -> str:
    return NONE if value is None or not whole else f"{100 * value / whole:.0f}%"


def _of(name: str) -> Callable[[Mapping[str, Any], Figure], str]:
    return lambda _, now: _percent(now(name))


_SLOW = ("BoardSlowerThanItsKind",)
COLUMNS = (
    Column("tok/s", lambda _, now: _rate(now("decode_tokens_per_s")), _SLOW),
    Column(
        "exp",
        lambda one, now: _percent(now("speed_tokens_per_s"), one.get("expected_tokens_per_s")),
        _SLOW,
    ),
    Column("run/q", lambda _, now: f"{_count(now('running'))}/{_count(now('queued'))}"),
    Column("KV", _of("kv_percent"), from_width=60),
    Column("cached", _of("cached_percent"), ("PrefixExpectedNotFound",), from_width=100),
    Column("NPU", _of("npu_percent"), ("NpuClockBelowMaxUnderLoad",), from_width=100),
    Column("°C", lambda _, now: _count(now("temperature_c")), ("Hot",), from_width=70),
    Column(
        "DDR MHz",
        lambda one, now: f"{_count(now('ddr_mhz'))}/{_count(one.get('ddr_max_mhz'))}",
        ("DdrBelowMax",),
    ),
    Column(
        "mem",
        lambda one, now: _percent(now("memory_mb"), one.get("memory_total_mb")),
        ("MemoryLow",),
        from_width=70,
    ),
    Column("model", lambda one, _: str(one["model"]), from_width=110, right=False),
    Column("loaded", lambda one, _: _loaded(one), from_width=120, right=False),
    Column("runtime", lambda one, _: str(one.get("runtime", NONE)), from_width=140, right=False),
    Column("driver", lambda one, _: str(one.get("driver", NONE)), from_width=140, right=False),
)


def _loaded(board: Mapping[str, Any]) -> str:
    return ", ".join(board.get("adapters") or [str(board["weights"])])


def draw(view: View, width: int, height: int | None = None, notice: str = "") -> RenderableType:
    """Return a frame for a terminal. Boards beyond its ``height`` are cut, the gravest last."""
    head = [*_head(view, notice), *_reasons(view["verdict"], width)]
    names = [name for name in view["order"] if name in view["boards"]]
    hidden = 0
    if height is not None:
        lines = sum(len(text.wrap(Console(width=width), width)) for text in head)
        room = max(1, height - lines - 3)  # a blank line, the titles, and the boards left out
        if len(names) > room:
            gravest = sorted(names, key=lambda name: -standing(view["boards"][name]).rank)[:room]
            hidden, names = len(names) - room, [name for name in names if name in gravest]
    rest = [Text(f"and {hidden} more boards; a higher terminal shows them", "dim")]
    return Group(*head, Text(), _boards(view, names, width), *(rest if hidden else ()))


def _head(view: View, notice: str) -> Iterator[Text]:
    word = view["verdict"]["verdict"]
    mark, style = _VERDICTS.get(word, ("✖", "bold red"))
    now, models = view["now"], view["models"].values()
    queued = _sum(now.get("queued")) + sum(one["waiting"] for one in models)
    silent = len(view["routers"]["silent"])
    parts = [
        f"{sum(one['ready'] for one in models)} of {len(view['boards'])} ready",
        *_withheld(view["boards"].values()),
        f"{_sum(now.get('decode_tokens_per_s')):.1f} tokens/s",
        f"{_sum(now.get('running')):.0f} running",
        f"{queued:.0f} queued",
        *([f"{silent} silent Routers"] if silent else []),
        *([] if view["coordinator"] == "reachable" else ["Coordinator unreachable"]),
        f"epoch {view['epoch']}",
    ]
    yield Text.assemble((f"{mark} {word}", style), "  ", ", ".join(parts))
    if notice:
        yield Text(notice, "bold red")


def _withheld(boards: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the numbers of boards that are kept from their work on purpose."""
    words = Counter(standing(one).word for one in boards)
    yield from (f"{words[word]} {word}" for word in ("paused", "drained", "asleep") if words[word])


def _sum(values: Iterable[float | None] | None) -> float:
    return sum(value or 0 for value in values or ())


def _reasons(verdict: Mapping[str, Any], width: int) -> Iterator[Text]:
    for reason in verdict["reasons"]:
        mark, style, _ = _BAD if reason["severity"] == "critical" else _WARN
        yield Text.assemble((f"{mark} ", style), reason["sentence"], _limit(reason))
        place = _place(reason)
        command = Text(f"  {reason['command']}", "bold cyan", overflow="fold")
        if len(reason["command"]) + len(place) + 6 <= width:
            yield Text.assemble(command, (f"  # {place}", "dim"))
        else:  # a command is copied as a whole
            yield Text(f"  # {place}", "dim")
            yield command
    if verdict["more"]:
        yield Text(f"and {verdict['more']} more reasons", "dim")


def _limit(reason: Mapping[str, Any]) -> str:
    if "figure" not in reason:
        return ""
    limit = f", limit {reason['limit']:g}" if "limit" in reason else ""
    return f" ({reason['figure']:g} {reason.get('unit', '')}".rstrip() + f"{limit})"


def _place(reason: Mapping[str, Any]) -> str:
    if reason["run_on"] == "head":
        return "on the head"
    boards = reason["boards"]
    if reason["run_on"] == "anywhere" or not boards:
        return "anywhere"
    return f"on {', '.join(boards)}" if len(boards) <= 3 else f"on each of {len(boards)} boards"  # noqa: PLR2004 - more names fill the line


def _boards(view: View, names: list[str], width: int) -> Table:
    columns = [one for one in COLUMNS if one.from_width <= width]
    made = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    made.add_column("board", no_wrap=True, overflow="ellipsis", min_width=6)
    made.add_column("state", no_wrap=True, overflow="ellipsis", min_width=9)
    for column in columns:
        side = "right" if column.right else "left"
        made.add_column(column.title, justify=side, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    for at, name in enumerate(view["order"]):
        if name in names:
            made.add_row(*_row(view, name, at, columns))
    return made


def _row(view: View, name: str, at: int, columns: list[Column]) -> Iterator[Text]:
    board = view["boards"][name]

    def now(column: str) -> float | None:
        values = view["now"].get(column) or []
        return values[at] if at < len(values) else None

    found = standing(board)
    behind = f" -{board['behind']}" if board.get("behind") else ""
    yield Text(name, found.style if found.rank >= _WARN[2] else "bold")
    yield Text(f"{found.mark} {found.word}{behind}", found.style)
    firing = set(board.get("rules") or ())
    for column in columns:
        wanting = firing.intersection(column.rules)
        text = column.text(board, now)
        yield Text(f"▲{text}" if wanting else text, "bold yellow" if wanting else "")


# -- the screen -----------------------------------------------------------------------------------


class Watch:
    """The stream, read in a thread of its own and opened again when it is lost."""

    def __init__(
        self,
        client: Client,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        """``clock`` and ``wait`` are for tests."""
        self._client, self._clock, self._wait = client, clock, wait
        self._lost: tuple[float, float, str] | None = None  # since when, next attempt, and why
        self.view: View | None = None
        self.refused: ClientError | None = None
        self.changed = threading.Event()

    def start(self) -> None:
        """Begin to read. The thread ends with the process."""
        threading.Thread(target=self.read, name="rkserve top", daemon=True).start()

    def read(self) -> None:
        """Read until the server refuses."""
        failures = 0
        while self.refused is None:
            why, began_s = "the stream has ended", self._clock()
            try:
                for document in self._client.watch():
                    self.view, self._lost, failures = document["view"], None, 0
                    self.changed.set()
            except (NotAllowed, NotFound, UnexpectedAnswer) as exc:
                self.refused = exc
                self.changed.set()
                return
            except ClientError as exc:
                why = exc.message if isinstance(exc, CallError) else str(exc)
            else:
                if self._clock() - began_s > WHOLE_S:
                    continue
            pause_s = PAUSES_S[min(failures, len(PAUSES_S) - 1)]
            failures += 1
            since_s = self._clock() if self._lost is None else self._lost[0]
            self._lost = (since_s, self._clock() + pause_s, why)
            self.changed.set()
            self._wait(pause_s)

    def notice(self) -> str:
        """Return the sentence about a lost stream, or nothing."""
        if (lost := self._lost) is None:
            return ""
        since_s, next_s, why = lost
        now_s = self._clock()
        return (
            f"stale since {now_s - since_s:.0f} s: {why}; "
            f"next attempt in {max(0.0, next_s - now_s):.0f} s"
        )

    def frame(self, width: int, height: int) -> RenderableType:
        """Return the screen as it is now."""
        if self.view is None:
            return Text(self.notice() or "waiting for the cluster; q quits")
        return draw(self.view, width, height, self.notice())


def watch(found: Watch, console: Console, keys: int) -> None:
    """Redraw the screen until ``q`` is read from ``keys``, or the server refuses the stream.

    Raises:
        ClientError: the server has refused the stream.
    """
    found.start()
    with _single_keys(keys), Live(console=console, screen=True, auto_refresh=False) as live:
        while found.refused is None:
            width, height = console.size  # as it is now: terminals change
            live.update(found.frame(width, height), refresh=True)
            found.changed.clear()
            if _pressed(keys, found.changed):
                return
    raise found.refused


def _pressed(keys: int, changed: threading.Event) -> bool:
    """Wait for a key, an event or the next redraw; return whether the key quits."""
    until_s = time.monotonic() + REDRAWN_S
    while time.monotonic() < until_s and not changed.is_set():
        if select.select([keys], [], [], 0.1)[0]:
            pressed = os.read(keys, 1)
            return pressed in (b"", *(bytes([one]) for one in QUIT))
    return False


@contextmanager
def _single_keys(keys: int) -> Iterator[None]:
    """Read keys as they are pressed, where they come from a terminal."""
    if not os.isatty(keys):
        yield
        return
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


@commands.command(cls=ClusterCommand)
def top(
    context: CommandContext,
    *,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, and end.")] = False,
) -> None:
    """Watch the cluster: its verdict, the reasons with their commands, its boards. q quits.

    Without a terminal, or with --json, it prints the cluster once.
    """
    if once or context.as_json or not (context.out.is_terminal and sys.stdin.isatty()):
        document = next(context.client.watch(), None)
        if document is None:
            raise Unreachable("the stream of events has ended before its first one")
        view = document["view"]
        context.show(view, lambda: draw(view, context.out.width))
        return
    watch(Watch(context.client), context.out, sys.stdin.fileno())

"""A whole cluster in virtual time: the real Coordinator, Routers and boards on simulated engines.

One seed decides every delay, loss, partition, crash and call of a run. The world is built of the
classes that a deployment connects by Ray; only engines (``FakeEngine``) and links are simulated:

- a message takes a random time, may be lost before or after its effect, and waits for the end of a
  partition of its direction, so that a call may arrive long after its caller gave up;
- boards, engines, Routers and the Coordinator crash and come back; a board keeps its disk only, the
  Coordinator its ledger;
- operators make calls at both Routers and repeat them under one key until they know the result;
- clients stream, and check each token against the weights that the answer names.

``History`` judges: a pause that was confirmed is obeyed by every board until its lease or the next
resume, no request after a confirmed rollout gets another version, boards accept nothing behind an
epoch that was confirmed before, and after the last fault everything converges.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from rkserve.config.router import RouterConfig
from rkserve.control.calls import OperationKind, OperationRequest, Strategy
from rkserve.core.board_report import BoardState
from rkserve.core.desired_state import Desired, InFlight, PauseMode, SleepLevel
from rkserve.core.errors import (
    CoordinatorAway,
    RkserveError,
)
from rkserve.core.messages import (
    Accepted,
    Delta,
    Finished,
    GenerateRequest,
)
from rkserve.core.metrics import RouterMetrics
from rkserve.fleet.fleet import Fleet
from rkserve.router.coordinator_client import CoordinatorClient
from rkserve.router.dispatch.dispatch import Dispatch, open_dispatch
from tests.support.boards.continued_house import Heard
from tests.support.cluster.fake_cluster import MODEL
from tests.support.cluster.simulated_history import (
    BOARDS,
    CLIENT,
    HEAD,
    LINE,
    ROUTERS,
    Answer,
    Call,
    History,
    Violated,
    next_token,
    now_s,
)
from tests.support.cluster.simulated_parts import Head, HeadLink, Link, Network, Node, Tasks
from tests.support.values.control_values import read_action

VERSIONS = {"v1": b"one" * 50, "v2": b"two" * 60, "v3": b"three" * 40}
BASES = {"w1": b"weights one" * 20, "w2": b"weights two" * 20}
AT_ONCE = 3  # calls of operators
LONGEST_CALL_S = 30.0  # how long an operator waits before it repeats a call
SETTLED_S = 180.0  # within which everything follows after the last fault
# A client may meet these while boards are paused, drained, asleep or lost; all else is a bug.
CLIENT_ERRORS = frozenset(
    (
        "board_failed",
        "board_asleep",
        "board_behind",
        "board_drained",
        "engine_paused",
        "model_drained",
        "model_not_ready",
        "no_board",
        "poison_request",
        "queue_full",
        "queue_timeout",
        "adapter_failed",
        "version_not_found",
    )
)


class Site:
    """One Router."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self._world = name, world
        network, tasks = world.network, world.tasks
        config, metrics = RouterConfig(), RouterMetrics(CollectorRegistry())
        self.fleet = Fleet({"g": Link(name, world.nodes, network, tasks)}, {"g": MODEL})
        self.cluster = CoordinatorClient(HeadLink(name, world.head, network, tasks), self._obey)
        rng = random.Random(world.rng.random())
        self.dispatch: Dispatch = open_dispatch(config, self.fleet, metrics, rng)
        self._loops = [
            tasks.start(self.cluster.follow()),
            tasks.start(self.fleet.follow(0.5)),
        ]
        self.clients: dict[asyncio.Task[Any], None] = {}

    def _obey(self, desired: Desired) -> None:
        self._world.history.note(f"Router {self.name} receives {_shown(desired)}")
        self.fleet.obey(desired)

    async def end(self) -> None:
        """Lose the Router with all its streams."""
        tasks = [*self._loops, *self.clients]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class World:
    """The cluster of one seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.history = History()
        self.network = Network(random.Random(self.rng.random()))
        self.tasks = Tasks()
        self.nodes: dict[str, Node] = {}
        for name in BOARDS:
            place = folder / name
            place.mkdir()
            self.nodes[name] = Node(name, place, self.history)
        (folder / HEAD).mkdir()
        self.head = Head(folder / HEAD, Link(HEAD, self.nodes, self.network, self.tasks))
        self.versions = {name: self.head.store.add(name, data) for name, data in VERSIONS.items()}
        self.bases = {name: self.head.store.add_base(name, data) for name, data in BASES.items()}
        self.sites: dict[str, Site] = {}
        self._numbers = 0
        # Dicts for their order: that of sets depends on addresses.
        self._operating: dict[asyncio.Task[Any], None] = {}
        self._coming: dict[asyncio.Task[Any], None] = {}  # what was crashed comes back

    async def start(self) -> None:
        """Start everything, and roll out the first version."""
        await asyncio.gather(*(node.start() for node in self.nodes.values()))
        await self.head.start()
        self.sites = {name: Site(name, self) for name in ROUTERS}
        for name in VERSIONS:
            await self._until_done(OperationKind.ADAPTER_STAGE, self._staging(name))
        await self._until_done(OperationKind.ADAPTER_ROLLOUT, self._rollout("v1"))

    async def end(self) -> None:
        """End everything."""
        for site in self.sites.values():
            await site.end()
        await self.tasks.end()
        await self.head.crash()
        for node in self.nodes.values():
            await node.crash()

    # -- faults -------------------------------------------------------------------------------

    def step(self) -> None:
        """Begin one random thing."""
        actions: tuple[tuple[int, Callable[[], None]], ...] = (
            (40, self._client),
            (25, self._operator),
            (4, self._crash_engine),
            (4, self._crash_board),
            (3, self._crash_head),
            (2, self._crash_router),
            (5, self._partition),
            (5, self._heal),
        )
        [chosen] = self.rng.choices([one for _, one in actions], [weight for weight, _ in actions])
        chosen()

    def _crash_engine(self) -> None:
        node = self.nodes[self.rng.choice(BOARDS)]
        if node.engine is not None:
            self.history.fault("engine crash", f"the engine of {node.name} crashes")
            node.engine.die("SIGSEGV")

    def _crash_board(self) -> None:
        node = self.nodes[self.rng.choice(BOARDS)]
        if node.board is not None:
            self.history.fault("board crash", f"board {node.name} crashes")
            self._later(self._replace_board(node, self.rng.uniform(0.2, 8.0)))

    async def _replace_board(self, node: Node, away_s: float) -> None:
        await node.crash()
        await asyncio.sleep(away_s)
        await node.start()
        self.history.note(f"board {node.name} is back as {node.replica}")

    def _crash_head(self) -> None:
        if self.head.it is not None:
            self.history.fault("Coordinator crash", "the Coordinator crashes")
            self._later(self._replace_head(self.rng.uniform(0.1, 4.0)))

    async def _replace_head(self, away_s: float) -> None:
        await self.head.crash()
        await asyncio.sleep(away_s)
        await self.head.start()
        self.history.note("the Coordinator is back")

    def _crash_router(self) -> None:
        name = self.rng.choice(ROUTERS)
        self.history.fault("Router crash", f"Router {name} crashes")
        self._later(self._replace_router(name))

    async def _replace_router(self, name: str) -> None:
        await self.sites[name].end()
        self.sites[name] = Site(name, self)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.tasks.start(work)
        self._coming[task] = None
        task.add_done_callback(self._coming.pop)

    def _partition(self) -> None:
        one, other = self.rng.choice(BOARDS), self.rng.choice((*ROUTERS, HEAD, HEAD))
        pairs = [(one, other), (other, one)]
        if self.rng.random() < 0.3:
            pairs = [(self.rng.choice(ROUTERS), HEAD), (HEAD, self.rng.choice(ROUTERS))]
        if self.rng.random() < 0.4:
            pairs = pairs[:1]
        self.history.fault("partition", f"no message passes {pairs}")
        for pair in pairs:
            self.network.cut(*pair)

    def _heal(self) -> None:
        self.history.note("messages pass again")
        self.network.heal()

    # -- clients ------------------------------------------------------------------------------

    def _client(self) -> None:
        site = self.sites[self.rng.choice(ROUTERS)]
        rng = random.Random(self.rng.random())
        task = self.tasks.start(self.listen(site, rng))
        site.clients[task] = None
        task.add_done_callback(site.clients.pop)

    async def listen(self, site: Site, rng: random.Random) -> bool:
        """Be a client; return whether there was an answer."""
        self._numbers += 1
        number = self._numbers
        line = LINE if rng.random() < 0.6 else None
        prompt = (CLIENT, *(rng.randrange(10, 900) for _ in range(rng.randrange(1, 12))))
        known = site.cluster.desired.line(MODEL, LINE)
        request = GenerateRequest(
            f"g{number}/0",
            MODEL,
            prompt,
            rng.choice((1, 5, 20, 60)),
            line=line,
            session=f"s{number}",
            min_epoch=known.epoch if line and known else 0,
        )
        began_s, heard, accepted = now_s(), Heard(), None
        self.history.note(f"request {number} for {line} at {site.name}")
        try:
            async with aclosing(site.dispatch.generate(request)) as events:
                async for event in events:
                    if isinstance(event, Accepted):
                        accepted = event
                        self.history.note(
                            f"request {number} is accepted by {event.board_id} at {event.epoch}"
                            f"{' and waits' * event.waits}"
                        )
                    elif isinstance(event, Delta):
                        heard.text = heard.text[: len(heard.text) - event.retract] + event.text
                        heard.take_ids(event)
                    elif isinstance(event, Finished):
                        heard.finished = event
        except RkserveError as exc:
            code = exc.code or type(exc).__name__
            self.history.note(f"request {number} ends with {code}")
            self.history.errors[code] = self.history.errors.get(code, 0) + 1
            if code not in CLIENT_ERRORS:
                raise Violated(f"request {number} ended with {code}: {exc}") from exc
            return False
        if heard.finished is None or accepted is None:
            raise Violated(f"request {number} ended without its end")
        versions = self._check(request, heard, heard.finished)
        self.history.note(f"request {number} ends as {heard.finished.reason.value}: {versions}")
        self.history.answers.append(Answer(began_s, now_s(), line, accepted, versions))
        return True

    def _check(self, request: GenerateRequest, heard: Heard, finished: Finished) -> tuple[str, ...]:
        """Check every token against the weights that the answer names; return their names."""
        ids = heard.token_ids
        if heard.text != "".join(f"{token_id} " for token_id in ids):
            raise Violated(f"{request.request_id}: the text is not that of the ids")
        if finished.usage.completion_tokens != len(ids):
            raise Violated(f"{request.request_id}: {finished.usage} for {len(ids)} tokens")
        borders = [0, *(span.end for span in finished.versions)]
        if borders != [*(span.start for span in finished.versions), len(ids)]:
            raise Violated(f"{request.request_id}: {finished.versions} for {len(ids)} tokens")
        for span in finished.versions:
            for at in range(span.start, span.end):
                context = (*request.prompt_ids, *ids[:at])
                if ids[at] not in self._possible(span.version, context):
                    raise Violated(
                        f"{request.request_id}: token {at} is none of {span.version} after what "
                        "was before it"
                    )
        if request.line is None and len(finished.versions) > 1:
            return tuple(span.version for span in finished.versions)
        names = tuple(span.version for span in finished.versions)
        if request.line is not None and len(set(names)) > 1:
            raise Violated(f"{request.request_id}: one answer of {names}")
        return names

    def _possible(self, version: str, context: tuple[int, ...]) -> set[int]:
        """Return the tokens that these weights may give; an adapter's version names no base."""
        bases = {name: base.digest for name, base in self.bases.items()} | {"default": ""}
        if version in bases:
            return {next_token(bases[version], None, 0, context)[0]}
        adapter = self.versions[version.partition("@")[2]].ref.key
        return {next_token(base, adapter, 0, context)[0] for base in bases.values()}

    # -- operators ----------------------------------------------------------------------------

    def _operator(self) -> None:
        if len(self._operating) >= AT_ONCE:
            return
        task = self.tasks.start(self._perform(*self._random_call()))
        self._operating[task] = None
        task.add_done_callback(self._operating.pop)

    def _random_call(self) -> tuple[OperationKind, dict[str, Any]]:
        rng = self.rng
        boards = list(rng.choice(((), (), (rng.choice(BOARDS),), tuple(rng.sample(BOARDS, 2)))))
        some: dict[str, Any] = {"boards": boards} if boards else {}
        lease: dict[str, Any] = rng.choice(({}, {"lease_s": rng.uniform(0.5, 8.0)}))
        kind = rng.choice(
            (
                *(OperationKind.PAUSE,) * 3,
                *(OperationKind.RESUME,) * 5,
                OperationKind.SLEEP,
                *(OperationKind.WAKE,) * 3,
                OperationKind.DRAIN,
                *(OperationKind.UNDRAIN,) * 2,
                *(OperationKind.ADAPTER_ROLLOUT,) * 3,
                OperationKind.ADAPTER_ROLLBACK,
                OperationKind.REBASE,
            )
        )
        params: dict[str, Any] = {}
        if kind is OperationKind.PAUSE:
            mode = rng.choice(list(PauseMode)).value
            params = {**some, **lease, "mode": mode, "clear_cache": rng.random() < 0.3}
        elif kind is OperationKind.SLEEP:
            level = int(rng.choice(list(SleepLevel)))
            params = {**some, **lease, "level": level, "wakes": rng.random() < 0.3}
        elif kind is OperationKind.DRAIN:
            params = {"boards": [rng.choice(BOARDS)], "mode": rng.choice(("wait", "move"))}
        elif kind is OperationKind.ADAPTER_ROLLOUT:
            params = self._rollout(rng.choice(list(VERSIONS)))
        elif kind is OperationKind.ADAPTER_ROLLBACK:
            params = {"model": MODEL, "name": LINE}
        elif kind is OperationKind.REBASE:
            params = self._rebase(rng.choice(list(BASES)))
        return kind, params

    def _rebase(self, name: str) -> dict[str, Any]:
        base = self.bases[name]
        return {
            "model": MODEL,
            "digest": base.digest,
            "size_bytes": base.size_bytes,
            "label": base.version,
            "in_flight": InFlight.PIN.value,
        }

    def _staging(self, name: str) -> dict[str, Any]:
        version = self.versions[name]
        return {
            "model": MODEL,
            "name": LINE,
            "version": name,
            "digest": version.digest,
            "size_bytes": version.size_bytes,
        }

    def _rollout(self, version: str) -> dict[str, Any]:
        strategy = self.rng.choice((Strategy.ATOMIC, Strategy.ROLLING)).value
        return {"model": MODEL, "name": LINE, "version": version, "strategy": strategy}

    async def _perform(self, kind: OperationKind, params: dict[str, Any]) -> Call:
        """Call under one key until the result is known."""
        call = Call(kind, params, now_s())
        self.history.calls.append(call)
        key = f"key-{len(self.history.calls)}"
        self.history.note(f"{key}: {kind.value} {params}")
        request = OperationRequest(read_action(kind, params), key=key, timeout_s=15.0)
        ids: set[str] = set()
        tries = 0
        while True:
            tries += 1
            site = self.sites[self.rng.choice(ROUTERS)]
            try:
                performed = self.tasks.start(site.cluster.perform(request))
                outcome = await asyncio.wait_for(asyncio.shield(performed), LONGEST_CALL_S)
            except (TimeoutError, asyncio.TimeoutError, CoordinatorAway):
                await asyncio.sleep(self.rng.uniform(0.1, 1.0))
                continue
            except RkserveError as exc:
                self.history.note(f"{key} is refused: {exc}")
                # A call that was sent once has begun nothing; of a repeated one nobody knows.
                if tries == 1:
                    call.ended_s = now_s()
                return call
            ids.add(outcome.operation.id)
            if len(ids) > 1:
                raise Violated(f"two operations under one key: {ids}")
            if outcome.operation.over:
                break
            await asyncio.sleep(0.5)
        call.ended_s, call.outcome = now_s(), outcome
        ended = outcome.operation
        self.history.note(
            f"{key} ({kind.value}) is {ended.state.value} at epoch {ended.epoch} after {tries}"
        )
        return call

    async def _until_done(self, kind: OperationKind, params: dict[str, Any]) -> None:
        """Repeat a call until it has succeeded everywhere."""
        deadline_s = now_s() + SETTLED_S
        while not (call := await self._perform(kind, params)).succeeded:
            if now_s() > deadline_s:
                raise Violated(f"{kind.value} does not succeed: {call.outcome}")
            await asyncio.sleep(1.0)

    # -- the end ------------------------------------------------------------------------------

    async def settle(self) -> None:
        """End all faults, holds and sleeps; raise ``Violated`` unless everything follows."""
        self.history.note("no more faults")
        self.network.heal()
        self.network.loss = 0.0
        while self._coming:
            await asyncio.wait(self._coming)
        deadline_s = now_s() + SETTLED_S
        while self._operating:
            if now_s() > deadline_s:
                raise Violated(f"{len(self._operating)} calls have no result")
            await asyncio.wait(self._operating, timeout=1.0)
        for kind in (OperationKind.RESUME, OperationKind.WAKE, OperationKind.UNDRAIN):
            await self._until_done(kind, {})
        deadline_s = now_s() + SETTLED_S
        while why := self._unsettled():
            if now_s() > deadline_s:
                raise Violated(f"{SETTLED_S:.0f} s after the last fault {why}")
            await asyncio.sleep(0.5)
        for site in self.sites.values():
            for _ in range(2):
                if not await self.listen(site, random.Random(self.rng.random())):
                    raise Violated("a calm cluster refuses a request")

    def _unsettled(self) -> str:
        """Return what does not follow yet."""
        if self.head.kept is None:
            return "there is no Coordinator"
        epoch = self.head.kept.desired().epoch
        reasons = [_board_unsettled(node, epoch) for node in self.nodes.values()]
        for site in self.sites.values():
            if site.cluster.desired.epoch != epoch:
                reasons.append(f"Router {site.name} is at {site.cluster.desired.epoch}")
            if site.clients:
                reasons.append(f"Router {site.name} has {len(site.clients)} clients")
        return ", ".join(filter(None, reasons))


def _board_unsettled(node: Node, epoch: int) -> str:
    report = node.board.report() if node.board is not None else None
    if report is None or report.state is not BoardState.READY:
        return f"board {node.name} is {report and (report.state, report.reason)}"
    if report.epoch != epoch or report.hold or report.drained:
        return f"board {node.name} is at {report.epoch}, the cluster at {epoch}"
    if report.running or report.queued:
        return f"board {node.name} has {report.running} and {report.queued} requests"
    return ""


def _shown(desired: Desired) -> str:
    """Return a desired state in few words."""
    pauses = [
        f"{'pause' if one.level is None else f'sleep {one.level:d}'} {one.mode.value} "
        f"{','.join(one.scope.boards) or 'all'} until {one.expires_s}{' or a request' * one.wakes}"
        for one in desired.pauses
    ]
    lines = [
        f"active {one.active and one.active.ref.version}"
        + (f" candidate {one.candidate.ref.version} on {one.switched}" if one.candidate else "")
        for one in desired.lines
    ]
    bases = [f"base {one.label} ({one.rebase})" for one in desired.weights]
    drained = [f"drained {desired.drained}"] if desired.drained else []
    return f"epoch {desired.epoch}: " + "; ".join([*pauses, *lines, *bases, *drained])


async def live(seed: int, folder: Path, steps: int = 80) -> World:
    """Run the world of one seed; raise ``Violated``, with the story, for what must not be."""
    world = World(seed, folder)
    try:
        try:
            await world.start()
            for _ in range(steps):
                world.step()
                await asyncio.sleep(world.rng.expovariate(3.0))
                if world.tasks.failed:
                    raise world.tasks.failed[0]
            await world.settle()
            world.history.judge()
            if world.tasks.failed:
                raise world.tasks.failed[0]
        finally:
            await world.end()
    except Exception as exc:
        story = "\n".join(world.history.story)
        raise Violated(f"seed {seed}: {exc!r}\n{story}") from exc
    return world

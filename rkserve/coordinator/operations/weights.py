"""Operations on weights: a trainer's update, of an adapter or of base weights, everywhere at one
instant; and other base weights board by board.

Each takes its ``OperationRun`` and awaits nothing before ``begin``; see ``pause``.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from rkserve.control import weight_changes
from rkserve.control.calls import (
    MODEL,
    AnyAction,
    ModelAction,
    OperationKind,
    RebaseAction,
    StoredArtifact,
    Strategy,
    WeightUpdateAction,
)
from rkserve.control.operations import OperationState, Phase
from rkserve.control.rollout_plan import AdapterRolloutPlan, RolloutPlan
from rkserve.control.weight_changes import FOLDER_LABEL, WeightsRolloutPlan
from rkserve.coordinator.boards.roster import Roster
from rkserve.coordinator.operations.operation_run import (
    FileStore,
    Handler,
    OperationContext,
    OperationRun,
)
from rkserve.coordinator.operations.rollout import LOAD_S, RolloutRunner
from rkserve.coordinator.operations.trust import ArtifactTrust
from rkserve.core.board_report import own_digest
from rkserve.core.desired_state import (
    AdapterVersion,
    Artifact,
    BaseVersion,
    Desired,
    InFlight,
    Scope,
    Weights,
)
from rkserve.core.errors import ArtifactNotFound, ArtifactRefused, RequestError
from rkserve.core.files import DIGEST

log = logging.getLogger(__name__)

# Seconds by which the lease of a hold outlasts its operation, which normally removes the hold
# itself: the lease is for a Coordinator that never returns.
SPARE_S = 60.0


class WeightOperations:
    """The handlers. Use it from one event loop."""

    def __init__(
        self,
        store: FileStore,
        roster: Roster,
        trust: ArtifactTrust,
        mixed: frozenset[str] = frozenset(),
    ) -> None:
        """Models of ``mixed`` have boards of several runtimes."""
        self._store = store
        self._roster = roster
        self._trust = trust
        self._mixed = mixed

    def find(self, desired: Desired, model: str, artifact: str) -> StoredArtifact:
        """Return the artifact named ``<adapter>@<version>`` or ``<model>@<version>``. It may read a
        file.

        Raises:
            ArtifactNotFound: nothing of that name is staged, or in the head's store.
            ArtifactRefused: it was trained on other base weights than the model has, or the model
                has boards of several runtimes.
            SignatureRequired: it is base weights without the signature that the rules want.
        """
        self.require_one_runtime(model)
        name, _, version = artifact.rpartition("@")
        if not name or not version:
            raise ArtifactNotFound(
                f"'{artifact[:80]}' names no artifact; '<name>@<version>' does.", "artifact"
            )
        found: Artifact
        if name == model:
            found = self._store.model(model, version)
        else:
            found = _staged(desired, model, name, version)
        facts = self._store.facts(found.digest)
        if name == model:
            self._trust.require(facts, model, model, MODEL)
        self.learn(model)
        self.require_base(desired, model, facts.base_digest)
        return StoredArtifact(found, facts.parameters)

    def require_one_runtime(self, model: str) -> None:
        """Raise ``ArtifactRefused`` for a model with boards of several runtimes."""
        if model in self._mixed:
            raise ArtifactRefused(
                f"Model '{model}' is served by NPUs (RKLLM) and by CPUs (llama.cpp), and no file "
                "of weights loads on both. Serve adapters and new weights with a model of its own "
                "that has boards of one kind.",
                "model",
            )

    def learn(self, model: str) -> None:
        """Compute the digest of the file in the model's folder, once; it may read all of it."""
        try:
            self._store.own_digest(model)
        except OSError as exc:
            log.warning("the file of model %s cannot be read on the head: %s", model, exc)

    async def prepare(self, desired: Desired, asked: AnyAction) -> None:
        """Compute the digest that a rollout's ``require_fit`` compares, if needed: a handler reads
        no file.
        """
        if not isinstance(asked, ModelAction):
            return
        model = asked.model
        line = desired.line(model, str(getattr(asked, "name", None)))
        if line is None or self._store.known_own_digest(model) is not None:
            return
        if any(self._store.facts(one.digest).base_digest is not None for one in line.versions):
            await asyncio.to_thread(self.learn, model)

    def require_base(self, desired: Desired, model: str, digest: str | None) -> None:
        """Raise ``ArtifactRefused`` unless the model's base weights have that sha256; None always
        passes. A digest that ``learn`` has not computed is taken from the boards' reports.
        """
        if digest is None:
            return
        base = desired.weights_of(model).base
        now = self._own(model) if base is None else base.digest
        if now is None:
            raise ArtifactRefused(
                f"Neither the head nor the boards of model '{model}' have reported the sha256 of "
                "its file to compare 'base_digest' with; GET /weight_info has it once it is known.",
                "base_digest",
            )
        if now != digest:
            raise ArtifactRefused(
                f"It was trained on base weights of the sha256 {digest[:12]}..., and model "
                f"'{model}' has {now[:12]}... .",
                "base_digest",
            )

    def require_fit(self, desired: Desired, model: str, version: AdapterVersion | None) -> None:
        """Raise ``ArtifactRefused`` for an adapter whose ``base_digest`` is not the model's now."""
        if version is None:
            return
        try:
            self.require_base(desired, model, self._store.facts(version.digest).base_digest)
        except ArtifactRefused as exc:
            raise ArtifactRefused(
                f"{version.title} does not fit. {exc.message}", exc.param
            ) from exc

    def _own(self, model: str) -> str | None:
        known = self._store.known_own_digest(model)
        if known is not None:
            return known
        digest = own_digest(self._roster.reports(model))
        return digest if DIGEST.fullmatch(digest) else None

    @property
    def handlers(self) -> dict[OperationKind, Handler]:
        """Return the handler of each kind."""
        return {OperationKind.WEIGHT_UPDATE: self.update, OperationKind.REBASE: self.rebase}

    async def update(self, run: OperationRun, asked: WeightUpdateAction) -> None:
        """Have all boards serve a trainer's weights from one instant on."""
        if asked.name is None:
            await self.rebase(run, asked)
            return
        model, in_flight = asked.model, asked.in_flight
        boards = _boards(run.context, model)
        planned = AdapterRolloutPlan(
            operation=run.operation.id,
            model=model,
            name=asked.name,
            version=_staged(run.context.state.desired, model, asked.name, asked.version),
            boards=boards,
            strategy=Strategy.ATOMIC,
            in_flight=in_flight,
            keep=run.context.config.keep_versions,
            step=asked.step,
            held_first=in_flight is not InFlight.PIN,
        )
        planned.check(run.context.state.desired)
        self.require_fit(run.context.state.desired, model, planned.version)
        _begin(run)
        run.allow(run.context.config.stage_timeout_s + LOAD_S)
        await _roll(run, replace(planned, hold_s=run.limit_s + SPARE_S))

    async def rebase(self, run: OperationRun, asked: RebaseAction | WeightUpdateAction) -> None:
        """Have boards load other base weights one by one, or for an update all at once."""
        model, version, before = asked.model, asked.artifact, run.context.state.desired
        boards = _boards(run.context, model)
        if version is not None:
            self._trust.require(self._store.facts(version.digest), model, model, MODEL)
        at_once = isinstance(asked, WeightUpdateAction)
        step, unavailable = (
            (asked.step, 1)
            if isinstance(asked, WeightUpdateAction)
            else (None, asked.max_unavailable)
        )
        planned = WeightsRolloutPlan(
            operation=run.operation.id,
            model=model,
            version=version,
            label=_label(asked, before.weights_of(model), version),
            boards=boards,
            at_once=at_once,
            max_unavailable=unavailable,
            in_flight=asked.in_flight,
            step=step,
        )
        if planned.holds(before):
            run.applied = False
            run.begin(Phase.RELEASING)
            run.end(OperationState.SUCCEEDED)
            return
        _require_possible(planned)
        planned.check(before)
        _begin(run)
        loads = 1 if at_once else -(-len(boards) // planned.max_unavailable)
        run.allow(run.context.config.stage_timeout_s + loads * run.context.config.load_timeout_s)
        if version is not None:
            with run.timed("checking"):
                await asyncio.to_thread(self._store.check, version)
        await _roll(run, replace(planned, hold_s=run.limit_s + SPARE_S))


def _begin(run: OperationRun) -> None:
    """Begin the operation, after which no other one may change the model's served versions."""
    run.spent("locking", run.limit_s - run.left_s)
    run.begin(Phase.ACCEPTED)


async def _roll(run: OperationRun, planned: RolloutPlan) -> None:
    finish = await RolloutRunner(run, planned).run()
    run.end(finish.state, finish.error)


def _boards(context: OperationContext, model: str) -> tuple[str, ...]:
    scope = Scope(models=(model,))
    context.check(scope)
    return tuple(sorted({address.board_id for address in context.roster.addresses(scope)}))


def _staged(desired: Desired, model: str, name: str, wanted: str) -> AdapterVersion:
    line = desired.line(model, name)
    version = None if line is None else line.version(wanted)
    if version is None:
        raise ArtifactNotFound(
            f"No version '{wanted}' of an adapter '{name}' of model '{model}' is staged.",
            "artifact",
        )
    return version


def _require_possible(planned: WeightsRolloutPlan) -> None:
    if planned.at_once and planned.in_flight is InFlight.PIN:
        raise RequestError(
            "Requests that run cannot keep base weights that no board has any more: 'in_flight' is "
            "'switch' or 'abort'; POST /update_weights_from_disk lets them end, board by board.",
            "in_flight",
        )


def _label(
    asked: RebaseAction | WeightUpdateAction, now: Weights, version: BaseVersion | None
) -> str:
    """Return the name of the weights: the given one, or the current one."""
    if isinstance(asked, RebaseAction):
        if asked.label is not None:
            return asked.label
        if weight_changes.is_same(now.base, version):
            return now.label
    return FOLDER_LABEL if version is None else version.version

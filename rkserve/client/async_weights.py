"""The calls of ``AsyncClient`` that change weights as a trainer does, and say which are served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rkserve.client import answers, calls, flows, requests
from rkserve.client.answers import Operation, Pushed
from rkserve.client.calls import InFlight
from rkserve.client.flows import OnProgress
from rkserve.client.running import AsyncRuns
from rkserve.client.weights import PushedWeights, WeightsPush, push


class AsyncWeightCalls(AsyncRuns):
    """Which weights are served: by step, by file, by label."""

    async def receive_weight_update(
        self,
        version: int,
        artifact: str | Pushed | PushedWeights,
        parameters: Sequence[Mapping[str, Any]] | None = None,
        *,
        model: str | None = None,
        in_flight: InFlight | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
        key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Operation:
        """Have staged weights served by all boards at once, as those of a trainer's step.

        ``version`` is the step, which must grow. ``artifact`` is what ``push_adapter(...,
        activate=False)`` or ``push_weights`` returned, or ``adapter@version``, ``model@version``;
        ``parameters`` are the tensors (``{name, shape, dtype}``) that it was pushed with. Requests
        that run go on with the new weights unless ``in_flight`` says otherwise.

        Raises:
            Conflict: the step is not newer than the last one (`stale_weights`), or another update
                runs.
            Refused: the parameters do not fit the artifact; nothing was paused.
            OperationFailed: it was undone, and what was served before is served.
        """
        request = requests.receive(
            version,
            artifact,
            parameters,
            model=model,
            in_flight=in_flight,
            timeout_s=timeout_s,
            key=key,
        )
        return await self._complete(request, wait, on_progress)

    async def update_weights(
        self,
        path: str | PushedWeights,
        version: str | None = None,
        *,
        model: str | None = None,
        in_flight: InFlight | None = None,
        max_unavailable: int | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
        key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Operation:
        """Have boards load another file of their base model, ``max_unavailable`` at a time.

        ``path`` is on the head node, in a folder of ``coordinator.allowed_paths``, or what
        ``push_weights`` returned; ``default`` is the file in the model's own folder. ``version`` is
        the label that answers bear then. Boards that sleep load it when they wake.

        Raises:
            Refused, NotFound: the file is no model for these boards, or may not be read.
            OperationFailed: a board could not load it, and all have the old one again.
            PartlyDone: it is in force, and some boards have not followed yet.
        """
        request = requests.update(
            path,
            version,
            model,
            in_flight,
            max_unavailable=max_unavailable,
            timeout_s=timeout_s,
            key=key,
        )
        return await self._complete(request, wait, on_progress)

    async def push_weights(
        self,
        source: Path | str | bytes,
        version: str | None = None,
        *,
        model: str | None = None,
        parameters: Sequence[Mapping[str, Any]] | None = None,
        key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> PushedWeights:
        """Send a base model file to the head, and change nothing that is served.

        Without a ``version`` it is called by the first 12 digits of its sha256. With
        ``parameters`` an update that names other tensors will be refused.

        Raises:
            SourceFailed: the file cannot be read.
            Refused: it is no model for these boards.
        """
        what = WeightsPush(source, version, model, parameters, key or calls.new_key())
        return await self._run(push(what, self._patience, on_progress))

    async def weight_info(self, model: str | None = None) -> dict[str, Any]:
        """Return the labels, steps and files of the weights, by model and board."""
        return await self._ask("/weight_info", dict, model=model)

    async def weight_version(self, model: str | None = None) -> str:
        """Return the label of a model's weights."""
        return await self._ask("/weight_info", answers.weight_version, model=model)

    async def set_weight_version(
        self, version: str, *, model: str | None = None, key: str | None = None
    ) -> Operation:
        """Label the weights of a model, which answers then carry."""
        return await self._run(flows.perform(requests.label(model, version, key), self._patience))

"""The child processes of the project's own benchmarks: also a controller, and bare bindings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rkserve.bench.harness.child import CommandProcess, Json, OnProgress
from rkserve.bench.harness.processes import ANSWER_S, MODEL, RELEASE, SLACK_S, BenchProcesses, Say
from rkserve.config.board_group import BoardGroupConfig, SimulatedConfig
from rkserve.config.serve_config import engine_environ
from rkserve.native.sim.build import ensure_built


class BenchCrew(BenchProcesses):
    """A crew with a controller of the cluster, and with bindings that serve without a cluster."""

    def __init__(
        self, folder: Path, say: Say, model: Path = MODEL, *, front: bool | None = None
    ) -> None:
        """See ``BenchProcesses``."""
        super().__init__(folder, say, model, front=front)
        self._controller: CommandProcess | None = None

    def control(self, timeout_s: float, heard: OnProgress, **command: Any) -> Json:
        """Load the cluster while a plan is played. Raises ``BenchFailed``."""
        if self._controller is None:
            self._controller = self._child("benchmarks.control.load")
            self._stack.callback(self._controller.close)
        asked = self._to(timeout_s=timeout_s, **command)
        return self._controller.ask(asked, timeout_s + SLACK_S, heard)

    def binding(self, profile: str) -> CommandProcess:
        """Return a process with the binding alone, at a board's pace; it ends with the others."""
        child = self._binding(SimulatedConfig(profile=profile, release=RELEASE), 1)
        self._stack.callback(child.close)
        return child

    @contextmanager
    def batching_binding(
        self,
        profile: str,
        n_batch: int,
        *,
        time_scale: float,
        gain: str,
        quirks: Mapping[str, bool] | None = None,
    ) -> Iterator[CommandProcess]:
        """Give a process with the binding alone for as long as the block lasts."""
        simulated = SimulatedConfig.model_validate(
            {
                "profile": profile,
                "release": RELEASE,
                "time_scale": time_scale,
                "batch_gain": gain,
                "load_s": 0.0,  # loading is not what is measured
            }
        )
        child = self._binding(simulated, n_batch, quirks)
        try:
            yield child
        finally:
            child.close()

    def _binding(
        self, simulated: SimulatedConfig, n_batch: int, quirks: Mapping[str, bool] | None = None
    ) -> CommandProcess:
        group = BoardGroupConfig(name="alone", model=MODEL, simulated=simulated)
        child = self._child("benchmarks.harness.alone", engine_environ(group, "alone"))
        model, library = str(self.model.path), str(ensure_built(RELEASE))
        command: Json = {"do": "load", "model": model, "library": library, "n_batch": n_batch}
        command["quirks"] = dict(quirks or {})
        try:
            child.ask(command, ANSWER_S)
        except BaseException:
            child.close()
            raise
        return child

    def _others(self) -> tuple[CommandProcess | None, ...]:
        return (self._controller,)

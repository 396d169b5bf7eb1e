"""One application with boards of many kinds, for tests that need a kind of their own each.

Every application has a Router and a Coordinator, which cost more than its tests: these share one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rkserve.native.sim import models
from tests.support.cluster.local_cluster import App, LocalCluster
from tests.support.cluster.varied import (
    ADAPT,
    ADAPTED,
    BATCH,
    BATCHED,
    CACHE,
    CACHED,
    CATALOGUED,
    EMBED,
    EXAMPLES,
    FILTERED,
    HOOKS,
    IDLE_S,
    NAME,
    NAP,
    NEAR,
    PAIR,
    PLAIN,
    REST,
    RESTED,
    TITLES,
    TWICE,
    VISION,
    adapter_file,
)
from tests.support.http.talk import MODEL
from tests.support.paths import PROJECT


@pytest.fixture(scope="session")
def varied(ray_cluster: LocalCluster) -> App:
    """All of them, deployed; ``of`` waits for the boards of one group."""
    catalog = ray_cluster.folder / "catalog-near"
    # Without its adapter, whose name alone is to mean that of another model.
    without = shutil.ignore_patterns("adapters")
    shutil.copytree(PROJECT / "models" / MODEL, catalog / CATALOGUED, ignore=without)
    (ray_cluster.python_dir / "redact.py").write_text(EXAMPLES["filter"], encoding="utf-8")

    def group(name: str, boards: int, model: Path | str, **more: Any) -> dict[str, Any]:
        return ray_cluster.simulated(name, boards, **{**more, "model": str(model)})

    at_once: dict[str, Any] = {"time_scale": 0.0}
    strict: dict[str, Any] = {"strict": True, **at_once}
    fast: dict[str, Any] = {"strict": True, "time_scale": 0.1}
    batches: dict[str, Any] = {"strict": True, "time_scale": 0.02}
    copy = ray_cluster.model_copy
    groups = [
        group(EMBED, 2, "models/sim-embed", simulated=at_once),
        group(VISION, 1, "models/sim-vision", simulated=at_once),
        group(BATCH, 1, copy(BATCHED), n_batch=4, batch_window_ms=200, simulated=batches),
        group(PAIR, 1, copy(TWICE), instances=2, simulated=batches),
        group(REST, 2, copy(RESTED), simulated=fast),
        group(NAP, 1, copy(NAP), idle_unload_s=IDLE_S, simulated=fast),
        group(NEAR, 1, f"catalog:{CATALOGUED}"),
        group(CACHE, 1, copy(CACHED, kv_bytes_per_token=28_672), simulated=strict),
        group(ADAPT, 1, _with_adapters(copy(ADAPTED, max_adapters=2)), simulated=strict),
        # The model of the page's examples, without the adapters that one above has, too.
        group(PLAIN, 1, copy(MODEL, "page"), simulated={"strict": True, "time_scale": 0.2}),
        group(FILTERED, 1, copy(FILTERED), hooks=json.loads(HOOKS[0]), simulated={"strict": True}),
    ]
    args = {"boards": groups, "router": {"ping_s": 0.1}, "catalog": {"folder": str(catalog)}}
    ray_cluster.deploy(NAME, args)
    ray_cluster.shared.append(NAME)
    return App(ray_cluster, NAME, NEAR, 1)


def _with_adapters(model: Path) -> Path:
    """Give a model folder adapters, two of them broken."""
    for seed, ((name, version), title) in enumerate(TITLES.items(), start=1):
        models.write_adapter(adapter_file(model, name, version), title, seed=seed, base=MODEL)
    damaged = bytearray(models.render_adapter("Nobody"))
    damaged[-1] ^= 0xFF
    adapter_file(model, "damaged", "v1").write_bytes(damaged)
    swapped = adapter_file(model, "swapped", "v1")
    models.write_adapter(swapped, "Somebody")
    swapped.with_name("manifest.json").write_text(json.dumps({"sha256": "0" * 64}))
    return model

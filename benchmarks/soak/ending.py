"""State of a cluster after a soak: everything ready, nothing held back, nothing left over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.control.faults_site import ADAPTERS, Site
from benchmarks.soak.operator import AdapterHistory
from benchmarks.soak.questions import ADAPTER
from benchmarks.soak.resources import processes_of
from rkserve.bench.processes import PROC, Json, snapshot

SETTLE_S = 240.0
LOOK_S = 1.0


def settled(site: Site, boards: int, adapters: AdapterHistory) -> list[str]:
    """Wait until the cluster is as it must be; return what is not so in the end."""
    deadline_s = time.monotonic() + SETTLE_S
    while (flaws := state_flaws(site, boards, adapters)) and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)
    return flaws


def state_flaws(site: Site, boards: int, adapters: AdapterHistory) -> list[str]:
    """Compare the cluster's own account of itself with what it must be."""
    looks = {
        path: site.get(path)
        for path in ("/v1/boards", "/is_paused", "/is_sleeping", ADAPTERS, "/v1/generations")
    }
    if missing := [path for path, found in looks.items() if found is None]:
        return [f"{path} does not answer" for path in missing]
    found: dict[str, Json] = {path: one for path, one in looks.items() if one is not None}
    return [
        *board_flaws(found["/v1/boards"]["data"], boards),
        *(["it is paused"] if found["/is_paused"]["is_paused"] else []),
        *(["it sleeps"] if found["/is_sleeping"]["is_sleeping"] else []),
        *adapter_flaws(found[ADAPTERS]["data"], boards, adapters.active),
        *(f"{one['id']} is still {one['state']}" for one in found["/v1/generations"]["data"]),
    ]


def board_flaws(told: Sequence[Json], boards: int) -> list[str]:
    """Return the boards that are not ready, drained or busy."""
    flaws = [] if len(told) == boards else [f"there are {len(told)} boards, not {boards}"]
    for one in told:
        if one["state"] != "ready":
            flaws.append(f"{one['id']} is {one['state']}")
        if one.get("drained"):
            flaws.append(f"{one['id']} is drained")
        busy = [f"{one[name]} {name}" for name in ("running", "queued") if one.get(name)]
        flaws += [f"{one['id']} has {what}" for what in busy]
    return flaws


def adapter_flaws(told: Sequence[Json], boards: int, active: Sequence[str]) -> list[str]:
    """Return what the adapter is not: served by a version that it may be, staged on all boards."""
    entry = next((one for one in told if one["name"] == ADAPTER), None)
    if entry is None:
        return ["the adapter is gone"]
    if entry["active"] not in active:
        return [f"the adapter is {entry['active']}, not {' or '.join(active)}"]
    flaws = [] if entry["candidate"] is None else ["the adapter has a candidate"]
    version = next(one for one in entry["versions"] if one["version"] == entry["active"])
    staged = sum(board["staged"] for board in version["boards"].values())
    if staged != boards:
        flaws.append(f"{entry['active']} is staged on {staged} of {boards} boards")
    return flaws


def orphans(site: Site, folder: Path) -> list[str]:
    """Return the processes of a cluster that lives on which have lost their parents."""
    below = {one.pid for one in snapshot(PROC, site.roots())}
    return [one for one in processes_of(folder) if int(one.split()[0]) not in below]


def left_over(folder: Path, patience_s: float = 20.0) -> list[str]:
    """Return the processes that outlived their cluster, and end them."""
    deadline_s = time.monotonic() + patience_s
    while (found := processes_of(folder)) and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)
    for one in found:
        try:
            psutil.Process(int(one.split()[0])).kill()
        except psutil.NoSuchProcess:
            continue
    return found

"""Routers and Coordinator in another version's Python, on a Ray and a Serve that go on.

``python -m rkserve.deployments.redeploy RAY_ADDRESS PYTHON`` is a program of its own, since it
connects to Ray. One Router more than configured is asked for first: Serve then starts a new one
before it ends an old one, which takes no further request and finishes its answers. Boards are other
deployments, and stay as they are.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from typing import Any

from rkserve.deployments.preflight import APPLICATION, check_args
from rkserve.deployments.replica import HEAD, ROUTER

LIMIT_S = 600.0
POLL_S = 1.0
RUNNING = "RUNNING"
ENDED = ("DEPLOY_FAILED", "DELETING", "NOT_STARTED")
COORDINATOR = "Coordinator"


def with_python(application: dict[str, Any], python: str, more: int) -> dict[str, Any]:
    """Return an application's configuration with its head's deployments in another Python.

    ``more`` Routers than configured are asked for.
    """
    from rkserve.deployments.build import MARKER_SHARE, router_place

    made = copy.deepcopy(application)
    router = check_args(made.get("args") or {}).router
    places = {COORDINATOR: {HEAD: MARKER_SHARE}, ROUTER: router_place(router.nodes)}
    listed = {one["name"]: one for one in made.get("deployments") or ()}
    for name, resources in places.items():
        one = listed.setdefault(name, {"name": name})
        options = {"num_cpus": 0, "resources": resources, **(one.get("ray_actor_options") or {})}
        environment = {**(options.get("runtime_env") or {}), "py_executable": python}
        one["ray_actor_options"] = {**options, "runtime_env": environment}
    one = listed[ROUTER]
    one["num_replicas"] = (one.get("num_replicas") or router.replicas) + more
    made["deployments"] = list(listed.values())
    return made


def redeploy(
    applications: dict[str, dict[str, Any]],
    python: str,
    deploy: Callable[[list[dict[str, Any]]], None],
    statuses: Callable[[], dict[str, str]],
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Replace the head's deployments of all applications of rkserve; return why it failed.

    ``applications`` are the configurations as deployed; others than rkserve's stay as they are.
    """
    ours = {name for name, one in applications.items() if one.get("import_path") == APPLICATION}
    if not ours:
        return f"No application with {APPLICATION} is deployed."
    plain = {name: without_one_more(one) for name, one in applications.items()}
    for more in (1, 0):
        deploy([with_python(plain[n], python, more) if n in ours else plain[n] for n in plain])
        pause(2 * POLL_S)  # until Serve has begun
        left_s = LIMIT_S
        while {(found := statuses())[name] for name in ours} != {RUNNING}:
            for name in sorted(ours):
                if found[name] in ENDED:
                    return f"Serve's status of {name} is {found[name]}."
            if left_s <= 0:
                return f"{', '.join(sorted(ours))} did not run within {LIMIT_S:.0f} s."
            pause(POLL_S)
            left_s -= POLL_S
    return ""


def without_one_more(application: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without the Router that an earlier run, cut off, has left behind."""
    made = copy.deepcopy(application)
    for one in made.get("deployments") or ():
        environment = (one.get("ray_actor_options") or {}).get("runtime_env") or {}
        if one["name"] == ROUTER and "py_executable" in environment:
            router = check_args(made.get("args") or {}).router
            one["num_replicas"] = router.replicas
    return made


def main(address: str, python: str) -> int:
    """Replace them in the Serve of a Ray."""
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="ERROR")
    client = _get_global_client()  # no public way to read a deployed configuration
    if client is None:
        print("No Serve runs there.")  # noqa: T201 - the last words of a program
        return 1
    details = client.get_serve_details()
    found = {
        name: one["deployed_app_config"]
        for name, one in details["applications"].items()
        if one.get("deployed_app_config") is not None
    }

    def deploy(applications: list[dict[str, Any]]) -> None:
        client.deploy_apps(ServeDeploySchema.model_validate({"applications": applications}))

    def statuses() -> dict[str, str]:
        listed = serve.status().applications.items()
        return {name: getattr(one.status, "value", str(one.status)) for name, one in listed}

    problem = redeploy(found, python, deploy, statuses)
    if problem:
        print(problem)  # noqa: T201 - as above
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))

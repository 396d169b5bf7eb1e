"""Another Python for Routers and Coordinator, in the configuration that is deployed."""

from __future__ import annotations

from typing import Any

import pytest

from rkserve.deployments.redeploy import redeploy, with_python, without_one_more

PYTHON = "/opt/rkserve/0.2.0/bin/python"


def application(**router: Any) -> dict[str, Any]:
    group = {"name": "chat", "model": "models/sim-chat", "simulated": {"boards": 1}}
    args = {"boards": [group], "router": router}
    return {"name": "rkserve", "import_path": "rkserve.app:build", "args": args}


def deployments(one: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in one["deployments"]}


def test_only_the_heads_deployments_get_another_python() -> None:
    plain = application(replicas=2)
    made = with_python(plain, PYTHON, 1)
    assert "deployments" not in plain
    found = deployments(made)
    assert found.keys() == {"Coordinator", "Router"}
    for one in found.values():
        assert one["ray_actor_options"]["runtime_env"] == {"py_executable": PYTHON}
        assert one["ray_actor_options"]["num_cpus"] == 0
        assert one["ray_actor_options"]["resources"]
    assert found["Router"]["num_replicas"] == 3
    assert "num_replicas" not in found["Coordinator"]
    # Anything else would have Serve replace the boards, too.
    assert {name: made[name] for name in plain} == plain


def test_an_operators_own_options_stay() -> None:
    own = {"name": "Router", "num_replicas": 4, "ray_actor_options": {"num_cpus": 1}}
    boards = {"name": "Board-chat", "max_ongoing_requests": 5}
    made = with_python({**application(), "deployments": [own, boards]}, PYTHON, 0)
    found = deployments(made)
    assert found["Router"]["num_replicas"] == 4
    assert found["Router"]["ray_actor_options"]["num_cpus"] == 1
    assert found["Board-chat"] == boards
    assert own["ray_actor_options"] == {"num_cpus": 1}


class FakeServe:
    """Serve whose applications take some looks to run."""

    def __init__(self, *ends: str) -> None:
        self.deployed: list[list[dict[str, Any]]] = []
        self.ends = [*ends]
        self.left = 0

    def deploy(self, applications: list[dict[str, Any]]) -> None:
        self.deployed.append(applications)
        self.left = 3

    def statuses(self) -> dict[str, str]:
        self.left -= 1
        status = self.ends[len(self.deployed) - 1] if self.left <= 0 else "DEPLOYING"
        return {"rkserve": status, "other": "RUNNING"}


def test_one_router_more_serves_while_they_are_replaced() -> None:
    serve = FakeServe("RUNNING", "RUNNING")
    other = {"name": "other", "import_path": "other:app"}
    found = {"rkserve": application(), "other": other}
    assert redeploy(found, PYTHON, serve.deploy, serve.statuses, lambda _: None) == ""
    counts = [deployments(one[0])["Router"]["num_replicas"] for one in serve.deployed]
    assert counts == [3, 2]
    assert [one[1] for one in serve.deployed] == [other, other]


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        ("DEPLOY_FAILED", "Serve's status of rkserve is DEPLOY_FAILED."),
        ("DEPLOYING", "rkserve did not run within 600 s."),
    ],
)
def test_a_deployment_that_does_not_run_is_a_reason(end: str, problem: str) -> None:
    serve = FakeServe(end)
    found = {"rkserve": application()}
    assert redeploy(found, PYTHON, serve.deploy, serve.statuses, lambda _: None) == problem
    assert len(serve.deployed) == 1


def test_the_router_more_of_a_run_that_was_cut_off_is_not_kept() -> None:
    first = with_python(application(replicas=2), PYTHON, 1)
    again = with_python(without_one_more(first), "/opt/rkserve/0.3.0/bin/python", 0)
    router = deployments(again)["Router"]
    assert router["num_replicas"] == 2
    assert router["ray_actor_options"]["runtime_env"] == {
        "py_executable": "/opt/rkserve/0.3.0/bin/python"
    }


def test_without_rkserve_nothing_is_deployed() -> None:
    serve = FakeServe()
    problem = redeploy({"other": {"import_path": "x:y"}}, PYTHON, serve.deploy, serve.statuses)
    assert problem == "No application with rkserve.app:build is deployed."
    assert not serve.deployed

"""The runtime's protocol: the binding has it, and the header its numbers."""

from __future__ import annotations

import json

from rkserve.native.binding.releases import RELEASES
from rkserve.native.binding.runtime import Binding
from rkserve.native.runtime import CallState, Runtime
from tests.support.paths import TESTS

FACTS = json.loads((TESTS / "data" / "rkllm_abi.json").read_text())["versions"]
pytest_plugins = ["tests.support.sim.binding_fixtures"]

VERSIONS = tuple(version for version in RELEASES if version in FACTS)


def test_call_states_are_those_of_the_header() -> None:
    for version in VERSIONS:
        values = FACTS[version]["enums"]["LLMCallState"]
        assert {f"RKLLM_RUN_{state.name}": state.value for state in CallState} == values


def test_the_binding_is_a_runtime(handle: Binding) -> None:
    runtime: Runtime = handle  # judged by the type checker
    assert (runtime.is_running(), runtime.poll_async()) == (False, False)

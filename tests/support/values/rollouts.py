"""Plans of rollouts of an adapter on three boards, and desired states to begin from."""

from __future__ import annotations

from rkserve.control import state_changes
from rkserve.control.rollout_plan import AdapterRolloutPlan
from rkserve.core.desired_state import Desired
from tests.support.values.control_values import version

V1, V2, V3 = (version("law", f"v{n}") for n in range(1, 4))
THREE = ("b1", "b2", "b3")


def served(*versions: object) -> Desired:
    """The state after these versions were served, in the order of their numbers."""
    desired = Desired()
    for one in (V1, V2, V3):
        if one in versions:
            desired = state_changes.commit(state_changes.begin(desired, "m", one), "m", "law")
    return desired


def atomic(**fields: object) -> AdapterRolloutPlan:
    """An atomic rollout of the third version, but for these fields."""
    given = {"version": V3, "boards": THREE, **fields}
    return AdapterRolloutPlan(operation="op", model="m", name="law", **given)  # type: ignore[arg-type]

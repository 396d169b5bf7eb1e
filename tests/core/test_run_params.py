"""Values that engine processes use: shapes of an encoder's states, and few imports."""

from __future__ import annotations

import pickle
import subprocess
import sys

from rkserve.core.run_params import (
    EncoderShape,
    EncoderStates,
    Guide,
    GuideKind,
    Picture,
    Sampling,
    Stepwise,
)


def test_states_of_one_token_have_a_row_for_each_layer_and_head() -> None:
    shape = EncoderShape(layers=2, kv_heads=3, head_dim=4)
    states = EncoderStates.zeros(shape)
    assert shape.row == 24
    assert (states.tokens, len(states.k_cache), len(states.v_cache)) == (1, 96, 96)
    assert len(states.mask) == len(states.positions) == 4


def test_values_cross_processes() -> None:
    steps = Stepwise(7, guide=Guide(GuideKind.REGEX, "a+"), logit_bias=((1, -2.0),))
    for value in (Sampling(top_k=1), steps, Picture(1, 1, b"rgb")):
        assert pickle.loads(pickle.dumps(value)) == value


def test_data_is_not_printed() -> None:
    assert "rgb" not in repr(Picture(1, 1, b"rgb"))


def test_an_engine_imports_nothing_else_for_them() -> None:
    code = "import sys, rkserve.core.run_params; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = {name for name in found.stdout.split() if name.startswith("rkserve")}
    modules = {"rkserve.core.run_params", "rkserve.core.skew"}  # the latter for values that travel
    assert ours == {"rkserve", "rkserve.core", *modules}
    assert not {"pydantic", "asyncio"} & set(found.stdout.split())

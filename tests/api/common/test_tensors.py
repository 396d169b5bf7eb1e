"""Tensors of a body: safetensors and NumPy arrays in base64."""

from __future__ import annotations

import base64
import json
import struct
from array import array
from typing import Any

import pytest

from rkserve.api.common.calls import parse_completion
from rkserve.api.common.tensors import MAX_TENSOR_BYTES, read_embeds
from rkserve.core.errors import RequestError
from rkserve.core.run_params import Embeds
from rkserve.native.engine_frames import FrameKind, FrameReader, pack_embeds, unpack_embeds

HIDDEN = 64


VALUES = [1.0, 2.5, -3.0, 0.125, 4.0, 5.0]  # three rows of two


# Written by safetensors 0.6 and numpy 2.
SAFETENSORS_F32 = (
    "SAAAAAAAAAB7InByb21wdF9lbWJlZHMiOnsiZHR5cGUiOiJGMzIiLCJzaGFwZSI6WzMsMl0sImRhdGFfb2Zmc2V0"
    "cyI6WzAsMjRdfX0gICAAAIA/AAAgQAAAQMAAAAA+AACAQAAAoEA="
)


SAFETENSORS_F16 = (
    "QAAAAAAAAAB7IngiOnsiZHR5cGUiOiJGMTYiLCJzaGFwZSI6WzMsMl0sImRhdGFfb2Zmc2V0cyI6WzAsMTJdfX0g"
    "ICAgICAgADwAQQDCADAARABF"
)


NPY_F32 = (
    "k05VTVBZAQB2AHsnZGVzY3InOiAnPGY0JywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDMsIDIp"
    "LCB9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoAAIA/"
    "AAAgQAAAQMAAAAA+AACAQAAAoEA="
)


NPY_F16 = (
    "k05VTVBZAQB2AHsnZGVzY3InOiAnPGYyJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDMsIDIp"
    "LCB9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoAPABB"
    "AMIAMABEAEU="
)


def safetensors(raw: bytes, shape: list[Any], kind: str = "F32", **more: Any) -> str:
    told = {"dtype": kind, "shape": shape, "data_offsets": [0, len(raw)], **more}
    header = json.dumps({"__metadata__": {"a": "b"}, "prompt_embeds": told}).encode()
    return base64.b64encode(struct.pack("<Q", len(header)) + header + raw).decode()


def npy(header: str, raw: bytes = b"") -> str:
    text = header.encode()
    return base64.b64encode(
        b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + raw
    ).decode()


@pytest.mark.parametrize("sent", [SAFETENSORS_F32, SAFETENSORS_F16, NPY_F32, NPY_F16])
def test_a_tensor_of_other_peoples_libraries_is_read(sent: str) -> None:
    found = read_embeds(sent, "prompt_embeds")
    assert (found.rows, found.columns) == (3, 2)
    assert found.data == array("f", VALUES).tobytes()


def test_bfloat16_is_widened() -> None:
    raw = b"".join(struct.pack("<f", value)[2:] for value in VALUES)
    assert read_embeds(safetensors(raw, [3, 2], "BF16"), "p").data == array("f", VALUES).tobytes()


ONE = array("f", [1.0]).tobytes()


PLAIN = "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1)}"


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        pytest.param(7, "expected base64", id="a number"),
        pytest.param("?", "not base64", id="no base64"),
        pytest.param("", "neither safetensors nor", id="nothing"),
        pytest.param(base64.b64encode(b"PK\x03\x04rest").decode(), "torch.save", id="torch's zip"),
        pytest.param(base64.b64encode(b"\x80\x02}q\x00.").decode(), "torch.save", id="a pickle"),
        pytest.param(base64.b64encode(b"x" * 99).decode(), "neither", id="noise"),
        pytest.param(safetensors(ONE, [1, 1], "I64"), "dtype is I64", id="integers"),
        pytest.param(safetensors(ONE, [1]), "shape is [1]", id="a vector"),
        pytest.param(safetensors(ONE, [0, 1]), "shape is [0, 1]", id="no rows"),
        pytest.param(safetensors(ONE, [2, 1]), "4 bytes for 2 x 1", id="too few bytes"),
        pytest.param(safetensors(ONE, [10**9, 10**9]), "are the most", id="too large"),
        pytest.param(safetensors(ONE, ["1", 1]), "does not fit", id="a shape of text"),
        pytest.param(safetensors(ONE, [1, 1], data_offsets=[0, 99]), "does not fit", id="beyond"),
        pytest.param(safetensors(ONE, [1, 1], data_offsets=[-4, 0]), "does not fit", id="before"),
        pytest.param(
            safetensors(array("f", [float("nan")]).tobytes(), [1, 1]), "no number", id="NaN"
        ),
        pytest.param(
            safetensors(array("f", [float("-inf")]).tobytes(), [1, 1]), "no number", id="infinite"
        ),
        pytest.param(npy("[1]"), "no NumPy header", id="npy: no dict"),
        pytest.param(npy("{" * 5000), "no NumPy header", id="npy: deep"),
        pytest.param(npy("__import__('os')"), "no NumPy header", id="npy: code"),
        pytest.param(npy(PLAIN.replace("<f4", "|O")), "dtype is |O", id="npy: objects"),
        pytest.param(npy(PLAIN.replace("False", "True"), ONE), "Fortran", id="npy: columns"),
        pytest.param(npy(PLAIN.replace("(1, 1)", "(-1, 1)"), ONE), "no shape", id="npy: below 0"),
        pytest.param(npy(PLAIN), "0 bytes for 1 x 1", id="npy: empty"),
    ],
)
def test_what_is_no_tensor_is_refused_with_its_reason(sent: object, why: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_embeds(sent, "prompt_embeds")
    assert why in refused.value.message
    assert refused.value.param == "prompt_embeds"


def test_what_is_accepted_fits_a_frame() -> None:
    rows = MAX_TENSOR_BYTES // 4 // HIDDEN
    sent = Embeds(rows, HIDDEN, bytes(rows * HIDDEN * 4))
    ((kind, payload),) = FrameReader().feed(pack_embeds(3, sent))
    assert (kind, unpack_embeds(payload)) == (FrameKind.EMBEDS, (3, sent))


def parsed(**body: Any) -> Any:
    return parse_completion(json.dumps({"model": "sim-chat", **body}).encode())


def test_an_empty_prompt_is_none_as_openais_clients_need_one() -> None:
    empty: tuple[dict[str, Any], ...] = ({}, {"prompt": ""}, {"prompt": None}, {"prompt": []})
    for prompt in empty:
        call = parsed(prompt_embeds=SAFETENSORS_F32, **prompt)
        assert [(one.rows, one.columns) for one in call.prompts] == [(3, 2)]
    assert parsed(prompt_embeds=[SAFETENSORS_F32, NPY_F16], n=2).choices == 4
    with pytest.raises(RequestError, match="not both"):
        parsed(prompt_embeds=SAFETENSORS_F32, prompt="x")
    with pytest.raises(RequestError, match="expected 1 to"):
        parsed(prompt_embeds=[])
    with pytest.raises(RequestError) as refused:
        parsed(prompt_embeds=[SAFETENSORS_F32, "?"])
    assert refused.value.param == "prompt_embeds[1]"

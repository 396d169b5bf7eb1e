"""The declarations that cffi gets are laid out as the vendor's headers were by a compiler."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from rkserve.native.binding.library import detect
from rkserve.native.binding.releases import RELEASES
from rkserve.native.sim import build
from tests.support.paths import PROJECT, TESTS

FACTS = json.loads((TESTS / "data" / "rkllm_abi.json").read_text())["versions"]
HEADERS = PROJECT / "rkserve" / "native" / "decl"
VERSIONS = tuple(version for version in RELEASES if version in FACTS)


def declarations(version: str) -> Any:
    return RELEASES[version].ffi


def member(ctype: Any, name: str) -> tuple[int, Any] | None:
    """Offset and type of a member, also within unnamed unions and along a dotted path."""
    head, _, rest = name.partition(".")
    for field_name, field in ctype.fields:
        if field_name == head:
            inner = member(field.type, rest) if rest else (0, field.type)
            return None if inner is None else (field.offset + inner[0], inner[1])
        if not field_name and (found := member(field.type, name)) is not None:
            return field.offset + found[0], found[1]
    return None


def named_members(ctype: Any) -> set[str]:
    names: set[str] = set()
    for name, field in ctype.fields:
        names |= {name} if name else named_members(field.type)
    return names


STRUCTS = [
    pytest.param(version, name, id=f"{version}-{name}")
    for version in VERSIONS
    for name in FACTS[version]["structs"]
]


@pytest.mark.parametrize(("version", "name"), STRUCTS)
def test_a_struct_is_laid_out_as_the_compiler_laid_it_out(version: str, name: str) -> None:
    ffi, facts = declarations(version), FACTS[version]["structs"][name]
    assert (ffi.sizeof(name), ffi.alignof(name)) == (facts["size"], facts["align"])
    for field, (offset, size) in facts["fields"].items():
        found = member(ffi.typeof(name), field)
        assert found is not None, field
        assert (found[0], ffi.sizeof(found[1])) == (offset, size), field


@pytest.mark.parametrize(("version", "name"), STRUCTS)
def test_a_struct_has_no_member_that_the_header_lacks(version: str, name: str) -> None:
    listed = {field.partition(".")[0] for field in FACTS[version]["structs"][name]["fields"]}
    assert named_members(declarations(version).typeof(name)) == listed


@pytest.mark.parametrize("version", VERSIONS)
def test_the_enums_have_the_vendors_numbers(version: str) -> None:
    ffi = declarations(version)
    for name, values in FACTS[version]["enums"].items():
        assert ffi.typeof(name).relements == values


def prototypes(lines: list[str]) -> dict[str, str]:
    """Name and function pointer type of each prototype."""
    found = {}
    for line in lines:
        match = re.fullmatch(r"\s*(\w+)\s+(rkllm_\w+)\s*\((.*?)\)\s*;?\s*", line, re.DOTALL)
        assert match is not None, line
        found[match[2]] = f"{match[1]}(*)({match[3].strip() or 'void'})"
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_the_functions_are_the_vendors(version: str) -> None:
    ffi = declarations(version)
    header = f"{RELEASES[version].declarations}.h"
    ours = prototypes(
        re.findall(r"^\w+ rkllm_\w+\([^;]*\);", (HEADERS / header).read_text(), re.MULTILINE)
    )
    vendors = prototypes(FACTS[version]["functions"])
    assert {name: ffi.typeof(ctype) for name, ctype in ours.items()} == {
        name: ffi.typeof(ctype) for name, ctype in vendors.items()
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_the_callbacks_are_the_vendors(version: str) -> None:
    ffi = declarations(version)
    for line in FACTS[version]["callbacks"]:
        match = re.fullmatch(r"typedef (\w+)\s*\(\*(\w+)\)\((.*)\)\s*;?", line)
        assert match is not None, line
        assert ffi.typeof(match[2]) == ffi.typeof(f"{match[1]}(*)({match[3]})")


def test_every_header_of_a_release_was_measured() -> None:
    measured = {RELEASES[version].declarations for version in VERSIONS}
    assert {release.declarations for release in RELEASES.values()} == measured


@pytest.mark.parametrize("version", VERSIONS)
def test_the_offset_that_identifies_a_layout_is_the_compilers(version: str) -> None:
    offset, _ = FACTS[version]["structs"]["RKLLMParam"]["fields"]["extend_param"]
    assert RELEASES[version].extend_param_offset == offset


@pytest.mark.parametrize("release", build.RELEASES)
def test_the_simulator_imitates_accepted_releases_only(release: str) -> None:
    assert detect(build.ensure_built(release)) is RELEASES[release]

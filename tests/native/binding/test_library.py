"""Releases are detected by two findings that agree, or refused with both (misuse M1)."""

from __future__ import annotations

import itertools
import struct
import subprocess
from pathlib import Path

import pytest

from rkserve.core.errors import LibraryMissing, ReleaseRefused
from rkserve.native.binding.library import (
    LibraryFindings,
    detect,
    extend_param_offset,
    judge,
)
from rkserve.native.binding.releases import RELEASES
from rkserve.native.binding.runtime import open_runtime
from tests.support.sim import rkllm_fake
from tests.support.sim.rkllm_fake import version

ABI_13 = "-DFAKE_ABI_13"
LAYOUT_12, LAYOUT_13 = (
    f"that of {', '.join(name for name in RELEASES if name.startswith(line))}"
    for line in ("1.2.", "1.3.")
)
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("libraries")


def made(workshop: Path, *flags: str) -> Path:
    return rkllm_fake.build(workshop / f"librkllmrt-{next(NUMBERS)}.so", *flags)


@pytest.mark.parametrize("release", RELEASES)
def test_m1_an_accepted_release_is_found_by_string_and_layout(workshop: Path, release: str) -> None:
    flags = [ABI_13] if RELEASES[release].per_run_sampling else []
    library = made(workshop, version(release), *flags)
    assert detect(library) is RELEASES[release]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param([version("1.2.1b1")], ["1.2.1b1", LAYOUT_12, "beta"], id="a beta"),
        pytest.param([version("1.2.0")], ["string is 1.2.0", "header was read"], id="too old"),
        pytest.param(
            [version("1.99.0"), ABI_13],
            ["string is 1.99.0", LAYOUT_13, "only after its header was read"],
            id="a newer release",
        ),
        pytest.param(
            [version("1.2.3"), ABI_13],
            ["string is 1.2.3", LAYOUT_13, "must agree"],
            id="the string says 1.2.3, the layout 1.3",
        ),
        pytest.param(
            [version("1.3.0")],
            ["string is 1.3.0", LAYOUT_12],
            id="the string says 1.3.0, the layout 1.2.x",
        ),
        pytest.param([], ["no version", LAYOUT_12], id="no version string"),
        pytest.param(
            [version("1.2.3"), "-DFAKE_ZERO_DEFAULTS"],
            ["string is 1.2.3", "that of no known release"],
            id="defaults of an unknown layout",
        ),
        pytest.param(
            [version("1.2.3"), "-DFAKE_WITHOUT_CROSS_ATTN"],
            ["Missing functions: rkllm_set_cross_attn_params"],
            id="a function is missing",
        ),
    ],
)
def test_m1_anything_else_is_refused_with_both_findings(
    workshop: Path, flags: list[str], words: list[str]
) -> None:
    library = made(workshop, *flags)
    with pytest.raises(ReleaseRefused) as refused:
        open_runtime(library)
    for word in [*words, str(library), ", ".join(RELEASES)]:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("version", "offset", "alike"),
    [
        pytest.param("1.9.0", 60, [v for v in RELEASES if v >= "1.3"], id="the layout of 1.3"),
        pytest.param("1.2.10", 88, [v for v in RELEASES if v < "1.3"], id="the layout of 1.2"),
    ],
)
def test_a_later_release_of_a_known_layout_is_accepted_where_that_is_allowed(
    version: str, offset: int, alike: list[str]
) -> None:
    findings = LibraryFindings((version,), offset)
    release = judge(Path("x.so"), findings, allow_unlisted=True)
    name = f"{version} (unlisted, driven as {alike[-1]})"
    assert (release.version, release.listed) == (name, False)
    with pytest.raises(ReleaseRefused, match="allow_unlisted tries it"):
        judge(Path("x.so"), findings)


@pytest.mark.parametrize(
    ("version", "offset", "missing"),
    [
        pytest.param("1.9.0b1", 60, (), id="a beta"),
        pytest.param("1.9.0", None, (), id="an unknown layout"),
        pytest.param("1.2.0", 88, (), id="an earlier release"),
        pytest.param("1.2.9", 60, (), id="earlier than its layout"),
        pytest.param("1.9.0", 60, ("rkllm_run",), id="a function is missing"),
    ],
)
def test_no_other_release_is_accepted_where_unlisted_ones_are(
    version: str, offset: int | None, missing: tuple[str, ...]
) -> None:
    with pytest.raises(ReleaseRefused) as refused:
        judge(Path("x.so"), LibraryFindings((version,), offset, missing), allow_unlisted=True)
    assert "allow_unlisted" not in str(refused.value)


def test_m1_two_version_strings_are_refused() -> None:
    with pytest.raises(ReleaseRefused, match=r"1\.2\.3 and 1\.3\.0"):
        judge(Path("x.so"), LibraryFindings(("1.2.3", "1.3.0"), 60))


def defaults(**at: bytes) -> bytes:
    """256 bytes of defaults with some of them set: ``at60=...``."""
    data = bytearray(256)
    for place, value in at.items():
        offset = int(place.removeprefix("at"))
        data[offset : offset + len(value)] = value
    return bytes(data)


EXTEND = struct.pack("<ibb2xIBb", 0, 0, 4, 0xF0, 1, 0)
POINTERS = struct.pack("<QQQ", 0x7F00_0000_0410, 0x7F00_0000_0401, 0x7F00_0000_0401)


@pytest.mark.parametrize(
    ("data", "offset"),
    [
        pytest.param(defaults(at88=EXTEND), 88, id="1.2.x"),
        pytest.param(defaults(at60=EXTEND), 60, id="1.3"),
        pytest.param(defaults(), None, id="zeros"),
        pytest.param(bytes([0xDD]) * 256, None, id="garbage"),
        pytest.param(defaults(at60=EXTEND, at88=EXTEND), None, id="both, for no reason"),
        pytest.param(
            defaults(at88=EXTEND, at64=POINTERS), 88, id="pointers look like 1.3 by chance"
        ),
        pytest.param(
            defaults(at88=struct.pack("<ibb2xIBb", 0, 0, 9, 0xF0, 1, 0)), None, id="9 cores"
        ),
        pytest.param(
            defaults(at88=struct.pack("<ibb2xIBb", 0, 0, 4, 0, 1, 0)), None, id="an empty mask"
        ),
        pytest.param(
            defaults(at60=struct.pack("<ibb2xIBb", 0, 0, 4, 0xF0, 0, 0)), None, id="n_batch 0"
        ),
    ],
)
def test_m1_the_layout_is_told_from_default_parameters(data: bytes, offset: int | None) -> None:
    assert extend_param_offset(data) == offset


def other_machine(good: Path, bad: Path) -> Path:
    data = bytearray(good.read_bytes())
    (machine,) = struct.unpack_from("<H", data, 18)
    struct.pack_into("<H", data, 18, 62 if machine == 183 else 183)
    bad.write_bytes(data)
    return bad


def without_libgomp(good: Path, bad: Path) -> Path:
    """A library that needs one whose name the loader cannot find."""
    stub = bad.with_name("stub.so")
    subprocess.run(
        ["gcc", "-shared", "-xc", "/dev/null", "-Wl,-soname,libgomp-absent.so.1", "-o", str(stub)],
        check=True,
    )
    return rkllm_fake.build(bad, version("1.2.3"), "-Wl,--no-as-needed", str(stub))


def test_a_missing_library_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(LibraryMissing, match=r"nowhere\.so cannot be read: No such file"):
        detect(tmp_path / "nowhere.so")


def test_a_directory_is_no_library(tmp_path: Path) -> None:
    with pytest.raises(LibraryMissing, match="cannot be read: Is a directory"):
        detect(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x7fEL", id="cut off"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\n", id="a git-lfs pointer"),
    ],
)
def test_what_is_not_elf_is_missing_with_the_fix(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "librkllmrt.so"
    file.write_bytes(content)
    with pytest.raises(LibraryMissing, match=r"no ELF header.*Copy librkllmrt\.so again"):
        detect(file)


def test_a_library_of_another_machine_names_both(workshop: Path, tmp_path: Path) -> None:
    bad = other_machine(made(workshop, version("1.2.3")), tmp_path / "librkllmrt.so")
    with pytest.raises(LibraryMissing, match=r"is for \w+, and this machine is \w+"):
        detect(bad)


@pytest.mark.parametrize("part", [0.01, 0.5, 0.95])
def test_a_library_that_was_cut_short_is_not_loaded(
    workshop: Path, tmp_path: Path, part: float
) -> None:
    bad, data = tmp_path / "librkllmrt.so", made(workshop, version("1.2.3")).read_bytes()
    bad.write_bytes(data[: int(part * len(data))])
    with pytest.raises(LibraryMissing, match=r"is cut short.*Copy librkllmrt\.so again"):
        detect(bad)


def test_a_library_that_the_loader_refuses_is_missing_with_its_words(
    workshop: Path, tmp_path: Path
) -> None:
    bad, data = tmp_path / "librkllmrt.so", bytearray(made(workshop).read_bytes())
    data[16] = 1  # a relocatable object rather than a shared one
    bad.write_bytes(data)
    with pytest.raises(LibraryMissing, match=r"cannot be loaded: .*only ET_DYN.*Run `ldd"):
        detect(bad)


def test_without_libgomp_the_package_to_install_is_named(workshop: Path, tmp_path: Path) -> None:
    bad = without_libgomp(made(workshop, version("1.2.3")), tmp_path / "librkllmrt.so")
    with pytest.raises(LibraryMissing, match=r"libgomp-absent\.so\.1.*apt-get install libgomp1"):
        detect(bad)

"""A library's file: its header and its version strings, read without loading it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from rkserve.native import library_file
from rkserve.native.library_file import (
    LLAMA_CPP_RELEASE,
    LibraryHeader,
    knows_architecture,
    llama_cpp_release,
    read_header,
    versions_in,
)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        pytest.param(b"\0RKLLM SDK (version: 1.2.3 (2025-11)\0", ("1.2.3",), id="a release"),
        pytest.param(b"RKLLM SDK (version:1.3.0)", ("1.3.0",), id="no space"),
        pytest.param(b"RKLLM SDK (version: 1.2.1b1 x", ("1.2.1b1",), id="a beta keeps its suffix"),
        pytest.param(b"RKLLM SDK (version: 1.3.0-rc1 x", ("1.3.0-rc1",), id="a candidate"),
        pytest.param(b"rkllm version: 1.2.3", (), id="another text"),
        pytest.param(b"RKLLM SDK (version: 1.2.3 " * 2, ("1.2.3",), id="twice the same"),
    ],
)
def test_version_strings_are_found_in_the_bytes(
    tmp_path: Path, content: bytes, found: tuple[str, ...]
) -> None:
    file = tmp_path / "bytes"
    file.write_bytes(b"\x7fELF" + bytes(5000) + content + bytes(5000))
    assert versions_in(file) == found


def header(machine: int, bits: int = 2, sections: int = 0, entries: int = 0) -> bytes:
    data = bytearray(64)
    data[:5] = b"\x7fELF" + bytes([bits])
    struct.pack_into("<H", data, 18, machine)
    struct.pack_into("<Q", data, 40, sections)
    struct.pack_into("<HH", data, 58, 64, entries)
    return bytes(data)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        pytest.param(header(183), LibraryHeader("aarch64", True, 64, 0), id="a board's"),
        pytest.param(header(40, 1), LibraryHeader("armv7l", False, 64, 0), id="of 32 bits"),
        pytest.param(header(999), LibraryHeader("machine 999", True, 64, 0), id="unknown machine"),
        pytest.param(header(62, 2, 100, 2), LibraryHeader("x86_64", True, 64, 228), id="cut short"),
        pytest.param(b"", None, id="empty"),
        pytest.param(b"\x7fELF", None, id="half a header"),
        pytest.param(b"version https://git-lfs" + bytes(99), None, id="a pointer of Git LFS"),
    ],
)
def test_a_header_names_machine_and_size(
    tmp_path: Path, content: bytes, found: LibraryHeader | None
) -> None:
    file = tmp_path / "library"
    file.write_bytes(content)
    assert read_header(file) == found
    assert found is None or found.cut_short == (found.promised_bytes > 64)


def test_an_architecture_is_known_by_its_whole_name(tmp_path: Path) -> None:
    library = tmp_path / "l.so"
    library.write_bytes(b"..\0llama\0qwen3moe\0..")
    assert knows_architecture(library, "llama")
    assert knows_architecture(library, "qwen3moe")
    assert not knows_architecture(library, "qwen3")
    assert not knows_architecture(library, "l.ama")


def test_the_installed_release_is_the_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert llama_cpp_release() == LLAMA_CPP_RELEASE
    monkeypatch.setattr(library_file, "LLAMA_CPP", "no_such_wheel")
    assert llama_cpp_release() == ""

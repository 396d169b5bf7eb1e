"""The quirk table: safe by default, overridden by name only."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from rkserve.core.errors import ConfigError
from rkserve.native.binding.releases import RELEASES
from rkserve.native.quirks import NAMES, QUIRKS_FORMAT, TABLE, quirks_for, read_quirks_file


def test_names_are_unique_and_every_quirk_says_what_it_is() -> None:
    assert len(NAMES) == len(TABLE)
    assert [quirk.name for quirk in TABLE if len(quirk.what) < 40] == []


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_differs_in_quirks_of_the_table_only(release: str) -> None:
    assert set(RELEASES[release].quirks) <= NAMES


@pytest.mark.parametrize("release", RELEASES)
def test_trust_is_given_only_where_a_reason_is_known(release: str) -> None:
    trusted = {
        "append_tokens_with_history",
        "waiting_token_id_valid",
        "prompt_cache_save_with_history",
    }
    if release != "1.2.1":
        trusted |= {"run_async"}
    if RELEASES[release].per_run_sampling:
        trusted |= {
            "eos_uint32_misread",
            "thinking_ends_run",
            "return_2_frees_buffer",
            "drain_by_limit",
            "prefix_reuse_in_ram",
        }
    values = quirks_for(RELEASES[release].quirks)
    assert {name for name, value in values.items() if value} == trusted
    assert set(values) == NAMES


def test_an_override_replaces_one_value() -> None:
    values = quirks_for(
        RELEASES["1.3.0"].quirks, {"pause_with_history": True, "eos_uint32_misread": False}
    )
    changed = {
        name
        for name, value in values.items()
        if value != quirks_for(RELEASES["1.3.0"].quirks)[name]
    }
    assert changed == {"pause_with_history", "eos_uint32_misread"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        pytest.param({"pause_with_histroy": True}, "pause_with_histroy", id="a misspelt name"),
        pytest.param({"abort_in_callback": "yes"}, "must be true or false", id="a string"),
        pytest.param({"abort_in_callback": 1}, "must be true or false", id="a number"),
    ],
)
def test_a_wrong_override_is_refused_by_name(overrides: dict[str, bool], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        quirks_for(RELEASES["1.2.3"].quirks, overrides)


def quirks_file(folder: Path, **changes: object) -> tuple[Path, Path]:
    """Write a library and a quirks file of it; return both."""
    library, file = folder / "librkllmrt.so", folder / "quirks.json"
    library.write_bytes(b"a library")
    content = {
        "format": QUIRKS_FORMAT,
        "library_sha256": hashlib.sha256(b"a library").hexdigest(),
        "quirks": {"abort_in_callback": True, "run_async": False},
    }
    file.write_text(json.dumps(content | changes))
    return file, library


def test_a_quirks_file_has_the_values_of_its_library(tmp_path: Path) -> None:
    assert read_quirks_file(*quirks_file(tmp_path)) == {
        "abort_in_callback": True,
        "run_async": False,
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"format": "rkserve-quirks-9"}, "is no quirks file", id="another format"),
        pytest.param({"library_sha256": "0" * 64}, "Run rkserve probe again", id="another library"),
        pytest.param({"quirks": ["run_async"]}, "no mapping", id="a list"),
        pytest.param({"quirks": {"run_asink": True}}, "run_asink", id="a misspelt name"),
        pytest.param({"quirks": {"run_async": None}}, "must be true or false", id="no value"),
    ],
)
def test_a_wrong_quirks_file_is_refused(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_quirks_file(*quirks_file(tmp_path, **changes))


def test_a_quirks_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file, library = quirks_file(tmp_path)
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"quirks\.json cannot be read"):
        read_quirks_file(file, library)
    file.unlink()
    with pytest.raises(ConfigError, match=r"quirks\.json cannot be read"):
        read_quirks_file(file, library)


def test_the_values_cannot_be_changed_behind_our_back() -> None:
    values = quirks_for(RELEASES["1.2.3"].quirks)
    with pytest.raises(TypeError):
        values["abort_in_callback"] = True  # type: ignore[index]

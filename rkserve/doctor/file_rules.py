"""Rules about files: the vendor's library, the model folder, disks, and Ray's token."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from rkserve.doctor.facts import BoardFacts, DiskSpace, Finding, LibraryFile, ModelFiles
from rkserve.doctor.hardware_rules import error, warning
from rkserve.models.gguf import SUFFIX, sidecar_of
from rkserve.native.binding.releases import RELEASES
from rkserve.native.library_file import CPU_EXTRA, LLAMA_CPP, LLAMA_CPP_RELEASE
from rkserve.verdicts.hardware import FULL_BYTES, low_disk, soc_of

LEAKY = "1.2.1"
# Releases from this one on misread the end token of models from older toolkits.
MISREADS_EOS = (1, 3, 0)
PACKAGES = {"libgomp.so.1": "libgomp1", "libomp.so.5": "libomp5", "libomp.so": "libomp-dev"}
TMPFS = ("tmpfs", "ramfs")
SOURCE = "https://github.com/airockchip/rknn-llm"
PRIVATE = 0o077


def library(facts: BoardFacts) -> Iterator[Finding]:
    """A library that is missing, no library, for another machine, cut short or of no accepted
    release.
    """
    found = facts.library
    if found is None:
        return
    if not found.exists:
        yield error(
            "library-missing",
            f"There is no librkllmrt.so at {found.path}.",
            f"sudo cp librkllmrt.so {found.path} && sudo ldconfig"
            f"  # from rkllm-runtime/Linux of {SOURCE}",
            f"{found.path}: not there",
        )
    elif found.problem:
        yield error(
            "library-unreadable",
            f"{found.path} could not be read: {found.problem}.",
            f"ls -ld {found.path}",
            f"{found.path}: {found.problem}",
        )
    elif found.machine is None:
        yield _again(found, "library-foreign", "is not a shared library (no ELF header)")
    elif facts.process is not None and (
        found.machine != facts.process.machine or not found.is_64_bit
    ):
        bits = "" if found.is_64_bit else " of 32 bits"
        yield error(
            "library-machine",
            f"{found.path} is for {found.machine}{bits}, and this machine is "
            f"{facts.process.machine}.",
            f"sudo cp librkllmrt.so {found.path} && sudo ldconfig"
            f"  # from rkllm-runtime/Linux of {SOURCE}, the folder {facts.process.machine}",
            f"{found.path}: ELF header",
        )
    elif found.promised_bytes > found.size_bytes:
        yield _again(
            found,
            "library-cut",
            f"is cut short: {found.size_bytes} of at least {found.promised_bytes} bytes",
        )
    else:
        yield from _release(found)
        yield from _needs(found)


def _again(found: LibraryFile, name: str, problem: str) -> Finding:
    return error(
        name,
        f"{found.path} {problem}.",
        f"sudo cp librkllmrt.so {found.path} && sudo ldconfig"
        f"  # from rkllm-runtime/Linux of {SOURCE}; a download may leave a pointer of Git LFS",
        f"{found.path}: {found.size_bytes} bytes",
    )


def _release(found: LibraryFile) -> Iterator[Finding]:
    accepted = ", ".join(RELEASES)
    if len(found.versions) != 1:
        names = " and ".join(found.versions) or "no release of RKLLM"
        yield error(
            "library-unnamed",
            f"{found.path} names {names}; a librkllmrt.so names one.",
            f"strings {found.path} | grep 'RKLLM SDK'",
            f"{found.path}: {len(found.versions)} version strings",
        )
    elif found.versions[0] not in RELEASES:
        yield error(
            "library-release",
            f"RKLLM {found.versions[0]} is not accepted; accepted are {accepted}.",
            f"sudo cp librkllmrt.so {found.path} && sudo ldconfig"
            f"  # of release {list(RELEASES)[-1]} of {SOURCE}",
            f"{found.path}: RKLLM SDK (version: {found.versions[0]}",
        )
    elif found.versions[0] == LEAKY:
        yield warning(
            "library-leaks",
            "The KV cache of RKLLM 1.2.1 was reported to leak from one run into the next.",
            f"sudo cp librkllmrt.so {found.path} && sudo ldconfig"
            f"  # of release 1.2.3 or later of {SOURCE}",
            f"{found.path}: RKLLM SDK (version: {LEAKY}",
        )


def _needs(found: LibraryFile) -> Iterator[Finding]:
    for name in found.missing:
        yield error(
            "library-needs",
            f"{found.path} needs {name}, which is in no library folder.",
            f"sudo apt install {PACKAGES.get(name, name)}",
            f"{found.path}: names {name}",
        )


def model(facts: BoardFacts) -> Iterator[Finding]:
    """A model folder that cannot be opened, weights that cannot be loaded, and missing files."""
    found = facts.model
    if found is None:
        return
    if found.problem:
        yield error(
            "model-folder",
            found.problem if found.problem.endswith((".", "?")) else f"{found.problem}.",
            f"ls -l {shlex.quote(found.path)}",
            f"{found.path}: not opened",
        )
        return
    if found.cpu:
        yield from _cpu(facts, found)
    else:
        yield from _weights(facts, found)
        yield from _end(facts, found)
    yield from _tokenizer(found)


def _cpu(facts: BoardFacts, found: ModelFiles) -> Iterator[Finding]:
    """llama.cpp that is missing or of another release, and a file that it cannot load."""
    if not facts.llama_cpp:
        yield error(
            "cpu-library",
            f"llama.cpp is not installed, which computes {found.weights}.",
            CPU_EXTRA,
            f"{LLAMA_CPP}: not installed",
        )
    elif facts.llama_cpp != LLAMA_CPP_RELEASE:
        yield warning(
            "cpu-release",
            f"{LLAMA_CPP} {facts.llama_cpp} is installed, and rkserve was written for "
            f"{LLAMA_CPP_RELEASE}; one of another layout is refused.",
            CPU_EXTRA,
            f"{LLAMA_CPP}: {facts.llama_cpp}",
        )
    if found.unfit:
        yield error(
            "model-unfit",
            f"{found.weights} is no model for llama.cpp: {found.unfit.rstrip('.')}.",
            f"ls -l {shlex.quote(found.path)}",
            f"{found.path}: {found.weights_bytes} bytes",
        )


def _weights(facts: BoardFacts, found: ModelFiles) -> Iterator[Finding]:
    path = shlex.quote(found.path)
    if found.weights is None:
        yield error(
            "model-weights",
            f"{found.path} holds no *.rkllm file.",
            f"cp MODEL.rkllm {path}/",
            f"{found.path}: no *.rkllm",
        )
        return
    file = f"{found.path}/{found.weights}"
    if found.unfit:
        yield error(
            "model-unfit",
            f"{file} is no model for RKLLM: {found.unfit}.",
            f"cp MODEL.rkllm {shlex.quote(file)}  # as rkllm-toolkit exported it",
            f"{file}: {found.weights_bytes} bytes",
        )
        return
    known = soc_of(facts.hardware.soc) if facts.hardware else None
    platform = found.platform if found.platform not in (None, "any") else None
    if known is not None and platform is not None and soc_of(platform) is not known:
        yield error(
            "model-soc",
            f"{file} was converted for {platform}, and this board is an {known.name}.",
            f"# convert the model with rkllm-toolkit, target_platform='{known.name.lower()}'",
            f"{file}: {platform}",
        )
    if known is not None and found.dtype and not found.dtype.startswith(known.dtypes):
        yield warning(
            "model-quantization",
            f"{file} is quantized as {found.dtype}; published models for {known.name} are "
            f"{' or '.join(known.dtypes)}.",
            f"# convert the model with rkllm-toolkit, quantized_dtype='{known.dtypes[0]}'",
            f"{file}: {found.dtype}",
        )
    if found.max_context is not None and found.context_length > found.max_context:
        yield error(
            "model-context",
            f"context_length is {found.context_length}; {file} was converted for at most "
            f"{found.max_context}.",
            f"cd {path} && touch rkserve.yaml && sed -i '/^context_length:/d' rkserve.yaml && "
            f"echo 'context_length: {found.max_context}' >> rkserve.yaml",
            f"{found.path}/rkserve.yaml: context_length {found.context_length}",
        )
    release = _version(_release_of(facts))
    if found.toolkit is not None and release and _version(found.toolkit) > release:
        yield warning(
            "model-toolkit",
            f"{file} was converted by toolkit {found.toolkit}, which is newer than the library's "
            f"release {_release_of(facts)}; the vendor does not support that.",
            f"# install librkllmrt.so {found.toolkit}, or convert with toolkit "
            f"{_release_of(facts)}",
            f"{file}: toolkit {found.toolkit}",
        )


def _tokenizer(found: ModelFiles) -> Iterator[Finding]:
    path = shlex.quote(found.path)
    if found.tokenizer_problem:
        yield error(
            "model-tokenizer",
            f"The tokenizer's files of {found.path} cannot be read: {found.tokenizer_problem}.",
            f"cp tokenizer.json tokenizer_config.json {path}/  # of the model's own repository",
            f"{found.path}: {found.tokenizer_problem}",
        )
    elif not found.has_tokenizer:
        yield warning(
            "model-no-tokenizer",
            f"{found.path} has no tokenizer.json: the KV cache is not reused, and tools, grammars "
            "and token counts are missing.",
            f"cp tokenizer.json tokenizer_config.json {path}/  # of the model's own repository",
            f"{found.path}/tokenizer.json: not there",
        )
    elif not found.has_template:
        yield warning(
            "model-template",
            f"{found.path} has no chat template: chat requests cannot be rendered.",
            f"echo 'chat_template: NAME' >> {shlex.quote(str(sidecar_of(Path(found.path))))}"
            if found.path.endswith(SUFFIX)
            else f"cp tokenizer_config.json {path}/  # of the model's own repository, or set "
            "chat_template in rkserve.yaml",
            f"{found.path}: neither chat_template.jinja nor chat_template",
        )


def _end(facts: BoardFacts, found: ModelFiles) -> Iterator[Finding]:
    release = _version(_release_of(facts))
    toolkit = _version(found.toolkit or "")
    safe = toolkit >= MISREADS_EOS or (release and release < MISREADS_EOS)
    if found.eos_token_ids or safe or not release or not found.generates:
        return
    ids = ", ".join(map(str, found.eos_hint)) or "ID"
    yield warning(
        "model-eos",
        f"{found.path}/rkserve.yaml names no eos_token_ids; RKLLM {_release_of(facts)} misreads "
        "the end token of models from toolkit 1.2.3 and older, whose answers then never end.",
        f"echo 'eos_token_ids: [{ids}]' >> {shlex.quote(found.path)}/rkserve.yaml",
        f"{found.path}/rkserve.yaml: no eos_token_ids",
    )


def _release_of(facts: BoardFacts) -> str:
    found = facts.library
    return found.versions[0] if found is not None and len(found.versions) == 1 else ""


def _version(text: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found is not None else ()


def disks(facts: BoardFacts) -> Iterator[Finding]:
    """Disks that are full, read-only or unfit for files that are written again and again."""
    for one in facts.disks:
        yield from _disk(one)
        if one.use == "state":
            yield from _owner(facts, one)


def _owner(facts: BoardFacts, one: DiskSpace) -> Iterator[Finding]:
    """A state folder that Ray's user cannot make, or that is another user's."""
    user, folder = facts.user, shlex.quote(one.folder)
    if user is None or user.uid == 0 or one.uid in (None, user.uid):
        return
    command = f"sudo install -d -m 700 -o {user.name} {folder}"
    if one.exists:
        yield error(
            "state-owner",
            f"{one.folder} belongs to the user {one.uid}, and Ray runs as {user.name}.",
            f"{command} && sudo chown -R {user.name} {folder}",
            f"{one.folder}: uid {one.uid}",
        )
    else:
        yield error(
            "state-missing",
            f"There is no folder {one.folder}, and {user.name} cannot make it.",
            command,
            f"{one.folder}: not there; the folder above it belongs to the user {one.uid}",
        )


def _disk(one: DiskSpace) -> Iterator[Finding]:
    folder = shlex.quote(one.folder)
    if one.use == "state" and one.read_only:
        yield error(
            "disk-readonly",
            f"{one.folder} is on a read-only file system; rkserve writes its state there.",
            f"sudo mount -o remount,rw {one.device or folder}",
            f"/proc/mounts: {one.device} {one.kind} ro",
        )
    if one.use == "state" and one.kind in TMPFS:
        yield warning(
            "disk-tmpfs",
            f"{one.folder} is in memory ({one.kind}): it takes the model's memory, and is lost at "
            "a restart.",
            "# name a folder on a disk as prompt_cache.folder, or set prompt_cache.max_bytes: 0",
            f"/proc/mounts: {one.device} {one.kind}",
        )
    if one.use == "model" and one.kind in TMPFS:
        yield warning(
            "model-tmpfs",
            f"{one.folder} is in memory ({one.kind}): a loaded model takes its size twice.",
            f"# copy {one.folder} to a disk, and name it there",
            f"/proc/mounts: {one.device} {one.kind}",
        )
    if one.use == "state" and one.sd_card:
        yield warning(
            "disk-card",
            f"{one.folder} is on an SD card, which prompt caches wear out and which is slow.",
            "# name a folder on eMMC or NVMe as prompt_cache.folder, or set "
            "prompt_cache.max_bytes: 0",
            f"/proc/mounts: {one.device}",
        )
    low = low_disk(one.folder, one.free_bytes) if one.use == "state" else None
    if low is not None:
        make = error if (one.free_bytes or 0) < FULL_BYTES else warning
        yield make("disk-full", low.sentence, low.command, low.evidence)


def token(facts: BoardFacts) -> Iterator[Finding]:
    """A token file of Ray that is missing, or that others may read."""
    found = facts.token
    if found is None:
        return
    path = shlex.quote(found.path)
    if found.mode is None:
        yield warning(
            "token-missing",
            f"Ray has no token file {found.path}: with it and RAY_AUTH_MODE=token only nodes that "
            "have the same one join.",
            f"scp HEAD:.ray/auth_token {path} && chmod 600 {path}",
            f"{found.path}: not there",
        )
    elif found.mode & PRIVATE:
        yield warning(
            "token-mode",
            f"Other accounts may read Ray's token {found.path} (mode {found.mode:04o}).",
            f"chmod 600 {path}",
            f"{found.path}: mode {found.mode:04o}",
        )

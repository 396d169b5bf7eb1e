"""Faults of the library, the model folder, disks and the token file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rkserve.doctor.facts import BoardFacts, DiskSpace, Severity, UserIdentity
from rkserve.doctor.rules import findings_of
from rkserve.native.binding.releases import RELEASES
from tests.support.boards.doctor_board import LIBRARY, X86_64, DoctorBoard, Fault, check, elf
from tests.support.paths import PROJECT

ACCEPTED, NEWEST = ", ".join(RELEASES), list(RELEASES)[-1]
ERROR, WARNING, UNKNOWN = Severity.ERROR, Severity.WARNING, Severity.UNKNOWN
SOURCE = "https://github.com/airockchip/rknn-llm"
COPY = f"sudo cp librkllmrt.so /{LIBRARY} && sudo ldconfig  # from rkllm-runtime/Linux of {SOURCE}"


def settings(board: DoctorBoard, text: str) -> DoctorBoard:
    board.settings.write_text(text)
    return board


def rename(board: DoctorBoard, name: str) -> DoctorBoard:
    board.weights.rename(board.model / name)
    return board


FAULTS = {
    # -- the library
    "no library": Fault(
        "library-missing",
        lambda b: b.drop(LIBRARY),
        ERROR,
        f"There is no librkllmrt.so at /{LIBRARY}.",
        COPY,
    ),
    "a text file": Fault(
        "library-foreign",
        lambda b: b.put(LIBRARY, "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        ERROR,
        f"/{LIBRARY} is not a shared library (no ELF header).",
        f"{COPY}; a download may leave a pointer of Git LFS",
    ),
    "an empty library": Fault(
        "library-foreign",
        lambda b: b.put(LIBRARY, ""),
        ERROR,
        f"/{LIBRARY} is not a shared library (no ELF header).",
        f"{COPY}; a download may leave a pointer of Git LFS",
    ),
    "an x86 ELF": Fault(
        "library-machine",
        lambda b: b.raw(LIBRARY, elf(machine=X86_64)),
        ERROR,
        f"/{LIBRARY} is for x86_64, and this machine is aarch64.",
        f"{COPY}, the folder aarch64",
    ),
    "an ELF of an unknown release": Fault(
        "library-release",
        lambda b: b.raw(LIBRARY, elf("1.99.0")),
        ERROR,
        f"RKLLM 1.99.0 is not accepted; accepted are {ACCEPTED}.",
        f"sudo cp librkllmrt.so /{LIBRARY} && sudo ldconfig  # of release {NEWEST} of {SOURCE}",
    ),
    "a beta": Fault(
        "library-release",
        lambda b: b.raw(LIBRARY, elf("1.2.1b1")),
        ERROR,
        f"RKLLM 1.2.1b1 is not accepted; accepted are {ACCEPTED}.",
        f"sudo cp librkllmrt.so /{LIBRARY} && sudo ldconfig  # of release {NEWEST} of {SOURCE}",
    ),
    "an ELF of something else": Fault(
        "library-unnamed",
        lambda b: b.raw(LIBRARY, elf("")),
        ERROR,
        f"/{LIBRARY} names no release of RKLLM; a librkllmrt.so names one.",
        f"strings /{LIBRARY} | grep 'RKLLM SDK'",
    ),
    "a truncated library": Fault(
        "library-cut",
        lambda b: b.raw(LIBRARY, elf(promised=7_000_000)),
        ERROR,
        f"/{LIBRARY} is cut short: {len(elf())} of at least 7000000 bytes.",
        f"{COPY}; a download may leave a pointer of Git LFS",
    ),
    "RKLLM 1.2.1": Fault(
        "library-leaks",
        lambda b: b.raw(LIBRARY, elf("1.2.1")),
        WARNING,
        "The KV cache of RKLLM 1.2.1 was reported to leak from one run into the next.",
        f"sudo cp librkllmrt.so /{LIBRARY} && sudo ldconfig  # of release 1.2.3 or later of "
        f"{SOURCE}",
    ),
    "no libgomp": Fault(
        "library-needs",
        lambda b: b.drop("usr/lib/aarch64-linux-gnu/libgomp.so.1"),
        ERROR,
        f"/{LIBRARY} needs libgomp.so.1, which is in no library folder.",
        "sudo apt install libgomp1",
    ),
    "a folder as library": Fault(
        "library-unreadable",
        lambda b: (b.drop(LIBRARY), b.put(f"{LIBRARY}/x", "")),
        ERROR,
        f"/{LIBRARY} could not be read: it is no regular file.",
        f"ls -ld /{LIBRARY}",
    ),
    # -- the model folder
    "unknown key": Fault(
        "model-folder",
        lambda b: settings(b, "context_len: 4096\n"),
        ERROR,
        "{m}/rkserve.yaml: context_len: unknown key 'context_len'; did you mean 'context_length'?",
        "ls -l {m}",
    ),
    "binary rkserve.yaml": Fault(
        "model-folder",
        lambda b: b.settings.write_bytes(b"\xff\xfe\x00\x01garbage"),
        ERROR,
        "{m}/rkserve.yaml cannot be read: 'utf-8' codec can't decode byte 0xff in position 0: "
        "invalid start byte.",
        "ls -l {m}",
    ),
    "no weights": Fault(
        "model-weights",
        lambda b: b.weights.unlink(),
        ERROR,
        "{m} holds no *.rkllm file.",
        "cp MODEL.rkllm {m}/",
    ),
    "a GGUF": Fault(
        "model-unfit",
        lambda b: b.weights.write_bytes(b"GGUF" + bytes(4000)),
        ERROR,
        "{w} is no model for RKLLM: it is a GGUF model, which has to be converted with "
        "rkllm-toolkit.",
        "cp MODEL.rkllm {w}  # as rkllm-toolkit exported it",
    ),
    "for another SoC": Fault(
        "model-soc",
        lambda b: rename(b, "Qwen2.5-1.5B-rk3576-w8a8.rkllm"),
        ERROR,
        "{m}/Qwen2.5-1.5B-rk3576-w8a8.rkllm was converted for RK3576, and this board is an RK3588.",
        "# convert the model with rkllm-toolkit, target_platform='rk3588'",
    ),
    "w4a16 on RK3588": Fault(
        "model-quantization",
        lambda b: rename(b, "Qwen2.5-1.5B-rk3588-w4a16_g128.rkllm"),
        WARNING,
        "{m}/Qwen2.5-1.5B-rk3588-w4a16_g128.rkllm is quantized as w4a16_g128; published models for "
        "RK3588 are w8a8.",
        "# convert the model with rkllm-toolkit, quantized_dtype='w8a8'",
    ),
    "newer toolkit": Fault(
        "model-toolkit",
        lambda b: (
            rename(b, "Qwen2.5-1.5B-w8a8-rk3588_v1.3.0.rkllm"),
            b.raw(LIBRARY, elf("1.2.3")),
        ),
        WARNING,
        "{m}/Qwen2.5-1.5B-w8a8-rk3588_v1.3.0.rkllm was converted by toolkit 1.3.0, which is newer "
        "than the library's release 1.2.3; the vendor does not support that.",
        "# install librkllmrt.so 1.3.0, or convert with toolkit 1.2.3",
    ),
    "a context beyond the model's": Fault(
        "model-context",
        lambda b: (
            shutil.copy(PROJECT / "models" / "sim-chat" / "model.rkllm", b.weights),
            settings(b, "context_length: 16384\neos_token_ids: [1]\n"),
        ),
        ERROR,
        "context_length is 16384; {w} was converted for at most 4096.",
        "cd {m} && touch rkserve.yaml && sed -i '/^context_length:/d' rkserve.yaml && "
        "echo 'context_length: 4096' >> rkserve.yaml",
    ),
    "no tokenizer": Fault(
        "model-no-tokenizer",
        lambda b: (b.model / "tokenizer.json").unlink(),
        WARNING,
        "{m} has no tokenizer.json: the KV cache is not reused, and tools, grammars and token "
        "counts are missing.",
        "cp tokenizer.json tokenizer_config.json {m}/  # of the model's own repository",
    ),
    "broken tokenizer": Fault(
        "model-tokenizer",
        lambda b: (b.model / "tokenizer.json").write_bytes(b"\x00\xff{"),
        ERROR,
        "The tokenizer's files of {m} cannot be read: tokenizer.json is not valid JSON.",
        "cp tokenizer.json tokenizer_config.json {m}/  # of the model's own repository",
    ),
    "no template": Fault(
        "model-template",
        lambda b: (b.model / "tokenizer_config.json").write_text("{}"),
        WARNING,
        "{m} has no chat template: chat requests cannot be rendered.",
        "cp tokenizer_config.json {m}/  # of the model's own repository, or set chat_template in "
        "rkserve.yaml",
    ),
    "no end token": Fault(
        "model-eos",
        lambda b: settings(b, "context_length: 4096\n"),
        WARNING,
        "{m}/rkserve.yaml names no eos_token_ids; RKLLM 1.3.0 misreads the end token of models "
        "from toolkit 1.2.3 and older, whose answers then never end.",
        "echo 'eos_token_ids: [151645]' >> {m}/rkserve.yaml",
    ),
    # -- disks
    "disk nearly full": Fault(
        "disk-full",
        lambda b: setattr(b, "free_bytes", 300_000_000),
        WARNING,
        "/var/lib/rkserve has 300 MB free; adapters, prompt caches and Ray's logs need 1000 MB.",
        "sudo du -xh --max-depth=2 /var/lib/rkserve /tmp/ray /var/log | sort -h | tail",
    ),
    "disk full": Fault(
        "disk-full",
        lambda b: setattr(b, "free_bytes", 4096),
        ERROR,
        "/var/lib/rkserve has 0 MB free; adapters, prompt caches and Ray's logs need 1000 MB.",
        "sudo du -xh --max-depth=2 /var/lib/rkserve /tmp/ray /var/log | sort -h | tail",
    ),
    "state in memory": Fault(
        "disk-tmpfs",
        lambda b: b.put("proc/mounts", b.read("proc/mounts") + "tmpfs /var/lib tmpfs rw 0 0\n"),
        WARNING,
        "/var/lib/rkserve is in memory (tmpfs): it takes the model's memory, and is lost at a "
        "restart.",
        "# name a folder on a disk as prompt_cache.folder, or set prompt_cache.max_bytes: 0",
    ),
    "state on an SD card": Fault(
        "disk-card",
        lambda b: (
            b.put("proc/mounts", "/dev/mmcblk1p2 / ext4 rw 0 0\n"),
            b.put("sys/block/mmcblk1/device/type", "SD\n"),
        ),
        WARNING,
        "/var/lib/rkserve is on an SD card, which prompt caches wear out and which is slow.",
        "# name a folder on eMMC or NVMe as prompt_cache.folder, or set prompt_cache.max_bytes: 0",
    ),
    "read-only disk": Fault(
        "disk-readonly",
        lambda b: b.put("proc/mounts", "/dev/mmcblk0p2 / ext4 ro,relatime 0 0\n"),
        ERROR,
        "/var/lib/rkserve is on a read-only file system; rkserve writes its state there.",
        "sudo mount -o remount,rw /dev/mmcblk0p2",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_each_fault_has_one_finding_with_its_command(tmp_path: Path, fault: Fault) -> None:
    check(fault, tmp_path / "board")


RAY = UserIdentity(name="ray", uid=1000, gids=())


@pytest.mark.parametrize(
    ("disk", "name", "command"),
    [
        pytest.param(
            DiskSpace(folder="/var/lib/rkserve", use="state", exists=False, uid=0),
            "state-missing",
            "sudo install -d -m 700 -o ray /var/lib/rkserve",
            id="no known maker",
        ),
        pytest.param(
            DiskSpace(folder="/var/lib/rkserve", use="state", uid=33),
            "state-owner",
            "sudo install -d -m 700 -o ray /var/lib/rkserve && sudo chown -R ray /var/lib/rkserve",
            id="another user's",
        ),
        pytest.param(
            DiskSpace(folder="/tmp/m", use="model", kind="tmpfs", uid=0),
            "model-tmpfs",
            "# copy /tmp/m to a disk, and name it there",
            id="a model in memory",
        ),
    ],
)
def test_folders_of_this_machine(disk: DiskSpace, name: str, command: str) -> None:
    found = findings_of(BoardFacts(disks=(disk,), user=RAY))
    assert [(one.id, one.command) for one in found] == [(name, command)]


def test_a_state_folder_of_rays_user_is_right() -> None:
    disk = DiskSpace(folder="/var/lib/rkserve", use="state", uid=1000)
    assert findings_of(BoardFacts(disks=(disk,), user=RAY)) == ()
    missing = disk.model_copy(update={"exists": False, "uid": 0})
    root = RAY.model_copy(update={"uid": 0})
    assert findings_of(BoardFacts(disks=(missing,), user=root)) == ()

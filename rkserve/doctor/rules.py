"""All rules over a board's facts, in the order of their report, and those about its node.

Pure: the facts are values, and the same facts have the same findings, on a board, in a tree that
a reporter sent, or from a report of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from rkserve.core.board_report import Hardware
from rkserve.doctor import file_rules, hardware_rules
from rkserve.doctor.facts import BoardFacts, DoctorReport, Finding, Severity
from rkserve.doctor.hardware_rules import error, warning
from rkserve.verdicts.hardware import HOT_C, MEGA, NEARLY, highest_ddr_hz, mhz, soc_of

OPEN_FILES = 102_400
OLDEST_LIBC = (2, 31)
THIS_PROGRAM_YEAR = 2026  # a clock before it is wrong
SKEW_S = 5.0
DOWN = ("failed", "hung", "quarantined", "lost", "stopped")

Rule = Callable[[BoardFacts], Iterator[Finding]]


def process(facts: BoardFacts) -> Iterator[Finding]:
    """An environment that rkserve or its wheels do not run in."""
    found = facts.process
    if found is None:
        return
    python = ".".join(map(str, found.python))
    oldest, above = found.python_wanted or (found.python, (found.python[0], found.python[1] + 1))
    if not oldest <= found.python < above:
        newest = f"3.{above[1] - 1}"
        yield error(
            "python-version",
            f"Python is {python}; rkserve needs 3.{oldest[1]} to {newest}.",
            "uv python install 3.12 && uv venv --python 3.12",
            f"python: {python}",
        )
    if found.libc is not None and found.libc < OLDEST_LIBC:
        libc = ".".join(map(str, found.libc))
        yield error(
            "libc-old",
            f"glibc is {libc}; the wheels need 2.31 or later (Debian 11, Ubuntu 20.04).",
            "# install a newer image on the board",
            f"glibc: {libc}",
        )
    if found.open_files is not None and found.open_files < OPEN_FILES:
        yield warning(
            "nofile",
            f"At most {found.open_files} files may be open; the vendor's demo sets {OPEN_FILES}.",
            f"echo '* - nofile {OPEN_FILES}' | sudo tee /etc/security/limits.d/rkserve.conf"
            f"  # in a unit of systemd: LimitNOFILE={OPEN_FILES}",
            f"RLIMIT_NOFILE: hard limit {found.open_files}",
        )


def localhost(facts: BoardFacts) -> Iterator[Finding]:
    """A machine on which Ray's processes do not find each other by ``localhost``."""
    if facts.process is not None and (problem := facts.process.localhost_problem):
        yield error(
            "localhost-unknown",
            f"The name localhost has no loopback address here ({problem}): each start of Ray takes "
            "minutes, and fails without naming the cause.",
            "echo '127.0.0.1 localhost' | sudo tee -a /etc/hosts",
            f"getaddrinfo of localhost: {problem}",
        )


def processors(facts: BoardFacts) -> Iterator[Finding]:
    """Fewer CPUs than NPU cores, with which RKLLM refuses to load."""
    known = soc_of(facts.hardware.soc) if facts.hardware else None
    found = facts.process
    if known is not None and found is not None and found.cpus < known.npu_cores:
        yield error(
            "cpus-few",
            f"This process may use {found.cpus} CPUs; RKLLM loads no model with fewer CPUs than "
            f"NPU cores, of which {known.name} has {known.npu_cores}.",
            "taskset -pc 0-7 $$  # or take CPUAffinity= out of the unit",
            f"scheduler affinity: {found.cpus} CPUs",
        )


def ray(facts: BoardFacts) -> Iterator[Finding]:
    """A missing Ray, or one of another version than the head's."""
    found = facts.process
    if found is None or found.ray_wanted is None:
        return
    pin = f"pip install 'ray[serve]=={found.ray_wanted}'"
    if found.ray is None:
        yield error("ray-missing", "Ray is not installed.", pin, "python: no package ray")
        return
    head = facts.head.ray if facts.head is not None else None
    if head is not None and head != found.ray:
        yield error(
            "ray-version",
            f"Ray is {found.ray} here and {head} on the head; a node joins only with the same.",
            f"pip install 'ray[serve]=={head}'",
            f"ray: {found.ray}",
        )
    elif not _fits(found.ray, found.ray_wanted):
        yield error(
            "ray-version",
            f"Ray is {found.ray}; rkserve needs {found.ray_wanted}.",
            pin,
            f"ray: {found.ray}",
        )


def _fits(version: str, wanted: str) -> bool:
    beginning = wanted.removesuffix("*")
    return version == wanted or (wanted.endswith("*") and version.startswith(beginning))


def raylet(facts: BoardFacts) -> Iterator[Finding]:
    """A running raylet without the variables that docs/how-to/boards.md sets."""
    found = facts.raylet
    if found is None or not found.readable:
        return
    where = f"/proc/{found.pid}/environ"
    if found.niceness != "0":
        yield warning(
            "raylet-nice",
            "The running Ray starts its workers, and with them the engine, at a low priority.",
            "export RAY_worker_niceness=0  # then start Ray again",
            f"{where}: RAY_worker_niceness={found.niceness or '(unset)'}",
        )
    if found.auth_mode != "token":
        yield warning(
            "raylet-auth",
            "The running Ray lets every host that reaches its ports run code.",
            "export RAY_AUTH_MODE=token  # then start Ray again, on all nodes",
            f"{where}: RAY_AUTH_MODE={found.auth_mode or '(unset)'}",
        )
    if found.log_level not in ("", "0"):
        yield warning(
            "raylet-log",
            f"RKLLM_LOG_LEVEL is {found.log_level}: the library prints figures in each run, and "
            "from level 2 on parameters and sizes.",
            "unset RKLLM_LOG_LEVEL  # then start Ray again",
            f"{where}: RKLLM_LOG_LEVEL={found.log_level}",
        )


def clock(facts: BoardFacts) -> Iterator[Finding]:
    """A wall clock that is wrong, or that nothing keeps right."""
    found = facts.clock
    if found is None:
        return
    if found.year < THIS_PROGRAM_YEAR:
        yield error(
            "clock-wrong",
            f"The clock is in the year {found.year}: certificates are not valid then.",
            "sudo timedatectl set-ntp true && sudo systemctl restart systemd-timesyncd",
            f"clock: {found.year}",
        )
    elif found.skew_s is not None and abs(found.skew_s) > SKEW_S:
        side = "ahead of" if found.skew_s > 0 else "behind"
        yield warning(
            "clock-skew",
            f"The clock is {abs(found.skew_s):.0f} s {side} that of the head.",
            "sudo timedatectl set-ntp true",
            f"Date header of the head: {found.skew_s:+.0f} s",
        )
    elif found.skew_s is None and not found.kept_by:
        yield warning(
            "clock-unkept",
            "No service keeps the clock, and boards without a battery start in the past.",
            "sudo timedatectl set-ntp true",
            "neither systemd-timesyncd nor chrony nor ntpd has synchronized it",
        )


def head(facts: BoardFacts) -> Iterator[Finding]:
    """A head that does not accept connections."""
    found = facts.head
    if found is not None and found.problem:
        host, _, port = found.address.rpartition(":")
        yield error(
            "head-unreachable",
            f"The head's port {found.address} cannot be reached: {found.problem}.",
            f"nc -vz {host} {port}  # and on the head: rkserve boards, and the firewall's rules",
            f"{found.address}: {found.problem}",
        )
    elif found is not None and found.url_problem:
        yield warning(
            "head-silent",
            f"rkserve does not answer at {found.url}: {found.url_problem}.",
            "serve status  # on the head; serve deploy CONFIG.yaml, if nothing is deployed yet",
            f"{found.url}/health: {found.url_problem}",
        )


def status(facts: BoardFacts) -> Iterator[Finding]:
    """A board of a running cluster that does not serve."""
    found = facts.status
    if found is not None and found.state in DOWN:
        why = f": {found.reason.rstrip('.')}" if found.reason else ""
        yield error(
            "board-down",
            f"The board is {found.state}{why}.",
            f"rkserve boards show '{found.id}'",
            f"/v1/boards: state {found.state}",
        )
    elif found is not None and found.circuit == "open":
        why = f": {found.circuit_reason.rstrip('.')}" if found.circuit_reason else ""
        yield warning(
            "board-avoided",
            f"The Router sends this board no requests for a while{why}.",
            f"rkserve boards show '{found.id}'",
            f"/v1/boards: circuit {found.circuit}",
        )


def measured(facts: BoardFacts) -> Iterator[Finding]:
    """A measured speed below the published one, with what limits it; or a model that fails."""
    found = facts.measured
    if found is None:
        return
    if found.problem:
        yield error(
            "measurement-failed",
            f"The model could not be measured: {found.problem.rstrip('.')}.",
            "sudo dmesg | tail -n 20",
            "a child process with the library and the model",
        )
        return
    expected = found.expected_tokens_per_s
    if expected is None:
        return
    rate = found.decode_tokens_per_s
    if rate < found.slow_share * expected:
        causes = _causes(facts, found.hardware)
        yield warning(
            "slow",
            f"decode {rate:.1f} tokens/s, expected {expected:.1f}: "
            f"{', '.join(causes) or 'no cause found in clocks or heat'}.",
            "# mend the other findings first"
            if causes
            else "uptime; ps -eo pcpu,pid,comm --sort=-pcpu | head",
            f"{found.basis}; {found.decode_tokens} tokens measured",
        )


def _causes(facts: BoardFacts, hardware: Hardware | None) -> list[str]:
    """Return what was below its best while the model ran."""
    found: list[str] = []
    known = soc_of(hardware.soc) if hardware is not None else None
    if hardware is None or known is None:
        return found
    ddr = (facts.ddr.highest_hz if facts.ddr else None) or highest_ddr_hz(hardware) or 0
    npu = hardware.npu_max_hz or known.npu_mhz * MEGA
    if hardware.ddr_hz is not None and hardware.ddr_hz < NEARLY * ddr:
        found.append(f"DDR at {mhz(hardware.ddr_hz)} of {mhz(ddr)} MHz")
    if hardware.npu_hz is not None and hardware.npu_hz < NEARLY * npu:
        found.append(f"NPU at {mhz(hardware.npu_hz)} of {mhz(npu)} MHz")
    governors = sorted({one.governor or "" for one in facts.cpus} - {"", *hardware_rules.FIXED})
    if governors:
        found.append(f"CPU governor {', '.join(governors)}")
    if hardware.temperature_c is not None and hardware.temperature_c >= HOT_C:
        found.append(f"{hardware.temperature_c:.0f} degrees Celsius")
    return found


# Of the board itself: a simulated library needs none.
BOARD_RULES: tuple[Rule, ...] = (
    hardware_rules.soc,
    hardware_rules.kernel,
    hardware_rules.driver,
    hardware_rules.nodes,
    hardware_rules.cpu_clocks,
    hardware_rules.npu_clock,
    hardware_rules.ddr_clock,
    hardware_rules.heat,
)
RULES: tuple[Rule, ...] = (
    status,
    hardware_rules.memory,
    file_rules.library,
    file_rules.model,
    processors,
    process,
    localhost,
    ray,
    raylet,
    file_rules.disks,
    file_rules.token,
    clock,
    head,
    measured,
    hardware_rules.unread,
)


def findings_of(facts: BoardFacts) -> tuple[Finding, ...]:
    """Return the findings about a board, the gravest first."""
    soc = facts.hardware.soc if facts.hardware is not None else ""
    needs_no_board = facts.simulated or (facts.model is not None and facts.model.cpu)
    rules = RULES if needs_no_board and not soc else (*BOARD_RULES, *RULES)
    found = list(chain.from_iterable(rule(facts) for rule in rules))
    order = list(Severity)
    return tuple(sorted(found, key=lambda one: order.index(one.severity)))


def report_on(facts: BoardFacts) -> DoctorReport:
    """Return the report about a board; it is healthy unless a finding stops it from serving."""
    found = findings_of(facts)
    return DoctorReport(
        board=facts.status.id if facts.status else "",
        healthy=all(one.severity is not Severity.ERROR for one in found),
        findings=found,
        facts=facts,
    )

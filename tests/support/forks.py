"""Run tests in forks of the process that has collected them.

To import and collect all tests takes longer than to run thousands of them, and each process of
pytest-xdist does it anew. A fork has what was imported and collected, and shares its memory.
"""

from __future__ import annotations

import multiprocessing
import random
import traceback
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import pytest

Job = list[pytest.Item]
LOOK_S = 1.0  # a process that a test left behind may hold the pipe of a fork that is gone
END_S = 60.0  # for fixtures to end what they started


@dataclass
class Fork:
    """One process, by the end of its pipe that is in the parent."""

    name: str
    process: BaseProcess
    link: Connection
    left: deque[pytest.Item] = field(default_factory=deque)  # of its jobs, the one that runs first

    @property
    def node(self) -> Any:
        """The attributes of a pytest-xdist worker that the terminal and JUnit reports use."""
        line = f"[{self.name}, process {self.process.pid}]"
        return SimpleNamespace(gateway=SimpleNamespace(id=self.name), _workerinfocache=line)


class Forks:
    """The parent: deals out jobs, and reports what became of each test."""

    def __init__(self, session: pytest.Session, jobs: Sequence[Job]) -> None:
        self._session = session
        self._jobs = list(jobs)
        self._waiting = deque(range(len(jobs)))
        self._forks: list[Fork] = []
        self._made = 0

    def run(self, count: int) -> None:
        """Run all jobs in so many processes at a time."""
        try:
            for _ in range(min(count, len(self._jobs))):
                self._start(self._waiting.popleft())
            while self._forks:
                ready = wait([one.link for one in self._forks], LOOK_S)
                for fork in list(self._forks):
                    gone = not fork.process.is_alive()
                    if fork.link in ready or gone:
                        self._read(fork, gone=gone)
        finally:
            self._end()
        if self._waiting and not self._stopping:
            raise RuntimeError(f"{len(self._waiting)} jobs were not run")
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    @property
    def _stopping(self) -> bool:
        return bool(self._session.shouldfail or self._session.shouldstop)

    def _start(self, job: int) -> None:
        here, there = multiprocessing.Pipe()
        name = f"fork{self._made}"
        self._made += 1
        others = [here, *(one.link for one in self._forks)]
        process = multiprocessing.get_context("fork").Process(
            target=_be_fork, args=(self._session, self._jobs, job, there, *others), name=name
        )
        with warnings.catch_warnings():
            # Python 3.12 warns of threads: those of numpy, which is prepared for forks.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        there.close()
        self._forks.append(Fork(name, process, here, deque(self._jobs[job])))

    def _read(self, fork: Fork, *, gone: bool) -> None:
        try:
            while fork.link.poll():
                kind, told = fork.link.recv()
                getattr(self, f"_on_{kind}")(fork, told)
        except (EOFError, ConnectionResetError):
            gone = True
        if gone:
            self._on_end(fork)

    def _on_next(self, fork: Fork, _told: None) -> None:
        """Answer a fork that runs the last test of its job, so that it knows which one follows."""
        job = self._waiting.popleft() if self._waiting and not self._stopping else None
        if job is not None:
            fork.left.extend(self._jobs[job])
        fork.link.send(job)

    def _on_reports(self, fork: Fork, told: list[dict[str, Any]]) -> None:
        item = fork.left.popleft()
        for data in told:
            report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
            self._report(fork, item, report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if self._stopping:
            for one in self._forks:
                with suppress(OSError):
                    one.link.send(None)

    def _on_warning(self, _fork: Fork, told: dict[str, Any]) -> None:
        self._session.config.hook.pytest_warning_recorded.call_historic(kwargs=told)

    def _on_broken(self, fork: Fork, told: str) -> None:
        raise RuntimeError(f"{fork.name} broke down:\n{told}")

    def _report(self, fork: Fork, item: pytest.Item, report: pytest.TestReport) -> None:
        vars(report)["node"] = fork.node  # as pytest-xdist does
        item.ihook.pytest_runtest_logreport(report=report)

    def _on_end(self, fork: Fork) -> None:
        """Report the test in which a fork died, and have another one run what follows it."""
        self._forks.remove(fork)
        fork.link.close()
        fork.process.join()
        code = fork.process.exitcode
        if not fork.left or (self._stopping and code == 0):
            if code:
                raise RuntimeError(f"{fork.name} ended with {code} after its tests")
            return
        item = fork.left.popleft()
        text = f"the process of this test ended with {code} (minus the signal's number)"
        report = pytest.TestReport(
            item.nodeid, item.location, {item.name: 1}, "failed", text, "call"
        )
        self._report(fork, item, report)
        if fork.left and not self._stopping:
            self._jobs.append(list(fork.left))
            self._start(len(self._jobs) - 1)

    def _end(self) -> None:
        """Have forks end that still run, after an error or an interrupt."""
        for fork in self._forks:
            with suppress(OSError):
                fork.link.send(None)
        for fork in self._forks:
            fork.process.join(END_S)
            if fork.process.is_alive():
                fork.process.kill()
                fork.process.join()


class Told:
    """The plugin that sends reports and warnings of a fork's pytest to its parent."""

    def __init__(self, config: pytest.Config, link: Connection) -> None:
        self._config, self._link = config, link
        self.reports: list[dict[str, Any]] = []
        self.begun = False  # a plugin is told of all earlier warnings when it is registered

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a report until its test is over."""
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self.reports.append(data)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        """Pass a warning on, its class as a part of its text: not all of them can be pickled."""
        if not self.begun:
            return
        kind = warning_message.category.__name__
        plain = warnings.WarningMessage(
            f"{kind}: {warning_message.message}",
            UserWarning,
            warning_message.filename,
            warning_message.lineno,
        )
        told = {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}
        self._link.send(("warning", told))


def _be_fork(
    session: pytest.Session,
    jobs: list[Job],
    job: int,
    link: Connection,
    *others: Connection,
) -> None:
    for one in others:
        one.close()
    told = _settle(session.config, link)
    try:
        _run_jobs(session, jobs, job, link, told)
        session._setupstate.teardown_exact(None)
    except KeyboardInterrupt:
        session._setupstate.teardown_exact(None)
    except BaseException:
        link.send(("broken", traceback.format_exc()))
        raise
    finally:
        manager: Any = session.config.pluginmanager.getplugin("capturemanager")
        if manager is not None:
            manager.stop_global_capturing()


def _settle(config: pytest.Config, link: Connection) -> Told:
    """Part from what a fork must not share: random numbers, captured output, temporary folders."""
    random.seed()
    plugins = config.pluginmanager
    capture: Any = plugins.getplugin("capturemanager")
    if capture is not None and capture.is_globally_capturing():
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    plugins.unregister(name="terminalreporter")
    told = Told(config, link)
    plugins.register(told)
    told.begun = True
    untyped: Any = config
    factory = untyped._tmp_path_factory
    factory._basetemp = factory.getbasetemp() / multiprocessing.current_process().name
    factory._basetemp.mkdir(mode=0o700)
    return told


def _run_jobs(
    session: pytest.Session, jobs: list[Job], job: int, link: Connection, told: Told
) -> None:
    at: int | None = job
    while at is not None:
        items = jobs[at]
        for number, item in enumerate(items):
            if link.poll():  # nothing was asked: the parent stops
                return
            if number + 1 < len(items):
                following: pytest.Item | None = items[number + 1]
            else:
                link.send(("next", None))
                at = link.recv()
                following = None if at is None else jobs[at][0]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            link.send(("reports", told.reports))
            told.reports = []
            if session.shouldfail or session.shouldstop:
                return

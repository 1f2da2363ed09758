"""Run the benchmarks' own code (``swebench``, ``swesmith``) in helper processes: row specifications, log parsers.

Helper processes isolate the packages: their import takes seconds and reads tokens, and code under test wrote the logs
that they parse. The first request starts a helper process, which runs until this process exits. One helper is usually
enough. While a log stalls it, other gradings start further helpers.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisandbox.errors import HarnessError, MissingExtra, NotFound
from minisandbox.tasks.harness import packages
from minisandbox.tasks.languages import not_python

START_TIMEOUT = 120.0
PARSE_TIMEOUT = 60.0
PATIENCE = 5.0
"""Seconds to wait for a busy helper process before another one starts; parsing most logs takes less time."""
MOST = 4
"""The maximum number of helper processes. If logs stall all of them, gradings wait until a parser times out."""
_EXTRA = "swe"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The results of a task's tests, by the benchmark's parser and rules.

    Attributes:
        statuses: the status of each named test in the log: PASSED, FAILED, ERROR, SKIPPED, XFAIL.
        found: whether the benchmark accepts the log as that of a test run: it shows a test, or no failure is reported.
        resolved: whether the task is resolved.
        failed_fail_to_pass: the FAIL_TO_PASS tests that did not pass.
        failed_pass_to_pass: the PASS_TO_PASS tests that did not pass.
    """

    statuses: Mapping[str, str]
    found: bool
    resolved: bool
    failed_fail_to_pass: tuple[str, ...]
    failed_pass_to_pass: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Misreading:
    """Result lines of a log that a parser reads wrongly.

    Attributes:
        what: the number of tests and the kind of misreading.
        tests: the names of the tests, as printed by the runner.
    """

    what: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Specification:
    """SWE-bench's build and test specification for one version of a repository.

    Attributes:
        python: the interpreter.
        packages: conda packages, or the kind of file in the repository that lists them: ``requirements.txt`` or
            ``environment.yml``.
        pip_packages: pip packages that are installed afterwards.
        commands: shell commands that install the repository.
        before_tests: shell commands that run before the tests.
        test_command: the command that runs the row's test files.
        requirements_files: possible paths of the repository's ``requirements.txt``.
    """

    python: str
    packages: str
    pip_packages: tuple[str, ...]
    commands: tuple[str, ...]
    before_tests: tuple[str, ...]
    test_command: str
    requirements_files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """SWE-smith's build and test specification for one repository.

    Attributes:
        name: the profile's name: ``owner__name.commit``.
        repo: ``owner/name``.
        commit: the commit into which bugs are introduced.
        mirror: the repository with one branch per bug.
        python: the interpreter.
        commands: shell commands that install the repository.
        test_command: the command that runs the tests.
        timeout: the time limit of all tests in seconds.
    """

    name: str
    repo: str
    commit: str
    mirror: str
    python: str
    commands: tuple[str, ...]
    test_command: str
    timeout: float


def specification(repo: str, version: str, test_patch: str) -> Specification:
    """Return SWE-bench's specification for a row.

    Args:
        repo: ``owner/name``.
        version: the project's version.
        test_patch: the row's ``test_patch``.

    Raises:
        NotFound: swebench has no specification for this version.
        TaskFileError: the repository is in another language than Python.
        MissingExtra: the package is not installed.
        HarnessError: the package failed.
    """
    answer = _ask("specification", START_TIMEOUT, repo=repo, version=version, test_patch=test_patch)
    if "versions" in answer:
        versions = ", ".join(answer["versions"]) or "none at all"
        raise NotFound(f"swebench has no specification for {repo} {version}", reason=f"it has {versions}")
    if not answer["python"]:
        raise not_python("repo", f"is {repo!r}, which swebench does not test with Python")
    return Specification(**answer)


def profile(instance_id: str, fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]) -> Profile:
    """Return SWE-smith's profile for a row.

    Args:
        instance_id: the row's id.
        fail_to_pass: the row's FAIL_TO_PASS.
        pass_to_pass: the row's PASS_TO_PASS.

    Raises:
        NotFound: swesmith does not know the repository.
        TaskFileError: the repository is in another language than Python.
        MissingExtra: the package is not installed.
        HarnessError: the package failed.
    """
    row = {"instance_id": instance_id, "FAIL_TO_PASS": list(fail_to_pass), "PASS_TO_PASS": list(pass_to_pass)}
    answer = _ask("profile", START_TIMEOUT, row=row)
    if not answer:
        raise NotFound(f"swesmith has no profile for {instance_id!r}")
    if not answer["python"]:
        raise not_python("instance_id", f"is {instance_id!r}, whose repository swesmith does not test with Python")
    return Profile(**answer)


def evaluation(row: Mapping[str, object]) -> tuple[str, str]:
    """Return SWE-bench's test script for a row in any language, and the grading rule.

    Args:
        row: ``repo``, ``version``, ``instance_id``, ``base_commit`` and ``test_patch``.

    Raises:
        NotFound: swebench has no specification for this version.
        MissingExtra: the package is not installed.
        HarnessError: the package failed.
    """
    answer = _ask("evaluation", START_TIMEOUT, row=dict(row))
    if not answer:
        raise NotFound(f"swebench has no specification for {row['repo']} {row['version']}")
    return str(answer["script"]), str(answer["rule"])


def check_parser(parser: str) -> None:
    """Check that a parser exists and that its package is installed.

    Args:
        parser: as for :func:`judge`.

    Raises:
        NotFound: the parser does not exist.
        MissingExtra: its package is not installed.
        HarnessError: the package could not be installed or loaded.
    """
    _ask("known", START_TIMEOUT, parser=parser)


def judge(
    parser: str,
    log: str,
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    *,
    rule: str = "pass_and_fail",
    about: Mapping[str, str] | None = None,
    exit_code: int | None = None,
) -> Judgement:
    """Parse the results of a task's tests from a log.

    Args:
        parser: as in :attr:`.LogGrader.parser`.
        log: the output of the test command.
        fail_to_pass: the task's FAIL_TO_PASS.
        pass_to_pass: the task's PASS_TO_PASS.
        rule: as in :attr:`.LogGrader.rule`.
        about: the row's columns that some parsers need: ``instance_id``, ``repo`` and ``version``.
        exit_code: the command's exit status; None if it is meaningless.

    Raises:
        NotFound: the parser does not exist.
        MissingExtra: the package is not installed.
        HarnessError: the parser failed, or ran longer than :data:`PARSE_TIMEOUT`.
    """
    answer = _ask(
        "judge",
        PARSE_TIMEOUT,
        parser=parser,
        log=log,
        fail_to_pass=list(fail_to_pass),
        pass_to_pass=list(pass_to_pass),
        rule=rule,
        about=dict(about or {}),
        exit_code=exit_code,
    )
    return Judgement(**answer)


def parse(parser: str, log: str, *, about: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the status of every test in a log; see :func:`judge` for arguments and errors."""
    return dict(_ask("parse", PARSE_TIMEOUT, parser=parser, log=log, about=dict(about or {}))["statuses"])


def misread(
    parser: str, log: str, named: Sequence[str], *, about: Mapping[str, str] | None = None
) -> tuple[Misreading, ...]:
    """Return the runner's result lines that a parser misreads; see :func:`judge` for errors.

    Args:
        parser: as in :attr:`.LogGrader.parser`.
        log: the output of the test command.
        named: the tests in the task's lists.
        about: the row's columns that some parsers need: ``instance_id``, ``repo`` and ``version``.
    """
    arguments = {"parser": parser, "log": log, "named": list(named), "about": dict(about or {})}
    return tuple(
        Misreading(description, tuple(tests))
        for description, tests in _ask("misread", PARSE_TIMEOUT, **arguments)["misread"]
    )


def close() -> None:
    """Stop the helper processes; the next request starts a new one."""
    for pool in _pools.values():
        pool.end()


def _ask(operation: str, timeout: float, **arguments: object) -> dict[str, Any]:
    """Send a request to a helper process, and return its response with lists converted to tuples."""
    family = str(arguments.get("parser", "")).partition(":")[0]
    request = json.dumps({"operation": operation, **arguments}).encode() + b"\n"
    answer = json.loads(_the_pool(packages.installed(family)).exchange(request, timeout))
    if "error" not in answer:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in answer["answer"].items()}
    if answer["kind"] == "unknown":
        raise NotFound(
            f"{family} has no such log parser",
            reason=answer["error"],
            hint="docs/reference/graders.md lists the parsers; test.parser names one",
        )
    if answer["kind"] == "missing":
        raise MissingExtra(
            "SWE-bench and SWE-smith tasks need the benchmarks' own packages",
            reason=answer["error"],
            hint=f"pip install 'swe-minisandbox[{_EXTRA}]'",
        )
    raise HarnessError(f"the benchmark's own code failed at {operation!r}", reason=answer["error"])


class _Pool:
    """A pool of helper processes, each of which serves one request at a time.

    Args:
        packages: a directory with the benchmark's package; None if this interpreter has the package.
    """

    def __init__(self, packages: Path | None) -> None:
        self._packages = packages
        self._servers = [_Server(packages)]
        self._free: queue.LifoQueue[_Server] = queue.LifoQueue()
        self._free.put(self._servers[0])
        self._lock = threading.Lock()

    def exchange(self, request: bytes, timeout: float) -> bytes:
        """Send a request of one line and return the response; the timeout starts when a process is free."""
        server = self._free_server()
        try:
            return server.exchange(request, timeout)
        finally:
            self._free.put(server)

    def end(self) -> None:
        for server in self._servers:
            server.end()

    def _free_server(self) -> _Server:
        with contextlib.suppress(queue.Empty):
            return self._free.get(timeout=PATIENCE)
        with self._lock:
            if len(self._servers) < MOST:
                self._servers.append(_Server(self._packages))
                return self._servers[-1]
        return self._free.get()  # a server becomes free, because every request has a deadline


class _Server:
    """One helper process; see :class:`_Pool` for the argument."""

    def __init__(self, packages: Path | None) -> None:
        self._packages = packages
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting = bytearray()

    def exchange(self, request: bytes, timeout: float) -> bytes:
        is_new = self._process is None or self._process.poll() is not None
        if is_new:
            self._start()
        try:
            return self._exchange(request, time.monotonic() + timeout + (START_TIMEOUT if is_new else 0))
        except BaseException:  # stop the process: a late response would be taken for the next request's
            self.end()
            raise

    def end(self) -> None:
        process, self._process = self._process, None
        self._waiting.clear()
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _start(self) -> None:
        self.end()
        command = [sys.executable, "-m", "minisandbox.tasks.harness.server"]
        # pass few variables: the packages imported there load .env files and read tokens
        inherited = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
        environment = {name: os.environ[name] for name in inherited if name in os.environ}
        if self._packages is not None:
            environment["PYTHONPATH"] = os.pathsep.join(
                filter(None, (str(self._packages), environment.get("PYTHONPATH")))
            )
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "LC_ALL": "C.UTF-8"},
            cwd=Path("/"),
            bufsize=0,
        )

    def _exchange(self, request: bytes, deadline: float) -> bytes:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        source, target = process.stdout.fileno(), process.stdin.fileno()
        os.set_blocking(target, False)
        unsent = memoryview(request)
        while b"\n" not in self._waiting:
            seconds = max(deadline - time.monotonic(), 0)
            readable, writable, _ = select.select([source], [target] if unsent else [], [], seconds)
            if not readable and not writable:
                raise HarnessError("the benchmark's own code took too long", reason="the log is not what it expects")
            if writable:
                unsent = unsent[_write(target, unsent) :]
            if readable:
                chunk = os.read(source, 1 << 20)
                if not chunk:
                    raise HarnessError("the process of the benchmark's own code ended", reason="it ran out of memory")
                self._waiting += chunk
        line, _, following = bytes(self._waiting).partition(b"\n")
        self._waiting = bytearray(following)
        return line


def _write(target: int, data: memoryview) -> int:
    try:
        return os.write(target, data)
    except BlockingIOError:
        return 0
    except BrokenPipeError as error:
        raise HarnessError("the process of the benchmark's own code ended") from error


_pools: dict[tuple[int, Path | None], _Pool] = {}


def _the_pool(packages: Path | None) -> _Pool:
    """Return the pool for a package; a forked process gets a new pool."""
    pool = _Pool(packages)
    if (current := _pools.setdefault((os.getpid(), packages), pool)) is pool:
        atexit.register(pool.end)
    return current

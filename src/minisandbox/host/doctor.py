"""Try each kernel feature, and report what depends on it and how to enable it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import minisandbox
from minisandbox.errors import MiniSandboxError

from . import environment, fixes

_BOOTSTRAP = (
    "import sys; path, _, store = sys.stdin.buffer.read().decode('utf-8', 'surrogateescape').partition('\\0'); "
    "sys.path.append(path); from minisandbox.host import probes; probes.main(store)"
)
_DEADLINE = 60.0
"""Seconds for all trials together, which normally take a fraction of a second."""


class CheckStatus(StrEnum):
    """The state of a feature."""

    OK = "ok"
    DEGRADED = "degraded"
    MISSING = "missing"
    UNTRIED = "untried"
    """The feature was not tried, because another feature that it needs is missing."""


@dataclass(frozen=True, slots=True)
class Check:
    """One feature of this machine.

    Attributes:
        name: name of the feature, in the output and in :func:`missing_for`.
        status: ok; degraded (available with restrictions); missing; untried (a feature that it needs is missing).
        detail: result of the check.
        needed_for: what depends on it: ``sandbox`` (required by everything), ``images``, or a description.
        fix: the command line that enables it, or "" if it is available or could not be tried.
    """

    name: str
    status: CheckStatus
    detail: str
    needed_for: tuple[str, ...]
    fix: str = ""


# What needs the feature of each trial, in the order of the output.
_NEEDED_FOR: dict[str, tuple[str, ...]] = {
    "user-namespaces": ("ordinary users",),
    "namespaces": ("sandbox",),
    "new-mount-api": ("sandbox",),
    "idmap-tmpfs": ("writes in memory",),
    "tmpfs-xattrs": ("writes in memory",),
    "overlay-tmpfs": ("sandbox",),
    "overlay-store": ("images",),
    "many-layers": ("images of many layers",),
    "private-proc": ("sandbox",),
    "devices": ("sandbox",),
    "private-network": ("sandbox",),
    "no-nesting": ("a second barrier against nested namespaces",),
    "idmap-store": ("sandbox", "root"),
    "idmap-usr": ("a writable /usr",),
    "id-ranges": ("user= and chown, for ordinary users",),
    "seccomp": ("the system-call filter",),
    "pidfd": ("sandbox",),
}
# Trials that write to the store's file system.
_ON_STORE = frozenset({"overlay-tmpfs", "overlay-store", "idmap-store"})
# Trials that need no user namespace, so that a missing user namespace does not explain their failure.
_INDEPENDENT = frozenset({"user-namespaces", "seccomp", "pidfd"})
_ON_DISK = (
    "the store's disk: this kernel's tmpfs cannot take what sandboxes write; a watchdog counts their files about once "
    "a second for Limits.disk, and ends commands when the disk is nearly full"
)
_TITLE = {"sandbox": "a sandbox", "images": "building images"}


def run_checks(store: Path | None = None, make_sandbox: Callable[[Path], None] | None = None) -> tuple[Check, ...]:
    """Try every feature. The trials take a fraction of a second and leave no files or processes behind.

    Args:
        store: current or future location of the store, whose file system is tried. None: the directory for temporary
            files.
        make_sandbox: creates sandboxes with a temporary store in the given directory, runs a command in each and
            removes the sandboxes. It is called last, and only if no required feature is missing.

    Returns:
        The checks in a fixed order; the last is the mode in which sandboxes would run.
    """
    store_directory = environment.nearest_directory(store)
    directory = store_directory if environment.is_writable(store_directory) else environment.nearest_directory(None)
    answer = _run_trials(directory)
    store_check = environment_check("store", environment.store(store_directory), ("images",))
    checks = [
        environment_check("kernel", environment.kernel(), ("sandbox",)),
        *(_judge(name, answer, store_check) for name in _NEEDED_FOR),
        _upper(answer),
        environment_check("cgroups", environment.control_groups(), ("limits on memory and CPU",)),
        environment_check("rlimits", environment.rlimits(), ("many sandboxes at once",)),
        environment_check("inotify", environment.inotify(), ("programs that watch files",)),
        environment_check("file-max", environment.file_max(), ("many open files at once",)),
        environment_check("core-pattern", environment.core_pattern(), ("crashes kept away from the host",)),
        environment_check(
            "landlock", environment.landlock(), ("abstract sockets of the host hidden from Network.host()",)
        ),
        *(
            environment_check(name, environment.program(name), needed_for)
            for name, needed_for in (
                ("bash", ("sandbox",)),
                ("git", ("sandbox", "images")),
                ("tar", ("image export",)),
                ("patch", ("damaged predictions",)),
            )
        ),
        store_check,
    ]
    if make_sandbox is not None:
        blocking = [*_blocking(checks)] or [store_check.name] * (store_check.status is CheckStatus.MISSING)
        checks.append(_real_sandbox(directory, make_sandbox, blocking))
    return (*checks, _mode(answer, checks))


def _real_sandbox(directory: Path, make_sandbox: Callable[[Path], None], blocking: list[str]) -> Check:
    """Check that a complete sandbox works, because the kernel may refuse a system call that no trial makes."""
    if blocking:
        return Check(
            "real-sandbox", CheckStatus.UNTRIED, f"could not be tried without {', '.join(blocking)}", ("sandbox",)
        )
    try:
        make_sandbox(directory)
    except (MiniSandboxError, OSError) as error:
        parts = filter(None, (error.what, error.reason)) if isinstance(error, MiniSandboxError) else (str(error),)
        detail = ": ".join(parts)
        return Check("real-sandbox", CheckStatus.MISSING, detail, ("sandbox",), fixes.fix_for("real-sandbox"))
    return Check("real-sandbox", CheckStatus.OK, "made, used and removed", ("sandbox",))


def environment_check(name: str, finding: environment.Finding, needed_for: tuple[str, ...]) -> Check:
    """Create a check from a finding of :mod:`.environment`."""
    return Check(name, CheckStatus(finding.status), finding.detail, needed_for, finding.fix)


def is_ready(checks: Sequence[Check]) -> bool:
    """Return whether this machine can run sandboxes and build images."""
    return not any(_blocks(check, feature) for check in checks for feature in ("sandbox", "images"))


def missing_for(feature: str, store: Path | None = None) -> str | None:
    """Return why a feature is not available on this machine.

    Args:
        feature: ``sandbox``, ``images``, ``root`` (each sandbox has an id range), ``ordinary user`` (each sandbox has
            one uid), or the name of a check.
        store: as for :func:`run_checks`.

    Returns:
        The reason with the fix, or None if the feature is available.
    """
    return explain(feature, run_checks(store))


def explain(feature: str, checks: Sequence[Check]) -> str | None:
    """Return why a feature is not available according to ``checks``, or None; see :func:`missing_for`."""
    if feature in ("root", "ordinary user"):
        mode = checks[-1].detail
        return None if mode.startswith(feature) else f"{feature} mode is not the one of this process ({mode})"
    blocking = [check for check in checks[:-1] if check.name == feature or _blocks(check, feature)]
    # report untried checks only if no other check explains them
    failed_checks = [check for check in blocking if check.status not in (CheckStatus.OK, CheckStatus.UNTRIED)]
    untried_checks = [check for check in blocking if check.status is CheckStatus.UNTRIED]
    reasons = [
        f"{check.name}: {check.detail}" + (f" (fix: {check.fix})" if check.fix else "") for check in failed_checks
    ]
    return "; ".join(reasons or [f"{check.name}: {check.detail}" for check in untried_checks]) or None


def _blocks(check: Check, feature: str) -> bool:
    return check.status in (CheckStatus.MISSING, CheckStatus.UNTRIED) and feature in check.needed_for


# --- the trials ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one trial."""

    ok: bool
    detail: str
    errno: int | None
    tried: bool = True


@dataclass(frozen=True, slots=True)
class TrialAnswer:
    """The results of all trials, and the privileges of this process."""

    privileged: bool
    trials: dict[str, Trial]


def _run_trials(store_directory: Path) -> TrialAnswer:
    package = Path(minisandbox.__file__).parent.parent
    try:
        completed = subprocess.run(
            [sys.executable, "-I", "-S", "-B", "-c", _BOOTSTRAP],
            input=os.fsencode(f"{package}\0{store_directory}"),
            capture_output=True,
            timeout=_DEADLINE,
            check=True,
            cwd="/",
        )
        answer = json.loads(completed.stdout)
        return TrialAnswer(answer["privileged"], {name: Trial(**trial) for name, trial in answer["results"].items()})
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        return _no_answer(f"the trials could not be run: {' '.join(reason) or error}")
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return _no_answer(f"the trials could not be run: {error}")


def _no_answer(reason: str) -> TrialAnswer:
    return TrialAnswer(privileged=False, trials={name: Trial(False, reason, None, tried=False) for name in _NEEDED_FOR})


def _judge(name: str, answer: TrialAnswer, store: Check) -> Check:
    """Turn a trial into a check. A failed trial is missing if this mode needs the feature, otherwise degraded."""
    trial, needed_for = answer.trials[name], _NEEDED_FOR[name]
    if name == "overlay-store" and _writes_to_disk(answer):
        needed_for = ("sandbox", *needed_for)
    if trial.ok:
        return Check(name, CheckStatus.OK, trial.detail, needed_for)
    if _without_user_namespaces(answer):
        if name == "user-namespaces":
            needed_for = ("sandbox", *needed_for)
        elif name not in _INDEPENDENT:
            return Check(name, CheckStatus.UNTRIED, "could not be tried without user-namespaces", needed_for)
    if name == "overlay-tmpfs" and _writes_to_disk(answer):
        return Check(name, CheckStatus.DEGRADED, "not used: see upper", ("writes in memory",), fixes.fix_for("upper"))
    is_vital = {"sandbox", "images"} & set(needed_for) or name == "user-namespaces"
    status = CheckStatus.MISSING if is_vital else CheckStatus.DEGRADED
    fix = store.fix if store.status is CheckStatus.MISSING and name in _ON_STORE else fixes.fix_for(name)
    return Check(name, status, trial.detail, needed_for, fix if trial.tried else "")


def _writes_to_disk(answer: TrialAnswer) -> bool:
    """Return whether uppers lie on the store's disk, as the launcher decides from the same two trials."""
    trials = (answer.trials[name] for name in ("idmap-tmpfs", "tmpfs-xattrs"))
    return any(trial.errno == errno.ENOTSUP for trial in trials)


def _upper(answer: TrialAnswer) -> Check:
    """Report whether uppers lie in memory or on disk."""
    if _without_user_namespaces(answer) or not answer.trials["tmpfs-xattrs"].tried:
        return Check("upper", CheckStatus.UNTRIED, "could not be tried without user-namespaces", ("sandbox",))
    if not _writes_to_disk(answer):
        return Check(
            "upper", CheckStatus.OK, "memory: a tmpfs takes what sandboxes write, up to Limits.disk", ("sandbox",)
        )
    if answer.trials["overlay-store"].ok:
        return Check("upper", CheckStatus.DEGRADED, _ON_DISK, ("sandbox",), fixes.fix_for("upper"))
    return Check("upper", CheckStatus.UNTRIED, "the store's disk, where overlay-store failed", ("sandbox",))


def _without_user_namespaces(answer: TrialAnswer) -> bool:
    """Return whether this process cannot create user namespaces; root may, even if ordinary users may not."""
    trials = answer.trials
    if trials["user-namespaces"].ok or not trials["user-namespaces"].tried:
        return False
    return not (answer.privileged and (trials["no-nesting"].ok or trials["devices"].ok))


def _mode(answer: TrialAnswer, checks: Sequence[Check]) -> Check:
    blocking = list(_blocking(checks))
    if answer.privileged:
        detail = "root: each sandbox has a range of 65,536 host ids of its own"
    elif answer.trials["id-ranges"].ok:
        detail = "ordinary user: each sandbox has 65,536 ids; yours is uid 0 inside, the rest is of /etc/subuid"
    else:
        detail = "ordinary user: each sandbox has one id, which is yours outside and uid 0 inside"
    if blocking:
        return Check(
            "mode", CheckStatus.MISSING, f"none: {', '.join(blocking)} missing", ("sandbox",), "see the lines above"
        )
    return Check("mode", CheckStatus.OK, detail, ("sandbox",))


def _blocking(checks: Sequence[Check]) -> Iterator[str]:
    yield from (check.name for check in checks if check.status is CheckStatus.MISSING and _blocks(check, "sandbox"))


def describe_need(check: Check) -> str:
    """Return a description of the features that depend on a check."""
    return ", ".join(_TITLE.get(need, need) for need in check.needed_for)

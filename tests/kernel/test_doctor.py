"""The doctor on this machine, and on machines that lack something: made of namespaces, so that the lack is real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from minisandbox.errors import SandboxCreationError
from minisandbox.host import doctor, environment, fixes
from minisandbox.host.doctor import CheckStatus

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.kernel("user-namespaces")

# Runs in a process of its own: {before} makes the machine poorer, then the doctor is asked there.
ASK = """
import json, os, sys
from minisandbox.launch.kernel import syscalls as sc
from minisandbox.launch.kernel.identity import enter_outer_namespace
from minisandbox.host import doctor, fixes, environment
from pathlib import Path
{before}
checks = doctor.run_checks(Path(sys.argv[1]))
found = {{c.name: [c.status.value, c.detail, c.fix] for c in checks}}
print(json.dumps([found, doctor.is_ready(checks), doctor.explain("sandbox", checks)]))
"""
# The namespace's own limit, as `sysctl user.max_user_namespaces=0` sets it for a whole machine (namespaces(7)).
WITHOUT_USER_NAMESPACES = """
enter_outer_namespace()
Path("/proc/sys/user/max_user_namespaces").write_text("0")
"""
# One masked file under /proc, as every container engine has it: a new /proc is refused then (fs/namespace.c).
WITH_MASKED_PROC = """
enter_outer_namespace()
sc.unshare(sc.CLONE_NEWNS)
sc.mount("/dev/null", "/proc/version", None, 4096)
"""

# A device that others may not write to: to a sandbox's root, all users of the host are others.
WITH_A_CLOSED_NULL = """
import stat
if os.geteuid() != 0:
    enter_outer_namespace()
sc.unshare(sc.CLONE_NEWNS)
sc.mount("none", "/", None, sc.MS_REC | sc.MS_PRIVATE)
null = sys.argv[1] + "/null"
os.mknod(null, {kind}, os.makedev(1, 3))
os.chmod(null, {mode})
sc.mount(null, "/dev/null", None, 4096)
"""

Found = dict[str, list[str]]


def ask(before: str, store: Path) -> tuple[Found, bool, str | None]:
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(before=before), str(store)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, ready, reason = json.loads(done.stdout)
    return found, ready, reason


def test_every_feature_is_judged(tmp_path: Path) -> None:
    checks = doctor.run_checks(tmp_path)
    names = [check.name for check in checks]
    assert len(names) == len(set(names))
    assert {"kernel", "user-namespaces", "overlay-tmpfs", "private-proc", "idmap-store", "cgroups", "git"} <= set(names)
    assert names[-1] == "mode"
    for check in checks:
        assert check.detail
        assert check.needed_for
        assert bool(check.fix) == (check.status not in (CheckStatus.OK, CheckStatus.UNTRIED)), check


def children() -> str:
    """Pids of this process's children, the ended ones that nobody has waited for included (proc_pid_task(5))."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")


def test_it_leaves_nothing_behind(tmp_path: Path) -> None:
    namespaces = {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")}
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
    before = children()
    doctor.run_checks(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert Path("/proc/self/mounts").read_text(encoding="utf-8") == mounts
    assert {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")} == namespaces
    assert children() == before


def test_what_a_killed_doctor_left_is_removed(tmp_path: Path) -> None:
    old, young = tmp_path / ".minisandbox-doctor-old", tmp_path / ".minisandbox-doctor-young"
    for directory in (old, young):
        (directory / "work").mkdir(parents=True)
        (directory / "work").chmod(0)
    os.utime(old, (0, 0))
    doctor.run_checks(tmp_path)
    assert list(tmp_path.iterdir()) == [young]
    (young / "work").chmod(0o700)


def test_a_program_with_threads_may_ask(tmp_path: Path) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert doctor.explain("namespaces", doctor.run_checks(tmp_path)) is None
    finally:
        stop.set()
        thread.join()


@pytest.mark.kernel
def test_ready_here(tmp_path: Path) -> None:
    checks = doctor.run_checks(tmp_path)
    assert doctor.is_ready(checks)
    modes = [doctor.explain(mode, checks) for mode in ("root", "ordinary user")]
    assert [reason is None for reason in modes].count(True) == 1


@pytest.mark.kernel
def test_a_real_sandbox_is_the_last_trial(tmp_path: Path) -> None:
    def refuse(directory: Path) -> None:
        asked.append(directory)
        raise SandboxCreationError("could not name it: refused", hint="run 'minisandbox doctor'")

    asked: list[Path] = []
    checks = doctor.run_checks(tmp_path, refuse)
    assert asked == [tmp_path]
    found = checks[-2]
    assert (found.name, found.status, found.detail) == (
        "real-sandbox",
        CheckStatus.MISSING,
        "could not name it: refused",
    )
    assert not doctor.is_ready(checks)
    assert doctor.run_checks(tmp_path, asked.append)[-2].status is CheckStatus.OK


def test_without_user_namespaces(tmp_path: Path) -> None:
    found, ready, reason = ask(WITHOUT_USER_NAMESPACES, tmp_path)
    assert not ready
    assert found["user-namespaces"][0] == "missing"
    assert "user.max_user_namespaces=65536" in found["user-namespaces"][2]
    assert reason is not None
    assert "sudo sysctl -w" in reason
    assert found["mode"][0] == "missing"
    assert found["mode"][1] == "none: user-namespaces missing"
    # what needs them gives neither a cause nor a fix of its own
    dependent = [name for name, (status, detail, fix) in found.items() if "without user-namespaces" in detail]
    assert {"namespaces", "new-mount-api", "overlay-tmpfs", "private-proc", "devices", "no-nesting"} <= {*dependent}
    assert all(found[name][0] == "untried" and not found[name][2] for name in dependent)
    assert "could not be tried" not in reason
    assert found["seccomp"][0] == found["pidfd"][0] == "ok"


def test_with_a_masked_proc(tmp_path: Path) -> None:
    found, ready, reason = ask(WITH_MASKED_PROC, tmp_path)
    assert not ready
    assert found["user-namespaces"][0] == "ok"
    assert found["private-proc"][0] == "missing"
    assert reason is not None
    assert "private-proc" in reason


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("kind", "mode", "fix"),
    [("stat.S_IFCHR", 0o644, "sudo chmod 666 /dev/null"), ("stat.S_IFCHR", 0o600, "sudo chmod 666 /dev/null"),
     ("stat.S_IFREG", 0o666, "sudo rm -f /dev/null && sudo mknod -m 666 /dev/null c 1 3")],
)  # fmt: skip
def test_a_device_that_sandboxes_cannot_use(tmp_path: Path, kind: str, mode: int, fix: str) -> None:
    if kind == "stat.S_IFCHR" and os.geteuid() != 0:
        pytest.skip("only root makes devices")
    if "nodev" in mount_options(tmp_path):
        pytest.skip("no device works on this file system")
    found, ready, reason = ask(WITH_A_CLOSED_NULL.format(kind=kind, mode=mode), tmp_path)
    assert not ready
    assert reason is not None
    assert "a sandbox cannot use /dev/null" in reason
    assert found["devices"][0] == "missing"
    assert found["devices"][2] == fix


def mount_options(path: Path) -> str:
    done = subprocess.run(["findmnt", "-no", "OPTIONS", "-T", path], capture_output=True, text=True, check=True)
    return done.stdout


def test_a_store_that_cannot_be_written_is_named() -> None:
    checks = {check.name: check for check in doctor.run_checks(Path("/proc/nowhere"))}
    assert checks["store"].status is CheckStatus.MISSING
    assert "MINISANDBOX_STORE" in checks["store"].fix
    assert checks["namespaces"].status is CheckStatus.OK


def test_no_interpreter_to_try_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    checks = doctor.run_checks(tmp_path)
    assert not doctor.is_ready(checks)
    assert "could not be run" in (doctor.explain("sandbox", checks) or "")


def test_features_that_nobody_knows(tmp_path: Path) -> None:
    assert doctor.missing_for("no such feature", tmp_path) is None


def test_the_command(tmp_path: Path) -> None:
    environment = {**os.environ, "MINISANDBOX_STORE": str(tmp_path / "store")}
    command = [sys.executable, "-m", "minisandbox", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    as_json = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    found = json.loads(as_json.stdout)
    assert done.returncode == as_json.returncode == (0 if found["ready"] else 10)
    assert done.stdout.splitlines()[-1].startswith("ready" if found["ready"] else "NOT ready")
    assert not (tmp_path / "store").exists()
    for check in found["checks"]:
        assert check["name"] in done.stdout


def test_what_the_machine_shares_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"fs.file-max": "100000", "kernel.core_pattern": "|/usr/share/apport/apport -p%p"}
    monkeypatch.setattr(fixes, "read_sysctl", settings.get)
    files, cores = environment.file_max(), environment.core_pattern()
    assert (files.status, cores.status) == ("degraded", "degraded")
    assert "fs.file-max" in files.fix
    assert "/usr/share/apport/apport" in cores.detail
    settings.update({"fs.file-max": str(2**63 - 1), "kernel.core_pattern": "core"})
    assert (environment.file_max().status, environment.core_pattern().status) == ("ok", "ok")

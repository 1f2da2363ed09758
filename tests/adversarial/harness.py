"""Run the probes without a sandbox and in one, then look at the host: ``make adversarial``.

The run without a sandbox is the control: a probe that cannot succeed there shows nothing by failing in a sandbox. All
of it is a program of its own, so that what it leaks to the launcher is not what another test leaked.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.adversarial import canaries as planting  # noqa: E402 - after the path is set
from tests.adversarial.open import HOLES  # noqa: E402
from tests.adversarial.probes import core, everything  # noqa: E402
from tests.adversarial.probes.core import ABSENT, BLOCKED, BROKEN, HOST, OPEN, WORKS, Probe  # noqa: E402

from minisandbox.images.base import base_entries, write_base  # noqa: E402
from minisandbox.sandbox import Sandbox  # noqa: E402
from minisandbox.sandbox.controller import shut_down  # noqa: E402
from minisandbox.sandbox.launcher import NO_GROUPS  # noqa: E402
from minisandbox.types import ExecResult, ImageSpec, Limits, Outcome  # noqa: E402

Told = planting.Told
MIB = 1 << 20
LIMITS = {"processes": 128, "memory": 2048 * MIB, "disk": 64 * MIB}
LITTLE = {"memory": 256 * MIB}  # for those that try to take more
PATIENCE = 900.0
GRACE = 30.0  # seconds within which all of a stopped sandbox has gone, on a machine that is busy with other things
SETTINGS = ("kernel/core_pattern", "kernel/modprobe", "kernel/hostname", "kernel/domainname", "vm/overcommit_memory",
            "fs/suid_dumpable", "net/ipv4/ip_forward", "kernel/sysrq")  # fmt: skip
APART = ("limit",)  # kinds whose probes have a sandbox each: they use it up


@dataclass(frozen=True, slots=True)
class Result:
    """What a probe found in one place."""

    verdict: str
    detail: str = ""


Results = dict[str, Result]
MISSING = Result(BROKEN, "no answer")
FOUND, WITHOUT_GROUPS = "in a sandbox", "in a sandbox without control groups"


@dataclass(frozen=True, slots=True)
class Report:
    """The runs, those in sandboxes by what holds their limits, and what was wrong with the host afterwards."""

    control: Results
    inside: dict[str, Results]
    damage: tuple[str, ...]
    ids: int
    seconds: float

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def report_from(text: str) -> Report:
    data = json.loads(text)
    inside = {mechanism: rows_from(rows) for mechanism, rows in data["inside"].items()}
    return Report(rows_from(data["control"]), inside, tuple(data["damage"]), data["ids"], data["seconds"])


def rows_from(rows: Mapping[str, dict[str, object]]) -> Results:
    return {name: Result(str(row["verdict"]), str(row["detail"])) for name, row in rows.items()}


def probe_named(name: str) -> Probe:
    return core.PROBES[name]


def all_probes() -> list[Probe]:
    return everything.probes()


# --- one run ---------------------------------------------------------------------------------------------------------


def results_of(output: str) -> Results:
    found: Results = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            found[row["name"]] = Result(row["verdict"], row["detail"])
    return found


def run_control(made: planting.Canaries, names: Sequence[str]) -> Results:
    """The probes as this user, with what leaks to a child."""
    workspace = made.base / "workspace"
    workspace.mkdir()
    image_file = workspace / "came-with-the-image"
    image_file.write_text("text\n", encoding="ascii")
    told = made.base / "control.json"
    told.write_text(json.dumps(made.told | {"control": True, "image_file": str(image_file), "limits": LIMITS}))
    environment = {**os.environ, "PYTHONPATH": str(HERE), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "probes", str(told), *names], cwd=workspace, env=environment, close_fds=False,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    return settle(results_of(done.stdout), made, alive=True, grace=0.2)


def run_inside(made: planting.Canaries, image: ImageSpec, names: Sequence[str]) -> Results:
    """The probes in a fresh sandbox, and what the host saw of them."""
    limits = LIMITS | (LITTLE if names[0].startswith("limit-memory") else {})
    box = Sandbox.create(
        image, limits=Limits(memory=limits["memory"], disk=limits["disk"], processes=limits["processes"])
    )
    try:
        box.files.upload(HERE / "probes", "/testbed/attack/probes")
        told = made.told | {"control": False, "image_file": "/etc/came-with-the-image", "limits": limits}
        box.files.write_text("/testbed/attack/canaries.json", json.dumps(told))
        command = ["python3", "-m", "probes", "/testbed/attack/canaries.json", *names]
        done = box.exec(command, cwd="/testbed/attack", timeout=PATIENCE)
        found = results_of(done.stdout)
        found |= {name: explain(done, probe_named(name)) for name in names if name not in found}
        alive = box.alive and box.exec("echo alive", timeout=20).stdout == "alive\n"
    finally:
        box.stop()
    return settle(found, made, alive=alive, grace=GRACE)


def explain(done: ExecResult, item: Probe) -> Result:
    """What became of a probe that gave no answer: a sandbox's own limit may end all that runs in it."""
    if item.may_die and done.outcome is Outcome.SIGNALED and "memory" in done.limits_hit:
        return Result(BLOCKED, "the limit of memory ended all of it")
    return Result(BROKEN, f"no answer; {done.fate}: {done.stderr[-300:]}")


def settle(found: Results, made: planting.Canaries, *, alive: bool, grace: float) -> Results:
    """Put the host's word in place of what a probe could only leave to it; take away what is left."""
    marker = Path(str(made.told["drop"]), f"marker-{made.run}")
    usr_marker = Path(str(made.told["usr_marker"]))
    usr_file = made.told["usr_file"]
    seen = {
        "files-marker-in-the-hosts-tmp": marker.exists(),
        "files-marker-in-the-hosts-usr": usr_marker.exists(),
        "files-change-a-file-of-usr": bool(usr_file) and changed(Path(str(usr_file))),
        "process-live-on": outlived(str(made.told["daemon"]), grace),
        "supervision-killed-by-every-signal": not alive,
    }
    for path in (marker, usr_marker):
        path.unlink(missing_ok=True)
    if seen["files-change-a-file-of-usr"]:
        restore(Path(str(usr_file)))
    for name, did in seen.items():
        if name in found and found[name].verdict == HOST:
            word = "the host has seen it" if did else "the host has seen nothing"
            found[name] = Result(OPEN if did else BLOCKED, f"{found[name].detail}; {word}")
    return found


def changed(path: Path) -> bool:
    try:
        status = path.stat()
        text = path.read_text(encoding="ascii", errors="replace")
        return text != "of the host\n" or status.st_mode & 0o7777 != 0o644 or status.st_uid != 0 or status.st_mtime < 10
    except FileNotFoundError:
        return True


def restore(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.write_text("of the host\n", encoding="ascii")
    path.chmod(0o644)


def outlived(token: str, grace: float) -> bool:
    """Whether a daemon is still there after the grace; it is ended then."""
    deadline = time.monotonic() + grace
    while found := processes_with(token):
        if time.monotonic() > deadline:
            for pid in found:
                with contextlib.suppress(OSError):
                    os.kill(pid, 9)
            return True
        time.sleep(0.05)
    return False


def processes_with(token: str) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if token.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
    return found


# --- the host --------------------------------------------------------------------------------------------------------


def settings() -> dict[str, str]:
    found = {}
    for name in SETTINGS:
        with contextlib.suppress(OSError):
            found[name] = Path("/proc/sys", name).read_text(encoding="utf-8")
    return found


def digest_of(tree: Path) -> str:
    """Names, kinds, modes, owners, times and content of a tree."""
    total = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        status = path.lstat()
        total.update(repr((str(path), status.st_mode, status.st_uid, status.st_mtime_ns)).encode())
        if path.is_file() and not path.is_symlink():
            total.update(path.read_bytes())
    return total.hexdigest()


@dataclass(frozen=True, slots=True)
class Host:
    """What must be the same before and after."""

    canaries: dict[str, tuple[str, int, int, int]]
    layers: str
    mounts: str
    settings: dict[str, str]

    def differences(self, later: Host) -> Iterator[str]:
        yield from (f"changed: {path}" for path, mark in self.canaries.items() if later.canaries[path] != mark)
        if self.layers != later.layers:
            yield "a layer has changed"
        if self.mounts != later.mounts:
            yield "the mount table has changed"
        yield from (
            f"/proc/sys/{name} has changed" for name in self.settings if later.settings[name] != self.settings[name]
        )


def look(made: planting.Canaries, layer: Path) -> Host:
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    return Host(made.fingerprints(), digest_of(layer), mounts, settings())


def damage(made: planting.Canaries, before: Host, layer: Path) -> Iterator[str]:
    yield from before.differences(look(made, layer))
    if not Path(f"/proc/{made.process}").exists() or str(made.told["token"]) not in _arguments(made.process):
        yield "the host's process has ended"
    yield from (f"left on the host: {path}" for path in Path("/tmp").glob(f"*{made.run}*") if path != made.base)


def _arguments(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    return ""


# --- all of it -------------------------------------------------------------------------------------------------------


def make_image(base: Path) -> ImageSpec:
    tree = base / "layers" / "tree"
    tree.parent.mkdir()
    write_base(base_entries(), tree)
    (tree / "etc" / "came-with-the-image").write_text("text\n", encoding="ascii")
    return ImageSpec("attacked", (tree,))


def attack(names: Sequence[str] = ()) -> Report:
    """All runs, one after the other."""
    started = time.monotonic()
    wanted = [item.name for item in all_probes() if not names or item.name in names or item.kind in names]
    with planting.planted() as made:
        image = make_image(made.base)
        control = run_control(made, wanted)
        before = look(made, image.layers[0])
        inside = {FOUND: run_every(made, image, wanted)}
        groups, ids = look_inside(image)
        if groups:
            shut_down()
            os.environ[NO_GROUPS] = "1"
            inside[WITHOUT_GROUPS] = run_every(made, image, wanted)
        shut_down()
        wrong = tuple(damage(made, before, image.layers[0]))
    return Report(control, inside, wrong, ids, time.monotonic() - started)


def look_inside(image: ImageSpec) -> tuple[bool, int]:
    """Whether control groups hold the limits here, and how many ids a sandbox has."""
    with Sandbox.create(image) as box:
        rows = box.exec("cat /proc/self/uid_map").check().stdout.splitlines()
        groups = any(mechanism.startswith("cgroup") for _, mechanism in box.info().enforced)
        return groups, sum(int(row.split()[2]) for row in rows)


def run_every(made: planting.Canaries, image: ImageSpec, wanted: Sequence[str]) -> Results:
    """What uses a sandbox up in one each, the rest in one."""
    apart = [name for name in wanted if probe_named(name).kind in APART]
    together = [name for name in wanted if name not in apart]
    found: Results = {}
    for group in ([together] if together else []) + [[name] for name in apart]:
        found |= run_inside(made, image, group)
    return found


def fine(verdict: str) -> bool:
    return verdict in (BLOCKED, WORKS, ABSENT)


def table(report: Report, *, everything_too: bool = True) -> Iterator[str]:
    """The runs beside each other; what is open is marked."""
    mechanisms = list(report.inside)
    yield f"{'':<41}{'without':>8}" + "".join(f"{word:>9}" for word in ("inside", "ungrouped")[: len(mechanisms)])
    kind = ""
    for item in (item for item in all_probes() if item.name in report.control):
        inside = [report.inside[mechanism].get(item.name, MISSING) for mechanism in mechanisms]
        worst = next((result for result in inside if not fine(result.verdict)), None)
        if everything_too and item.kind != kind:
            kind = item.kind
            yield f"\n{kind}"
        if everything_too or worst:
            words = [report.control[item.name].verdict, *(result.verdict for result in inside)]
            name = item.name if not everything_too else item.name.removeprefix(kind + "-")
            known = f"in docs/security: {HOLES[item.name]}" if worst and item.name in HOLES else ""
            detail = " ".join((known or (worst or inside[0]).detail).split())[:70]
            yield f"{'!' if worst else ' '} {name:<38.38} " + "".join(f"{word:>9}" for word in words) + f"  {detail}"
    yield from summary(report)


def summary(report: Report) -> Iterator[str]:
    attacks = [item.name for item in all_probes() if item.kind != "function" and item.name in report.control]
    functions = [item.name for item in all_probes() if item.kind == "function" and item.name in report.control]
    yield ""
    for title, run in (("without a sandbox", report.control), *report.inside.items()):
        verdicts = [run.get(name, MISSING).verdict for name in attacks]
        working = sum(run.get(name, MISSING).verdict == WORKS for name in functions)
        counts = ", ".join(f"{verdicts.count(word)} {word}" for word in (OPEN, BLOCKED, ABSENT, BROKEN))
        yield f"{title + ':':<38} {len(attacks)} attacks: {counts}; {working} of {len(functions)} functions work"
    yield from (f"! {line}" for line in report.damage)
    yield f"{report.seconds:.1f} s as {'root' if os.geteuid() == 0 else 'an ordinary user'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="probes or kinds; all if none are given")
    parser.add_argument("--json", action="store_true", help="print both runs as JSON")
    parser.add_argument("--brief", action="store_true", help="list only what is open")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - {name for item in all_probes() for name in (item.name, item.kind)}:
        parser.error(f"there is no probe or kind {', '.join(sorted(unknown))}")
    report = attack(chosen.names)
    if chosen.json:
        print(report.to_json())
        return 0
    print("\n".join(table(report, everything_too=not chosen.brief)))
    results = [(name, result.verdict) for run in report.inside.values() for name, result in run.items()]
    # holes that docs/security documents show as open in the table, and are no failure
    return int(
        bool(report.damage)
        or not all(fine(verdict) or (verdict == OPEN and name in HOLES) for name, verdict in results)
    )


if __name__ == "__main__":
    sys.exit(main())

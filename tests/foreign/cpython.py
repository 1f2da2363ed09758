"""CPython's own tests of system calls, in a sandbox and on the host: every difference has to be in the table.

Debian packages them for its interpreter, of which the host's ``/usr`` in a sandbox shows the same files:

    make test-cpython CPYTHON='--suite DIR --modules test_os test_pty'
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # what tests share is imported by its full name

from tests.foreign.cpython_differences import IGNORED, difference_of

from minisandbox.images import host_image
from minisandbox.sandbox import Sandbox
from minisandbox.store import Store
from minisandbox.types import Limits, Mount

PYTHON = Path("/usr/bin/python3.11")
MODULES = ("test_os", "test_subprocess", "test_signal", "test_pty", "test_socket")
INSTALL = "apt-get install libpython3.11-testsuite (or, without root: apt-get download, dpkg-deb -x, and --suite DIR)"
USER = 1000  # of the sandbox's made /etc/passwd
SECONDS = 1200.0
LIBRARY = "usr/lib/python3.11"
INSIDE = PurePosixPath("/mnt/suite")

KINDS = {"failure": "failed", "error": "failed", "skipped": "skipped"}

Outcomes = dict[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, help="where the package was unpacked, if it is not installed")
    parser.add_argument("--modules", nargs="+", default=list(MODULES), choices=MODULES)
    args = parser.parse_args()
    parts = [Path(root, LIBRARY) for root in ("/", args.suite) if root]
    if not PYTHON.exists() or not (parts[-1] / "test" / "test_os.py").exists():
        print(f"skipped: there is no {PYTHON} with its tests: {INSTALL}")
        return 0
    mine = os.getuid()
    users = (0, USER) if mine == 0 else (mine,)
    for pattern, reason in IGNORED.items():
        print(f"{pattern} on neither side  [{reason}]")
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        library = merged(parts, Path(place, "library"))
        unknown = [line for user in users for module in args.modules for line in compare(module, library, user)]
    print(f"{len(unknown)} differences that are not in the table")
    return 1 if unknown else 0


def merged(parts: list[Path], library: Path) -> Path:
    """Copy the package ``test`` together: the runner is the interpreter's, most tests are the other package's."""
    library.parent.chmod(0o755)
    for part in parts:
        shutil.copytree(part / "test", library / "test", dirs_exist_ok=True)
    return library


def compare(module: str, library: Path, user: int) -> list[str]:
    """Run a module on both sides and print how they differ; returns the differences without a reason."""
    outside, inside = on_the_host(module, library, user), in_a_sandbox(module, library, user)
    print(f"== {module} as uid {user}: host {counts(outside)}; sandbox {counts(inside)}")
    if not outside or not inside:
        return [f"{module}: no report"]
    unknown = []
    for name in sorted(outside.keys() | inside.keys()):
        before, after = outside.get(name, "absent"), inside.get(name, "absent")
        if before == after:
            if difference_of(name, root=user == 0):
                print(f"  {name}: {after} on both sides, other than the table has it")
            continue
        known = difference_of(name, root=user == 0)
        is_known = known is not None and (known.outside, known.inside) == (before, after)
        line = f"{name}: {before} -> {after}"
        print(f"  {line}  [{known.rule if known is not None and is_known else 'NOT IN THE TABLE'}]")
        if not is_known:
            unknown.append(line)
    return unknown


def on_the_host(module: str, library: Path, user: int) -> Outcomes:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o755)
        work = Path(place, "work")
        work.mkdir()
        if os.getuid() == 0:
            os.chown(work, user, user)
            drop: dict[str, Any] = {"user": user, "group": user, "extra_groups": []}
        else:
            drop = {}
        report = work / "report.xml"
        done = subprocess.run(
            command(module, report), env=environment(library, work), cwd=work, timeout=SECONDS, check=False,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", start_new_session=True, **drop,
        )  # fmt: skip
        if not report.exists():
            print(f"{module}: exit status {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
            return {}
        return outcomes(report.read_bytes())


def in_a_sandbox(module: str, library: Path, user: int) -> Outcomes:
    mounts = [Mount(library / "test", INSIDE / "test")]
    with Sandbox.create(host_image(Store.open()).spec(), mounts=mounts, limits=Limits(memory="4G")) as box:
        who = user if os.getuid() == 0 else USER
        work = PurePosixPath("/tmp/work")
        box.exec(["install", "-d", "-o", str(who), str(work)]).check()
        result = box.exec(
            command(module, work / "report.xml"), env=environment(INSIDE, work), cwd=work, timeout=SECONDS,
            user=who or None,
        )  # fmt: skip
        if not box.files.exists(work / "report.xml"):
            print(f"{module}: {result.fate}: {result.stdout[-2000:]}{result.stderr[-2000:]}")
            return {}
        return outcomes(box.files.read_bytes(work / "report.xml"))


def command(module: str, report: Path | PurePosixPath) -> list[str]:
    ignored = [word for pattern in IGNORED for word in ("--ignore", pattern)]
    return [str(PYTHON), "-m", "test", "--timeout", "600", *ignored, "--junit-xml", str(report), module]


def environment(library: Path | PurePosixPath, work: Path | PurePosixPath) -> dict[str, str]:
    return {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "PYTHONPATH": str(library), "HOME": str(work),
        "TMPDIR": str(work), "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip


def outcomes(report: bytes) -> Outcomes:
    """The outcome of each test; those of its subtests are its own."""
    found: Outcomes = {}
    for case in ET.fromstring(report).iter("testcase"):
        name = case.get("name", "").partition(" ")[0]
        kind = next((KINDS[child.tag] for child in case if child.tag in KINDS), "ok")
        found[name] = kind if found.get(name, "ok") == "ok" else found[name]
    return found


def counts(found: Outcomes) -> str:
    kinds = Counter(found.values())
    return ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds)) or "no report"


if __name__ == "__main__":
    sys.exit(main())

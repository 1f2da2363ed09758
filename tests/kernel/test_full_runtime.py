"""Where the runtime directory is full or read-only: an error that says what, where, why and what to do.

The lack is real: each script runs in a mount namespace of its own, where small file systems lie over the directory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minisandbox.types import ImageSpec

pytestmark = pytest.mark.kernel("user-namespaces", "sandbox")

ALONE = """
import os, sys
from pathlib import Path
from minisandbox.launch.kernel import syscalls as sc
from minisandbox.launch.kernel.identity import enter_outer_namespace

if os.geteuid() != 0:
    enter_outer_namespace()
sc.unshare(sc.CLONE_NEWNS)
sc.mount("none", "/", None, sc.MS_REC | sc.MS_PRIVATE)
from minisandbox.errors import HostError
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec

spec, runtime = ImageSpec("k", (Path(sys.argv[1]),)), Path(sys.argv[2])
os.environ["MINISANDBOX_RUNTIME"] = str(runtime)

def mount(options, place=runtime):
    sc.mount("tmpfs", str(place), "tmpfs", 0, options)

def again(options):
    sc.mount("none", str(runtime), None, 0x20, options)  # MS_REMOUNT

def fill():
    with open(runtime / "filling", "wb", buffering=0) as out:
        try:
            while out.write(bytes(4096)):
                pass
        except OSError:
            pass

def refused(function, *words):
    try:
        function()
    except HostError as error:
        text = str(error)
        assert "likely reason: " in text and "what to do: " in text, text
        missing = [word for word in words if word not in text]
        assert not missing, (missing, text)
    else:
        raise AssertionError("it went well")

def create():
    return Sandbox.create(spec)
"""
ROOM = "free some space there (df, df -i), or set MINISANDBOX_RUNTIME"
ALONE += f"ROOM = {ROOM!r}\n"


def carry_out(script: str, spec: ImageSpec, tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    done = subprocess.run(
        [sys.executable, "-c", ALONE + script, str(spec.layers[0]), str(runtime)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


NOTHING_CAN_BE_MADE = """
mount("mode=0700,nr_inodes=1")
refused(create, f"make a directory for records of sandboxes in {runtime}/owners", "No space left", ROOM)
again("nr_inodes=0")
with create() as box:
    box.exec("true").check()
"""
NO_DOOR = """
mount("mode=0700,nr_inodes=8")
with create() as box:
    names = [runtime / f"filling-{number}" for number in range(8)]
    try:
        for name in names:
            name.touch()
    except OSError:
        pass
    refused(create, "make the socket box-", f" in {runtime}/owners/", "No space left", ROOM)
    refused(lambda: box.start("sleep 60", lifetime="sandbox"), f"make the socket {box.id}.", "No space left", ROOM)
    assert box.exec("echo alive").stdout == "alive\\n"
    for name in names:
        name.unlink(missing_ok=True)
    with create() as other:
        other.exec("true").check()
"""
NO_RECORD = """
mount("mode=0700,size=64k")
with create() as box:
    fill()
    refused(create, "record sandbox box-", f" in {runtime}/owners/", "No space left", ROOM)
    (runtime / "filling").unlink()
    names = [path.name for path in next((runtime / "owners").iterdir()).iterdir()]
    assert sorted(names) == sorted([f"{box.id}.door", f"{box.id}.json", "groups"]), names
    with create() as other:
        other.exec("true").check()
"""
READ_ONLY = """
mount("mode=0700")
box, other = create(), create()
sc.mount("none", str(runtime), None, 0x21, "")  # MS_REMOUNT | MS_RDONLY
refused(create, "make the socket box-", "Read-only file system", "mounted read-only", "mount it writable")
other.stop()
assert box.exec("echo alive").stdout == "alive\\n"
again("")
with create() as third:
    third.exec("true").check()
box.stop()
"""
ELSEWHERE_TOO = """
os.environ["MINISANDBOX_RUNTIME"] = str(runtime / "file/below")
(runtime / "file").touch()
refused(create, f"make a runtime directory in {runtime}/file/below", "Not a directory", "no directory", "set MINISAN")
refused(lambda: Sandbox.attach("box-1"), f"make a runtime directory in {runtime}/file/below")
os.environ["MINISANDBOX_RUNTIME"] = str(runtime / "open")
(runtime / "open").mkdir()
(runtime / "open").chmod(0o777)
refused(create, f"{runtime}/open is not a private directory of this user", "others may write to it", "remove it")
"""
SCRIPTS = [NOTHING_CAN_BE_MADE, NO_DOOR, NO_RECORD, READ_ONLY, ELSEWHERE_TOO]
NAMES = ["nothing can be made", "no socket", "no record", "read-only", "no such place"]


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_a_runtime_directory_that_cannot_be_written(script: str, spec: ImageSpec, tmp_path: Path) -> None:
    carry_out(f"{script}\nprint('done')", spec, tmp_path)


NO_PLACE_FOR_RANGES = """
mount("mode=0755,nr_inodes={inodes}", Path("/run"))
refused(create, "{what} in /run/minisandbox", "No space left", "what to do: free some space there")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="root has a place of its own for ranges of ids")
@pytest.mark.parametrize(
    ("inodes", "what"),
    [(1, "make a runtime directory"), (2, "make locks of id ranges"), (3, "make locks of id ranges")],
)
def test_no_room_for_locks_of_ranges(inodes: int, what: str, spec: ImageSpec, tmp_path: Path) -> None:
    script = NO_PLACE_FOR_RANGES.format(inodes=inodes, what=what)
    carry_out(f"{script}\nassert not list((runtime / 'owners').iterdir())\nprint('done')", spec, tmp_path)

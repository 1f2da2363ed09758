"""What the tests wait by, where the first process reaps no orphans."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernel

TESTS = Path(__file__).resolve().parents[1]
ORPHAN = """
import os, sys
sys.path.insert(0, sys.argv[1])
from tests.waiting import running, until
reader, writer = os.pipe()
stay, leave = os.pipe()
if (child := os.fork()) == 0:
    if os.fork() == 0:
        os.close(leave)
        os.write(writer, b"%d" % os.getpid())
        os.read(stay, 1)
    os._exit(0)
os.waitpid(child, 0)
orphan = int(os.read(reader, 10))
assert running(orphan)
os.close(leave)
until(lambda: not running(orphan))
print(os.path.exists(f"/proc/{orphan}"), os.getpid() != 1)
sys.exit(7)
"""


def test_an_orphan_that_nobody_reaps_has_ended() -> None:
    command = [sys.executable, str(TESTS / "without_reaper.py"), sys.executable, "-c", ORPHAN, str(TESTS.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "True True\n", "")

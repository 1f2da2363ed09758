"""Where mounts lie below /usr an ordinary user's sandboxes see the host's own: nobody listens to them there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minisandbox.types import ImageSpec

pytestmark = pytest.mark.kernel

# Root with one capability is an ordinary user to the launcher, and whose mounts these are it cannot change.
HOST = """
import json, os, socket, sys
from pathlib import Path
from minisandbox.launch.kernel import syscalls as sc
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec

SETFCAP = 31  # to map uid 0, which this is (user_namespaces(7))
place = next(path for path in map(Path, ("/usr/local/games", "/usr/games", "/usr/src", "/usr/share")) if path.is_dir())
sc.unshare(sc.CLONE_NEWNS)
sc.mount("none", "/", None, sc.MS_REC | sc.MS_PRIVATE)
sc.mount("tmpfs", str(place), "tmpfs", 0)
place.chmod(0o755)
listener = socket.socket(socket.AF_UNIX)
listener.bind(str(place / "socket"))
listener.listen()
os.mkfifo(place / "fifo")
reader = os.open(place / "fifo", os.O_RDONLY | os.O_NONBLOCK)
for name in ("socket", "fifo"):
    (place / name).chmod(0o777)
(place / "file").write_text("of the host")
(place / "closed").mkdir(0o711)
os.chown(place / "closed", 1234, 1234)
for number in set(range(41)) - {SETFCAP}:
    sc.prctl(sc.PR_CAPBSET_DROP, number)
sc.capset(1 << SETFCAP)
INSIDE = '''
import os, socket, sys
found = []
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1] + "/socket")
    found.append("connected")
except OSError:
    pass
try:
    os.write(os.open(sys.argv[1] + "/fifo", os.O_WRONLY | os.O_NONBLOCK), b"x")
    found.append("written")
except OSError:
    pass
print(sorted(os.listdir(sys.argv[1])), found, open(sys.argv[1] + "/file").read())
'''
with Sandbox.create(ImageSpec("image", tuple(map(Path, json.loads(sys.argv[1]))))) as box:
    done = box.exec(["python3", "-c", INSIDE, str(place)])
    print(done.stdout + done.stderr, end="")
"""


@pytest.mark.once
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make mounts that a user cannot change")
def test_sockets_and_fifos_below_a_bound_usr_are_covered(spec: ImageSpec, tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", HOST, json.dumps([str(layer) for layer in spec.layers])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['closed', 'fifo', 'file', 'socket'] [] of the host\n"

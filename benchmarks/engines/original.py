"""The original's way (arXiv 2602.11210): unpack the environment's and the repository's archives, mount, chroot.

Written from the original's source: Python's tarfile unpacks, mount(8) binds the host's directories in a mount
namespace, a bash in the chroot takes the commands, ``rm -rf`` removes the tree. Left out, in its favour: two pauses of
0.3 s, the copy of its tools, and its limit on unpacking at once.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.engines.engine import WORKDIR, Bash, Project, Shelled

_UNPACK = "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])"
_READ_ONLY = ("bin", "sbin", "lib", "lib64", "usr", "etc", "root", "run", "var")
_WRITABLE = ("dev", "proc", "sys")


class Original(Shelled):
    """As root only: nobody else may chroot."""

    needs_root = True

    def create(self, project: Project) -> tuple[Bash, Path]:
        """Unpack, mount and enter."""
        root = Path(tempfile.mkdtemp(dir=self.place))
        for archive in project.archives:
            subprocess.run([sys.executable, "-I", "-S", "-c", _UNPACK, archive, root], check=True)
        script = [f"mount -t tmpfs tmpfs {root}/tmp"]
        script += [f"mount -o bind,ro /{name} {root}/{name}" for name in _READ_ONLY]
        script += [f"mount -o bind /{name} {root}/{name}" for name in _WRITABLE]
        script += [f'exec {shutil.which("chroot")} {root} "$@"']
        for name in ("tmp", *_READ_ONLY, *_WRITABLE):
            (root / name).mkdir()
        bash = Bash(["unshare", "--mount", "sh", "-c", " && ".join(script), "sh"])
        bash.run(f"cd {WORKDIR}")
        return bash, root

"""Attacks by way of paths: what the file verbs, the mounts and the devices give away of the host, or let change."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from minisandbox.errors import FileAccessError
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec, Limits, Mount

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("name", ["maps", "exe"])
def test_a_link_to_the_workers_own_proc_files_is_not_read(box: Sandbox, name: str) -> None:
    """A worker runs the host's interpreter: its maps name the host's directories, its exe is a file of the host."""
    box.exec(["ln", "-s", f"/proc/self/{name}", "/testbed/README"], cwd="/").check()
    with pytest.raises(FileAccessError):
        box.files.read_bytes("/testbed/README")


def test_the_place_of_a_mount_on_the_host_is_not_shown(spec: ImageSpec, tmp_path: Path) -> None:
    source = tmp_path / "path-on-the-host"
    source.mkdir()
    with Sandbox.create(spec, mounts=(Mount(source, PurePosixPath("/given")),)) as box:
        assert source.name not in box.exec("cat /proc/self/mountinfo").stdout


def test_the_hosts_devices_keep_their_times(box: Sandbox) -> None:
    before = Path("/dev/null").stat().st_mtime_ns
    box.exec("touch /dev/null")
    assert Path("/dev/null").stat().st_mtime_ns == before


def test_what_is_setuid_in_an_upper_is_out_of_others_reach(spec: ImageSpec, tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir(mode=0o755)
    with Sandbox.create(spec, upper=upper) as box:
        box.exec("cp /bin/true /testbed/true; chmod 4755 /testbed/true", cwd="/").check()
    assert (upper / "tree/testbed/true").stat().st_mode & 0o4000
    assert upper.stat().st_mode & 0o077 == 0


def test_empty_files_count_against_the_disk_limit(spec: ImageSpec) -> None:
    disk = 16 << 20
    with Sandbox.create(spec, limits=Limits(disk=disk)) as box:
        inodes = int(box.exec(["stat", "-f", "-c", "%c", "/tmp"]).stdout)
        assert inodes * 512 <= disk, "an empty file takes at least that much of the kernel's memory"

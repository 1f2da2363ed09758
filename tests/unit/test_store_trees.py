"""Trees that resist: odd modes, depth, links, names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minisandbox.store import measure_tree, remove_tree


def _deep(root: Path, depth: int) -> None:
    fd = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=fd)
        child = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = child
    os.close(os.open("leaf", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)


def test_nothing_to_remove(tmp_path: Path) -> None:
    remove_tree(tmp_path / "nothing")


def test_no_descriptor_leaks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="ascii")
    before = sorted(os.listdir("/proc/self/fd"))
    remove_tree(tmp_path / "nothing")
    with pytest.raises(NotADirectoryError):
        remove_tree(tmp_path / "file")
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
def test_depth_costs_no_stack(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    _deep(root, 6000)
    remove_tree(root)
    assert not root.exists()


@pytest.mark.slow
def test_what_is_deeper_than_a_path_can_say_is_measured(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "beside").mkdir(parents=True)
    (root / "beside" / "file").write_bytes(b"x" * 10_000)
    _deep(root, 6000)
    before = sorted(os.listdir("/proc/self/fd"))
    assert measure_tree(root).files == 2
    assert measure_tree(root).bytes >= 10_000
    assert sorted(os.listdir("/proc/self/fd")) == before
    remove_tree(root)


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").touch()
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "link").symlink_to(outside)
    (root / "up").symlink_to("..")
    os.mkfifo(root / "fifo")
    remove_tree(root)
    assert not root.exists()
    assert (outside / "keep").exists()


def test_a_link_in_place_of_the_tree_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").touch()
    (tmp_path / "root").symlink_to(outside)
    with pytest.raises(OSError, match="root"):
        remove_tree(tmp_path / "root")
    assert (outside / "keep").exists()


ODD_MODES = """
import os, sys
from pathlib import Path
from minisandbox.store import remove_tree
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
root = Path(sys.argv[1]) / "root"
(root / "work" / "work" / "x").mkdir(parents=True)
(root / "closed" / "inner").mkdir(parents=True)
(root / "closed" / "inner" / "file").write_text("x")
(root / "closed" / "inner" / "file").chmod(0)
(root / "closed" / "inner" / "sub").mkdir()
(root / "closed" / "inner" / "sub").chmod(0o555)
(root / "closed" / "inner").chmod(0o555)
(root / "closed").chmod(0)
(root / "work" / "work").chmod(0)
root.chmod(0o500)
remove_tree(root)
print(root.exists())
"""


def test_odd_modes_as_an_ordinary_user(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents:  # pytest's own directories are private to the user who runs it
        if parent.name.startswith(("pytest-", "popen-")):
            parent.chmod(0o755)
    result = subprocess.run(
        [sys.executable, "-c", ODD_MODES, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.stdout == "False\n", result.stderr


def test_measure_counts_an_inode_once(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    empty = measure_tree(root)
    (root / "a").write_bytes(b"x" * 10000)
    os.link(root / "a", root / "sub" / "b")
    (root / "link").symlink_to("a")
    size = measure_tree(root)
    assert size.files == 3
    assert size.bytes - empty.bytes == 12288

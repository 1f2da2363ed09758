"""Patches of turns: what git makes of them is the workspace, whatever an agent did to it."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from minisandbox.agents import Session
from minisandbox.agents.record import MOST_PATCH
from minisandbox.images.base import base_entries, write_base
from minisandbox.sandbox import AsyncSandbox
from minisandbox.sandbox.tracking import track_changes
from minisandbox.types import ImageSpec

pytestmark = [pytest.mark.kernel, pytest.mark.once]

TURNS = [
    "true",
    "sed -i 's/line 5$/five/' long.txt && echo last >> long.txt",
    "printf 'no newline' > new.txt; chmod +x new.txt; ln -s new.txt link",
    r"""mkdir -p a/b && echo x > 'a/b/with space' && echo y > $'a/tab\t"q" é'""",
    "rm gone.txt; mv old.txt renamed.txt; chmod +x long.txt; rm -r directory; echo file > directory",
    "head -c 3000 /dev/urandom > data.bin; printf 'a\\0b' > old.bin; : > empty",
    "echo ignored > x.log; mkdir -p build __pycache__; echo o > build/out; touch __pycache__/m.pyc",
    "printf 'no newline\\n' > new.txt; rm link; echo text > link; git checkout -q long.txt",
    "git -c user.name=a -c user.email=a@b commit -qam all; sed -i '1,400d;s/line/row/' long.txt",
    "printf 'a\\r\\nb\\rc\\n' > crlf.txt; rm -r a; mkdir -p old.txt; echo inside > old.txt/file",
]


def git(directory: Path, *words: str, stdin: bytes = b"") -> bytes:
    return subprocess.run(["git", "-C", str(directory), *words], input=stdin, capture_output=True, check=True).stdout


@pytest.fixture
def image(tmp_path: Path) -> ImageSpec:
    write_base(base_entries(), tmp_path / "base")
    source = tmp_path / "layer" / "testbed"
    (source / "directory").mkdir(parents=True)
    (source / "long.txt").write_text("".join(f"line {number}\n" for number in range(1000)))
    for name in ("gone.txt", "old.txt", "keep.txt", "directory/one", "directory/two"):
        (source / name).write_text(f"{name}\n")
    (source / "old.bin").write_bytes(bytes(range(256)))
    (source / ".gitignore").write_text("*.log\nbuild/\n__pycache__/\n")
    git(source, "init", "-q")
    git(source, "add", "-A")
    git(source, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    commit = git(source, "rev-parse", "HEAD").decode().strip()
    workdir = PurePosixPath("/testbed")
    return ImageSpec("turns", (tmp_path / "base", tmp_path / "layer"), workdir=workdir, base_commit=commit, clean=True)


def tree(image: ImageSpec, scratch: Path, patch: bytes) -> bytes:
    """The tree that git makes of a patch."""
    if not scratch.exists():
        git(image.layers[1], "clone", "-q", str(image.layers[1] / "testbed"), str(scratch))
    git(scratch, "read-tree", image.base_commit)
    if patch:
        git(scratch, "apply", "--cached", "-", stdin=patch)
    return git(scratch, "write-tree")


def test_git_makes_the_same_of_both_patches(image: ImageSpec, tmp_path: Path) -> None:
    async def body() -> None:
        async with await AsyncSandbox.create(image) as box:
            tracker = track_changes(box)
            assert tracker is not None
            for script in TURNS:
                (await box.exec(script)).check()
                patch, of_git = await tracker.patch(), await box.patch()
                assert tree(image, tmp_path / "scratch", patch) == tree(image, tmp_path / "scratch", of_git), script
            await box.reset()
            assert await tracker.patch() == b""
            await tracker.close()
            await tracker.close()

    asyncio.run(body())


def test_a_write_within_a_tick_of_the_last_is_seen(image: ImageSpec) -> None:
    async def body() -> None:
        async with await AsyncSandbox.create(image) as box:
            tracker = track_changes(box)
            assert tracker is not None
            for number in range(10):  # of one size, as fast as it goes
                await box.files.write_bytes("keep.txt", b"%d\n" % number)
                assert b"+%d\n" % number in await tracker.patch()
            await tracker.close()

    asyncio.run(body())


def test_a_session_records_turns_that_changed_something(image: ImageSpec) -> None:
    async def body() -> None:
        async with await AsyncSandbox.create(image) as box:
            tracker = track_changes(box)
            assert tracker is not None
            session = Session(box, changes=tracker.patch)
            scripts = ("true", "echo 1 >> keep.txt", "cat keep.txt", f"seq {MOST_PATCH} > many", "truncate -s 2M many")
            for script in scripts:
                await session.perform(script, timeout=60)
                await session.record_patch()
                await session.record_patch()
            small, large, huge = session.record.patches
            assert small.patch is not None
            assert small.patch.endswith(b" keep.txt\n+1\n")
            assert (large.patch, huge.patch) == (None, None)
            assert "at most 65536 are recorded" in large.detail
            assert "many has more than 1 MiB" in huge.detail
            await tracker.close()

    asyncio.run(body())

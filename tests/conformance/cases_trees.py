"""Copies between host and sandbox: files and trees, whole or not at all."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from tests.conformance.contract import case, raises

from minisandbox.errors import FileAccessError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.contract import World

    from minisandbox.sandbox import AsyncSandbox

TREE = r"""
set -e
mkdir -p tree/sub/deeper tree/empty 'tree/with space'
echo a > tree/a; head -c 300000 /dev/zero | tr '\0' b > tree/sub/b; : > tree/sub/deeper/zero
echo odd > 'tree/with space/new
line'; printf x > $'tree/caf\xe9'; ln -s a tree/link; ln -s sub tree/dirlink; chmod 755 tree/a; chmod 700 tree/empty
"""


def names(tree: Path) -> set[str]:
    """Paths of everything below a host directory."""
    return {str(path.relative_to(tree)) for path in tree.rglob("*")}


@case("a file goes up and comes down whole; nothing else is left on the host")
async def case_file(make: World, box: AsyncSandbox) -> None:
    source = make.directory / "source"
    source.write_bytes(b"\0\xff" * 3_000_000)
    up = await box.files.upload(str(source), "up/file")
    down = await box.files.download("up/file", str(make.directory / "back"))
    assert (up.files, up.size, up.skipped) == (down.files, down.size, down.skipped) == (1, 6_000_000, ())
    assert (make.directory / "back").read_bytes() == source.read_bytes()
    assert names(make.directory) == {"source", "back"}


@case("an upload can be given a mode, and else keeps whether a file is executable")
async def case_upload_mode(make: World, box: AsyncSandbox) -> None:
    source = make.directory / "tool"
    source.write_text("#!/bin/sh\necho ran\n")
    source.chmod(0o755)
    await box.files.upload(source, "given", mode=0o700)
    assert (await box.exec("./given; stat -c %a given")).stdout == "ran\n700\n"


@case("a download replaces a file when it is complete, and not before")
async def case_failed_download(make: World, box: AsyncSandbox) -> None:
    target = make.directory / "target"
    target.write_text("old")
    await box.exec("head -c 100000 /dev/zero > large; mkfifo fifo")
    for path, limit in (("no/such", 1 << 20), ("large", 1000), ("fifo", 1 << 20)):
        with raises(FileAccessError):
            await box.files.download(path, target, limit=limit)
        assert target.read_text() == "old"
    assert names(make.directory) == {"target"}
    await box.files.download("large", target)
    assert target.stat().st_size == 100_000


@case("a tree comes down as it is: modes, links as links, empty directories, odd names")
async def case_download_tree(make: World, box: AsyncSandbox) -> None:
    (await box.exec(TREE)).check()
    transfer = await box.files.download("tree", make.directory / "tree")
    tree = make.directory / "tree"
    assert names(tree) == {
        "a", "sub", "sub/b", "sub/deeper", "sub/deeper/zero", "empty", "with space", "with space/new\nline",
        "caf\udce9", "link", "dirlink",
    }  # fmt: skip
    assert (tree / "a").read_text() == "a\n"
    assert (tree / "sub/b").read_bytes() == b"b" * 300_000
    assert os.readlink(tree / "link") == "a"
    assert os.readlink(tree / "dirlink") == "sub"
    assert stat.S_IMODE((tree / "a").stat().st_mode) & 0o111
    assert (transfer.files, transfer.size, transfer.skipped) == (5, 300_007, ())
    assert names(make.directory) == {"tree"} | {f"tree/{name}" for name in names(tree)}


@case("a tree goes up as it is")
async def case_upload_tree(make: World, box: AsyncSandbox) -> None:
    tree = make.directory / "tree"
    (tree / "sub" / "empty").mkdir(parents=True)
    (tree / "sub" / "f").write_text("f")
    (tree / "tool").write_text("#!/bin/sh\necho ran\n")
    (tree / "tool").chmod(0o755)
    (tree / "new\nline").write_text("odd")
    (tree / os.fsdecode(b"caf\xe9")).write_text("latin")
    os.symlink("sub/f", tree / "link")
    os.symlink("/no/such", tree / "dangling")
    transfer = await box.files.upload(tree, "to/there")
    assert (transfer.files, transfer.size) == (4, len("f#!/bin/sh\necho ran\noddlatin"))
    result = await box.exec("cd to/there; ./tool; cat link; ls -A | wc -l; readlink dangling; ls -d sub/empty")
    assert result.stdout == "ran\nf7\n/no/such\nsub/empty\n" or result.stdout == "ran\nf6\n/no/such\nsub/empty\n"
    assert await box.files.read_text(f"to/there/{os.fsdecode(bytes([99, 97, 102, 0xE9]))}") == "latin"


@case("up and down again is the same tree")
async def case_tree_round_trip(make: World, box: AsyncSandbox) -> None:
    (await box.exec(TREE)).check()
    await box.files.download("tree", make.directory / "one")
    await box.files.upload(make.directory / "one", "back")
    listing = r"find . -printf '%P %y %m %l %s\n' | grep -v ' d ' | sort; cat a sub/b | sha256sum"
    first = await box.exec(listing, cwd="tree")
    assert (await box.exec(listing, cwd="back")).stdout_bytes == first.stdout_bytes


@case("what cannot be copied to a host is left out and named")
async def case_skipped(make: World, box: AsyncSandbox) -> None:
    (await box.exec(
        "mkdir t; cd t; echo f > f; mkfifo fifo; ln -s /etc/passwd absolute; ln -s ../../out out; ln -s f inside;"
        "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('socket')\""
    )).check()  # fmt: skip
    transfer = await box.files.download("t", make.directory / "t")
    assert {name for name, _ in transfer.skipped} == {"fifo", "absolute", "out", "socket"}
    assert all(why for _, why in transfer.skipped)
    assert names(make.directory / "t") == {"f", "inside"}
    assert transfer.files == 1


@case("links in the way on the host are not followed")
async def case_links_on_the_host(make: World, box: AsyncSandbox) -> None:
    await box.exec("mkdir t; echo inside > t/f")
    victim = make.directory / "victim"
    victim.write_text("untouched")
    os.symlink(victim, make.directory / "target")
    await box.files.download("t/f", make.directory / "target")
    assert victim.read_text() == "untouched"
    assert (make.directory / "target").read_text() == "inside\n"


@case("the limit of a tree counts all of its files together, holes included; nothing is left of what is too large")
async def case_tree_limit(make: World, box: AsyncSandbox) -> None:
    await box.exec(
        "mkdir t; for i in {1..20}; do head -c 1000 /dev/zero > t/$i; done; mkdir s; truncate -s 3G s/sparse"
    )
    with raises(FileAccessError):
        await box.files.download("t", make.directory / "t", limit=19_999)
    assert names(make.directory) == set()
    await box.files.download("t", make.directory / "t", limit=20_000)
    with raises(FileAccessError):
        await box.files.download("s", make.directory / "s")


@case("holes stay holes", deadline=240.0)
async def case_sparse(make: World, box: AsyncSandbox) -> None:
    (await box.exec("mkdir t; truncate -s 500M t/sparse; printf end >> t/sparse")).check()
    transfer = await box.files.download("t", make.directory / "t")
    copied = (make.directory / "t" / "sparse").stat()
    assert copied.st_size == transfer.size == 500 * (1 << 20) + 3
    assert copied.st_blocks * 512 < 10_000_000


@case("a tree of five thousand files both ways", deadline=270.0)
async def case_many_files(make: World, box: AsyncSandbox) -> None:
    (await box.exec("for d in {1..50}; do mkdir -p t/$d; for f in {1..100}; do echo $f > t/$d/$f; done; done")).check()
    assert (await box.files.download("t", make.directory / "t")).files == 5000
    assert (await box.files.upload(make.directory / "t", "again")).files == 5000
    assert (await box.exec("diff -r t again")).ok


@case("an upload of what is not there is an error of the host, and changes nothing")
async def case_missing_source(make: World, box: AsyncSandbox) -> None:
    with raises(OSError):
        await box.files.upload(make.directory / "no", "x")
    assert not await box.files.exists("x")


@case("an upload over what is not a file is an error with its path")
async def case_upload_in_the_way(make: World, box: AsyncSandbox) -> None:
    source = make.directory / "f"
    source.write_text("new")
    await box.exec("mkdir dir; mkfifo fifo; echo > file")
    for path in ("dir", "fifo", "file/sub"):
        with raises(FileAccessError, path):
            await box.files.upload(source, path)


@case("copies do not disturb each other")
async def case_at_once(make: World, box: AsyncSandbox) -> None:
    async def copy(number: int) -> bytes:
        (make.directory / f"up{number}").write_bytes(bytes([number]) * 500_000)
        await box.files.upload(make.directory / f"up{number}", f"f{number}")
        await box.files.download(f"f{number}", make.directory / f"down{number}")
        return (make.directory / f"down{number}").read_bytes()

    assert await make.together(*map(copy, range(8))) == [bytes([number]) * 500_000 for number in range(8)]

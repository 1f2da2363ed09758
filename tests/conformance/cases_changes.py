"""changes(): every path that differs from the image."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from tests.conformance.contract import case, until

from minisandbox.types import ChangeKind, FileType

if TYPE_CHECKING:
    from tests.conformance.contract import World

    from minisandbox.sandbox import AsyncSandbox

ADDED, MODIFIED, DELETED = ChangeKind.ADDED, ChangeKind.MODIFIED, ChangeKind.DELETED


async def changes(box: AsyncSandbox) -> dict[str, tuple[ChangeKind, FileType]]:
    """What changed below the workdir, by relative path."""
    found = {}
    everything = await box.changes()
    assert [change.path for change in everything] == sorted(change.path for change in everything)
    for change in everything:
        if change.path != box.image.workdir and change.path.is_relative_to(box.image.workdir):
            found[str(change.path.relative_to(box.image.workdir))] = (change.kind, change.type)
    return found


async def settled(make: World, script: str) -> AsyncSandbox:
    """A sandbox over an image in whose workdir ``script`` has been run."""
    tree = make.directory / "tree"
    tree.mkdir()
    subprocess.run(["bash", "-ec", f"umask 022; {script}"], cwd=tree, check=True, timeout=60)
    return await make(make.image(tree=tree))


@case("a new sandbox has no changes")
async def case_none(box: AsyncSandbox) -> None:
    assert await changes(box) == {}


@case("what is new is added, with all that lies below a new directory")
async def case_added(box: AsyncSandbox) -> None:
    await box.exec(
        "mkdir -p d/e; echo > d/e/f; ln -s nowhere link; mkfifo fifo; echo > $'caf\\xe9'; echo > $'new\\nline'"
    )
    assert await changes(box) == {
        "d": (ADDED, FileType.DIRECTORY),
        "d/e": (ADDED, FileType.DIRECTORY),
        "d/e/f": (ADDED, FileType.FILE),
        "link": (ADDED, FileType.SYMLINK),
        "fifo": (ADDED, FileType.FIFO),
        "caf\udce9": (ADDED, FileType.FILE),
        "new\nline": (ADDED, FileType.FILE),
    }


@case("content, permissions, link target and type that differ are modified", needs="layers")
async def case_modified(make: World) -> None:
    box = await settled(make, "echo 1 > content; echo 2 > mode; ln -s a link; echo 3 > type; mkdir kept; echo > same")
    (await box.exec("echo 9 > content; chmod 600 mode; ln -sfn b link; rm type; mkdir type; echo > kept/new")).check()
    found = await changes(box)
    assert found.pop("kept", (MODIFIED, FileType.DIRECTORY)) == (MODIFIED, FileType.DIRECTORY)
    assert found == {
        "content": (MODIFIED, FileType.FILE),
        "mode": (MODIFIED, FileType.FILE),
        "link": (MODIFIED, FileType.SYMLINK),
        "type": (MODIFIED, FileType.DIRECTORY),
        "kept/new": (ADDED, FileType.FILE),
    }


@case("what is gone is deleted, with all that lay below, and has the type that it had", needs="layers")
async def case_deleted(make: World) -> None:
    box = await settled(make, "echo > f; mkdir -p d/e; echo > d/e/f; ln -s x link; echo > stays")
    (await box.exec("rm -r f d link")).check()
    assert await changes(box) == {
        "f": (DELETED, FileType.FILE),
        "d": (DELETED, FileType.DIRECTORY),
        "d/e": (DELETED, FileType.DIRECTORY),
        "d/e/f": (DELETED, FileType.FILE),
        "link": (DELETED, FileType.SYMLINK),
    }


@case("a directory that was removed and made again differs by its content alone", needs="layers")
async def case_made_again(make: World) -> None:
    box = await settled(make, "mkdir d; echo 1 > d/old; echo 2 > d/both")
    (await box.exec("rm -r d; mkdir d; echo 9 > d/new; echo 9 > d/both")).check()
    found = await changes(box)
    assert found.pop("d", (MODIFIED, FileType.DIRECTORY)) == (MODIFIED, FileType.DIRECTORY)
    assert found == {
        "d/old": (DELETED, FileType.FILE),
        "d/new": (ADDED, FileType.FILE),
        "d/both": (MODIFIED, FileType.FILE),
    }


@case("what was made and removed again, or written with the same bytes, is no change", needs="layers")
async def case_no_change(make: World) -> None:
    box = await settled(make, "echo same > f; mkdir d; echo x > d/g")
    (
        await box.exec(
            "echo > new; rm new; mkdir n; rmdir n; echo same > f; mv d e; mv e d; chmod 600 d/g; chmod 644 d/g"
        )
    ).check()
    assert await changes(box) == {}


@case("a rename is one path less and one more", needs="layers")
async def case_rename(make: World) -> None:
    box = await settled(make, "echo > a; mkdir d; echo > d/f")
    (await box.exec("mv a b; mv d e")).check()
    assert await changes(box) == {
        "a": (DELETED, FileType.FILE),
        "b": (ADDED, FileType.FILE),
        "d": (DELETED, FileType.DIRECTORY),
        "d/f": (DELETED, FileType.FILE),
        "e": (ADDED, FileType.DIRECTORY),
        "e/f": (ADDED, FileType.FILE),
    }


@case("changes are read while processes run, and change nothing")
async def case_while_running(make: World, box: AsyncSandbox) -> None:
    await box.exec("echo > f; while :; do echo >> busy; sleep 0.01; done >/dev/null 2>&1 &")
    await until(make, lambda: box.files.exists("busy"))
    for _ in range(3):
        assert {"f", "busy"} <= (await changes(box)).keys()
    assert (await box.exec("cat f")).stdout == "\n"


@case("changes outside of the workdir are listed with absolute paths", needs="kernel")
async def case_outside(box: AsyncSandbox) -> None:
    await box.exec("echo x > /etc/new.conf; echo y >> /etc/passwd; mkdir /opt/tool")
    found = {str(change.path): change.kind for change in await box.changes()}
    assert found["/etc/new.conf"] is ADDED
    assert found["/etc/passwd"] is MODIFIED
    assert found["/opt/tool"] is ADDED


@case("changes are counted from the image, through snapshots, forks and resets", needs="layers")
async def case_from_the_image(make: World) -> None:
    box = await settled(make, "echo 1 > kept; echo 2 > gone; echo 3 > changed")
    (await box.exec("rm gone; echo > one")).check()
    snapshot = await box.snapshot()
    (await box.exec("echo 9 > changed; echo > two")).check()
    expected = {"gone": (DELETED, FileType.FILE), "one": (ADDED, FileType.FILE)}
    more = {**expected, "changed": (MODIFIED, FileType.FILE), "two": (ADDED, FileType.FILE)}
    assert await changes(box) == more
    assert await changes(await make(snapshot)) == expected
    [kid] = await box.fork()
    assert await changes(kid) == more
    await kid.stop()
    await box.reset(snapshot)
    assert await changes(box) == expected
    await box.reset()
    assert await changes(box) == {}

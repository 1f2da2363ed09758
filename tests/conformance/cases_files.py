"""File verbs: carried out inside, honest about what is not a regular file."""

from __future__ import annotations

import stat
import time
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from tests.conformance.contract import case, raises

from minisandbox.errors import FileAccessError, SandboxGone
from minisandbox.types import FileType, Limits

if TYPE_CHECKING:
    from tests.conformance.contract import World

    from minisandbox.sandbox import AsyncSandbox

ODD_NAMES = (
    "with space",
    "quote'\"",
    "new\nline",
    "-rf",
    "caf\udce9",
    "ünïcode",
    "日本",
    "*",
    "$HOME",
    ".hidden",
    "a" * 255,
)


@case("text and bytes are written and read back whole")
async def case_round_trip(box: AsyncSandbox) -> None:
    await box.files.write_text("a.txt", "héllo\n")
    assert await box.files.read_text("a.txt") == "héllo\n"
    data = bytes(range(256)) * 20_000
    await box.files.write_bytes("b.bin", data)
    assert await box.files.read_bytes("b.bin") == data
    await box.files.write_bytes("empty", b"")
    assert await box.files.read_bytes("empty") == b""
    assert (await box.exec(["stat", "-c", "%s", "a.txt", "b.bin", "empty"])).stdout == f"7\n{len(data)}\n0\n"


@case("bytes that are not UTF-8 are replaced when read as text, and kept by surrogate escapes when written")
async def case_text_not_utf8(box: AsyncSandbox) -> None:
    await box.files.write_bytes("f", b"a\xffb")
    assert await box.files.read_text("f") == "a\ufffdb"
    await box.files.write_text("g", "caf\udce9")
    assert await box.files.read_bytes("g") == b"caf\xe9"


@case("paths are absolute or below the workdir, text or PurePosixPath")
async def case_paths(box: AsyncSandbox) -> None:
    await box.files.write_text("x", "1")
    for path in ("x", "./x", PurePosixPath("x"), box.image.workdir / "x", str(box.image.workdir / "x")):
        assert await box.files.read_text(path) == "1"


@case("missing directories are made, and an existing file is replaced and keeps its mode")
async def case_replace(box: AsyncSandbox) -> None:
    await box.files.write_text("deep/er/f", "a long old content", mode=0o600)
    await box.files.write_text("deep/er/f", "new")
    assert (await box.exec("cat deep/er/f; stat -c %a deep/er/f deep")).stdout == "new600\n755\n"
    await box.files.write_text("script", "#!/bin/sh\necho ran\n", mode=0o755)
    assert (await box.exec(["./script"])).stdout == "ran\n"
    await box.files.write_text("plain", "")
    assert (await box.files.stat("plain")).mode == 0o644


@case("odd names are names like others, for every verb")
async def case_odd_names(box: AsyncSandbox) -> None:
    for name in ODD_NAMES:
        await box.files.write_text(f"d/{name}", name)
        assert await box.files.read_bytes(f"d/{name}") == name.encode("utf-8", "surrogateescape")
        assert (await box.files.stat(f"d/{name}")).path == box.image.workdir / "d" / name
    assert {info.path.name for info in await box.files.list("d")} == set(ODD_NAMES)
    for name in ODD_NAMES:
        await box.files.move(f"d/{name}", f"e-{name}"[:255])
        await box.files.remove(f"e-{name}"[:255])
    assert await box.files.list("d") == ()


@case("what is not there, or not a regular file, is an error with path and number")
async def case_errors(box: AsyncSandbox) -> None:
    await box.files.mkdir("dir")
    for path, number in (("no/such", 2), ("dir", 21)):
        with raises(FileAccessError, path) as caught:
            await box.files.read_bytes(path)
        assert caught.value.errno == number
        assert path in caught.value.path
    with raises(FileAccessError, "dir"):
        await box.files.write_text("dir", "x")


@case("FIFOs, devices, loops of links and sockets are errors and never hang")
async def case_odd_files(box: AsyncSandbox) -> None:
    (await box.exec(
        "mkfifo fifo; ln -s loop loop; ln -s /dev/zero zero; ln -s fifo tofifo; "
        "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('socket')\""
    )).check()  # fmt: skip
    for name in ("fifo", "loop", "zero", "tofifo", "socket"):
        with raises(FileAccessError, name):
            await box.files.read_bytes(name)
        with raises(FileAccessError, name):
            await box.files.write_text(name, "x")


@case("links are followed")
async def case_links(box: AsyncSandbox) -> None:
    await box.exec("echo in > target; ln -s target link; mkdir d; echo f > d/f; ln -s d dlink")
    assert await box.files.read_text("link") == "in\n"
    assert await box.files.read_text("dlink/f") == "f\n"
    await box.files.write_text("link", "out")
    assert (await box.exec("cat target; test -L link; echo $?")).stdout == "out0\n"


@case("a file larger than the limit is an error, before it takes memory", deadline=240.0)
async def case_limit(box: AsyncSandbox) -> None:
    await box.exec("truncate -s 5G sparse; head -c 1000 /dev/zero > exact")
    with raises(FileAccessError, "larger than 1000 bytes"):
        await box.files.read_bytes("sparse", limit=1000)
    with raises(FileAccessError, "larger than"):
        await box.files.read_bytes("sparse")
    assert len(await box.files.read_bytes("exact", limit=1000)) == 1000


@case("a full disk is said, and the sandbox lives on", needs="kernel")
async def case_full_disk(make: World) -> None:
    box = await make(limits=Limits(disk="4M"))
    with raises(FileAccessError, "No space left") as caught:
        await box.files.write_bytes("big", b"x" * 8_000_000)
    assert caught.value.errno == 28
    assert (await box.exec("rm -f big; echo ok > f; cat f")).stdout == "ok\n"


@case("list() is a directory's entries, sorted, not recursive")
async def case_list(box: AsyncSandbox) -> None:
    await box.exec("mkdir -p d/sub/deep; echo hello > d/b; ln -s b d/a; mkfifo d/c; chmod 640 d/b")
    infos = await box.files.list("d")
    assert [info.path for info in infos] == [box.image.workdir / "d" / name for name in ("a", "b", "c", "sub")]
    assert [info.type for info in infos] == [FileType.SYMLINK, FileType.FILE, FileType.FIFO, FileType.DIRECTORY]
    assert (infos[0].target, infos[1].target) == ("b", None)
    assert (infos[1].size, infos[1].mode) == (6, 0o640)
    assert {info.path.name for info in await box.files.list()} == {"d"}
    with raises(FileAccessError):
        await box.files.list("d/b")
    with raises(FileAccessError):
        await box.files.list("no")


@case("list() of twenty thousand entries", deadline=240.0)
async def case_list_many(box: AsyncSandbox) -> None:
    (await box.exec("mkdir many; cd many; seq -f 'a-rather-long-name-of-a-file-%05g' 20000 | xargs touch")).check()
    infos = await box.files.list("many")
    assert len(infos) == 20_000
    assert infos[-1].path.name.endswith("20000")


@case("stat() says what a path is; links are followed unless asked otherwise")
async def case_stat(box: AsyncSandbox) -> None:
    await box.exec("echo 12345 > f; chmod 4750 f; ln -s f l; ln -s nowhere dangling; mkdir d")
    info = await box.files.stat("f")
    assert (info.type, info.size, info.mode, info.target) == (FileType.FILE, 6, 0o4750, None)
    assert abs(info.mtime - time.time()) < 3600
    assert (await box.files.stat("l")).type is FileType.FILE
    link = await box.files.stat("l", follow=False)
    assert (link.type, link.target) == (FileType.SYMLINK, "f")
    assert (await box.files.stat("/dev/null")).type is FileType.DEVICE
    with raises(FileAccessError) as caught:
        await box.files.stat("dangling")
    assert caught.value.errno == 2
    assert (await box.files.stat("d")).type is FileType.DIRECTORY
    assert (await box.files.stat(".")).path == box.image.workdir


@case("exists() is true for what is there")
async def case_exists(box: AsyncSandbox) -> None:
    await box.exec("echo > f; ln -s nowhere dangling; mkdir d")
    assert [await box.files.exists(path) for path in ("f", "d", "/", "no", "f/x", "no/no")] == [True] * 3 + [False] * 3
    assert not await box.files.exists("n" * 300)


@case("mkdir() makes parents and is content with an existing directory, unless asked otherwise")
async def case_mkdir(box: AsyncSandbox) -> None:
    await box.files.mkdir("a/b/c")
    await box.files.mkdir("a/b/c")
    await box.files.mkdir("private", mode=0o700)
    assert (await box.files.stat("private")).mode == 0o700
    with raises(FileAccessError):
        await box.files.mkdir("a/b", exist_ok=False)
    with raises(FileAccessError):
        await box.files.mkdir("x/y", parents=False)
    await box.files.write_text("f", "")
    for path in ("f", "f/sub"):
        with raises(FileAccessError):
            await box.files.mkdir(path)


@case("remove() takes a file, a link itself, and a tree only when told to")
async def case_remove(box: AsyncSandbox) -> None:
    await box.exec(
        "echo > f; mkdir -p d/e; echo > d/e/f; ln -s d link; mkdir keep; echo > keep/f; ln -s ../keep d/e/out"
    )
    await box.files.remove("f")
    await box.files.remove("link")
    with raises(FileAccessError):
        await box.files.remove("d")
    await box.files.remove("d", recursive=True)
    assert (await box.exec("ls; ls keep")).stdout == "keep\nf\n"
    with raises(FileAccessError) as caught:
        await box.files.remove("f")
    assert caught.value.errno == 2
    await box.files.remove("f", missing_ok=True)
    await box.files.remove("keep", recursive=True)


@case("remove() takes trees deeper than any path may be long")
async def case_remove_deep(box: AsyncSandbox) -> None:
    name = "d" * 20
    (await box.exec(f"mkdir deep; cd deep; for i in {{1..300}}; do mkdir {name}; cd {name}; done; echo > f")).check()
    await box.files.remove("deep", recursive=True)
    assert await box.files.list() == ()


@case("remove() takes trees that their owner may not enter", needs="kernel")
async def case_remove_shut(box: AsyncSandbox) -> None:
    (await box.exec("mkdir -p shut/in; touch shut/in/f; chmod 0 shut/in shut")).check()
    await box.files.remove("shut", recursive=True)
    assert await box.files.list() == ()


@case("move() renames files and trees, and replaces a file")
async def case_move(box: AsyncSandbox) -> None:
    await box.exec("echo 1 > a; echo 2 > b; mkdir -p d/e; echo 3 > d/e/f")
    await box.files.move("a", "b")
    await box.files.move("d", "moved")
    assert (await box.exec("cat b moved/e/f; ls")).stdout == "1\n3\nb\nmoved\n"
    with raises(FileAccessError):
        await box.files.move("no", "x")
    with raises(FileAccessError):
        await box.files.move("b", "moved/e/f/x")


@case("files of the kernel and of the image's system cannot be used to get out", needs="kernel")
async def case_magic_links(box: AsyncSandbox) -> None:
    for path in ("/proc/1/root/etc/passwd", "/proc/self/exe", "/proc/self/root", "/proc/self/cwd/x"):
        with raises(FileAccessError):
            await box.files.write_text(path, "x")


@case("file verbs work at the same time as commands and each other")
async def case_at_once(make: World, box: AsyncSandbox) -> None:
    async def one(number: int) -> str:
        await box.files.write_text(f"f{number}", str(number) * 1000)
        return (await box.exec(["cat", f"f{number}"])).stdout

    assert await make.together(*map(one, range(16))) == [str(number) * 1000 for number in range(16)]


@case("after stop every file verb says that the sandbox is gone")
async def case_after_stop(make: World) -> None:
    box = await make()
    await box.stop()
    for call in (
        box.files.read_bytes,
        box.files.list,
        box.files.stat,
        box.files.exists,
        box.files.mkdir,
        box.files.remove,
    ):
        with raises(SandboxGone):
            await call("f")
    with raises(SandboxGone):
        await box.files.write_text("f", "x")


@case("special bits and modes of files are kept as given")
async def case_modes(box: AsyncSandbox) -> None:
    for mode in (0o400, 0o644, 0o755, 0o777):
        await box.files.write_text("f", "x", mode=mode)
        assert (await box.files.stat("f")).mode == mode
        await box.files.remove("f")
    assert stat.S_IMODE((await box.files.stat("/etc/passwd")).mode) & 0o444 == 0o444

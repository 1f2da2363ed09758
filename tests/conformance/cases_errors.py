"""Errors: which classes, with which fields."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from tests.conformance.contract import case, raises

from minisandbox.errors import (
    CommandFailed,
    FileAccessError,
    InvalidValue,
    MiniSandboxError,
    NotFound,
    SandboxGone,
    WaitTimeout,
)
from minisandbox.types import Mount

if TYPE_CHECKING:
    from tests.conformance.contract import World

    from minisandbox.sandbox import AsyncSandbox


@case("every error is of one tree, has an exit status, and says what failed")
async def case_one_tree(make: World) -> None:
    box = await make()
    await box.stop()
    with raises(MiniSandboxError, box.id) as caught:
        await box.exec("true")
    assert isinstance(caught.value, SandboxGone)
    assert caught.value.exit_code == 12
    assert caught.value.what


@case("errors are also the builtin that fits")
async def case_builtins(box: AsyncSandbox) -> None:
    with raises(OSError):
        await box.files.read_bytes("no")
    with raises(ValueError):
        await box.exec("")
    with raises(LookupError):
        await box.process("no")
    async with await box.start(["cat"]) as process:
        with raises(TimeoutError):
            await process.wait(0.1)
        with raises(WaitTimeout) as caught:
            await process.wait(0.1)
    assert caught.value.exit_code == 17


@case("a file error carries path and number; a command's carries the result")
async def case_fields(box: AsyncSandbox) -> None:
    with raises(FileAccessError) as caught:
        await box.files.read_bytes("no/such")
    assert (caught.value.errno, caught.value.exit_code) == (2, 13)
    assert caught.value.path.endswith("no/such")
    with raises(CommandFailed) as failed:
        (await box.exec(["false"])).check()
    assert (failed.value.result.exit_code, failed.value.exit_code) == (1, 14)


@case("a fate is never an error: exit status, signal and timeout are values")
async def case_fates_are_values(box: AsyncSandbox) -> None:
    assert (await box.exec("exit 1")).exit_code == 1
    assert (await box.exec("kill -9 $$")).signal == 9
    assert (await box.exec("sleep 9", timeout=0.1)).outcome.value == "timeout"


@case("results are values: equal, hashable, not to be changed")
async def case_values(box: AsyncSandbox) -> None:
    result = await box.exec("true")
    assert result == result
    assert hash(result)
    with raises(AttributeError):
        result.exit_code = 1  # type: ignore[misc]
    info = await box.files.stat(".")
    assert {info: 1}


@case("an error of one call does no harm to the next")
async def case_no_harm(box: AsyncSandbox) -> None:
    for _ in range(20):
        with raises(FileAccessError):
            await box.files.read_bytes("no")
        with raises(FileAccessError):
            await box.exec("true", cwd="no")
        with raises(InvalidValue):
            await box.exec("")
        with raises(NotFound):
            await box.process("no")
    assert (await box.exec("echo fine")).stdout == "fine\n"


@case("an argument of a wrong type is named with its type, and nothing is run")
async def case_wrong_types(box: AsyncSandbox) -> None:
    arguments: tuple[tuple[str, Any, str], ...] = (
        ("timeout", "5", "timeout is of type str"),
        ("timeout", float("nan"), "timeout nan"),
        ("env", {"A": 1}, "env['A'] is of type int"),
        ("env", {1: "x"}, "a name in env is of type int"),
        ("cwd", b"/", "cwd is of type bytes"),
    )
    for name, value, said in arguments:
        for verb in (box.exec, box.start):
            with raises(InvalidValue, said):
                await verb("touch ran", **{name: value})
        if name != "timeout":
            with raises(InvalidValue, said):
                await box.shell(**{name: value})
    assert not await box.files.exists("ran")


@case("mounts that cannot be made as asked are refused", needs="kernel")
async def case_bad_mounts(make: World) -> None:
    with raises(InvalidValue, "mounts is of type str"):
        await make(mounts="/data")  # type: ignore[arg-type] # that is the point
    for source, target, read_only in (
        (Path("/no/such"), "/data", True),
        (Path("relative"), "/data", True),
        (make.directory, "relative", True),
        (make.directory, "/a/../b", True),
        (make.directory, "/", True),
    ):
        with raises(InvalidValue):
            await make(mounts=[Mount(source, PurePosixPath(target), read_only)])


@case("a mount shows a host directory, which nothing inside can change", needs="kernel")
async def case_mounts(make: World) -> None:
    (make.directory / "f").write_text("from the host")
    make.directory.chmod(0o755)
    box = await make(mounts=[Mount(make.directory, PurePosixPath("/data"))])
    assert (await box.exec("cat /data/f")).stdout == "from the host"
    assert not (await box.exec("echo x > /data/f || touch /data/new")).ok
    assert (make.directory / "f").read_text() == "from the host"

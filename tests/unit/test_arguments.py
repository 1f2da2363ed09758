"""Arguments of wrong types: an error that names argument and type, from both colours, before anything is done."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from minisandbox.errors import InvalidValue
from minisandbox.sandbox import AsyncSandbox, Sandbox
from minisandbox.testing import AsyncFakeSandbox, FakeSandbox
from minisandbox.types import ImageSpec, Limits, Mount

Cases = list[tuple[dict[str, Any], str]]
NAN = float("nan")
SECONDS: Cases = [
    ({"timeout": "5"}, "timeout is of type str; .*seconds"),
    ({"timeout": object()}, "timeout is of type object"),
    ({"timeout": True}, "timeout is of type bool"),
    ({"timeout": NAN}, "timeout nan is not a positive number of seconds"),
]
PLACES: Cases = [
    ({"env": {"A": 1}}, r"env\['A'\] is of type int; .*each value as a str"),
    ({"env": {1: "x"}}, "a name in env is of type int"),
    ({"env": {"A": None}}, r"env\['A'\] is None"),
    ({"env": [("A", "x")]}, "env is of type list; .*dict"),
    ({"env": ""}, "env is of type str"),
    ({"cwd": b"/"}, "cwd is of type bytes; .*PurePosixPath"),
    ({"cwd": 5}, "cwd is of type int"),
    ({"user": 1.5}, "user 1.5 is neither a name nor a uid"),
]
COMMANDS: Cases = [
    ({"command": 5}, "command is of type int"),
    ({"command": b"true"}, "command is of type bytes"),
    ({"command": None}, "command is None"),
    ({"command": ["echo", 1]}, r"command\[1\] is of type int"),
    ({"command": iter(["true"])}, "command is of type list_iterator"),
]
EXEC: Cases = [
    *SECONDS,
    *PLACES,
    *COMMANDS,
    ({"stdin": 5}, "stdin is of type int"),
    ({"stdin": ["x"]}, "stdin is of type list"),
]
START: Cases = [
    *SECONDS,
    *PLACES,
    *COMMANDS,
    ({"pty": True}, "pty is of type bool; .*Terminal"),
    ({"lifetime": 5}, "lifetime 5"),
]
CREATE: Cases = [
    ({"image": "python"}, "image is of type str; .*ImageSpec"),
    ({"image": None}, "image is None"),
    ({"limits": {"memory": "1G"}}, "limits is of type dict; .*Limits"),
    ({"network": "off"}, r"network is of type str; .*Network.off\(\)"),
    ({"mounts": "/data"}, "mounts is of type str; .*list of Mount"),
    ({"mounts": None}, "mounts is None"),
    ({"mounts": ["/data:/data"]}, r"mounts\[0\] is of type str; .*Mount\(source, target\)"),
    ({"environment": {"A": 1}}, r"environment\['A'\] is of type int"),
    ({"environment": {1: "x"}}, "a name in environment is of type int"),
    ({"upper": "/tmp/upper"}, "upper is of type str; .*Path"),
    ({"labels": "x"}, "labels is of type str"),
    ({"labels": {"x": 1}}, r"labels\['x'\] is of type int"),
    ({"labels": {"": "x"}}, "label has an empty name"),
]
SPEC = ImageSpec("none", (Path("/nowhere"),))


def names(cases: Cases) -> list[str]:
    return [f"{name} of {type(value).__name__}" for given, _ in cases for name, value in given.items()]


@pytest.fixture(scope="module")
def box() -> Iterator[FakeSandbox]:
    with FakeSandbox.create() as made:
        yield made


def refused(said: str, does: Callable[[], object]) -> None:
    with pytest.raises(InvalidValue, match=said):
        does()


def in_both(box: FakeSandbox, does: Callable[[Any], Any], said: str) -> None:
    """Ask the synchronous handle, and an asynchronous one of another fake."""

    async def ask() -> None:
        async with await AsyncFakeSandbox.create() as other:
            answer = does(other)
            await answer

    refused(said, lambda: does(box))
    refused(said, lambda: asyncio.run(ask()))


@pytest.mark.parametrize(("given", "said"), EXEC, ids=names(EXEC))
def test_exec(box: FakeSandbox, given: dict[str, Any], said: str) -> None:
    in_both(box, lambda any_box: any_box.exec(**{"command": "true", **given}), said)


@pytest.mark.parametrize(("given", "said"), START, ids=names(START))
def test_start(box: FakeSandbox, given: dict[str, Any], said: str) -> None:
    in_both(box, lambda any_box: any_box.start(**{"command": "true", **given}), said)


@pytest.mark.parametrize(("given", "said"), PLACES, ids=names(PLACES))
def test_shell(box: FakeSandbox, given: dict[str, Any], said: str) -> None:
    in_both(box, lambda any_box: any_box.shell(**given), said)


@pytest.mark.parametrize(("given", "said"), [*SECONDS, ({"script": 5}, "script is of type int")])
def test_a_script_of_a_shell(box: FakeSandbox, given: dict[str, Any], said: str) -> None:
    async def ask() -> None:
        async with await AsyncFakeSandbox.create() as other, await other.shell() as shell:
            with pytest.raises(InvalidValue, match=said):
                await shell.run(**{"script": "true", **given})
            assert (await shell.run("echo on")).stdout == "on\n"

    with box.shell() as shell:
        refused(said, lambda: shell.run(**{"script": "true", **given}))
        assert shell.run("echo on").stdout == "on\n"
    asyncio.run(ask())


@pytest.mark.parametrize("timeout", ["5", object(), NAN, True])
def test_waiting_for_a_process(box: FakeSandbox, timeout: Any) -> None:
    async def ask() -> None:
        async with await AsyncFakeSandbox.create() as other, await other.start("cat") as process:
            await process.wait(timeout)

    with box.start("cat") as process:
        refused("timeout", lambda: process.wait(timeout))
    refused("timeout", lambda: asyncio.run(ask()))


def test_several_wait_without_end(box: FakeSandbox) -> None:
    """One of them listens, the others wait for its news."""
    with box.start("cat") as process, ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(process.wait, math.inf) for _ in range(3)]
        assert not wait(waiting, 0.2).done
        process.close_stdin()
        assert [one.result(60).ok for one in waiting] == [True] * 3


@pytest.mark.parametrize("timeout", ["5", NAN])
def test_patches_and_changes(box: FakeSandbox, timeout: Any) -> None:
    in_both(box, lambda any_box: any_box.patch(timeout=timeout), "timeout")
    in_both(box, lambda any_box: any_box.changes(timeout=timeout), "timeout")


def test_a_path_of_bytes_is_no_path(box: FakeSandbox) -> None:
    in_both(box, lambda any_box: any_box.files.read_bytes(b"/etc/passwd"), "path is of type bytes")
    in_both(box, lambda any_box: any_box.patch(b"/"), "path is of type bytes")


@pytest.mark.parametrize(("given", "said"), CREATE, ids=names(CREATE))
def test_create(given: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"image": SPEC, **given}
    refused(said, lambda: Sandbox.create(**arguments))
    refused(said, lambda: asyncio.run(AsyncSandbox.create(**arguments)))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("/data", PurePosixPath("/data")), "Mount.source is of type str; .*give a Path"),
        ((Path("/data"), "/data"), "Mount.target is of type str; .*PurePosixPath"),
        ((Path("/data"), PurePosixPath("/data"), "ro"), "Mount.read_only is of type str"),
        ((Path("/data"), PurePosixPath("/data"), True, [Path("/x")]), "Mount.below is of type list"),
        ((Path("/data"), PurePosixPath("/data"), True, ("/x",)), r"Mount.below\[0\] is of type str"),
    ],
)
def test_mounts(given: tuple[Any, ...], said: str) -> None:
    refused(said, lambda: Mount(*given))


@pytest.mark.parametrize("given", [{"cpu": "1"}, {"cpu": NAN}, {"cpu": True}, {"lifetime": "5"}, {"lifetime": NAN}])
def test_limits(given: dict[str, Any]) -> None:
    refused(f"Limits.{next(iter(given))}", lambda: Limits(**given))


def test_numbers_of_other_kinds_are_taken(box: FakeSandbox) -> None:
    assert box.exec("echo in time", timeout=60).stdout == "in time\n"
    assert box.exec("cat", stdin=b"x", cwd=PurePosixPath(), env={}).stdout == "x"

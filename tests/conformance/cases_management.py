"""Labels, lifetime, info, usage, attach and list: sandboxes as things that are looked after."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from tests.conformance.contract import a_while, case, raises, until

from minisandbox.errors import InvalidValue, NotFound, SandboxGone
from minisandbox.types import Limits

if TYPE_CHECKING:
    from tests.conformance.contract import World

    from minisandbox.sandbox import AsyncSandbox


@case("a sandbox has an id of its own, an image, and a time that it took")
async def case_identity(make: World) -> None:
    one, two = await make(), await make()
    assert one.id != two.id
    assert one.alive
    assert one.image.name == make.image().name
    assert 0 < one.created_in < 30


@case("info() says what is known about it")
async def case_info(make: World) -> None:
    before = time.time()
    box = await make()
    info = await box.info()
    assert (info.id, info.image, info.network) == (box.id, box.image.name, "off")
    assert info.owner == os.getpid()
    assert before - 1 <= info.created <= time.time() + 1
    assert info.expires is None
    os.kill(info.pid, 0)


@case("list() has every live sandbox, and those with given labels", needs="attach")
async def case_list(make: World) -> None:
    mark = a_while()
    one = await make(labels={"mark": mark, "n": "1"})
    two = await make(labels={"mark": mark, "n": "2"})
    plain = await make()
    assert {one.id, two.id, plain.id} <= {info.id for info in await make.live()}
    assert {info.id for info in await make.live({"mark": mark})} == {one.id, two.id}
    assert [info.id for info in await make.live({"mark": mark, "n": "2"})] == [two.id]
    assert await make.live({"mark": mark, "n": "3"}) == ()
    assert await one.info() in await make.live({"mark": mark})
    assert dict((await one.info()).labels) == {"mark": mark, "n": "1"}
    await one.stop()
    assert [info.id for info in await make.live({"mark": mark})] == [two.id]


@case("labels that are not text are refused")
async def case_bad_labels(make: World) -> None:
    for labels in ({"": "x"}, {"a": 1}, {2: "x"}):
        with raises((InvalidValue, TypeError)):
            await make(labels=labels)  # type: ignore[arg-type]


@case("a sandbox with a lifetime ends by itself, with its processes")
async def case_lifetime(make: World) -> None:
    box = await make(limits=Limits(lifetime=2.0))
    expires = (await box.info()).expires
    assert expires is not None
    assert -5 < expires - time.time() <= 2.0
    assert (await box.exec("echo alive")).stdout == "alive\n"
    with raises(SandboxGone):
        await box.exec("sleep 300", timeout=600)

    async def unlisted() -> bool:
        return not box.alive and box.id not in {info.id for info in await make.live()}

    await until(make, unlisted)
    await box.stop()


@case("a lifetime does not end a sandbox early")
async def case_long_lifetime(make: World) -> None:
    box = await make(limits=Limits(lifetime=3600))
    await make.pause(0.5)
    assert (await box.exec("echo on")).stdout == "on\n"


@case("usage() counts processes, memory, disk and time", needs="kernel")
async def case_usage(box: AsyncSandbox) -> None:
    before = await box.usage()
    program = "x = bytearray(60_000_000); print('on', flush=True); input()"
    async with await box.start(["python3", "-S", "-c", program]) as process:
        async for _ in process.events():
            break
        (await box.exec("head -c 5000000 /dev/zero > large; for i in {1..200000}; do :; done")).check()
        during = await box.usage()
    assert during.processes >= before.processes + 1
    assert during.memory >= before.memory + 50_000_000
    assert during.disk >= before.disk + 4_000_000
    assert during.cpu > before.cpu


@case("usage() is numbers that make sense")
async def case_usage_numbers(box: AsyncSandbox) -> None:
    usage = await box.usage()
    assert min(usage.cpu, usage.memory, usage.disk, usage.processes) >= 0


@case("usage() of an idle sandbox is nothing to speak of", needs="kernel")
async def case_idle_usage(box: AsyncSandbox) -> None:
    usage = await box.usage()
    assert usage.processes == 0
    assert 0 <= usage.cpu < 10
    assert usage.disk < 1_000_000


@case("attach() gives a handle that does all but what is the owner's", needs="attach")
async def case_attach(make: World, box: AsyncSandbox) -> None:
    await box.files.write_text("f", "shared")
    async with await make.attach(box.id) as other:
        assert (other.id, other.alive) == (box.id, True)
        assert other.image.workdir == box.image.workdir
        assert (await other.exec("cat f")).stdout == "shared"
        await other.files.write_text("g", "back")
        assert await other.info() == await box.info()
        async with await other.shell() as shell:
            assert (await shell.run("cat g")).stdout == "back"
        async with await other.start("read x; echo $x") as process:
            await process.write("1\n")
            assert (await process.wait(60)).stdout == "1\n"
        assert (await other.usage()).processes >= 0
    assert box.alive
    assert await box.files.read_text("g") == "back"


@case("commands by an attached handle have the sandbox's variables and limits", needs="attach")
async def case_attach_settings(make: World) -> None:
    image = make.image({"IMAGE": "i"})
    box = await make(image, environment={"BOX": "b"}, limits=Limits(output=100))
    other = await make.attach(box.id)
    result = await other.exec("echo $IMAGE $BOX; head -c 1000 /dev/zero >&2")
    assert result.stdout == "i b\n"
    assert result.dropped_stderr == 900


@case("stop() by an attached handle ends the sandbox", needs="attach")
async def case_attach_and_stop(make: World, box: AsyncSandbox) -> None:
    other = await make.attach(box.id)
    await other.stop()

    async def gone() -> bool:
        return not box.alive

    await until(make, gone)
    with raises(SandboxGone):
        await box.exec("true")
    await box.stop()


@case("an attached handle notices the end", needs="attach")
async def case_attached_end(make: World, box: AsyncSandbox) -> None:
    other = await make.attach(box.id)
    await box.stop()
    assert not other.alive
    with raises(SandboxGone):
        await other.exec("true")
    await other.stop()


@case("attach() to what is not there is NotFound")
async def case_attach_unknown(make: World, box: AsyncSandbox) -> None:
    await box.stop()
    for name in (box.id, "no-such-sandbox", "", "../x", "box-\0"):
        with raises(NotFound):
            await make.attach(name)


@case("a process with the sandbox's lifetime can be attached to by another handle", needs="attach")
async def case_attach_to_a_process(make: World, box: AsyncSandbox) -> None:
    process = await box.start("read x; echo got $x", lifetime="sandbox")
    await process.close()
    other = await make.attach(box.id)
    assert await other.processes() == (process.id,)
    async with await other.process(process.id) as again:
        await again.write("this\n")
        assert (await again.wait(60)).stdout == "got this\n"

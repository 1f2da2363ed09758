"""snapshot, fork and reset: the state of files, sealed, copied and put back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.contract import a_while, case, raises, runs

from minisandbox.errors import OwnerOnly, SandboxGone

if TYPE_CHECKING:
    from tests.conformance.contract import World

    from minisandbox.sandbox import AsyncSandbox

LISTING = r"find . -printf '%P %y %m %l\n' | sort; find . -type f -print0 | sort -z | xargs -0r sha256sum"
STATE = r"""
set -e
mkdir -p d/e empty; echo 1 > f; echo 2 > d/e/g; ln -s f link; mkfifo fifo; chmod 640 f; chmod 755 d/e/g
printf 'x' > $'caf\xe9'; head -c 100000 /dev/zero > zero; ln f hard
"""


async def state(box: AsyncSandbox) -> bytes:
    """Everything that can be seen of the files of the workdir."""
    return (await box.exec(LISTING)).check().stdout_bytes


@case("after a snapshot the handle goes on over the same files, and its processes have ended", needs="snapshots")
async def case_snapshot(box: AsyncSandbox) -> None:
    mark = a_while()
    (await box.exec(STATE)).check()
    await box.exec(f"setsid sleep {mark} >/dev/null 2>&1 &")
    before, name = await state(box), box.id
    await box.snapshot()
    assert (box.id, box.alive) == (name, True)
    assert await state(box) == before
    assert not await runs(box, f"sleep {mark}")
    (await box.exec("echo more > more; rm f")).check()


@case("sandboxes over a snapshot begin with its files and do not see each other's changes", needs="snapshots")
async def case_from_a_snapshot(make: World, box: AsyncSandbox) -> None:
    (await box.exec(STATE)).check()
    before = await state(box)
    snapshot = await box.snapshot()
    one, two = await make(snapshot), await make(snapshot)
    assert await state(one) == await state(two) == before
    (await one.exec("echo one > f; rm -r d")).check()
    (await box.exec("echo box > only-here")).check()
    assert await state(two) == before
    assert await state(await make(snapshot)) == before


@case("hard links, times and permissions survive a snapshot", needs="snapshots")
async def case_details(make: World, box: AsyncSandbox) -> None:
    (await box.exec(f"{STATE}\ntouch -d @1000000000 f; mkdir shut; chmod 500 shut")).check()
    other = await make(await box.snapshot())
    assert (await other.exec("stat -c '%Y %h %a' f; [ f -ef hard ]; echo $?; stat -c %a shut")).stdout == (
        "1000000000 2 640\n0\n500\n"
    )


@case("snapshots of snapshots, ten deep", needs="snapshots")
async def case_chain(make: World, box: AsyncSandbox) -> None:
    for number in range(10):
        (await box.exec(f"echo {number} > f{number}; rm -f f{number - 2}; echo {number} >> log")).check()
        snapshot = await box.snapshot()
    other = await make(snapshot)
    assert (await other.exec("echo f*; wc -l < log")).stdout == "f8 f9\n10\n"
    assert await state(other) == await state(box)


@case("a fork is a sandbox of its own with the same files, limits, variables and labels", needs="snapshots")
async def case_fork(make: World) -> None:
    box = await make(environment={"A": "given"}, labels={"task": "t1"})
    (await box.exec(STATE)).check()
    before = await state(box)
    one, two = await box.fork(2)
    assert len({box.id, one.id, two.id}) == 3
    try:
        for kid in (one, two):
            assert await state(kid) == before
            assert (await kid.exec("echo $A")).stdout == "given\n"
            assert dict((await kid.info()).labels) == {"task": "t1"}
        (await one.exec("echo one > f; echo > new")).check()
        (await box.exec("rm -r d")).check()
        assert await state(two) == before
    finally:
        await one.stop()
        await two.stop()
    assert box.alive


@case("eight forks write independently, and outlive the sandbox that they come from", needs="snapshots")
async def case_eight_forks(make: World) -> None:
    box = await make()
    (await box.exec(STATE)).check()
    kids = await box.fork(8)
    await box.stop()
    try:
        await make.together(*(kid.exec(f"echo {number} > f; sleep 0.1") for number, kid in enumerate(kids)))
        found = [(await kid.exec("cat f d/e/g")).stdout for kid in kids]
        assert found == [f"{number}\n2\n" for number in range(8)]
    finally:
        for kid in kids:
            await kid.stop()


@case("forks of forks", needs="snapshots")
async def case_fork_of_a_fork(box: AsyncSandbox) -> None:
    await box.exec("echo 1 > a")
    [kid] = await box.fork()
    await kid.exec("echo 2 > b")
    [grandchild] = await kid.fork()
    await kid.stop()
    assert (await grandchild.exec("cat a b")).stdout == "1\n2\n"
    assert await grandchild.changes()
    await grandchild.stop()


@case("reset goes back to the image, and ends all processes", needs="snapshots")
async def case_reset(box: AsyncSandbox) -> None:
    mark, name = a_while(), box.id
    (await box.exec(STATE)).check()
    await box.exec(f"setsid sleep {mark} >/dev/null 2>&1 &")
    await box.reset()
    assert (box.id, box.alive) == (name, True)
    assert (await box.exec("ls -A")).stdout == ""
    assert not await runs(box, f"sleep {mark}")
    assert not [c for c in await box.changes() if c.path.is_relative_to(box.image.workdir / "f")]


@case("reset goes to the snapshot that is given, as often as wanted", needs="snapshots")
async def case_reset_to(box: AsyncSandbox) -> None:
    await box.exec("echo 1 > f")
    first = await box.snapshot()
    await box.exec("echo 2 > f; echo > g")
    second = await box.snapshot()
    for snapshot, expected in ((first, "1\n"), (second, "2\n"), (first, "1\n"), (first, "1\n")):
        await box.reset(snapshot)
        assert (await box.exec("cat f")).stdout == expected
        await box.exec("echo 9 > f")
    await box.reset(first)
    assert (await box.exec("ls")).stdout == "f\n"


@case("reset of a sandbox that was made from a snapshot goes back to that", needs="snapshots")
async def case_reset_of_a_derived_sandbox(make: World, box: AsyncSandbox) -> None:
    await box.exec("echo 1 > f")
    other = await make(await box.snapshot())
    await other.exec("rm f; echo > g")
    await other.reset()
    assert (await other.exec("ls; cat f")).stdout == "f\n1\n"


@case("a deleted file stays deleted, and a directory made anew stays empty, over a snapshot", needs="snapshots")
async def case_whiteouts(make: World, box: AsyncSandbox) -> None:
    await box.exec("mkdir d; echo > d/old; echo > f; mkdir gone; echo > gone/x")
    first = await make(await box.snapshot())
    await first.exec("rm -r d f gone; mkdir d")
    second = await make(await first.snapshot())
    assert (await second.exec("find . -mindepth 1")).stdout == "./d\n"
    await second.exec("echo new > f; mkdir gone")
    third = await make(await second.snapshot())
    assert (await third.exec("find . -mindepth 1 | sort")).stdout == "./d\n./f\n./gone\n"


@case("a command under way when a snapshot is made is over, and its caller is told", needs="snapshots")
async def case_during_a_command(make: World, box: AsyncSandbox) -> None:
    async def command() -> str:
        try:
            result = await box.exec("echo on > new; mv new f; sleep 600", timeout=600)
        except SandboxGone:
            return "gone"
        return result.outcome.value

    async def seal() -> str:
        while not await box.files.exists("f"):
            await make.pause(0.05)
        await box.snapshot()
        return "sealed"

    fate, _ = await make.together(command(), seal())
    assert fate in ("gone", "signaled")
    assert (await box.exec("cat f")).stdout == "on\n"


@case("a snapshot can be closed; a sandbox over it goes on", needs="snapshots")
async def case_close(make: World, box: AsyncSandbox) -> None:
    await box.exec("echo 1 > f")
    snapshot = await box.snapshot()
    other = await make(snapshot)
    snapshot.close()
    snapshot.close()
    assert (await other.exec("cat f; echo 2 > g; cat g")).stdout == "1\n2\n"
    assert (await box.exec("cat f")).stdout == "1\n"


@case("only the owner makes snapshots, forks, resets and lists changes", needs="snapshots")
async def case_owner_only(make: World, box: AsyncSandbox) -> None:
    other = await make.attach(box.id)
    for call in (other.snapshot, other.fork, other.reset, other.changes):
        with raises(OwnerOnly):
            await call()
    assert (await other.exec("echo works")).stdout == "works\n"


@case("a stopped sandbox has no snapshot to give", needs="snapshots")
async def case_after_stop(make: World) -> None:
    box = await make()
    await box.stop()
    for call in (box.snapshot, box.fork, box.reset, box.changes):
        with raises(SandboxGone):
            await call()

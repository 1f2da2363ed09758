"""user=: an ordinary user inside, without any capability."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.contract import a_while, case, raises, runs

from minisandbox.errors import InvalidValue
from minisandbox.types import Terminal

if TYPE_CHECKING:
    from minisandbox.sandbox import AsyncSandbox


@case("a command is run as root of the sandbox unless a user is given", needs="kernel")
async def case_root(box: AsyncSandbox) -> None:
    assert (await box.exec("id -u; id -g; id -un")).stdout == "0\n0\nroot\n"


@case("a user is given by name or by number", needs="range")
async def case_by_name_or_number(box: AsyncSandbox) -> None:
    named = await box.exec("id -un; id -u; id -gn", user="nobody")
    assert named.stdout.split()[0] == "nobody"
    uid = int(named.stdout.split()[1])
    assert (await box.exec(["id", "-u"], user=uid)).stdout == f"{uid}\n"
    assert (await box.exec("id -u; id -g", user=4321)).stdout.split()[0] == "4321"
    assert (await box.exec(["id", "-u"], user="root")).stdout == "0\n"
    assert (await box.exec(["id", "-u"], user=0)).stdout == "0\n"


@case("another user has no capabilities and cannot get any", needs="range")
async def case_no_capabilities(box: AsyncSandbox) -> None:
    status = await box.exec(["grep", "-E", "^(Cap|NoNewPrivs)", "/proc/self/status"], user="nobody")
    fields = dict(line.split(":\t") for line in status.stdout.splitlines())
    assert {int(fields[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
    assert fields["NoNewPrivs"] == "1"
    assert not (await box.exec(["chown", "0", "."], user="nobody")).ok


@case("another user may not touch what is root's, and may use what is its own", needs="range")
async def case_permissions(box: AsyncSandbox) -> None:
    await box.exec("echo s > secret; chmod 600 secret; mkdir own; chown nobody own")
    assert not (await box.exec(["cat", "secret"], user="nobody")).ok
    assert not (await box.exec(["touch", "new"], user="nobody")).ok
    assert (await box.exec(["touch", "own/new"], user="nobody")).ok
    assert (await box.exec(["stat", "-c", "%U", "own/new"])).stdout == "nobody\n"


@case("HOME, USER and LOGNAME are those of the user, unless given", needs="range")
async def case_variables(box: AsyncSandbox) -> None:
    await box.exec("echo 'someone:x:1234:1234::/testbed/home:/bin/bash' >> /etc/passwd; mkdir home; chown 1234 home")
    result = await box.exec("echo $HOME $USER $LOGNAME", user="someone")
    assert result.stdout == "/testbed/home someone someone\n"
    given = await box.exec("echo $HOME $USER", user="someone", env={"HOME": "/elsewhere"})
    assert given.stdout == "/elsewhere someone\n"


@case("a user has its own groups and none of root's", needs="range")
async def case_groups(box: AsyncSandbox) -> None:
    await box.exec(
        "echo 'member:x:1235:1235::/:/bin/sh' >> /etc/passwd; echo 'club:x:4000:member' >> /etc/group;"
        "echo 'others:x:4001:somebody' >> /etc/group"
    )
    assert set((await box.exec(["id", "-G"], user="member")).stdout.split()) == {"1235", "4000"}


@case("a user that does not exist, or cannot, is refused before anything runs", needs="range")
async def case_unknown(box: AsyncSandbox) -> None:
    for user in ("no-such-user", "", -1, 1 << 32):
        with raises(InvalidValue):
            await box.exec(["touch", "/tmp/ran"], user=user)
    assert not (await box.exec(["test", "-e", "/tmp/ran"])).ok


@case("chown and chgrp to any id of the range work", needs="range")
async def case_chown(box: AsyncSandbox) -> None:
    assert (await box.exec("touch f; chown 1000:2000 f; stat -c '%u %g' f")).stdout == "1000 2000\n"
    info = await box.files.stat("f")
    assert (info.uid, info.gid) == (1000, 2000)


@case("processes and shells take a user too", needs="range")
async def case_processes_and_shells(box: AsyncSandbox) -> None:
    async with await box.start(["id", "-u"], user=1234) as process:
        assert (await process.wait(60)).stdout == "1234\n"
    async with await box.start(["id", "-u"], user=1234, pty=Terminal()) as process:
        assert (await process.wait(60)).stdout == "1234\r\n"
    async with await box.shell(user=1234) as shell:
        assert (await shell.run("id -u")).stdout == "1234\n"


@case("a timeout ends the processes of another user too", needs="range")
async def case_timeout(box: AsyncSandbox) -> None:
    mark = a_while()
    result = await box.exec(f"setsid sleep {mark} & sleep {mark}", user="nobody", timeout=0.5)
    assert result.outcome.value == "timeout"
    assert not await runs(box, mark)


@case("where there is one id only, a user is refused with what to do", needs="one id")
async def case_one_id(box: AsyncSandbox) -> None:
    with raises(InvalidValue) as caught:
        await box.exec("true", user=1000)
    assert "newuidmap" in str(caught.value)
    assert (await box.exec(["id", "-u"], user="root")).stdout == "0\n"

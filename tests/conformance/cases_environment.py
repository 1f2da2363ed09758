"""The environment of commands: whose variables they get, and which win."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.contract import case

if TYPE_CHECKING:
    from tests.conformance.contract import World

    from minisandbox.sandbox import AsyncSandbox


@case("variables for a command reach it as they are, and only it")
async def case_given_variables(box: AsyncSandbox) -> None:
    given = {"A": "by the caller=really", "EMPTY": "", "LINES_": "a\nb", "U": "ü", "B": "caf\udce9", "sp ace": "1"}
    output = (await box.exec(["env", "-0"], env=given)).stdout_bytes.split(b"\0")
    for name, value in given.items():
        assert f"{name}={value}".encode("utf-8", "surrogateescape") in output
    assert "by the caller" not in (await box.exec(["env"])).stdout


@case("the sandbox's variables are over the image's, the command's over both")
async def case_precedence(make: World) -> None:
    image = make.image({"IMAGE": "image", "BOX": "image", "COMMAND": "image"})
    box = await make(image, environment={"BOX": "box", "COMMAND": "box"})
    result = await box.exec("echo $IMAGE $BOX $COMMAND", env={"COMMAND": "command"})
    assert result.stdout == "image box command\n"


@case("what programs look for is set: PATH, HOME, USER, a UTF-8 locale, a dumb terminal")
async def case_defaults(box: AsyncSandbox) -> None:
    result = await box.exec("echo $USER $TERM; [ -d $HOME ]; echo $?; echo $PATH; locale charmap; echo ${TMPDIR:+set}")
    lines = result.stdout.splitlines()
    assert lines[:2] == ["root dumb", "0"]
    assert "/usr/bin" in lines[2].split(":")
    assert lines[3:] == ["UTF-8", "set"]


@case("a variable may have 100,000 bytes, and there may be two thousand")
async def case_huge_environment(box: AsyncSandbox) -> None:
    result = await box.exec("printf %s $LONG | wc -c; env | grep -c ^V_", env={"LONG": "x" * 100_000})
    assert result.stdout.split() == ["100000", "0"]
    many = {f"V_{number}": "y" * 100 for number in range(2000)}
    assert (await box.exec("env | grep -c ^V_", env=many)).stdout == "2000\n"


@case("an environment that the kernel refuses is status 126, and the sandbox lives on")
async def case_environment_too_large(box: AsyncSandbox) -> None:
    refused = await box.exec("true", env={f"V_{number}": "y" * 100_000 for number in range(80)})
    assert refused.exit_code == 126
    assert "too long" in refused.stderr
    assert (await box.exec("echo fine")).stdout == "fine\n"


@case("what a command exports or changes does not outlive it")
async def case_no_state(box: AsyncSandbox) -> None:
    await box.exec("export LEFT=1; cd /; umask 077; alias ls=false; set -e")
    result = await box.exec("echo [$LEFT]; pwd; umask; false; echo on")
    assert result.stdout == f"[]\n{box.image.workdir}\n0022\non\n"


@case("Python in the sandbox prints at once and in UTF-8")
async def case_python_output(box: AsyncSandbox) -> None:
    result = await box.exec(["python3", "-c", "print('héllo'); import os; os._exit(0)"])
    assert result.stdout == "héllo\n"


@case("an image or sandbox can take a default's place")
async def case_defaults_can_be_replaced(make: World) -> None:
    box = await make(environment={"TERM": "xterm", "PAGER": "less"})
    assert (await box.exec("echo $TERM $PAGER")).stdout == "xterm less\n"


@case("no process of the host is seen, and no file of its users", needs="kernel")
async def case_own_world(box: AsyncSandbox) -> None:
    assert (await box.exec("ls -A /home /root /srv /mnt 2>/dev/null | grep -v : | grep .")).stdout == ""
    assert len((await box.exec("ls -d /proc/[0-9]*")).stdout.split()) < 10
    assert (await box.exec("hostname")).stdout == "sandbox\n"


@case("the network is off: loopback and nothing else", needs="kernel")
async def case_no_network(box: AsyncSandbox) -> None:
    interfaces = (await box.exec("tail -n +3 /proc/net/dev | cut -d: -f1")).stdout.split()
    assert interfaces == ["lo"]
    probe = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"
    assert (await box.exec(["python3", "-S", "-c", probe], timeout=60)).ok


@case("two sandboxes do not see each other's processes, files or ports", needs="kernel")
async def case_two_worlds(make: World) -> None:
    one, two = await make(), await make()
    await one.exec("echo secret > /tmp/here; echo secret > mine; sleep 299.5 & true")
    await one.exec("python3 -S -m http.server --bind 127.0.0.1 8123 >/dev/null 2>&1 &")
    await one.exec("until (: < /dev/tcp/127.0.0.1/8123) 2>/dev/null; do sleep 0.05; done", timeout=60)
    seen = await two.exec("ls -A /tmp . ; cat /proc/*/cmdline | tr '\\0' ' '")
    assert "here" not in seen.stdout
    assert "mine" not in seen.stdout
    assert "299.5" not in seen.stdout
    assert not (await two.exec(": < /dev/tcp/127.0.0.1/8123", timeout=60)).ok

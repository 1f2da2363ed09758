"""``user=``: commands, processes and shells of an ordinary user."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from tests.identities import has_one_id
from tests.kernel.driving import Driver, Shell
from tests.waiting import PATIENCE, until

from minisandbox.errors import FileAccessError, InvalidValue
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.io_sync import converse
from minisandbox.sandbox.protocol.channels import ProcessChannel
from minisandbox.sandbox.protocol.wire import ExecCall, environment_for
from minisandbox.types import ExecResult, ImageSpec, Outcome, Terminal

pytestmark = pytest.mark.kernel

PASSWD = (
    "ann:x:1100:1001:Ann:/opt/ann:/bin/sh\nrobot:x:1200:1200::/:/bin/sh\n"
    "bad:x:2147483648:2147483648::/:/bin/sh\nbroken:x:y\n"
)
GROUP = "ann:x:1001:\nteam:x:1500:robot,ann\nothers:x:1600:robot\nodd\n"


@pytest.fixture
def peopled(box: Sandbox) -> Sandbox:
    """A sandbox whose tables name users."""
    script = 'printf "%s" "$1" >>/etc/passwd; printf "%s" "$2" >>/etc/group; mkdir -p /opt/ann /secret'
    assert box.exec(["bash", "-c", script, "-", PASSWD, GROUP]).ok
    return box


@pytest.fixture
def town(peopled: Sandbox) -> Sandbox:
    """A sandbox whose users can be had."""
    if has_one_id(peopled):
        pytest.skip("sandboxes have one id here: no newuidmap, or no range in /etc/subuid")
    assert peopled.exec("chown 1100 /opt/ann; chmod 700 /secret").ok
    return peopled


def run(
    box: Sandbox,
    command: str | list[str],
    user: str | int | None,
    *,
    cwd: str = "/",
    env: dict[str, str] | None = None,
    stdin: bytes | None = None,
    timeout: float | None = PATIENCE,
) -> ExecResult:
    environment = environment_for(box._core.environment, env, user)
    call = ExecCall(command, env=environment, cwd=cwd, timeout=timeout, stdin=stdin, output=1 << 20, user=user)
    with box._core.open_job() as connection:
        connection.settimeout(PATIENCE)
        converse(call, connection)
    return call.result()


def start(box: Sandbox, command: str, user: str | int, *, pty: Terminal | None = None) -> Driver:
    environment = environment_for(box._core.environment, None, user)
    channel = ProcessChannel(
        command, id="p", env=environment, cwd="/", timeout=None, user=user, pty=pty, lifetime="handle", output=1000
    )
    return Driver(channel, box._core.open_job())


def test_a_user_of_the_sandboxes_own_files(town: Sandbox) -> None:
    result = run(town, "id -u; id -g; id -G; echo $HOME $USER $LOGNAME; grep ^Cap /proc/self/status", "ann")
    lines = result.stdout.splitlines()
    assert lines[:3] == ["1100", "1001", "1001 1500"]
    assert lines[3] == "/opt/ann ann ann"
    capabilities = dict(line.split() for line in lines[4:])
    assert {name for name, mask in capabilities.items() if int(mask, 16)} == {"CapBnd:"}
    assert run(town, "id -u", 1100).stdout == "1100\n"
    assert run(town, "echo $USER $(id -G)", 1100).stdout == "ann 1001 1500\n"


def test_a_uid_without_a_name(town: Sandbox) -> None:
    assert run(town, "id -u; id -g; id -G; echo $HOME $USER", 4321).stdout == "4321\n0\n0\n/ 4321\n"
    assert run(town, "id -u", "4321").stdout == "4321\n"


FORMS = {  # as GetExecUser of moby/sys/user, which docker and podman use: uid, gid, groups
    "4321": "4321 0 0", "4321:": "4321 0 0", "4321:4": "4321 4 4", "4321:team": "4321 1500 1500",
    "1100": "1100 1001 1001 1500",
    "1100:": "1100 1001 1001 1500", "1100:0": "1100 0 0", "ann:": "1100 1001 1001 1500", "ann:team": "1100 1500 1500",
    ":5": "0 5 5", "0:5": "0 5 5", "root:team": "0 1500 1500", ":": "0 0 0", "0:": "0 0 0", "0000": "0 0 0",
}  # fmt: skip


@pytest.mark.parametrize("user", FORMS)
def test_forms_of_a_user(town: Sandbox, user: str) -> None:
    assert run(town, "echo $(id -u) $(id -g) $(id -G)", user).stdout == f"{FORMS[user]}\n"
    capable = run(town, "grep -c ^CapEff:.0*$ /proc/self/status", user).stdout == "0\n"
    assert capable == FORMS[user].startswith("0 "), "root of any group keeps its capabilities"


def test_variables_that_are_named_win(town: Sandbox) -> None:
    assert run(town, "echo $HOME $USER $LOGNAME", "ann", env={"HOME": "/tmp"}).stdout == "/tmp ann ann\n"


def test_root_is_who_we_are(box: Sandbox) -> None:
    assert run(box, "id -u; echo $HOME $USER; pwd", "root", cwd="/usr").stdout == "0\n/root root\n/usr\n"
    assert run(box, "id -u", 0).stdout == "0\n"


def test_permissions_hold(town: Sandbox) -> None:
    assert run(town, "echo x >/opt/ann/mine && stat -c %u:%g /opt/ann/mine", "ann").stdout == "1100:1001\n"
    assert run(town, "echo x >/etc/passwd", "ann").exit_code == 1
    assert run(town, "chown 0 /opt/ann/mine", "ann").exit_code == 1
    assert run(town, "kill -9 1", "ann").exit_code == 1
    with pytest.raises(FileAccessError, match="cannot enter /secret") as caught:
        run(town, "true", "ann", cwd="/secret")
    assert caught.value.errno == 13
    with pytest.raises(FileAccessError, match="cannot enter /none"):
        run(town, "true", "ann", cwd="/none")
    assert run(town, "pwd", "ann", cwd="/opt/ann").stdout == "/opt/ann\n"


def test_programs_are_looked_up_and_missed_as_ever(town: Sandbox) -> None:
    assert run(town, ["no-such"], "ann").exit_code == 127
    assert "no-such: not found" in run(town, ["no-such"], "ann").stderr
    assert run(town, ["/etc"], "ann").exit_code == 126
    town.files.write_text("/secret/run", "#!/bin/sh\necho ran", mode=0o755)
    town.files.write_text("/opt/ann/run", "#!/bin/sh\necho $0 ran", mode=0o755)
    assert run(town, ["/secret/run"], "ann").exit_code == 126
    assert run(town, ["./run"], "ann", cwd="/opt/ann").stdout == "./run ran\n"
    assert run(town, ["env"], "ann", env={"A": "=b"}).stdout.count("A==b") == 1


def test_standard_descriptors(town: Sandbox) -> None:
    assert (
        run(town, "cat; echo out >/dev/stdout; echo err >/dev/stderr; cat /dev/stdin", "ann", stdin=b"in").stdout
        == "inout\n"
    )
    assert run(town, "ls -l /proc/self/fd | grep -c pipe", "ann").stdout == "2\n"
    assert run(town, "ls -l /dev/null", "ann").stdout == run(town, "ls -l /dev/null", None).stdout
    assert run(town, "echo " + "x" * 300_000, "ann").stdout == "x" * 300_000 + "\n"


def test_fates(town: Sandbox) -> None:
    assert run(town, "kill -SEGV $$", "ann").signal == 11
    assert run(town, "(trap '' TERM; setsid -f sleep 80); sleep 81", "ann", timeout=0.4).outcome is Outcome.TIMEOUT
    assert "sleep 8" not in town.exec("ps -eo args").stdout
    assert run(town, ["grep", "SigIgn", "/proc/self/status"], "ann").stdout.split()[1] == "0000000000000000"


def test_processes_and_terminals(town: Sandbox) -> None:
    with start(town, "read x; echo $x $(id -u); exit 3", "ann") as process:
        process.write(b"hello\n")
        result = process.wait()
        assert (result.stdout, result.exit_code) == ("hello 1100\n", 3)
    script = "stat -c %u $(tty); echo x >/dev/tty; stty size; read y; echo $y"
    with start(town, script, "ann", pty=Terminal(10, 20)) as process:
        process.write(b"z\n")
        said = process.wait().stdout.split()
        said.remove("z")  # the terminal echoes it whenever it comes
        assert said == ["1100", "x", "10", "20", "z"]
    with start(town, "echo ready; sleep 82", "ann") as process:
        process.until_output(b"ready")
    until(lambda: "sleep 82" not in town.exec("ps -eo args").stdout)


def test_a_terminal_is_its_users_alone(town: Sandbox) -> None:
    """Its group is that of who made it, root's, and other users may be in that."""
    assert town.exec("echo wheel:x:1300:0::/:/bin/sh >>/etc/passwd").ok
    for owner in ("root", "ann"):
        with start(town, "tty; sleep 83", owner, pty=Terminal()) as process:
            process.until_output(b"/dev/pts/")
            assert town.exec("stat -c '%g %a' /dev/pts/[0-9]*").stdout == "0 600\n"
            for other in ("wheel", "robot"):
                assert run(town, "id -g; echo typed > /dev/pts/[0-9]*", other).exit_code == 1


def test_shells(town: Sandbox) -> None:
    with closing(Shell(town, user="ann")) as shell:
        assert shell.run("id -u; cd; pwd; x=1").stdout == "1100\n/opt/ann\n"
        assert shell.run("exit 3").restarted
        assert shell.run("id -u; pwd; echo $x $HOME").stdout == "1100\n/opt/ann\n/opt/ann\n"
        assert shell.run("sleep 100", timeout=0.2).outcome is Outcome.TIMEOUT
        assert shell.run("kill -STOP $$; echo on; id -u").stdout == "on\n1100\n"
    with pytest.raises(FileAccessError, match="cannot enter /secret"):
        Shell(town, user="ann", cwd="/secret")
    with pytest.raises(InvalidValue, match="does not exist"):
        Shell(town, user="nobody-here")


def test_users_that_there_are_not(peopled: Sandbox) -> None:
    with pytest.raises(InvalidValue, match="user 'nobody-here' does not exist"):
        run(peopled, "true", "nobody-here")
    with pytest.raises(InvalidValue, match="'broken' does not exist"):
        run(peopled, "true", "broken")
    for user in ("bad", 1 << 31):
        with pytest.raises(InvalidValue, match="cannot be had"):
            run(peopled, "true", user)
    assert run(peopled, "echo on", None).stdout == "on\n"


@pytest.mark.parametrize("user", ["", "a:b", "a:b:c", "1:2:", "a\nb", "a\0b", -1, True, 1.5, 1 << 32])
def test_users_that_cannot_be(box: Sandbox, user: object) -> None:
    with pytest.raises(InvalidValue):
        run(box, "true", user)  # type: ignore[arg-type] # what the test is about


def test_one_id_only(box: Sandbox) -> None:
    if has_one_id(box):
        with pytest.raises(InvalidValue, match=r"one id only.*newuidmap"):
            run(box, "true", 1000)
        assert run(box, "id -u", "root").stdout == "0\n"
    else:
        assert run(box, "id -u", 1000).stdout == "1000\n"


@pytest.mark.parametrize(
    "replacement",
    ["mkfifo", "mkdir", "ln -s /proc/self/exe", "ln -s /dev/zero", "head -c 3000000 /dev/zero >", "touch"],
)
def test_a_table_that_is_something_else(box: Sandbox, replacement: str) -> None:
    assert box.exec(f"rm /etc/passwd; {replacement} /etc/passwd").ok
    with pytest.raises(InvalidValue, match="does not exist"):
        run(box, "true", "ann")
    assert run(box, "echo $HOME", 0).stdout == "/\n"


@pytest.mark.parametrize("user", ["user", "toor"])
def test_a_name_that_stands_for_root_is_refused(box: Sandbox, user: str) -> None:
    """Root inside rewrites the table; whoever asked for a user by name would get a command with root's capabilities."""
    assert box.exec(f"sed -i '/^user:/d' /etc/passwd; echo '{user}:x:0:0::/:/bin/sh' >>/etc/passwd").ok
    with pytest.raises(InvalidValue, match=rf"'{user}' would be root.*uid 0.*user=\"root\""):
        run(box, "touch /ran", user)
    with pytest.raises(InvalidValue, match="would be root"), closing(Shell(box, user=user)):
        pass
    assert run(box, "id -u; ls /ran", "root").stdout == "0\n"


def test_the_patch_of_a_users_own_repository_is_made_as_that_user(town: Sandbox) -> None:
    """Git refuses repositories of others; what the settings of this one name is not run as root."""
    script = (
        "cd /opt/ann; git init -q .; git config user.email a@b; git config user.name n; echo 1 > a; git add a;"
        "git commit -qm base; git config filter.e.clean 'id -u > /tmp/who; cat'; echo '* filter=e' > .gitattributes;"
        "echo 2 > a"
    )
    assert town.exec(script, user=1100).ok
    patch = town.patch("/opt/ann", base="HEAD")
    assert b"+2\n" in patch
    assert town.exec("cat /tmp/who").stdout == "1100\n"
    assert town.exec("ls -d /tmp/patch.*").stdout == ""


def test_a_user_of_many_groups(town: Sandbox) -> None:
    already = len(run(town, "id -G", "ann").stdout.split())
    add = "for n in $(seq {} {}); do echo group$n:x:$n:ann; done >>/etc/group"
    town.exec(add.format(3001, 3063 - already)).check()
    assert len(run(town, "id -G", "ann").stdout.split()) == 63
    town.exec(add.format(4000, 4000)).check()
    with pytest.raises(InvalidValue, match="'ann' is in more than 63 groups"):
        run(town, "true", "ann")


def test_servers_may_have_any_port_of_their_own_loopback(box: Sandbox) -> None:
    program = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 80)); print(s.getsockname()[1])"
    assert box.exec(["python3", "-c", program]).check().stdout == "80\n"


@pytest.mark.parametrize("user", ["\u00b2", "9" * 5000])
def test_an_image_whose_user_is_no_number(spec: ImageSpec, user: str) -> None:
    with Sandbox.create(spec) as box:
        if has_one_id(box):
            pytest.skip("sandboxes have one id here, which every command has")
    with Sandbox.create(replace(spec, user=user)) as box, pytest.raises(InvalidValue, match=user[:40]):
        box.exec("true")

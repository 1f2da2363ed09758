"""Sandboxes of container images: made by hand, and by real engines, whose own view of them is compared with ours."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.oci_tools import END, MadeImage, entry, folder, hard_link, link

from minisandbox import Sandbox
from minisandbox.errors import FileAccessError, MiniSandboxError
from minisandbox.images import Image, export_images, pull, push
from minisandbox.store import Store
from minisandbox.store.entries import Entry, read_entries
from minisandbox.store.verify import verify

pytestmark = pytest.mark.kernel

HOME = "/home/" + "app"
PASSWD = b"root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::" + HOME.encode() + b":/bin/sh\n"
GROUP = b"root:x:0:\napp:x:1000:\nmail:x:8:\n"
APPLETS = (
    "cat", "chmod", "chown", "echo", "id", "ln", "ls", "mkdir", "mount", "pwd", "readlink", "rm", "sh", "sleep", "stat",
    "test", "touch", "wc",
)  # fmt: skip


def static_busybox() -> bytes | None:
    """The program busybox, if this machine has one that needs no library."""
    path = shutil.which("busybox")
    data = Path(path).read_bytes() if path else b""
    return data if data and b"/ld-linux" not in data and b"/lib64/ld" not in data else None


@pytest.fixture(scope="module")
def base() -> bytes:
    """The tar of a small root filesystem, without its end."""
    program = static_busybox()
    if program is None:
        pytest.skip("no static busybox here (Debian's package is busybox-static)")
    return (
        folder("bin") + entry("bin/busybox", program, mode=0o755)
        + b"".join(hard_link(f"bin/{name}", "bin/busybox") for name in APPLETS)
        + folder("etc") + entry("etc/passwd", PASSWD) + entry("etc/group", GROUP) + entry("etc/hosts", b"of the image")
        + folder("home/app", uid=1000, gid=1000) + folder("d") + entry("d/gone", b"1") + entry("d/kept", b"1")
        + folder("old") + entry("old/x", b"1") + entry("private", b"secret", mode=0o600) + folder("root", mode=0o700)
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store.open(tmp_path / "store")


def made(tmp_path: Path, store: Store, *tars: bytes, **config: object) -> Image:
    """Take an image of these layers in."""
    layout = MadeImage([tar + END for tar in tars], config).write_layout(tmp_path / "layout")
    return pull(f"oci:{layout}", store=store)


@contextlib.contextmanager
def box_of(image: Image) -> Iterator[Sandbox]:
    """A sandbox of an image."""
    with Sandbox.create(image.spec()) as box:
        yield box


def test_a_command_sees_the_images_own_tree(tmp_path: Path, store: Store, base: bytes) -> None:
    second = entry("d/.wh.gone") + entry("old/.wh..wh..opq") + entry("old/y") + entry("bin/suid", mode=0o4755)
    image = made(tmp_path, store, base, second, Env=["GREETING=hello", "PATH=/bin"], WorkingDir=HOME)
    with box_of(image) as box:
        done = box.exec(
            'echo $GREETING $PWD; ls /; ls /d /old; cat /etc/passwd | wc -l; stat -c "%a %u" /private /bin/suid'
        )
        words = done.check().stdout.split()
        assert words[:2] == ["hello", HOME]
        assert "usr" not in words, "the host's /usr is not there"
        assert done.stdout.endswith("/d:\nkept\n\n/old:\ny\n2\n600 0\n4755 0\n")
        assert box.exec(["ls", "/d/gone"]).exit_code == 1
        assert box.exec("rm -r /d && mkdir /d && touch /d/gone && ls /d").check().stdout == "gone\n"
        changes = {str(change.path): change.kind.value for change in box.changes()}
        assert changes["/d/gone"] == "added"
        assert changes["/d/kept"] == "deleted"
        box.reset()
        assert box.exec("ls /d").check().stdout == "kept\n"


def test_files_that_each_sandbox_has_of_its_own(tmp_path: Path, store: Store, base: bytes) -> None:
    with box_of(made(tmp_path, store, base)) as box:
        assert "localhost" in box.exec("cat /etc/hosts").check().stdout
        assert box.exec("cat /etc/resolv.conf").check().stdout == ""
        assert "overlay" in box.exec("cat /etc/mtab").check().stdout
        assert box.exec("echo x > /tmp/x && echo x > /run/x && echo x > /dev/null && ls -d /dev/shm /proc/self").ok
        assert box.exec("stat -c %a /run/lock").check().stdout == "1777\n"


def test_commands_run_as_the_images_user(tmp_path: Path, store: Store, base: bytes) -> None:
    files = entry("home/app/f", uid=1000, gid=1000)
    image = made(tmp_path, store, base, files, User="app:mail", WorkingDir=HOME)
    with box_of(image) as box:
        if os.geteuid() != 0:  # all files are root's inside: the user could not write to its own
            assert "commands run as root, not as app:mail" in image.notes["not as in the image"]
            assert box.exec("id -u; id -g; echo $HOME; stat -c %u f").check().stdout.split() == ["0", "0", "/root", "0"]
            return
        assert box.exec("id -u; id -g; id -G; echo $HOME").check().stdout.split() == ["1000", "8", "8", HOME]
        assert box.exec("id -u", user="root").check().stdout == "0\n"
        assert box.exec("cat /private").exit_code == 1
        assert box.exec("stat -c %u f && echo more >> f").check().stdout == "1000\n"
        assert box.exec("id -u; id -g", user="1000:1000").check().stdout.split() == ["1000", "1000"]
        with Sandbox.attach(box.id) as other:
            assert other.exec("id -u").check().stdout == "1000\n"


MISSING = {  # a missing WorkingDir, and where commands start then
    "nothing of it": ("/no/such/dir", "/no/such/dir"),
    "the last part": (f"{HOME}/x", f"{HOME}/x"),
    "in a closed directory": ("/root/deep/er", "/root/deep/er"),
    "behind a link": ("/link/x/y", "/d/x/y"),
    "behind a link to above the root": ("/up/x", "/x"),
    "in /tmp": ("/tmp/a/b", "/tmp/a/b"),
    "in /run": ("/run/a", "/run/a"),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_workdir_is_made(tmp_path: Path, store: Store, base: bytes, case: str) -> None:
    path, real = MISSING[case]
    more = link("link", "/d") + link("up", "../../..")
    with box_of(made(tmp_path, store, base, more, WorkingDir=path)) as box:
        assert box.exec(["pwd"]).check().stdout == f"{real}\n"
        assert box.exec('stat -c "%a %u %g" .').check().stdout == "755 0 0\n"
        assert box.exec("touch f").ok
        assert box.files.exists(f"{real}/f")
        box.exec(["rm", "-r", real], cwd="/").check()
        with pytest.raises(FileAccessError, match="cannot enter"):
            box.exec(["pwd"])
        [fork] = box.fork(1)
        with fork, pytest.raises(FileAccessError, match="cannot enter"):
            fork.exec(["pwd"])
        box.reset()
        assert box.exec(["pwd"]).check().stdout == f"{real}\n"


@pytest.mark.parametrize("path", ["/etc/passwd/x", "/dangling/x", "/proc/x", "/loop/x"])
def test_a_workdir_that_cannot_be_made_is_named(tmp_path: Path, store: Store, base: bytes, path: str) -> None:
    image = made(tmp_path, store, base, link("dangling", "/none") + link("loop", "loop"), WorkingDir=path)
    with box_of(image) as box:
        with pytest.raises(FileAccessError, match=f"cannot enter {path}"):
            box.exec(["pwd"])
        assert box.exec(["pwd"], cwd="/").check().stdout == "/\n"


def test_volumes_are_made_and_a_user_can_start_in_a_missing_workdir(tmp_path: Path, store: Store, base: bytes) -> None:
    volumes: dict[str, object] = {"/data/one": {}, "/d": {}, "relative": {}, "/etc/passwd": {}}
    image = made(tmp_path, store, base, User="app", WorkingDir="/work/of/app", Volumes=volumes)
    with box_of(image) as box:
        assert box.exec(["pwd"]).check().stdout == "/work/of/app\n"
        assert box.exec('stat -c "%F %a %u" /data/one; ls /d').check().stdout == "directory 755 0\ngone\nkept\n"
        assert box.exec(["test", "-f", "/etc/passwd"]).ok


def test_what_an_image_closes_to_its_owner_is_exported(tmp_path: Path, store: Store) -> None:
    tree = folder("closed", mode=0) + folder("closed/in", mode=0o100) + entry("closed/in/file", b"content", mode=0)
    image = made(tmp_path, store, tree)
    export_images(store, [image.name], tmp_path / "exported.tar")
    other = pull(f"oci-archive:{tmp_path}/exported.tar", store=Store.open(tmp_path / "other"))
    names = ("closed", "closed/in", "closed/in/file")
    found = [{entry.path: (entry.mode, entry.digest) for entry in entries_of(one)} for one in (image, other)]
    assert [found[0][name] for name in names] == [found[1][name] for name in names]
    assert [found[0][name][0] for name in names] == [0, 0o100, 0]
    assert not verify(store).damaged  # the rights that reading took are given back


def entries_of(image: Image) -> list[Entry]:
    """What the lowest layer of an image has."""
    return list(read_entries(image.store.layer_directory(image.layers[0])))


def test_an_image_without_a_shell(tmp_path: Path, store: Store, base: bytes) -> None:
    program = static_busybox()
    assert program is not None, base[:0]
    with box_of(made(tmp_path, store, entry("cat", program, mode=0o755) + entry("f", b"content"))) as box:
        assert box.exec(["/cat", "/f"]).check().stdout == "content"
        with contextlib.suppress(MiniSandboxError):
            assert not box.exec("cat /f").ok
        assert box.files.read_text("/f") == "content"
        box.files.write_text("/g", "new")
        assert box.exec(["/cat", "/g"]).check().stdout == "new"


HOSTILE: dict[str, Callable[[Path], bytes]] = {
    "links in place of mount points": lambda outside: b"".join(
        link(name, str(outside)) for name in ("dev", "proc", "run", "tmp", "sys")
    ),
    "files in place of mount points": lambda _: b"".join(entry(name) for name in ("dev", "proc", "run", "tmp", "sys")),
    "a link in place of /etc": lambda outside: entry(".wh.etc") + link("etc", str(outside)),
    "links below /dev": lambda outside: folder("dev") + link("dev/shm", str(outside)) + link("dev/null", "/private"),
    "closed directories": lambda _: folder("./", mode=0o555) + folder("d", mode=0o000) + folder("tmp", mode=0o000),
    "links upwards": lambda _: link("up", "../../../../..") + link("proc", "../../../../proc"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_tree_makes_a_sandbox_like_any_other(tmp_path: Path, store: Store, base: bytes, case: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o777)
    with box_of(made(tmp_path, store, base, HOSTILE[case](outside))) as box:
        assert box.exec(
            "test -c /dev/null && test -d /proc/self && echo x > /tmp/x && echo y > /run/y && cat /etc/hosts"
        ).ok
        assert not box.exec(["ls", str(outside)]).ok
        assert box.exec("ls /up/ || true").ok
    assert not os.listdir(outside)


def test_an_image_is_used_by_the_command_line(tmp_path: Path, base: bytes) -> None:
    layout = MadeImage([base + END], {"Env": ["A=b"], "Cmd": ["sh", "-c", "a b"]}).write_layout(
        tmp_path / "layout", tags=["v1"]
    )
    environment = {**os.environ, "MINISANDBOX_STORE": str(tmp_path / "store")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "minisandbox", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    told = run("image", "pull", f"oci:{layout}:v1", "--name", "mine")
    assert told.returncode == 0, told.stderr
    assert "sandbox run --image mine" in told.stdout
    assert run("sandbox", "run", "--image", "mine", "--", "sh", "-c", "echo $A; exit 3").stdout == "b\n"
    assert run("sandbox", "run", "--image", "mine", "--", "sh", "-c", "exit 3").returncode == 3
    facts = json.loads(run("image", "show", "mine", "--json").stdout)
    assert facts["own_root"] is True
    assert facts["notes"]["reference"] == f"oci:{layout}:v1"
    assert "cmd: sh -c 'a b'\n" in run("image", "show", "mine").stdout
    missing = run("image", "pull", f"oci:{tmp_path}/none")
    assert missing.returncode == 28
    assert "none has no file 'index.json'" in missing.stderr
    assert run("image", "verify").returncode == 0


# --- real engines ----------------------------------------------------------------------------------------------------

SLOW, SLOW_WAYS = pytest.mark.slow, ("registry-zstd", "layout", "oci-archive")
SLOW_EXPORTS = ("registry-zstd", "layout", "zstd")
ENGINES = ("buildah", "skopeo", "podman", "docker-registry")
CONTAINERFILE = """
FROM scratch
ADD base.tar /
ENV GREETING=hello
RUN mkdir -p /data/deep /gone/deep && echo 1 > /data/deep/x && echo 2 > /data/y
RUN ln /data/y /data/hard && touch /gone/deep/z
RUN chown 1000:8 /data/y && chmod 6755 /bin/ls && rm -r /data/deep && ln -s ../data/y /d/link && rm /d/gone
RUN rm -r /gone /old && mkdir /old && echo new > /old/new && touch "/d/a name with spaces" && chmod 1777 /d
WORKDIR /data
USER app
"""
LIST = """
import hashlib, json, os, stat, sys
found = {}
for folder, names, files in os.walk(sys.argv[1]):
    for name in names + files + ["."]:
        path = os.path.join(folder, name)
        info = os.lstat(path)
        known = [stat.S_IFMT(info.st_mode), stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid]
        if stat.S_ISREG(info.st_mode):
            known += [hashlib.sha256(open(path, "rb").read()).hexdigest(), info.st_mtime_ns // 10**9]
        if stat.S_ISLNK(info.st_mode):
            known += [os.readlink(path)]
        names_ = [n for n in os.listxattr(path, follow_symlinks=False) if n.startswith(("user.", "security.cap"))]
        known += [{n: os.getxattr(path, n, follow_symlinks=False).hex() for n in names_ if ".overlay." not in n}]
        found[os.path.normpath(os.path.relpath(path, sys.argv[1]))] = known
json.dump(found, sys.stdout)
"""
CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")  # cap_net_bind_service+ep


def run(*words: object) -> str:
    """Run a program; return its output."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return str(done.stdout)


class Engine:
    """buildah and podman with a storage of their own, whose layers are plain directories."""

    def __init__(self, place: Path) -> None:
        self._options = ["--root", place / "root", "--runroot", place / "run", "--storage-driver", "vfs"]
        self.place = place
        (place / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')

    def buildah(self, *words: object) -> str:
        """Run buildah."""
        return run("buildah", *self._options, *words)

    def podman(self, *words: object) -> str:
        """Run podman."""
        return run("podman", *self._options, *words)

    def view(self, image: str) -> dict[str, object]:
        """The engine's own view of an image."""
        container = self.buildah("from", "--pull-never", image).strip()
        tree = self.buildah("mount", container).strip()
        found = json.loads(run(sys.executable, "-c", LIST, tree))
        self.buildah("umount", container)
        self.buildah("rm", container)
        return dict(found)


def our_view(image: Image) -> dict[str, object]:
    """What an overlay of an image's own layers shows, in a mount namespace that ends with the command."""
    lowers = ":".join(str(tree) for tree in reversed(image.spec().layers[:-1]))
    place = image.store.root / "staging"
    script = 'mount -t overlay overlay -o "ro,userxattr,lowerdir=$1:$2" /mnt && exec "$3" -c "$4" /mnt'
    empty = place / "empty-lower"
    empty.mkdir(exist_ok=True)
    try:
        found = json.loads(run("unshare", "--mount", "sh", "-c", script, "sh", lowers, empty, sys.executable, LIST))
    finally:
        empty.rmdir()
    return dict(found)


@contextlib.contextmanager
def registry(place: Path) -> Iterator[str]:
    """Debian's docker-registry on a free port; yields its host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{probe.getsockname()[1]}"
    storage = f"storage: {{filesystem: {{rootdirectory: {place}/registry}}}}"
    (place / "registry.yml").write_text(f"version: 0.1\nlog: {{level: error}}\n{storage}\nhttp: {{addr: {host}}}\n")
    with subprocess.Popen(["docker-registry", "serve", place / "registry.yml"], stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError), socket.create_connection(host.split(":"), 1):  # type: ignore[arg-type]
                    break
                time.sleep(0.05)
            yield host
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Real engines, or a skip that says which is missing."""
    missing = [name for name in ENGINES if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed here: {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("engines build as root here, and owners are compared")
    with tempfile.TemporaryDirectory(prefix="engine-") as place:  # podman: its runroot has 50 characters at most
        yield Engine(Path(place))


@pytest.fixture(scope="module")
def built(engine: Engine, base: bytes) -> str:
    """An image of several layers that buildah built."""
    context = engine.place / "context"
    context.mkdir()
    tree = context / "tree"
    tree.mkdir()
    (context / "raw.tar").write_bytes(base + END)
    run("tar", "-C", tree, "-xf", context / "raw.tar")
    os.setxattr(tree / "bin/busybox", "security.capability", CAPABILITY)
    run("tar", "-C", tree, "--format=pax", "--xattrs", "--xattrs-include=*", "-cf", context / "base.tar", ".")
    shutil.rmtree(tree)
    (context / "raw.tar").unlink()
    (context / "Containerfile").write_text(CONTAINERFILE)
    engine.buildah("bud", "--isolation", "chroot", "--layers", "-q", "-t", "localhost/app:1", context)
    return "localhost/app:1"


def copied(engine: Engine, image: str, target: str, *options: str) -> str:
    """Copy an image with skopeo; return where it is."""
    saved = engine.place / "copied.tar"
    if not saved.exists():
        engine.podman("save", "--format", "oci-archive", "-o", saved, image)
    run("skopeo", "--policy", engine.place / "policy.json", "copy", "-q", *options, f"oci-archive:{saved}", target)
    return target


@pytest.mark.once
@pytest.mark.parametrize("way", ["registry", "docker-archive", *(pytest.param(way, marks=SLOW) for way in SLOW_WAYS)])
def test_an_engines_image_is_the_same_here(engine: Engine, built: str, tmp_path: Path, way: str) -> None:
    store = Store.open(tmp_path / "store")
    with contextlib.ExitStack() as stack:
        if way.startswith("registry"):
            host = stack.enter_context(registry(tmp_path))
            packed = ["--dest-compress-format", "zstd"] if way.endswith("zstd") else []
            copied(engine, built, f"docker://{host}/team/app:1", "--dest-tls-verify=false", *packed)
            image = pull(f"{host}/team/app:1", store=store)
        elif way == "layout":
            copied(engine, built, f"oci:{tmp_path}/layout:v1")
            image = pull(f"oci:{tmp_path}/layout:v1", store=store)
        else:
            engine.podman("save", "--format", way, "-o", tmp_path / "saved.tar", built)
            image = pull(f"{way}:{tmp_path}/saved.tar", store=store)
    theirs, ours = engine.view(built), our_view(image)
    theirs.pop("."), ours.pop(".")  # layers of these engines do not describe the root; its mode is theirs to choose
    assert ours == theirs
    assert len(ours) > 30
    assert image.notes["user"] == "app"
    with box_of(image) as box:
        done = box.exec('echo $GREETING; pwd; id -un; cat /old/new; stat -c "%u:%g %a" /data/y /bin/ls; ls /d')
        assert done.check().stdout == "hello\n/data\napp\nnew\n1000:8 644\n0:0 6755\na name with spaces\nkept\nlink\n"


def taken_by(engine: Engine, image: Image, way: str, place: Path) -> str:
    """Have the engine take an image that we export or push; return what it is called there."""
    name, skopeo = "localhost/back:latest", ("skopeo", "--policy", engine.place / "policy.json", "copy", "-q")
    path = place / ("back" if way == "layout" else "back.tar")
    if way.startswith("registry"):
        with registry(place) as host:
            compression = "zstd" if way.endswith("zstd") else "gzip"
            push("back", f"{host}/team/back:1", store=image.store, compression=compression)
            assert push("back", f"{host}/team/back:2", store=image.store, compression=compression).sent == 0
            run(*skopeo, "--src-tls-verify=false", f"docker://{host}/team/back:1", f"oci-archive:{path}:back:latest")
    else:
        export_images(image.store, ["back"], path, compression="zstd" if way == "zstd" else "gzip")
    if way == "layout":
        run(*skopeo, f"oci:{path}:back:latest", f"docker-archive:{place}/layout.tar:{name}")
        path = place / "layout.tar"
    engine.podman("load", "-i", path)
    return name


@pytest.mark.once
@pytest.mark.parametrize(
    "way", ["archive", "registry", *(pytest.param(way, marks=SLOW) for way in ("layout", "zstd", "registry-zstd"))]
)
def test_an_image_of_ours_is_the_same_in_an_engine(engine: Engine, built: str, tmp_path: Path, way: str) -> None:
    engine.podman("save", "--format", "oci-archive", "-o", tmp_path / "saved.tar", built)
    image = pull(f"oci-archive:{tmp_path}/saved.tar", store=Store.open(tmp_path / "store"), name="back")
    back = taken_by(engine, image, way, tmp_path)
    try:
        theirs, ours = engine.view(built), engine.view(back)
        theirs.pop("."), ours.pop(".")
        assert ours == theirs
        (before,), (after,) = (json.loads(engine.podman("inspect", name)) for name in (built, back))
        assert {name: before["Config"].get(name) for name in ("Env", "User", "WorkingDir", "Cmd")} == {
            name: after["Config"].get(name) for name in ("Env", "User", "WorkingDir", "Cmd")
        }
    finally:
        engine.podman("rmi", "--force", back)


DEBIAN = """
FROM scratch
ADD base.tar /
RUN useradd --create-home --uid 1234 app && apt-get clean && rm -rf /usr/share/doc/apt /var/lib/apt/lists
RUN mkdir /testbed && echo 'print 6 * 7' > /testbed/answer.pl && chown -R app /testbed
RUN rm -rf /etc/apt && mkdir /etc/apt
WORKDIR /testbed
"""


@pytest.mark.once
@pytest.mark.slow
def test_a_debian_image_is_the_same_here(engine: Engine, tmp_path: Path) -> None:
    if shutil.which("debootstrap") is None:
        pytest.skip("debootstrap is not installed here")
    context = tmp_path / "context"
    context.mkdir()
    command = ["unshare", "--mount", "debootstrap", "--variant=minbase", "bookworm", str(tmp_path / "root")]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("debootstrap fails here: no Debian mirror can be reached")
    run("tar", "-C", tmp_path / "root", "--format=pax", "--exclude=./dev/*", "-cf", context / "base.tar", ".")
    shutil.rmtree(tmp_path / "root")
    (context / "Containerfile").write_text(DEBIAN)
    engine.buildah("bud", "--isolation", "chroot", "--layers", "-q", "-t", "localhost/debian:1", context)
    engine.podman("save", "-o", tmp_path / "saved.tar", "localhost/debian:1")
    image = pull(f"docker-archive:{tmp_path}/saved.tar", store=Store.open(tmp_path / "store"))
    theirs, ours = engine.view("localhost/debian:1"), our_view(image)
    theirs.pop("."), ours.pop(".")
    assert ours == theirs
    assert len(ours) > 5000
    with box_of(image) as box:
        assert box.exec("perl answer.pl; stat -c %U answer.pl; ls /etc/apt").check().stdout == "42app\n"
        assert box.exec("useradd other && su other -c 'id -un' && dpkg --audit").check().stdout == "other\n"
        assert box.exec("echo x > new && stat -c %U new", user="app").check().stdout == "app\n"

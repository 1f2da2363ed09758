"""Container engines as a backend: what the conformance suite does not say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from tests.engines import in_engine
from tests.waiting import until

from minisandbox.errors import SandboxCreationError, SandboxGone, Unsupported
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.engines import runtime
from minisandbox.sandbox.engines.client import LABEL, Client
from minisandbox.types import ImageSpec, Mount, Network

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

_OWNER = """
import json, sys
from pathlib import Path, PurePosixPath
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec
name, layers, backend = json.loads(sys.argv[1])
box = Sandbox.create(ImageSpec(name, tuple(map(Path, layers)), backend=backend))
print(box.id, flush=True)
box.exec("sleep 300")
"""


@pytest.fixture(params=["podman", "docker"])
def image(request: pytest.FixtureRequest, spec: ImageSpec) -> ImageSpec:
    """The smallest image, in an engine."""
    return in_engine(request.param, spec)


@pytest.fixture
def client(image: ImageSpec) -> Client:
    return Client.find(image.backend)


def containers(client: Client) -> list[str]:
    """Names of our containers, those that have ended included."""
    return client.run("ps", "--all", "--filter", f"label={LABEL}=container", "--format", "{{.Names}}").split()


def test_a_stopped_sandbox_leaves_nothing(image: ImageSpec, client: Client) -> None:
    with Sandbox.create(image) as box:
        assert box.exec("sleep 300 & echo started").check().stdout == "started\n"
        assert box.id in containers(client)
    assert box.id not in containers(client)


def test_a_killed_owner_leaves_nothing(image: ImageSpec, client: Client) -> None:
    given = json.dumps([image.name, list(map(str, image.layers)), image.backend])
    with subprocess.Popen([sys.executable, "-c", _OWNER, given], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        assert name in containers(client)
        owner.kill()
    until(lambda: name not in containers(client))


def test_a_container_that_cannot_start_leaves_nothing(
    image: ImageSpec, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "COMMAND", ("/missing", *runtime.COMMAND[1:]))
    with pytest.raises(SandboxCreationError, match="missing"):
        Sandbox.create(image, labels={"test": "cannot-start"})
    assert not client.run("ps", "--all", "--quiet", "--filter", "label=test=cannot-start")


def test_a_container_removed_from_outside_is_gone(image: ImageSpec, client: Client) -> None:
    with Sandbox.create(image) as box:
        client.run("rm", "--force", box.id)
        with pytest.raises(SandboxGone):
            box.exec("true")
        assert not box.alive


def test_a_command_in_a_container_that_ends_has_no_result(image: ImageSpec, client: Client) -> None:
    """It would look like a command that was killed, and so like a verdict."""
    with Sandbox.create(image) as box, box.start("echo on; sleep 300") as process:
        next(process.events())
        client.run("kill", box.id)
        with pytest.raises(SandboxGone):
            process.wait(60)


def test_what_an_engine_cannot_do_is_refused(image: ImageSpec, tmp_path: Path) -> None:
    with Sandbox.create(image) as box:
        for refused in (box.snapshot, box.fork, box.reset, box.changes):
            with pytest.raises(Unsupported, match="leave out the backend"):
                refused()
        with pytest.raises(Unsupported):
            box.start("sleep 300", lifetime="sandbox")
    with pytest.raises(Unsupported):
        Sandbox.create(image, network=Network.allow("example.org"))
    with pytest.raises(Unsupported):
        Sandbox.create(image, upper=tmp_path)


def test_mounts_are_read_only_and_the_network_is_off(image: ImageSpec, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hidden")
    tmp_path.chmod(0o755)
    with Sandbox.create(image, mounts=[Mount(tmp_path, PurePosixPath("/hidden"))]) as box:
        assert box.files.read_text("/hidden/file") == "hidden"
        assert not box.exec("echo forged > /hidden/file").ok
        assert not box.exec("echo forged > /.minisandbox/linker").ok
        assert box.exec("cat /proc/net/dev").check().stdout.count(":") == 1


def test_the_runtime_needs_no_python_inside(image: ImageSpec, client: Client, own_root: ImageSpec) -> None:
    with Sandbox.create(replace(own_root, backend=image.backend)) as box:
        assert not box.exec("command -v python3").ok
        assert box.exec("echo ready").check().stdout == "ready\n"


@pytest.fixture
def own_root(tmp_path: Path) -> ImageSpec:
    """An image with a root of its own: a static-like shell with its libraries, and tar."""
    root = tmp_path / "layer"
    for program in ("/bin/bash", "/bin/tar"):
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for word in [program, *(word for word in listed.split() if word.startswith("/"))]:
            target = root / word[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(Path(word).read_bytes())
            target.chmod(0o755)
    os.symlink("bash", root / "bin/sh")
    for name in ("etc", "tmp", "dev", "proc", "run", "testbed", "usr"):
        (root / name).mkdir(exist_ok=True)
    tmp_path.chmod(0o755)
    return ImageSpec("own-root", (root,), (("PATH", "/bin"),), PurePosixPath("/testbed"), host_usr=False)


def test_a_remote_engine_gets_copies(
    image: ImageSpec, own_root: ImageSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "remote", True)
    (tmp_path / "file").write_text("hidden")
    with pytest.raises(Unsupported, match="remote engine lacks"):
        Sandbox.create(image)
    mounts = [Mount(tmp_path / "file", PurePosixPath("/testbed/deep/file"))]
    with Sandbox.create(replace(own_root, backend=image.backend), mounts=mounts) as box:
        assert box.files.read_text("deep/file") == "hidden"

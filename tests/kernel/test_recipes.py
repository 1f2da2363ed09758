"""Images of a base and steps: container images of which nothing is asked, made by hand; stages; scratch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath

import pytest
from tests.kernel.test_container_images import APPLETS, static_busybox
from tests.unit.oci_tools import END, MadeImage, entry, folder, hard_link
from tests.unit.private_server import make_authority, serve_files

from minisandbox import Sandbox, certificates
from minisandbox.errors import BuildError, InvalidValue
from minisandbox.images import Image, StepState, build, build_all
from minisandbox.images.progress import BuildEvent
from minisandbox.sandbox.controller import current_controller
from minisandbox.spec import (
    Buildable,
    CheckOut,
    CutHistory,
    HiddenTests,
    HostBase,
    Install,
    LocalSource,
    OciBase,
    Recipe,
    Run,
    ScratchBase,
    StageBase,
    Step,
)
from minisandbox.store import Store
from minisandbox.tasks.recipe_file import read_recipe

pytestmark = pytest.mark.kernel

WORKDIR = PurePosixPath("/work")
SECRET = b"assert answer() == 42  # nobody may read this before\n"
BUG = "--- a/code.py\n+++ b/code.py\n@@ -1,2 +1,2 @@\n def answer():\n-    return 42\n+    return 41\n"
TASK: tuple[Step, ...] = (HiddenTests(("test_code.py",)), CutHistory(BUG, ("test_code.py",)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


@pytest.fixture
def source(tmp_path: Path) -> LocalSource:
    """A project with a hidden test."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "code.py").write_text("def answer():\n    return 42\n")
    (root / "test_code.py").write_bytes(SECRET)
    return LocalSource(root)


@pytest.fixture
def bare(tmp_path: Path) -> OciBase:
    """A container image with neither a shell nor any other program: two files, one a copy of a hidden test."""
    tar = folder("etc") + entry("etc/name", b"bare") + folder("opt") + entry("opt/copy", SECRET)
    made = MadeImage([tar + END], {"Env": ["GREETING=hello"]}).write_layout(tmp_path / "bare")
    return OciBase(f"oci:{made}")


@pytest.fixture
def small(tmp_path: Path) -> OciBase:
    """A container image with busybox, and nothing of git, bash or find."""
    program = static_busybox()
    if program is None:
        pytest.skip("no static busybox here (Debian's package is busybox-static)")
    tar = (
        folder("bin") + entry("bin/busybox", program, mode=0o755)
        + b"".join(hard_link(f"bin/{name}", "bin/busybox") for name in APPLETS)
        + folder("etc") + entry("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n") + folder("root", mode=0o700)
    )  # fmt: skip
    config = {"Env": ["GREETING=hello", "PATH=/bin"], "WorkingDir": "/srv", "Entrypoint": ["/bin/echo"]}
    return OciBase(f"oci:{MadeImage([tar + END], config).write_layout(tmp_path / 'small')}")


def _objects(box: Sandbox) -> list[str]:
    return [one.path.name for one in box.files.list(WORKDIR / ".git/objects/pack") if one.path.suffix == ".pack"]


def _hidden(image: Image) -> dict[str, bytes]:
    folder = image.tests_dir()
    assert folder is not None
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_task_over_an_image_without_any_program(store: Store, bare: OciBase, source: LocalSource) -> None:
    image = build(Recipe(bare, (CheckOut(source), *TASK), workdir=WORKDIR), store=store, name="task")
    assert image.own_root
    assert len(image.commit) == 40
    assert _hidden(image) == {"test_code.py": SECRET}
    with Sandbox.create(image.spec()) as box:
        assert "return 41" in box.files.read_text(WORKDIR / "code.py")
        assert not box.files.exists(WORKDIR / "test_code.py")
        assert not box.files.exists("/opt/copy"), "a copy of a hidden file was left"
        assert box.files.read_text("/etc/name") == "bare"
        assert image.commit in box.files.read_text(WORKDIR / ".git/packed-refs")
        assert len(_objects(box)) == 1
        assert not box.files.exists("/usr"), "the host's /usr is nobody's"
    assert dict(image.environment)["GREETING"] == "hello"


def test_a_task_over_an_image_with_a_shell_alone(store: Store, small: OciBase, source: LocalSource) -> None:
    steps = (
        Run(("/bin/sh", "-c", "echo $GREETING $MORE > made; pwd > where"), (("MORE", "you"),), PurePosixPath("/root")),
        CheckOut(source),
        Install(("echo installed > built", "mkdir .git && echo x > .git/config"), network="off"),
        *TASK,
    )
    image = build(Recipe(small, steps, workdir=WORKDIR), store=store, name="task")
    with Sandbox.create(image.spec()) as box:
        assert box.exec("cat /root/made /root/where", cwd="/").stdout == "hello you\n/root\n"
        assert not box.files.list("/tmp"), "what a build writes for itself stays outside"
        assert box.exec("cat built && ls && pwd").stdout == "installed\nbuilt\ncode.py\n/work\n"
        assert "x\n" not in box.files.read_text(WORKDIR / ".git/config")
    assert image.config["Entrypoint"] == ["/bin/echo"]


def test_the_base_gives_workdir_environment_and_key(store: Store, small: OciBase, tmp_path: Path) -> None:
    run = Run(("/bin/sh", "-c", "pwd > /made"))
    first = build(Recipe(small, (run,)), store=store, name="first")
    assert first.workdir == PurePosixPath("/srv")
    events: list[BuildEvent] = []
    again = build(Recipe(small, (run,)), store=store, name="again", progress=events.append)
    assert again.key == first.key
    assert {event.state for event in events} == {StepState.CACHED}
    other = build(Recipe(small, (Run(("/bin/sh", "-c", "true")),)), store=store, name="other")
    assert other.layers[:-1] == first.layers[:-1]
    assert other.key != first.key


def test_a_layout_that_changed_is_another_base(store: Store, tmp_path: Path, source: LocalSource) -> None:
    places = [tmp_path / "layout", tmp_path / "newer"]
    for number, place in enumerate(places):
        MadeImage([entry("version", b"%d" % number) + END]).write_layout(place)
    recipe = Recipe(OciBase(f"oci:{places[0]}"), (CheckOut(source),), workdir=WORKDIR)
    old = build(recipe, store=store, name="x")
    shutil.rmtree(places[0])
    places[1].rename(places[0])
    new = build(recipe, store=store, name="x")
    assert old.key != new.key
    with Sandbox.create(new.spec()) as box:
        assert box.files.read_text("/version") == "1"


def test_stages_share_their_layers(store: Store, small: OciBase) -> None:
    stage = Recipe(small, (Run(("touch", "/one")),), environment=(("STAGE", "1"),), config={"Cmd": ["ls"]})
    alone = build(stage, store=store, name="alone")
    image = build(Recipe(StageBase(stage), (Run(("sh", "-c", "echo $STAGE > /two")),)), store=store, name="both")
    assert image.layers[: len(alone.layers)] == alone.layers
    assert image.config["Cmd"] == ["ls"]
    with Sandbox.create(image.spec()) as box:
        assert box.files.read_text("/two") == "1\n"


def test_scratch_has_mount_points_alone(store: Store, source: LocalSource) -> None:
    image = build(Recipe(ScratchBase(), (CheckOut(source),), workdir=WORKDIR), store=store, name="scratch")
    with Sandbox.create(image.spec()) as box:
        names = {found.path.name for found in box.files.list("/")}
    assert names == {"dev", "etc", "proc", "run", "sys", "tmp", "work"}


def test_a_command_that_fails_names_its_step(store: Store, small: OciBase) -> None:
    with pytest.raises(BuildError, match=r"'run' of image 'x' failed.*exit status 3") as failed:
        build(Recipe(small, (Run(("/bin/sh", "-c", "echo why; exit 3")),)), store=store, name="x")
    assert "why" in (failed.value.reason or "")


def test_a_repository_behind_a_link_is_refused(store: Store, small: OciBase, source: LocalSource) -> None:
    steps = (Run(("ln", "-s", "/root", "/work")), CheckOut(source), Install(("true",), network="off"))
    image = build(Recipe(small, steps, workdir=WORKDIR), store=store, name="covered")
    assert image.workdir == WORKDIR, "the layer of a source covers what is there"
    aside = (CheckOut(source), Install(("cd / && rm -rf /work && ln -s /root /work",), network="off"))
    with pytest.raises(BuildError, match="tidy") as failed:
        build(Recipe(small, aside, workdir=WORKDIR), store=store, name="moved")
    assert "/work is a link" in (failed.value.reason or "")


def test_recipes_of_all_kinds_are_built_together(store: Store, bare: OciBase, source: LocalSource) -> None:
    recipes: dict[str, Callable[[], Buildable]] = {
        name: partial(Recipe, bare, (CheckOut(source), *steps), workdir=WORKDIR)
        for name, steps in (("plain", ()), ("task", TASK))
    }
    built = build_all(recipes, store=store)
    assert not built.failures
    assert set(built.images) == {"plain", "task"}


def test_a_recipe_file_names_a_base_and_steps(
    store: Store, small: OciBase, source: LocalSource, tmp_path: Path
) -> None:
    path = tmp_path / "image.toml"
    path.write_text(
        f'base = "{small.reference}"\nworkdir = "/work"\ninstall = ["echo done > built"]\nnetwork = "off"\n'
        f'[source.local]\npath = "{source.path}"\n[environment]\nSHOWN = "1"\n'
        '[[step]]\nrun = "echo $GREETING > /greeting"\n[[step]]\nrun = ["touch", "/listed"]\nworkdir = "/root"\n'
    )
    image = build(read_recipe(path), store=store, name="file")
    with Sandbox.create(image.spec()) as box:
        assert box.exec("cat /greeting built; echo $SHOWN; ls /listed").stdout == "hello\ndone\n1\n/listed\n"
        assert box.files.exists(WORKDIR / ".git")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "debian"\npython = "3.11"\n', "need its /usr"),
        ('base = "debian"\n[[step]]\nrun = 3\n', "step 1.*run"),
        ('base = "debian"\n[[step]]\nrun = "x"\nwrong = 1\n', "step 1.*wrong"),
        ('base = "debian"\nstep = 3\n', "step"),
        ('base = "debian"\n[[step]]\nrun = "x"\nnetwork = "moon"\n', "step 1.*moon"),
        ('workdir = "/x"\n', "workdir"),
    ],
)
def test_a_wrong_recipe_file_names_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "image.toml"
    path.write_text(text)
    with pytest.raises(InvalidValue, match=message):
        read_recipe(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="with one id, every file is the user's own")
def test_owners_of_an_image_stay_and_steps_run_as_its_users(store: Store, tmp_path: Path, source: LocalSource) -> None:
    program = static_busybox()
    if program is None:
        pytest.skip("no static busybox here (Debian's package is busybox-static)")
    tar = (
        folder("bin") + entry("bin/sh", program, mode=0o755) + folder("etc") + entry("etc/shadow", b"x", gid=42)
        + entry("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::/home:/bin/sh\n")
        + folder("home", uid=1000, gid=1000)
    )  # fmt: skip
    base = OciBase(f"oci:{MadeImage([tar + END]).write_layout(tmp_path / 'owned')}")
    steps = (
        Run(("/bin/sh", "-c", "echo mine > /home/made"), (("PATH", "/bin"),), user="app"),
        Run(("/bin/sh", "-c", "echo more >> /etc/shadow")),
        CheckOut(source),
        CutHistory(),
    )
    if not current_controller().launcher.ids > 1:
        pytest.skip("this machine gives root no range of ids")
    image = build(Recipe(base, steps, workdir=WORKDIR), store=store, name="owned")
    with Sandbox.create(image.spec()) as box:
        made, shadow = box.files.stat("/home/made"), box.files.stat("/etc/shadow")
    assert (made.uid, made.gid) == (1000, 1000)
    assert shadow.gid == 42


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_steps_on_the_hosts_network_trust_what_the_host_trusts(
    store: Store, source: LocalSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = make_authority(tmp_path)
    for name in certificates.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CERT", "/nonexistent")  # before that of /etc/pip.conf
    monkeypatch.setattr(certificates, "SYSTEM", (str(authority),))
    with serve_files(source.path, authority) as address:
        read = f"/usr/bin/env python3 -c \"import urllib.request; urllib.request.urlopen('{address}/code.py')\""
        steps = (CheckOut(source), Install((read,), network="host"))
        build(Recipe(HostBase(), steps, workdir=WORKDIR), store=store, name="private")

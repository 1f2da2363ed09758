"""The store beside running sandboxes and builds: what is in use stays; images travel and behave the same."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.store_tools import frozen_keys

from minisandbox.errors import NotFound, StoreError
from minisandbox.images import build, export_images, host_image, import_images, load_image
from minisandbox.sandbox import Sandbox
from minisandbox.spec import LocalSource, PythonRecipe
from minisandbox.store import Store
from minisandbox.store.blobs.freezing import freeze
from minisandbox.store.collect import collect
from minisandbox.store.leases import in_use, use_of
from minisandbox.store.overview import ImageStatus, image_rows
from minisandbox.store.verify import verify

pytestmark = pytest.mark.kernel

COLLECT = """
import sys
from minisandbox.store import Store
from minisandbox.store.collect import collect, remove_images
store = Store.open(sys.argv[1])
if len(sys.argv) > 2:
    remove_images(store, sys.argv[2:])
done = collect(store, budget=0, unused_for=0, grace=0)
print(len(done.images), len(done.layers), len(done.spared))
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def collect_elsewhere(store: Store, *remove: str) -> list[int]:
    """Collect everything, in another process: images, layers, and layers that are spared."""
    command = [sys.executable, "-c", COLLECT, str(store.root), *remove]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_layers_of_a_live_sandbox_are_never_removed(store: Store) -> None:
    image = host_image(store)
    layer = store.layer_directory(image.layers[-1])
    with Sandbox.create(image.spec()) as box:
        assert in_use(layer)
        assert [row.in_use for row in image_rows(store)] == [True]
        assert collect_elsewhere(store) == [0, 0, 0]
        assert collect_elsewhere(store, image.name) == [0, 0, 1], "its record went, by name; its layer is in use"
        assert store.has_layer(image.layers[-1])
        assert box.exec("cat /etc/passwd | head -1; ls /etc | wc -l").check().stdout.startswith("root:")
        with box.snapshot() as snapshot:
            box.stop()
            assert collect_elsewhere(store) == [0, 0, 1], "a sandbox can be made over the snapshot"
            with Sandbox.create(snapshot) as again:
                assert again.exec("cat /etc/passwd").check().stdout.startswith("root:")
    assert not in_use(layer)
    assert use_of(layer, 0.0).count == 2
    assert collect_elsewhere(store) == [0, 1, 0]


def test_forks_and_resets_hold_what_they_need(store: Store) -> None:
    image = host_image(store)
    layer = store.layer_directory(image.layers[-1])
    with Sandbox.create(image.spec()) as box:
        child = box.fork(1)[0]
        box.reset()
    assert in_use(layer)
    child.stop()
    assert not in_use(layer)


def test_a_sandbox_over_what_has_gone_is_refused(store: Store) -> None:
    spec = host_image(store).spec()
    assert collect_elsewhere(store) == [1, 1, 0]
    with pytest.raises(NotFound, match="is not in the store") as caught:
        Sandbox.create(spec)
    assert "build" in str(caught.value.hint)


def test_many_sandboxes_cost_one_descriptor_for_each_layer(store: Store) -> None:
    spec = host_image(store).spec()
    root = str(store.root)

    def held() -> int:
        links = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                links.append(os.readlink(f"/proc/self/fd/{name}"))
        return sum(link.startswith(root) for link in links)

    with Sandbox.create(spec), Sandbox.create(spec), Sandbox.create(spec):
        assert held() == 1
    assert held() == 0


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "data").mkdir(parents=True)
    (root / "check.sh").write_text("#!/bin/sh\nset -e\ngrep -q right data/answer\nexit 3\n")
    (root / "check.sh").chmod(0o755)
    (root / "data/answer").write_text("right\n")
    (root / "link").symlink_to("data/answer")
    return root


OUTCOME = (
    "git status --porcelain; git log --format=%H; ./check.sh; echo $?; cat link; "
    "find . -path ./.git -prune -o -printf '%p %m %y %l\\n' | sort"
)


def outcome(store: Store, name: str) -> str:
    with Sandbox.create(load_image(store, name).spec()) as box:
        return box.exec(OUTCOME, timeout=60).check().stdout


@pytest.mark.slow
def test_an_image_behaves_the_same_wherever_it_travels(store: Store, project: Path, tmp_path: Path) -> None:
    build(PythonRecipe(source=LocalSource(project)), store=store, name="mine")
    before = outcome(store, "mine")
    assert "\n3\nright\n" in before
    export_images(store, ["mine"], tmp_path / "mine.tar", private=True)
    other = Store.open(tmp_path / "far/away")
    import_images(tmp_path / "mine.tar", store=other, private=True)
    third = Store.open(tmp_path / "third")
    export_images(other, ["mine"], tmp_path / "mine", private=True, compression="zstd")
    import_images(tmp_path / "mine", store=third, private=True)
    for each in (other, third):
        assert outcome(each, "mine") == before
        assert verify(each, full=True).damaged == ()
        build(PythonRecipe(source=LocalSource(project)), store=each, name="again")
        assert [row.status for row in image_rows(each)] == [ImageStatus.READY, ImageStatus.READY]
        assert len(each.layer_keys()) == len(store.layer_keys()), "what was imported is what a build would make"


def test_a_damaged_layer_is_built_again_by_its_next_use(store: Store, project: Path) -> None:
    recipe = PythonRecipe(source=LocalSource(project))
    image = build(recipe, store=store, name="mine")
    answer = next(path for key in image.layers if (path := store.layer_tree(key) / "testbed/data/answer").exists())
    answer.chmod(0o644)
    answer.write_text("wrong!\n")
    assert len(verify(store).damaged) >= 1
    assert [row.status for row in image_rows(store)] == [ImageStatus.BROKEN]
    with pytest.raises(NotFound, match="is not in the store"):
        load_image(store, "mine").spec()
    build(recipe, store=store, name="mine")
    assert "\nright\n" in outcome(store, "mine")
    assert verify(store, full=True).damaged == ()
    assert collect(store, grace=0).leftovers


# --- frozen ----------------------------------------------------------------------------------------------------------

RUN = """
import sys
from minisandbox.images import load_image
from minisandbox.sandbox import Sandbox
from minisandbox.store import Store
with Sandbox.create(load_image(Store.open(sys.argv[1]), "mine").spec()) as box:
    print(box.exec("git status --porcelain; cat link").check().stdout)
"""


@pytest.mark.slow
def test_a_sandbox_of_a_frozen_image_thaws_it(store: Store, project: Path) -> None:
    build(PythonRecipe(source=LocalSource(project)), store=store, name="mine")
    before = outcome(store, "mine")
    spec = load_image(store, "mine").spec()
    with Sandbox.create(spec):
        assert freeze(store, ["mine"]).layers == [], "somebody uses all of them"
    freeze(store, ["mine"])
    assert len(frozen_keys(store)) == len(store.layer_keys())
    with Sandbox.create(spec) as box:  # of a specification from before it was frozen
        assert box.exec("cat link").check().stdout == "right\n"
    assert frozen_keys(store) == []
    assert outcome(store, "mine") == before
    assert verify(store, full=True).damaged == ()


def test_what_is_built_over_frozen_layers_thaws_them(store: Store, project: Path) -> None:
    build(PythonRecipe(source=LocalSource(project)), store=store, name="mine")
    freeze(store, ["mine"])
    build(PythonRecipe(source=LocalSource(project)), store=store, name="again")
    assert len(frozen_keys(store)) == len(store.layer_keys()), "all of it is there"
    build(PythonRecipe(source=LocalSource(project), install=("touch made",)), store=store, name="more")
    assert "./made" in outcome(store, "more")
    assert verify(store, full=True).damaged == ()


def test_several_processes_want_a_frozen_image(store: Store, project: Path) -> None:
    build(PythonRecipe(source=LocalSource(project)), store=store, name="mine")
    freeze(store, ["mine"])
    command = [sys.executable, "-c", RUN, str(store.root)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [each.communicate(timeout=120) for each in running]
    assert [(each.returncode, out.strip()) for each, (out, _) in zip(running, said, strict=True)] == [(0, "right")] * 3
    assert frozen_keys(store) == []
    assert verify(store, full=True).damaged == ()


def test_a_damaged_blob_costs_a_build(store: Store, project: Path) -> None:
    recipe = PythonRecipe(source=LocalSource(project))
    build(recipe, store=store, name="mine")
    before = outcome(store, "mine")
    freeze(store, ["mine"])
    for blob in (store.root / "blobs").iterdir():
        data = bytearray(blob.read_bytes())
        data[-20] ^= 1
        blob.write_bytes(data)
    with pytest.raises(StoreError, match="build or pull its images again"):
        outcome(store, "mine")
    verify(store, full=True)
    build(recipe, store=store, name="mine")
    assert outcome(store, "mine") == before
    assert verify(store, full=True).damaged == ()


@pytest.mark.slow
def test_the_command_line_freezes(store: Store, project: Path) -> None:
    build(PythonRecipe(source=LocalSource(project)), store=store, name="mine")

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "minisandbox", "image", *arguments]
        settings = {**os.environ, "MINISANDBOX_STORE": str(store.root)}
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "frozen: image mine" in run("gc", "--unused-for", "0s", "--grace", "0s", "--freeze", "--dry-run")
    assert "frozen" not in run("gc", "--unused-for", "1h", "--grace", "0s", "--freeze")
    assert "frozen: image mine" in run("gc", "--unused-for", "0s", "--grace", "0s", "--freeze")
    assert "ready, frozen" in run("ls")
    assert ", frozen" in run("show", "mine")
    assert "frozen" in run("ls", "--sizes")
    assert "0 layers damaged" in run("verify", "--full")

"""Many images at once: what they share is made once, one that fails costs the others nothing, Ctrl-C loses nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from minisandbox.errors import BuildError, InvalidValue, NotFound, SourceError
from minisandbox.images import Budget, BuildEvent, StepState, build, build_all, list_images, repair
from minisandbox.images.repair import forget_manual_layers, images_by_hand
from minisandbox.sandbox import Sandbox
from minisandbox.spec import LocalSource, PythonRecipe
from minisandbox.store import Store
from minisandbox.values import GiB

pytestmark = pytest.mark.kernel


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    (root / "a.py").write_text("x = 1\n")
    return root


def _patch(value: int) -> str:
    return f"--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x = 1\n+x = {value}\n"


def _recipes(project: Path, count: int, *install: str) -> dict[str, Callable[[], PythonRecipe]]:
    def recipe(number: int) -> Callable[[], PythonRecipe]:
        return lambda: PythonRecipe(source=LocalSource(project), install=install, patch=_patch(number + 10))

    return {f"task-{number}": recipe(number) for number in range(count)}


def _staged(store: Store) -> list[str]:
    return [name for name in os.listdir(store.root / "staging") if not name.startswith(".")]


def test_shared_steps_are_made_once(store: Store, project: Path) -> None:
    events: list[BuildEvent] = []
    remaining: list[str] = []
    built = build_all(
        _recipes(project, 4, "date +%N > /testbed/when"), store=store, budget=Budget(jobs=4), progress=events.append,
        on_remaining=remaining.append,
    )  # fmt: skip
    assert list(built.images) == [f"task-{number}" for number in range(4)]
    assert not built.failures
    finished = sorted(event.step for event in events if event.state is StepState.FINISHED)
    assert finished == ["base", "install", "repository", "source", *["task"] * 4]
    assert len({image.layers[:-1] for image in built.images.values()}) == 1
    assert len({image.commit for image in built.images.values()}) == 4
    assert (remaining[0], remaining[-1]) == ("step 1 of 7", "")
    events.clear()
    again = build_all(_recipes(project, 4, "date +%N > /testbed/when"), store=store, progress=events.append)
    assert again.images == built.images
    assert [event.step for event in events if event.state is not StepState.CACHED] == []


def test_a_shared_step_that_fails_is_each_images_failure(store: Store, project: Path) -> None:
    built = build_all(_recipes(project, 2, "exit 3"), store=store)
    again = build_all(_recipes(project, 2, "exit 3"), store=store, retry_failed=False)
    for failures in (built.failures, again.failures):
        assert [re.findall(r"task-\d", error.what) for error in failures.values()] == [["task-0"], ["task-1"]]


def test_independent_steps_run_side_by_side(store: Store, project: Path, tmp_path: Path) -> None:
    """Each install waits until the other has begun: one after the other they would hang."""
    recipes: dict[str, Callable[[], PythonRecipe]] = {}
    began: set[str] = set()
    both = threading.Event()

    def tell(event: BuildEvent) -> None:
        if event.step == "install" and event.state is StepState.STARTED:
            began.add(event.image)
            if len(began) == 2:
                both.set()
            assert both.wait(30), "the other install does not begin"

    for name in ("one", "two"):
        recipes[name] = lambda name=name: PythonRecipe(source=LocalSource(project), install=(f"echo {name}",))  # type: ignore[misc]
    built = build_all(recipes, store=store, budget=Budget(jobs=2), progress=tell)
    assert set(built.images) == {"one", "two"}


def test_a_budget_of_memory_bounds_steps_and_how_many_run() -> None:
    assert Budget(jobs=8, memory=8 * GiB).workers == 2
    assert Budget(jobs=8, memory=GiB).workers == 1
    assert Budget(jobs=8, memory=GiB).step_memory == GiB
    assert Budget(jobs=1, memory=64 * GiB).workers == 1
    assert Budget(jobs=3).step_memory is None
    with pytest.raises(InvalidValue, match="0 jobs"):
        Budget(jobs=0)


def test_a_step_beyond_its_memory_ends_and_says_so(store: Store, project: Path) -> None:
    hog = "x=$(head -c 300000000 /dev/zero | tr '\\0' x); test ${#x} = 300000000"
    built = build_all(_recipes(project, 1, hog), store=store, budget=Budget(jobs=1, memory=64 << 20))
    [error] = built.failures.values()
    assert isinstance(error, BuildError)
    assert error.step == "install"
    assert "memory" in str(error)


def test_one_that_fails_costs_the_others_nothing(store: Store, project: Path, tmp_path: Path) -> None:
    recipes = {
        **_recipes(project, 1),
        "bad-install": lambda: PythonRecipe(source=LocalSource(project), install=("echo so it goes; exit 3",)),
        "bad-source": lambda: PythonRecipe(source=LocalSource(tmp_path / "nothing")),
        "bad-too": lambda: PythonRecipe(
            source=LocalSource(project), install=("echo so it goes; exit 3",), patch=_patch(2)
        ),
        "last": lambda: PythonRecipe(source=LocalSource(project), patch=_patch(3)),
    }
    built = build_all(recipes, store=store)
    assert list(built.images) == ["task-0", "last"]
    assert list(built.failures) == ["bad-install", "bad-source", "bad-too"]
    assert isinstance(built.failures["bad-source"], SourceError)
    error = built.failures["bad-install"]
    assert isinstance(error, BuildError)
    assert error.log is not None
    assert "so it goes" in error.log.read_text()
    assert "exit status 3" in error.log.read_text()
    assert "so it goes" in (error.reason or "")
    assert [image.name for image in list_images(store)] == ["last", "task-0"]
    assert _staged(store) == []


def test_failures_are_kept_and_tried_again_when_asked(store: Store, project: Path, tmp_path: Path) -> None:
    flag = tmp_path / "project" / "flag"
    recipes = _recipes(project, 1, "exit 7")
    first = build_all(recipes, store=store, retry_failed=False)
    assert "exit status 7" in str(first.failures["task-0"])
    assert store.failure("task-0").step == "install"
    events: list[BuildEvent] = []
    second = build_all(recipes, store=store, retry_failed=False, progress=events.append)
    assert "was not tried again" in str(second.failures["task-0"])
    assert "--retry-failed" in str(second.failures["task-0"])
    assert all(event.state is not StepState.STARTED for event in events)
    build_all(recipes, store=store, retry_failed=True, progress=events.append)
    assert any(event.state is StepState.STARTED for event in events)
    flag.touch()  # another source, and so another step
    build_all(_recipes(project, 1, "test -e flag"), store=store, retry_failed=False)
    with pytest.raises(NotFound):
        store.failure("task-0")


INTERRUPTED = """
    import sys
    from pathlib import Path
    from minisandbox.images import Budget, build_all
    from minisandbox.spec import LocalSource, PythonRecipe
    from minisandbox.store import Store
    store = Store.open(sys.argv[1])
    source = LocalSource(Path(sys.argv[2]))
    command = f"touch /testbed/started; sleep {sys.argv[3]}; echo"
    recipes = {
        name: lambda name=name: PythonRecipe(source=source, install=(f"{command} {name}",)) for name in ("a", "b")
    }
    try:
        built = build_all(recipes, store=store, budget=Budget(jobs=2))
        print(*built.images)
    except KeyboardInterrupt:
        staged = [path.name for path in (store.root / "staging").iterdir() if not path.name.startswith(".")]
        print("interrupted", staged, sorted(str(layer.step["kind"]) for layer in store.layers()))
"""


@pytest.mark.slow
def test_an_interrupt_ends_the_steps_and_the_next_call_goes_on(tmp_path: Path, store: Store, project: Path) -> None:
    def start(seconds: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(INTERRUPTED), str(store.root), str(project), seconds]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")

    running = start("60")
    deadline = time.monotonic() + 30
    while len(list(store.root.glob("staging/*/upper/tree/testbed/started"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    began = time.monotonic()
    running.send_signal(signal.SIGINT)
    output, errors = running.communicate(timeout=40)
    assert output == "interrupted [] ['base', 'local', 'repository']\n", errors
    assert time.monotonic() - began < 40, "the steps ran to their end"
    output, errors = start("0").communicate(timeout=60)
    assert output == "a b\n", errors


MANY = """
    import sys
    from pathlib import Path
    from minisandbox.images import Budget, StepState, build_all
    from minisandbox.spec import LocalSource, PythonRecipe
    from minisandbox.store import Store
    store, source = Store.open(sys.argv[1]), LocalSource(Path(sys.argv[2]))
    patch = "--- a/a.py\\n+++ b/a.py\\n@@ -1 +1 @@\\n-x = 1\\n+x = {}\\n"
    recipes = {
        f"i{n}": lambda n=n: PythonRecipe(
            source=source, install=("sleep 0.2; date +%N > when",), patch=patch.format(n + 2)
        )
        for n in range(4)
    }
    made = []
    tell = lambda event: made.append(event.key) if event.state is StepState.FINISHED else None
    built = build_all(recipes, store=store, budget=Budget(jobs=1), progress=tell)
    print(len(built.images), *made)
"""


@pytest.mark.slow
def test_processes_that_want_the_same_images_make_each_layer_once_though_some_are_killed(
    store: Store, project: Path
) -> None:
    command = [sys.executable, "-c", textwrap.dedent(MANY), str(store.root), str(project)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    deadline = time.monotonic() + 60
    for process, layers in zip(running[:3], (1, 2, 4), strict=True):  # each at another stage of the work
        while len(list(store.root.glob("layers/*/layer.json"))) < layers and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    outputs = [process.communicate(timeout=120) for process in running]
    lines = [out.split() for out, _ in outputs[3:]]
    assert [line[:1] for line in lines] == [["4"]] * 5, outputs
    made = [key for line in lines for key in line[1:]]
    assert len(made) == len(set(made)), "a layer was made twice"
    assert len(list(store.layers())) == 1 + 3 + 4
    deadline = time.monotonic() + 30
    while _staged(store) and time.monotonic() < deadline:  # a killed owner's sandbox ends a moment later
        Store.open(store.root)
        time.sleep(0.05)
    assert _staged(store) == []


# --- repair by hand ---------------------------------------------------------------------------------------------------


def test_a_failed_build_is_repaired_by_hand(store: Store, project: Path) -> None:
    recipe = PythonRecipe(source=LocalSource(project), install=("cat made-by-hand > installed",))
    with pytest.raises(BuildError):
        build(recipe, store=store, name="broken")
    with repair.open_failed(store, "broken") as work:
        assert work.failure.step == "install"
        assert work.box.exec("ls").check().stdout == "a.py\n"
        work.box.exec("echo by hand > made-by-hand").check()
        layer = work.keep()
    image = build(recipe, store=store, name="broken")
    assert layer.key in image.layers
    with Sandbox.create(image.spec()) as box:
        assert box.exec("cat installed; git status --porcelain").check().stdout == "by hand\n"
    events: list[BuildEvent] = []
    assert build(recipe, store=store, name="broken", progress=events.append) == image
    with pytest.raises(BuildError):
        build(recipe, store=store, name="another")  # what was done is this image's alone
    assert images_by_hand(store) == ["broken"]
    assert forget_manual_layers(store, "broken")
    with pytest.raises(BuildError):
        build(recipe, store=store, name="broken")


def test_a_shell_without_keep_leaves_nothing(store: Store, project: Path) -> None:
    recipe = PythonRecipe(source=LocalSource(project), install=("cat made-by-hand > installed",))
    with pytest.raises(BuildError):
        build(recipe, store=store, name="broken")
    before = {record.key for record in store.layers()}
    with repair.open_failed(store, "broken") as work:
        work.box.exec("echo by hand > made-by-hand").check()
    assert {record.key for record in store.layers()} == before
    assert _staged(store) == []
    with pytest.raises(BuildError):
        build(recipe, store=store, name="broken")


def test_a_layer_made_by_hand_that_is_gone_is_named(store: Store, project: Path) -> None:
    recipe = PythonRecipe(source=LocalSource(project), install=("test -e made-by-hand",))
    with pytest.raises(BuildError):
        build(recipe, store=store, name="broken")
    with repair.open_failed(store, "broken") as work:
        work.box.exec("touch made-by-hand").check()
        store.remove_unused_layer(work.keep().key)
    with pytest.raises(BuildError, match="no longer in the store") as caught:
        build(recipe, store=store, name="broken")
    assert "image rm broken" in (caught.value.hint or "")


def test_nothing_to_repair(store: Store) -> None:
    with pytest.raises(NotFound, match="no failed build of"), repair.open_failed(store, "fine"):
        pass
    assert not forget_manual_layers(store, "fine")

"""Builds in bad company: several at once, killed ones, a disk that fills."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests.waiting import PATIENCE, until

from minisandbox.errors import BuildError, DiskFull
from minisandbox.images import build
from minisandbox.spec import LocalSource, PythonRecipe
from minisandbox.store import Store

pytestmark = pytest.mark.kernel

BUILD = """
    import sys
    from pathlib import Path
    from minisandbox.images import build
    from minisandbox.spec import LocalSource, PythonRecipe
    from minisandbox.store import Store
    store = Store.open(sys.argv[1])
    recipe = PythonRecipe(source=LocalSource(Path(sys.argv[2])), install=tuple(sys.argv[3:]))
    events = []
    image = build(recipe, store=store, name="image", progress=events.append)
    print(image.commit, *sorted(event.step for event in events if event.state.value == "finished"))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.py").write_text("x = 1\n")
    return tmp_path / "source"


def _start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")


def _staged(store: Store) -> list[str]:
    return [name for name in os.listdir(store.root / "staging") if not name.startswith(".")]


def test_processes_that_want_the_same_image_build_it_once(tmp_path: Path, source: Path) -> None:
    store = Store.open(tmp_path / "store")
    running = [_start(BUILD, store.root, source, "sleep 0.5; date +%N > when") for _ in range(3)]
    outputs = [process.communicate(timeout=2 * PATIENCE) for process in running]
    lines = [out.split() for out, _ in outputs]
    assert all(line for line in lines), [err for _, err in outputs]
    assert len({line[0] for line in lines}) == 1
    assert sorted(step for line in lines for step in line[1:]) == ["base", "install", "repository", "source", "task"]
    assert _staged(store) == []


def test_a_killed_build_is_cleaned_up_and_can_be_repeated(tmp_path: Path, source: Path) -> None:
    store = Store.open(tmp_path / "store")
    killed = _start(BUILD, store.root, source, "touch /testbed/started; sleep 300")
    until(lambda: list(store.root.glob("staging/*/upper/tree/testbed/started")))
    assert _staged(store)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=PATIENCE)
    _wait_for_reclaim(store)
    again = _start(BUILD, store.root, source, "true")
    output, errors = again.communicate(timeout=2 * PATIENCE)
    assert "task" in output, errors


def _wait_for_reclaim(store: Store) -> None:
    """The sandbox of a killed owner ends within two seconds; until then it may still write."""

    def reclaimed() -> bool:
        Store.open(store.root)
        return _staged(store) == []

    until(reclaimed)


FULL = """
    import subprocess, sys
    subprocess.run(["mount", "-t", "tmpfs", "-o", sys.argv[3], "tmpfs", sys.argv[1]], check=True)
    from pathlib import Path
    from minisandbox.errors import DiskFull, HostError
    from minisandbox.images import build
    from minisandbox.spec import LocalSource, PythonRecipe
    from minisandbox.sandbox.controller import shut_down
    from minisandbox.store import Store
    store = Store.open(sys.argv[1] + "/store")
    recipe = PythonRecipe(source=LocalSource(Path(sys.argv[2])), install=(sys.argv[4],))
    try:
        build(recipe, store=store, name="image")
    except DiskFull as error:
        kinds = sorted(record.step["kind"] for record in store.layers())
        staged = [p.name for p in (store.root / "staging").iterdir() if p.name != ".gate"]
        print(error.exit_code, kinds, staged, [failure.key for failure in store.failures()])
    except HostError as error:
        print("no sandbox here:", error)
    finally:
        shut_down()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disk", "command"),
    [
        ("size=48m", "head -c 100000000 /dev/zero > big"),
        # as tar, where a write is cut short; there is room for the log
        ("size=48m", "head -c 100000000 /dev/zero > big 2> /dev/null || (truncate -s -1M big; exit 2)"),
        (
            "size=400m,nr_inodes=2000",
            "for i in {1..2000}; do : > file$i || (rm file{1..20}; exit 2); done 2> /dev/null",
        ),
        ("size=400m", "head -c 500000000 /dev/zero > big || (rm big; exit 2)"),  # as pip, which removes what it wrote
    ],
    ids=["said", "unsaid", "inodes", "removed"],
)
def test_a_disk_that_fills_loses_nothing_that_was_finished(
    tmp_path: Path, source: Path, disk: str, command: str
) -> None:
    (tmp_path / "small").mkdir()
    flags = "-m" if os.geteuid() == 0 else "-Urm"
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, flags, "true"], check=False, capture_output=True).returncode:
        pytest.skip("unshare(1) cannot make a mount namespace here")
    script = [sys.executable, "-c", textwrap.dedent(FULL), str(tmp_path / "small"), str(source), disk, command]
    done = subprocess.run([unshare, flags, *script], capture_output=True, text=True, timeout=120, check=False, cwd="/")
    if done.stdout.startswith("no sandbox here"):
        pytest.skip(done.stdout)
    assert done.stdout.strip() == f"{DiskFull.exit_code} ['base', 'local'] [] []", done.stdout + done.stderr


def test_what_a_step_left_holds_up_nobody(tmp_path: Path, source: Path) -> None:
    command = "name=$(printf '%0200d' 0); for i in {1..30}; do mkdir $name; cd $name; done"
    store = Store.open(tmp_path / "store")
    recipe = PythonRecipe(source=LocalSource(source), install=(command,), step_timeout=20.0)
    begun = time.monotonic()
    with pytest.raises(BuildError, match="4,095 bytes") as caught:
        build(recipe, store=store, name="left")
    assert time.monotonic() - begun < PATIENCE
    assert len(str(caught.value)) < 1000
    assert caught.value.step == "install"
    assert store.failure("left").step == "install"
    assert _staged(store) == []

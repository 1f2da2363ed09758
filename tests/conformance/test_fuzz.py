"""Random sequences of operations: a sandbox and a small model of a file tree never come apart, hang or leak.

The sequences are the same in every run. ``make fuzz`` runs two thousand instead of a few dozen.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from tests.conformance.contract import a_while
from tests.conformance.implementations import WORKDIR, in_thread, stack_of
from tests.conformance.model import Node, RefusedError, Tree
from tests.waiting import running_with, until

from minisandbox.errors import FileAccessError
from minisandbox.images.base import base_entries, write_base
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox._sync.shell import Shell
from minisandbox.sandbox.snapshots import Snapshot
from minisandbox.types import FileType, ImageSpec, Outcome

SEQUENCES = int(os.environ.get("MINISANDBOX_FUZZ_SEQUENCES", "40"))
STEPS = 25
DEADLINE = 120.0  # seconds for one operation, on a busy machine
MOST_BOXES = 4
MOST_SNAPSHOTS = 4
T = TypeVar("T")

PATHS = st.sampled_from(
    ("a", "b", "d", "d/a", "d/e", "d/e/f", "e", "e/b", "sp ace", "sp ace/ü", "caf\udce9", "new\nline", "-x", "l")
)
CONTENTS = st.sampled_from([b"", b"x", b"line\n", b"\0\xff\xc3", b"0123456789" * 20_000])
MODES = st.sampled_from([0o600, 0o644, 0o700, 0o755])
WHICH = st.integers(0, 1 << 16)


@dataclass
class Pair:
    """A sandbox and what its files must be."""

    box: Sandbox
    tree: Tree
    origin: Tree
    shell: Shell | None = None
    cwd: str = ""
    variables: dict[str, str] = field(default_factory=dict)


class Machine(RuleBasedStateMachine):
    """Sandboxes, snapshots and their models."""

    spec: ClassVar[ImageSpec]
    image: ClassVar[Tree]

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[Pair] = []
        self.snapshots: list[tuple[Snapshot, Tree]] = []
        self.mark = a_while()

    # --- helpers -----------------------------------------------------------------------------------------------------

    def within_deadline(self, work: Callable[[], T]) -> T:
        """Carry out an operation, which is over in time."""
        thread, future = in_thread(work)
        thread.join(DEADLINE)
        assert not thread.is_alive(), f"hangs:\n{stack_of(thread)}"
        return future.result()

    def agree(self, work: Callable[[], T], model: Callable[[], T]) -> None:
        """The sandbox and the model answer the same, or both refuse."""
        try:
            expected: T | str = model()
        except RefusedError:
            expected = "refused"
        try:
            actual: T | str = self.within_deadline(work)
        except FileAccessError:
            actual = "refused"
        assert actual == expected

    def pair(self, which: int) -> Pair:
        return self.pairs[which % len(self.pairs)]

    def add(self, box: Sandbox, tree: Tree, origin: Tree) -> None:
        self.pairs.append(Pair(box, tree.copy(), origin.copy()))

    def create(self, image: ImageSpec | Snapshot, tree: Tree) -> None:
        self.add(self.within_deadline(lambda: Sandbox.create(image, labels={"mark": self.mark})), tree, tree)

    def is_link(self, pair: Pair, path: str) -> bool:
        """Whether a path is a link: what is written through one is not in the model."""
        return path in pair.tree.nodes and pair.tree.look(path).type is FileType.SYMLINK

    def script(self, pair: Pair, words: Sequence[str], model: Callable[[], None]) -> None:
        """A command's exit status is that of the model."""

        def run() -> None:
            if not pair.box.exec(list(words)).ok:
                raise FileAccessError("failed")

        self.agree(run, model)

    # --- rules -------------------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        self.add(
            self.within_deadline(lambda: Sandbox.create(self.spec, labels={"mark": self.mark})),
            self.image,
            self.image,
        )

    @rule(which=WHICH, path=PATHS, data=CONTENTS, mode=st.none() | MODES)
    def write(self, which: int, path: str, data: bytes, mode: int | None) -> None:
        pair = self.pair(which)
        if not self.is_link(pair, path):
            write = pair.box.files.write_bytes
            self.agree(lambda: write(path, data, mode=mode), lambda: pair.tree.write(path, data, mode))

    @rule(which=WHICH, path=PATHS)
    def read(self, which: int, path: str) -> None:
        pair = self.pair(which)
        self.agree(lambda: pair.box.files.read_bytes(path), lambda: pair.tree.read(path))

    @rule(which=WHICH, path=PATHS, mode=st.sampled_from([0o700, 0o750, 0o755]))
    def mkdir(self, which: int, path: str, mode: int) -> None:
        pair = self.pair(which)
        self.agree(lambda: pair.box.files.mkdir(path, mode=mode), lambda: pair.tree.make_directory(path, mode))

    @rule(which=WHICH, path=PATHS, recursive=st.booleans(), missing_ok=st.booleans())
    def remove(self, which: int, path: str, recursive: bool, missing_ok: bool) -> None:
        pair = self.pair(which)
        if not pair.tree.is_directory(path.rpartition("/")[0]):
            missing_ok = False  # what a missing parent means is not promised
        self.agree(
            lambda: pair.box.files.remove(path, recursive=recursive, missing_ok=missing_ok),
            lambda: pair.tree.remove(path, recursive=recursive, missing_ok=missing_ok),
        )

    @rule(which=WHICH, source=PATHS, goal=PATHS)
    def move(self, which: int, source: str, goal: str) -> None:
        pair = self.pair(which)
        fails = source not in pair.tree.nodes or goal.startswith(f"{source}/")
        if fails and not pair.tree.is_directory(goal.rpartition("/")[0]):
            return  # whether the goal's parents have been made when it fails is not promised
        self.agree(lambda: pair.box.files.move(source, goal), lambda: pair.tree.move(source, goal))

    @rule(which=WHICH, path=PATHS)
    def stat(self, which: int, path: str) -> None:
        pair = self.pair(which)
        assert self.within_deadline(lambda: pair.box.files.exists(path)) == (path in pair.tree.nodes) or (
            pair.tree.look(path).type is FileType.SYMLINK  # which dangles
        )

        def facts() -> tuple[FileType, int]:
            info = pair.box.files.stat(path, follow=False)
            return info.type, info.mode

        self.agree(facts, lambda: (pair.tree.look(path).type, pair.tree.look(path).mode))

    @rule(which=WHICH, path=PATHS | st.just(""))
    def list_directory(self, which: int, path: str) -> None:
        pair = self.pair(which)
        self.agree(lambda: [i.path.name for i in pair.box.files.list(path or None)], lambda: pair.tree.children(path))

    @rule(which=WHICH, path=PATHS, data=st.sampled_from(["x", "more\n"]))
    def append(self, which: int, path: str, data: str) -> None:
        pair = self.pair(which)
        if not self.is_link(pair, path):
            words = ["bash", "-c", 'printf %s "$1" >> "$2"', "-", data, f"./{path}"]
            self.script(pair, words, lambda: pair.tree.append(path, data.encode()))

    @rule(which=WHICH, path=PATHS, mode=MODES)
    def chmod(self, which: int, path: str, mode: int) -> None:
        pair = self.pair(which)
        if self.is_link(pair, path):
            return
        mode |= 0o100 if pair.tree.is_directory(path) else 0  # or nobody but root can go on
        self.script(pair, ["chmod", f"{mode:o}", "--", path], lambda: pair.tree.change_mode(path, mode))

    @rule(which=WHICH, path=PATHS)
    def link(self, which: int, path: str) -> None:
        pair = self.pair(which)
        self.script(pair, ["ln", "-s", "-T", "--", "nowhere", path], lambda: pair.tree.link(path, "nowhere"))

    @rule(which=WHICH, source=PATHS, goal=PATHS)
    def copy_file(self, which: int, source: str, goal: str) -> None:
        pair = self.pair(which)
        words = ["cp", "-p", "--remove-destination", "-T", "--", source, goal]
        self.script(pair, words, lambda: pair.tree.copy_file(source, goal))

    @rule(which=WHICH)
    def time_out(self, which: int) -> None:
        pair = self.pair(which)
        command = f"setsid sleep {self.mark} & echo on; sleep {self.mark}"
        result = self.within_deadline(lambda: pair.box.exec(command, timeout=0.1))
        assert result.outcome is Outcome.TIMEOUT

    @rule(which=WHICH)
    def leave_running(self, which: int) -> None:
        pair = self.pair(which)
        result = self.within_deadline(lambda: pair.box.exec(f"setsid sleep {self.mark} >/dev/null 2>&1 & echo on"))
        assert (result.stdout, result.left_running) == ("on\n", 1)

    @rule(which=WHICH, value=st.sampled_from(["1", "two words", "ü"]), path=PATHS)
    def shell(self, which: int, value: str, path: str) -> None:
        pair = self.pair(which)
        shell = pair.shell or self.within_deadline(pair.box.shell)
        if pair.shell is None:
            pair.cwd, pair.variables = "", {}
        pair.shell = shell
        directory = path if pair.tree.is_directory(path) else ""
        script = (
            f"cd {shlex.quote(str(pair.box.image.workdir))}/{shlex.quote(f'./{directory}')}; v={shlex.quote(value)}"
        )
        before = pair.variables.get("v", "")
        result = self.within_deadline(lambda: shell.run(f'printf %s "$v"; {script}', timeout=20))
        assert (result.stdout, result.exit_code, result.restarted) == (before, 0, False)
        pair.cwd, pair.variables = directory, {"v": value}
        assert result.cwd == pair.box.image.workdir / directory

    @rule(which=WHICH, script=st.sampled_from(["if", "exit 3", "echo 'unclosed", "set -e; false", "exec true"]))
    def shock_shell(self, which: int, script: str) -> None:
        pair = self.pair(which)
        if pair.shell is None:
            return
        shell = pair.shell
        result = self.within_deadline(lambda: shell.run(script, timeout=20))
        assert result.outcome is Outcome.EXITED
        if script != "if":
            pair.variables = {}
        if result.restarted:
            self.within_deadline(shell.close)
            pair.shell = None
        else:
            assert self.within_deadline(lambda: shell.run("echo on; unset v")).stdout == "on\n"
            pair.variables = {}

    @precondition(lambda self: len(self.snapshots) < MOST_SNAPSHOTS)
    @rule(which=WHICH)
    def snapshot(self, which: int) -> None:
        pair = self.pair(which)
        self.forget_shell(pair)
        self.snapshots.append((self.within_deadline(pair.box.snapshot), pair.tree.copy()))

    @rule(which=WHICH, to=st.none() | WHICH)
    def reset(self, which: int, to: int | None) -> None:
        pair = self.pair(which)
        self.forget_shell(pair)
        if to is None or not self.snapshots:
            self.within_deadline(pair.box.reset)
            pair.tree = pair.origin.copy()
            return
        snapshot, tree = self.snapshots[to % len(self.snapshots)]
        self.within_deadline(lambda: pair.box.reset(snapshot))
        pair.tree = tree.copy()

    @precondition(lambda self: len(self.pairs) < MOST_BOXES)
    @rule(which=WHICH, count=st.integers(1, 2))
    def fork(self, which: int, count: int) -> None:
        pair = self.pair(which)
        self.forget_shell(pair)
        for kid in self.within_deadline(lambda: pair.box.fork(count)):
            self.add(kid, pair.tree, pair.tree)

    @precondition(lambda self: self.snapshots and len(self.pairs) < MOST_BOXES)
    @rule(which=WHICH)
    def create_over_snapshot(self, which: int) -> None:
        snapshot, tree = self.snapshots[which % len(self.snapshots)]
        self.create(snapshot, tree)

    @precondition(lambda self: self.snapshots)
    @rule(which=WHICH)
    def close_snapshot(self, which: int) -> None:
        snapshot, _ = self.snapshots.pop(which % len(self.snapshots))
        self.within_deadline(snapshot.close)

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(which=WHICH)
    def stop(self, which: int) -> None:
        pair = self.pairs.pop(which % len(self.pairs))
        self.forget_shell(pair)
        self.within_deadline(pair.box.stop)

    @rule(which=WHICH)
    def changes(self, which: int) -> None:
        pair = self.pair(which)
        workdir = pair.box.image.workdir
        below = [
            c for c in self.within_deadline(pair.box.changes) if c.path != workdir and c.path.is_relative_to(workdir)
        ]
        found = {str(change.path.relative_to(workdir)): (change.kind, change.type) for change in below}
        expected = pair.tree.changes(self.image)
        for path in found.keys() - expected.keys():  # a directory whose entries differ may be named too
            assert found[path] == (found[path][0].MODIFIED, FileType.DIRECTORY), path
            del found[path]
        assert found == expected

    def forget_shell(self, pair: Pair) -> None:
        if pair.shell is not None:
            self.within_deadline(pair.shell.close)
        pair.shell = None

    # --- at the end --------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Every sandbox agrees with its model in everything, and nothing is left of any."""
        try:
            for pair in self.pairs:
                self.compare(pair)
        finally:
            for pair in self.pairs:
                self.forget_shell(pair)
                self.within_deadline(pair.box.stop)
        self.pairs, self.snapshots = [], []
        assert [info.id for info in Sandbox.list(labels={"mark": self.mark})] == []
        until(lambda: not running_with(self.mark.encode()))

    def compare(self, pair: Pair) -> None:
        with tempfile.TemporaryDirectory() as directory:
            copy = Path(directory, "copy")
            transfer = self.within_deadline(lambda: pair.box.files.download(".", copy))
            assert transfer.skipped == ()
            assert look(copy) == pair.tree.nodes


def look(root: Path) -> dict[str, Node]:
    """A host tree as the model has it."""
    found = {}
    for path in root.rglob("*"):
        status, name = path.lstat(), str(path.relative_to(root))
        if path.is_symlink():
            found[name] = Node(FileType.SYMLINK, os.fsencode(os.readlink(path)), 0o777)
        elif path.is_dir():
            found[name] = Node(FileType.DIRECTORY, b"", status.st_mode & 0o7777)
        else:
            found[name] = Node(FileType.FILE, path.read_bytes(), status.st_mode & 0o7777)
    return found


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageSpec, Tree]:
    """An image with a few files, and its model."""
    base = tmp_path_factory.mktemp("base") / "tree"
    write_base(base_entries(), base)
    layer = tmp_path_factory.mktemp("layer")
    tree = Tree()
    tree.write("a", b"of the image\n", 0o644)
    tree.write("d/a", b"too\n", 0o755)
    tree.write("d/e/f", b"0123456789" * 1000, 0o644)
    tree.make_directory("e", 0o755)
    tree.link("l", "nowhere")
    for name, node in tree.nodes.items():
        path = layer / WORKDIR.relative_to("/") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if node.type is FileType.DIRECTORY:
            path.mkdir(exist_ok=True)
        elif node.type is FileType.SYMLINK:
            path.symlink_to(os.fsdecode(node.content))
            continue
        else:
            path.write_bytes(node.content)
        path.chmod(node.mode)
    (layer / "testbed").chmod(0o755)
    return ImageSpec("fuzz", (base, layer), workdir=WORKDIR), tree


def fuzz(image: tuple[ImageSpec, Tree], sequences: int) -> None:
    spec, tree = image

    class Held(Machine):
        pass

    Held.spec, Held.image = replace(spec), tree
    with Sandbox.create(spec):  # whatever a first sandbox leaves open for later ones is open
        before = len(os.listdir("/proc/self/fd"))
    options = settings(
        max_examples=sequences,
        stateful_step_count=STEPS,
        derandomize=True,
        deadline=None,
        database=None,
        print_blob=False,
        phases=[Phase.generate],  # a failing sequence is shown as it is: making it shorter takes minutes
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Held, settings=options)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


@pytest.mark.slow
@pytest.mark.kernel
def test_sandboxes_and_their_model_stay_together(image: tuple[ImageSpec, Tree]) -> None:
    fuzz(image, SEQUENCES)

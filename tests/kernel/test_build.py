"""Building images without any package: sources, patches, hidden files, the one commit, failures."""

from __future__ import annotations

import io
import os
import re
import socket
import stat
import subprocess
import tarfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from minisandbox.errors import BuildError, InvalidValue, NotFound, PatchError, SourceError
from minisandbox.images import (
    BuildEvent,
    StepState,
    build,
    host_image,
    image_sizes,
    list_images,
    load_image,
    total_size,
)
from minisandbox.images.base import BaseEntry, base_entries
from minisandbox.images.image import Image
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.controller import current_controller
from minisandbox.spec import GitSource, LocalSource, PythonRecipe, SdistSource
from minisandbox.store import Store
from minisandbox.types import Mount

pytestmark = pytest.mark.kernel

BUG = """\
diff --git a/calc/core.py b/calc/core.py
--- a/calc/core.py
+++ b/calc/core.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a + b
+    return a - b
"""
TEST_PATCH = f"""\
diff --git a/tests/test_core.py b/tests/test_core.py
--- a/tests/test_core.py
+++ b/tests/test_core.py
@@ -1,4 +1,4 @@
 from calc.core import add
{" "}
 def test_add():
-    assert add(2, 2) == 4
+    assert add(2, 3) == 5
diff --git a/tests/test_new.py b/tests/test_new.py
new file mode 100644
--- /dev/null
+++ b/tests/test_new.py
@@ -0,0 +1,1 @@
+def test_new(): pass
"""
FILES = {
    "calc/__init__.py": "",
    "calc/core.py": "def add(a, b):\n    return a + b\n",
    "tests/test_core.py": "from calc.core import add\n\ndef test_add():\n    assert add(2, 2) == 4\n",
    "tests/test_other.py": "def test_other(): pass\n",
    "data/odd name [x]*.txt": "odd\n",
    ".gitignore": "*.log\n*.egg-info\n",
    "shipped.log": "ignored by git and yet part of the source\n",
}


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.open(tmp_path_factory.mktemp("build") / "store")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "run.sh").write_text("#!/bin/sh\necho run\n")
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("calc/core.py")
    return root


def _recipe(project: Path, **changes: object) -> PythonRecipe:
    return replace(PythonRecipe(source=LocalSource(project)), **changes)  # type: ignore[arg-type]


def _run(image: Image, command: str, mounts: Sequence[Mount] = ()) -> str:
    with Sandbox.create(image.spec(), mounts=mounts) as box:
        return box.exec(command, timeout=60).check().stdout


def _git(cwd: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *arguments], cwd=cwd, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _states(events: Sequence[BuildEvent]) -> list[tuple[str, StepState]]:
    return [(event.step, event.state) for event in events]


def test_host_image_is_private(store: Store) -> None:
    image = host_image(store)
    assert host_image(store) == image == load_image(store, "host")
    listing = _run(image, "ls -A / /etc /root; id -un; cat /etc/hosts; stat -c '%a %U' /root /tmp /var/tmp")
    assert "machine-id" not in listing
    assert "shadow" not in listing
    assert "\nroot\n127.0.0.1" in listing
    assert listing.endswith("700 root\n1777 root\n1777 root\n")


def test_an_upgrade_of_the_host_makes_the_base_alone_anew(
    tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(tmp_path / "store")
    recipe = _recipe(project, install=("echo made > made",))
    old = build(recipe, store=store, name="upgraded")
    added = BaseEntry("etc/services", stat.S_IFREG | 0o644, b"upgraded 1/tcp\n")

    def upgraded() -> tuple[BaseEntry, ...]:
        entries = {one.path: one for one in (*base_entries(), added)}
        return tuple(entries[path] for path in sorted(entries))

    monkeypatch.setattr("minisandbox.images.plan.base_entries", upgraded)
    events: list[BuildEvent] = []
    new = build(recipe, store=store, name="upgraded", progress=events.append)
    assert [event.step for event in events if event.state is not StepState.CACHED] == ["base"]
    assert (new.key, new.layers[1:]) == (old.key, old.layers[1:])
    assert new.layers[0] != old.layers[0]
    assert _run(load_image(store, "upgraded"), "cat /etc/services made") == "upgraded 1/tcp\nmade\n"


def test_the_source_becomes_one_commit(store: Store, project: Path) -> None:
    image = build(_recipe(project), store=store, name="one")
    output = _run(
        image,
        "git rev-parse HEAD; git rev-list --all --count; git status --porcelain;"
        "git log -1 --format='%an %ae %at %cn %ct';"
        "git for-each-ref --format='%(refname)'; git remote; git reflog; ls .git/hooks .git/logs 2>/dev/null;"
        "git ls-files -z | tr '\\0' '\\n'; ./run.sh; readlink link",
    )
    assert output.splitlines() == [
        image.commit,
        "1",
        "MiniSandbox minisandbox@localhost 946684800 MiniSandbox 946684800",
        "refs/heads/main",
        *sorted([*FILES, "link", "run.sh"]),
        "run",
        "calc/core.py",
    ]
    assert image.spec().base_commit == image.commit


def test_a_second_build_rebuilds_nothing(store: Store, project: Path) -> None:
    recipe = _recipe(project, install=("touch made",), patch=BUG)
    first: list[BuildEvent] = []
    image = build(recipe, store=store, name="twice", progress=first.append)
    assert ("task", StepState.FINISHED) in _states(first)
    finished = [event for event in first if event.state is StepState.FINISHED]
    assert all(event.seconds > 0 and event.bytes > 0 for event in finished)
    second: list[BuildEvent] = []
    again = build(recipe, store=store, name="twice", progress=second.append)
    assert again == image
    assert {event.state for event in second} == {StepState.CACHED}


def test_patch_hidden_and_tests_layer(store: Store, project: Path) -> None:
    recipe = _recipe(project, patch=BUG, hidden=("tests/test_core.py",), test_patch=TEST_PATCH)
    image = build(recipe, store=store, name="task")
    assert _run(image, "cat calc/core.py; ls tests; git status --porcelain") == (
        "def add(a, b):\n    return a - b\ntest_other.py\n"
    )
    hidden = image.tests_dir()
    assert hidden is not None
    mount = Mount(hidden, PurePosixPath("/hidden"))
    assert _run(image, "cd /hidden; find . -type f | sort; cat tests/test_core.py", [mount]).splitlines() == [
        "./tests/test_core.py",
        "./tests/test_new.py",
        *FILES["tests/test_core.py"].replace("2) == 4", "3) == 5").splitlines(),
    ]
    assert image.tests_layer not in image.layers
    with Sandbox.create(image.spec()) as box:
        assert box.patch() == b""


def test_build_products_are_no_part_of_a_patch(store: Store, project: Path) -> None:
    install = (
        "mkdir -p calc.egg-info build/lib/calc calc/__pycache__ 'gen [a]*'",
        "touch calc.egg-info/PKG-INFO 'gen [a]*/x' calc/__pycache__/core.cpython-39.pyc $'two\\nlines'",
        "cp calc/core.py build/lib/calc/ && echo v > calc/_version.py",
    )
    image = build(_recipe(project, install=install, patch=BUG), store=store, name="products")
    with Sandbox.create(image.spec()) as box:
        assert box.patch() == b""
        stale = box.exec("ls calc/__pycache__ build/lib/calc calc/_version.py").stdout
        box.files.write_text("/testbed/new.py", "x = 1\n")
        patch = box.patch()
    assert "core" not in stale, "clean code or stale byte code is still there"
    assert "calc/_version.py" in stale
    assert patch.count(b"diff --git") == 1
    assert b"+++ b/new.py" in patch


def test_what_was_installed_has_the_patch_too(store: Store, project: Path) -> None:
    """Otherwise who copies it back has solved the task."""
    install = (
        "mkdir -p /opt/site/__pycache__ && cp -r calc /opt/site/ && chmod 755 /opt/site/calc/core.py",
        "mkdir -p /opt/site/calc/__pycache__ && touch /opt/site/calc/__pycache__/core.cpython-39.pyc",
    )
    image = build(_recipe(project, install=install, patch=BUG), store=store, name="installed")
    output = _run(image, "cmp /opt/site/calc/core.py /testbed/calc/core.py && stat -c %a /opt/site/calc/core.py")
    assert output == "755\n"
    assert _run(image, "ls /opt/site/calc/__pycache__ | wc -l") == "0\n"


def test_copies_under_another_name_have_the_patch_too_or_are_gone(store: Store, project: Path) -> None:
    (project / "calc/core.py").write_text(CORE := f"# {'long' * 8}\n{FILES['calc/core.py']}")
    (project / "tests/test_core.py").write_text(f"# {'long' * 8}\n{FILES['tests/test_core.py']}")
    (project / "tests/__init__.py").write_text("import calc\n")
    (project / "tests/ends in *  ").write_text("# written by hand for this test\n")
    (project / "opt/calc").mkdir(parents=True)
    (project / "opt/calc/core.py").write_text("mine\n")
    install = (
        "mkdir -p /opt/a /opt/calc '/opt/a/odd [x]* '",
        "cp calc/core.py /opt/a/renamed.py; cp calc/core.py /opt/a/core.py.orig; ln calc/core.py /opt/a/hard.py",
        "cp calc/core.py inside; cp calc/core.py $'/opt/a/two\\nlines \\\\ \\xff'; cp inside '/opt/a/odd [x]* /x '",
        "cp calc/core.py /opt/calc/core.py",  # the source has another one at /testbed/opt
        "cp tests/test_core.py /opt/a/tests.txt; cp tests/test_core.py ./kept.py; cp 'tests/ends in *  ' /opt/a/hand",
        "cp tests/__init__.py /opt/a/tiny.py; cp tests/__init__.py /opt/a/; : > /opt/a/empty",
    )
    hidden = ("tests/test_core.py", "tests/__init__.py", "tests/ends in *  ")
    patch = BUG.replace("@@ -1,2 +1,2 @@", "@@ -2,2 +2,2 @@")
    image = build(_recipe(project, install=install, patch=patch, hidden=hidden), store=store, name="renamed")
    assert _run(image, "grep -rlF 'assert add(2, 2)' /testbed /opt /root /var || echo none") == "none\n"
    assert _run(image, "grep -rlF 'return a + b' /testbed /opt /root /var || echo none") == "none\n"
    installed = "/opt/a/*.py* /opt/a/two* /opt/a/odd*/x* /opt/calc/*"
    same = f'for file in {installed}; do cmp -s "$file" calc/core.py && echo; done'
    assert _run(image, same).count("\n") == 6
    assert _run(image, "ls inside kept.py /opt/a/hand /opt/a/__init__.py 2> /dev/null; true") == ""
    assert _run(image, "cat /opt/a/tiny.py /opt/a/empty opt/calc/core.py") == "import calc\nmine\n"
    assert CORE.splitlines()[0] in _run(image, "cat /opt/a/hard.py")


def test_copies_below_usr_have_the_patch_too(store: Store, project: Path) -> None:
    if not current_controller().launcher.writable_usr:
        pytest.skip("this user's sandboxes cannot write below /usr")
    install = ("mkdir -p /usr/local/calc && cp calc/core.py /usr/local/calc/",)
    image = build(_recipe(project, install=install, patch=BUG), store=store, name="usr")
    assert _run(image, "cmp /usr/local/calc/core.py calc/core.py && echo same") == "same\n"


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        (BUG.replace("a/calc/core.py", "a/../../etc/passwd").replace("b/calc/core.py", "b/../../etc/passwd"), "leaves"),
        ("--- a/.git/config\n+++ b/.git/config\n@@ -0,0 +1 @@\n+[x]\n", "git's own directory"),
    ],
)
def test_patches_that_reach_outside_are_refused_before_anything_is_built(project: Path, patch: str, said: str) -> None:
    for kind in ("patch", "test_patch"):
        with pytest.raises(PatchError, match=said):
            _recipe(project, **{kind: patch}).recipe()


def test_hidden_contents_are_nowhere(store: Store, project: Path) -> None:
    secret = FILES["tests/test_core.py"].splitlines()[-1].strip()
    install = (
        "mkdir -p build/lib/tests /opt/site && cp tests/test_core.py build/lib/tests/ && cp -r tests /opt/site/",
    )
    image = build(_recipe(project, install=install, hidden=("tests/test_core.py",)), store=store, name="hide")
    found = _run(image, f"grep -rlF '{secret}' /testbed /opt /root /var 2>/dev/null || echo none")
    assert found == "none\n"
    assert _run(image, f"git log -p --all | grep -cF '{secret}' || true") == "0\n"


def test_crlf_patches(store: Store, project: Path) -> None:
    with pytest.raises(PatchError, match="CRLF"):  # converted on its way: the loader of task files says the same
        _recipe(project, patch=BUG.replace("\n", "\r\n")).recipe()
    # the headers of git have LF whatever the files have
    crlf = re.sub(r"(?m)^([-+ ](?!-- a|\+\+ b).*)$", "\\1\r", BUG)
    with pytest.raises(PatchError, match="does not apply") as caught:
        build(_recipe(project, patch=crlf), store=store, name="crlf-patch")
    assert "CRLF line endings" in str(caught.value.reason)
    (project / "calc/core.py").write_bytes(FILES["calc/core.py"].replace("\n", "\r\n").encode())
    image = build(_recipe(project, patch=crlf), store=store, name="crlf-both")
    with Sandbox.create(image.spec()) as box:
        assert box.files.read_bytes("/testbed/calc/core.py") == b"def add(a, b):\r\n    return a - b\r\n"
        assert box.patch() == b""


@pytest.mark.parametrize(
    "patch",
    [
        BUG.replace("return a + b", "return b + a"),
        BUG.replace("calc/core.py", "calc/gone.py"),
    ],
)
def test_patches_that_do_not_apply(store: Store, project: Path, patch: str) -> None:
    with pytest.raises(PatchError, match="the patch of image 'bad' does not apply") as caught:
        build(_recipe(project, patch=patch), store=store, name="bad")
    assert caught.value.reason
    with pytest.raises(PatchError, match="the test patch of image 'bad'"):
        build(_recipe(project, test_patch=patch), store=store, name="bad")
    with pytest.raises(NotFound):
        load_image(store, "bad")


def test_a_hidden_file_must_exist(store: Store, project: Path) -> None:
    with pytest.raises(BuildError, match="hidden file") as caught:
        build(_recipe(project, hidden=("tests/nothing.py",)), store=store, name="bad")
    assert caught.value.step == "tests"


def test_a_failing_command_keeps_its_log_and_publishes_nothing(store: Store, project: Path) -> None:
    before = {record.key for record in store.layers()}
    recipe = _recipe(project, install=("echo first", "echo about to fail >&2; no-such-program", "echo never"))
    with pytest.raises(BuildError, match="exit status 127") as caught:
        build(recipe, store=store, name="fails")
    error = caught.value
    assert error.step == "install"
    assert "a program is missing" in (error.reason or "")
    assert error.log is not None
    log = error.log.read_text()
    assert "first" in log
    assert "about to fail" in log
    assert "never" not in log
    made = {record.step["kind"] for record in store.layers() if record.key not in before}
    assert made <= {"base", "local"}
    assert [name for name in os.listdir(store.root / "staging") if not name.startswith(".")] == []


def test_an_error_does_not_steer_the_terminal_that_shows_it(store: Store, project: Path) -> None:
    said = "\x1b]0;owned\x07\x1b[2J\u202eback"
    with pytest.raises(BuildError, match="back") as caught:
        build(_recipe(project, install=(f"printf '%s\\n' '{said}'; exit 3",)), store=store, name="steers")
    assert not set("\x1b\x07\u202e") & set(str(caught.value))
    assert "\N{REPLACEMENT CHARACTER}]0;owned" in str(caught.value)
    assert caught.value.log is not None
    assert said in caught.value.log.read_text()


def test_a_hanging_command_ends(store: Store, project: Path) -> None:
    recipe = _recipe(project, install=("sleep 300 & sleep 300",), step_timeout=1.0)
    begun = time.monotonic()
    with pytest.raises(BuildError, match="timed out") as caught:
        build(recipe, store=store, name="hangs")
    assert time.monotonic() - begun < 120
    assert "hangs" in (caught.value.reason or "")


def test_a_flooding_command_ends_with_a_bounded_log(store: Store, project: Path) -> None:
    recipe = _recipe(project, install=("yes flood | head -c 100000000; exit 3",))
    with pytest.raises(BuildError, match="exit status 3") as caught:
        build(recipe, store=store, name="floods")
    assert caught.value.log is not None
    assert caught.value.log.stat().st_size < 20 << 20


def test_environment_is_captured_and_the_hosts_is_not(
    store: Store, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", "hunter2")
    recipe = _recipe(project, environment=(("FLAVOUR", "sour"),), install=('test "$FLAVOUR" = sour', "env > seen"))
    image = build(recipe, store=store, name="environment")
    assert dict(image.environment)["FLAVOUR"] == "sour"
    seen = _run(image, "cat seen; env")
    assert "hunter2" not in seen
    assert "PYTHONDONTWRITEBYTECODE" not in seen
    assert "VIRTUAL_ENV" not in seen


def test_index_settings_do_not_stay(
    store: Store, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step sees an index on the loopback; the host's settings, secrets among them, stay on the host."""
    wheels = tmp_path / "secret-wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://me:hunter2@index.invalid/simple")
    install = (
        'case "$PIP_INDEX_URL $UV_DEFAULT_INDEX" in "http://127.0.0.1:"*) ;; *) exit 1;; esac',
        "env > environment; cat /proc/self/mountinfo > mounts; ls /run/minisandbox/uv",
    )
    image = build(_recipe(project, install=install), store=store, name="settings")
    for key in image.layers:
        tree = store.layer_tree(key)
        done = subprocess.run(
            ["grep", "-rlE", "secret-wheels|index\\.invalid|hunter2", tree], capture_output=True, check=False
        )
        assert done.stdout == b""
        assert not (tree / "run/minisandbox").exists()
    assert "127.0.0.1:" not in _run(image, "env; ls -A /run")


@pytest.mark.parametrize("network", ["index", "off"])
def test_install_commands_reach_the_index_at_most(store: Store, project: Path, network: str) -> None:
    """Another server on the host's loopback is reached neither directly nor through the proxy."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        reach = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/', timeout=5)"
        install = (f'! /usr/bin/env python3 -c "{reach}"', f"! (exec 3<>/dev/tcp/127.0.0.1/{port})")
        build(_recipe(project, install=install, network=network), store=store, name=f"network-{network}")
        other.settimeout(0.1)
        with pytest.raises(TimeoutError):
            other.accept()


def _repository(root: Path, project: Path) -> str:
    subprocess.run(["cp", "-a", project, root], check=True)
    _git(root, "init", "-q", "-b", "main")
    _git(root, "add", "-A")
    _git(root, "commit", "-q", "-m", "secret history")
    first = _git(root, "rev-parse", "HEAD")
    (root / "calc/core.py").write_text("later\n")
    _git(root, "commit", "-qam", "later")
    return first


def test_git_source(store: Store, project: Path, tmp_path: Path) -> None:
    commit = _repository(tmp_path / "repo", project)
    image = build(PythonRecipe(source=GitSource(str(tmp_path / "repo"), commit)), store=store, name="git")
    output = _run(
        image, "cat calc/core.py; git log --all --format=%s; git ls-files | wc -l; ls -A / | grep -c build || true"
    )
    assert (
        output == FILES["calc/core.py"] + f"Initial commit\n{len(FILES) - 1 + 2}\n0\n"
    )  # shipped.log is ignored there
    events: list[BuildEvent] = []
    url = f"{tmp_path}/repo/"
    build(PythonRecipe(source=GitSource(url, commit)), store=store, name="git", progress=events.append)
    assert {event.state for event in events} == {StepState.CACHED}


def test_who_knows_a_commit_alone_gets_nothing_of_it(store: Store, project: Path, tmp_path: Path) -> None:
    """A row may name any address; what the store has from elsewhere may be private."""
    commit = _repository(tmp_path / "private", project)
    build(PythonRecipe(source=GitSource(str(tmp_path / "private"), commit)), store=store, name="mine")
    for url in ("https://127.0.0.1:1/owner/name", (tmp_path / "other").as_uri()):
        with pytest.raises(SourceError):
            build(PythonRecipe(source=GitSource(url, commit)), store=store, name="theirs")


def test_git_source_that_is_not_there(store: Store, project: Path, tmp_path: Path) -> None:
    _repository(tmp_path / "repo", project)
    with pytest.raises(SourceError, match="no commit 0123"):
        build(PythonRecipe(source=GitSource(str(tmp_path / "repo"), "0123" * 10)), store=store, name="bad")
    with pytest.raises(SourceError, match="cannot fetch"):
        build(PythonRecipe(source=GitSource(str(tmp_path / "nowhere"), "0123" * 10)), store=store, name="bad")


def test_local_source_heeds_git(store: Store, project: Path) -> None:
    _git(project, "init", "-q")
    (project / "notes.log").write_text("ignored\n")
    (project / "untracked.py").write_text("x\n")
    image = build(_recipe(project), store=store, name="local-git")
    assert _run(image, "ls -A | grep -E 'log|untracked'") == "untracked.py\n"


def test_local_source_content_decides(store: Store, project: Path) -> None:
    one = build(_recipe(project), store=store, name="content")
    os.utime(project / "calc/core.py", (1, 1))
    assert build(_recipe(project), store=store, name="content") == one
    (project / "calc/core.py").write_text("changed\n")
    assert build(_recipe(project), store=store, name="content").key != one.key


@pytest.mark.parametrize("kind", ["missing", "empty", "file"])
def test_local_source_that_is_none(store: Store, tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "empty":
        path.mkdir()
    elif kind == "file":
        path.touch()
    with pytest.raises(SourceError):
        build(PythonRecipe(source=LocalSource(path)), store=store, name="bad")


def _archive(files: dict[str, bytes], path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.uid, member.gid = len(content), 0o666, 4321, 4321
            archive.addfile(member, io.BytesIO(content))


def _serve(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put an archive on a package index of files; return its hash."""
    digest = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]
    index = path.parent / "simple"
    (index / name).mkdir(parents=True)
    (index / name / "index.html").write_text(f'<a href="../../{path.name}#sha256={digest}">{path.name}</a>')
    monkeypatch.setenv("PIP_INDEX_URL", index.as_uri())
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return digest


def test_sdist_source(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sdist_demo-1.0.tar.gz"
    _archive(
        {"sdist_demo-1.0/a.py": b"a\n", "sdist_demo-1.0/.git/config": b"[evil]\n", "sdist_demo-1.0/b/c": b""}, path
    )
    digest = _serve(path, "sdist-demo", monkeypatch)
    image = build(PythonRecipe(source=SdistSource("Sdist.Demo", "1", digest)), store=store, name="sdist")
    assert (
        _run(image, "git ls-files; stat -c '%a %U' a.py; grep -c evil .git/config || true")
        == "a.py\nb/c\n644 root\n0\n"
    )


def test_sdist_that_reaches_outside(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "escape-1.0.tar.gz"
    _archive({"escape-1.0/a.py": b"a\n", "escape-1.0/../../../../etc/evil": b"x\n"}, path)
    digest = _serve(path, "escape", monkeypatch)
    with pytest.raises(BuildError) as caught:
        build(PythonRecipe(source=SdistSource("escape", "1.0", digest)), store=store, name="escape")
    assert caught.value.step == "source"
    assert not Path("/etc/evil").exists()


def test_zipped_sdist(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "zipped-1.0.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("zipped-1.0/a.py", "a\n")
        archive.writestr("zipped-1.0/.hidden", "h\n")
    digest = _serve(path, "zipped", monkeypatch)
    image = build(PythonRecipe(source=SdistSource("zipped", "1.0", digest)), store=store, name="zipped")
    assert _run(image, "git ls-files") == ".hidden\na.py\n"


def test_sizes_tell_shared_from_unique(store: Store, project: Path) -> None:
    clean = build(_recipe(project), store=store, name="size-clean")
    buggy = build(_recipe(project, patch=BUG), store=store, name="size-bug")
    sizes = image_sizes([clean, buggy])
    source = sum(store.layer(key).bytes for key in clean.layers[:-1])
    assert sizes["size-clean"].shared == sizes["size-bug"].shared == source
    assert sizes["size-bug"].unique == store.layer(buggy.layers[-1]).bytes > 0
    assert total_size([clean, buggy]) == source + sizes["size-clean"].unique + sizes["size-bug"].unique
    assert {"size-clean", "size-bug"} <= {image.name for image in list_images(store)}


def test_a_name_must_be_usable(store: Store) -> None:
    with pytest.raises(InvalidValue):
        build(PythonRecipe(), store=store, name="../x")


def test_an_image_whose_layer_is_gone_says_so(store: Store, project: Path) -> None:
    recipe = _recipe(project, environment=(("A", "b"),), install=("touch gone",))
    image = build(recipe, store=store, name="gone")
    store.remove_unused_layer(image.layers[-1])
    with pytest.raises(NotFound, match="build the image again"):
        image.spec()
    assert build(recipe, store=store, name="gone").spec().layers == tuple(map(store.layer_tree, image.layers))


def test_shared_steps_do_not_see_a_recipes_variables(store: Store, project: Path) -> None:
    """They are no part of those steps' keys: another recipe would get what these variables did."""
    recipe = _recipe(project, environment=(("PATH", "/nowhere"), ("TAR_OPTIONS", "--bad-option")))
    image = build(recipe, store=store, name="variables")
    assert dict(image.environment)["PATH"] == "/nowhere"
    assert image.layers[:2] == build(_recipe(project), store=store, name="plain").layers[:2]


def test_a_damaged_checkout_is_not_taken_whole(store: Store, project: Path) -> None:
    (project / ".git").write_text("gitdir: /nowhere\n")
    with pytest.raises(SourceError, match="git cannot list"):
        build(_recipe(project), store=store, name="bad")


def test_git_source_from_a_server_that_gives_out_only_tips(
    store: Store, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "only-here").write_text("so that the commit is new\n")
    commit = _repository(tmp_path / "repo", project)
    for name, value in {"COUNT": "1", "KEY_0": "protocol.version", "VALUE_0": "0"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    image = build(PythonRecipe(source=GitSource((tmp_path / "repo").as_uri(), commit)), store=store, name="old-git")
    assert _run(image, "cat calc/core.py") == FILES["calc/core.py"]
